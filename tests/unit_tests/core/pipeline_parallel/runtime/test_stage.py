"""A stage keeps the graph and not the output, and splits its backward where a sink can file."""

from __future__ import annotations

import weakref

import numpy as np
import pytest
import torch

from megatron.core.pipeline_parallel.runtime.stage import ModelStage
from megatron.core.tensor_parallel.parallel_layers import column_linear
from megatron.core.weight_grad import WeightGradAccumulator
from tests.harness.toy_pipeline import HIDDEN, TOKENS, ToyChunk


def hidden(seed=3):
    return torch.randn(*TOKENS, HIDDEN, generator=torch.Generator().manual_seed(seed))


def test_backward_of_a_middle_stage_equals_autograd():
    chunk, plain = ToyChunk(1, 3), ToyChunk(1, 3)
    stage = chunk.stage()
    x, dy = hidden(), hidden(4)
    out = stage.forward(0, x)
    assert not out.requires_grad
    assert not x.requires_grad  # the received tensor stays as it is
    grad = stage.backward(0, dy)
    leaf = x.clone().requires_grad_()
    plain.run(0, leaf).backward(dy)
    assert torch.equal(grad, leaf.grad)
    assert chunk.grads() == plain.grads()
    stage.check_empty()


def test_b_and_w_together_are_bw_bit_for_bit_in_any_interleaving():
    whole, split = ToyChunk(1, 2), ToyChunk(1, 2)
    a, b = whole.stage(), split.stage()
    for microbatch in range(3):
        assert a.forward(microbatch, hidden(microbatch)) is None  # the loss goes nowhere
        b.forward(microbatch, hidden(microbatch))
    grads = [a.backward(microbatch, None) for microbatch in range(3)]
    assert all(torch.equal(b.backward_input(m, None), grads[m]) for m in range(2))
    assert not any(split.grads()["scale"])  # put finished, added in W as the others
    assert not any(split.grads()["bias"])
    with pytest.raises(AssertionError, match=r"no backward of microbatches \[2\]"):
        b.check_empty()
    b.backward_weight(0)
    assert torch.equal(b.backward_input(2, None), grads[2])
    with pytest.raises(
        AssertionError, match=r"weight gradients of microbatches \[1, 2\] were never computed"
    ):
        b.check_empty()
    b.backward_weight(1)
    b.backward_weight(2)
    b.check_empty()
    assert split.grads() == whole.grads()


def test_between_b_and_w_the_input_and_its_gradient_are_free():
    """What is filed for W is a tensor of the graph, and must not keep the graph's leaf."""
    sink = WeightGradAccumulator()
    weight = torch.randn(HIDDEN, HIDDEN, requires_grad=True)
    sink.bind_new({"w": (HIDDEN, HIDDEN)}, torch.float32, torch.device("cpu"))
    stage = ModelStage(
        lambda _, x: column_linear(torch.tanh(x), weight, sink=sink, key="w"),
        sink,
        begins=False,
        ends=False,
    )
    memory = np.random.default_rng(3).random((*TOKENS, HIDDEN), np.float32)  # its life is the input's
    seen = weakref.ref(memory)
    x = torch.from_numpy(memory)
    expected = torch.ones(TOKENS).flatten() @ torch.tanh(x).flatten(0, -2)
    stage.forward(0, x)
    del x, memory
    assert seen() is not None
    stage.backward_input(0, torch.ones(*TOKENS, HIDDEN))
    assert seen() is None
    stage.backward_weight(0)
    torch.testing.assert_close(sink.main_grads["w"], expected.expand(HIDDEN, HIDDEN))


def test_backward_frees_the_graph_and_forward_keeps_no_output():
    kept = []

    def run(microbatch, x):
        inner = torch.exp(x)  # exp saves its result, the sum does not
        kept.append(weakref.ref(inner))
        out = inner + 1
        kept.append(weakref.ref(out))
        return out

    stage = ModelStage(run, None, begins=False, ends=False)
    out = stage.forward(0, torch.zeros(3))
    assert kept[1]() is None  # the tensor with the graph; what is handed on is another, on the same memory
    assert out.tolist() == [2.0] * 3
    assert stage.backward(0, torch.ones(3)).tolist() == [1.0] * 3
    assert kept[0]() is None
    stage.check_empty()


def test_identity_constant_and_frozen_stages():
    identity = ModelStage(lambda m, x: x, None, begins=False, ends=False)
    x, dy = hidden(), hidden(1)
    assert torch.equal(identity.forward(0, x), x)
    assert torch.equal(identity.backward(0, dy), dy)
    constant = ModelStage(lambda m, x: torch.ones(2), None, begins=False, ends=False)
    constant.forward(0, x)
    assert not constant.backward(0, torch.ones(2)).any()
    frozen = ModelStage(lambda m, x: torch.ones(2), None, begins=True, ends=False)
    frozen.forward(0, None)
    assert frozen.backward(0, torch.ones(2)) is None
    for stage in (identity, constant, frozen):
        stage.check_empty()


def test_a_forward_that_is_forgotten_can_run_again():
    once, again = ToyChunk(1, 2), ToyChunk(1, 2)
    one, two = once.stage(), again.stage()
    two.forward(0, hidden(5))
    kept = weakref.ref(two._saved[0][0])
    two.forget(0)
    assert kept() is None
    two.check_empty()
    for stage in (one, two):
        stage.forward(0, hidden())
        stage.backward(0, None)
    assert once.grads() == again.grads()
    with pytest.raises(AssertionError, match="no F0 to forget"):
        two.forget(0)


def test_evaluation_keeps_nothing():
    chunk = ToyChunk(0, 1)
    stage = chunk.stage()
    with torch.no_grad():
        assert stage.forward(0, None) is None
        assert stage.forward(0, None) is None
    stage.check_empty()
    middle = ToyChunk(1, 3).stage()
    with torch.no_grad():
        assert middle.forward(0, hidden()).shape == (*TOKENS, HIDDEN)
    middle.check_empty()


def test_a_plain_module_does_f_and_bw_only():
    module = torch.nn.Linear(HIDDEN, HIDDEN)
    stage = ModelStage(lambda m, x: module(x), None, begins=False, ends=False)
    assert not stage.splits
    assert ToyChunk(0, 1).stage().splits
    stage.forward(0, hidden())
    stage.backward(0, hidden(1))
    expected = hidden(1).flatten(0, 1).t() @ hidden().flatten(0, 1)
    torch.testing.assert_close(module.weight.grad, expected)
    stage.forward(0, hidden())
    with pytest.raises(AssertionError, match="B0 of a stage whose gradients autograd accumulates"):
        stage.backward_input(0, hidden(1))


def test_misuse_is_told():
    stage = ToyChunk(1, 3).stage()
    with pytest.raises(AssertionError, match="F0: begins False, hidden False"):
        stage.forward(0, None)
    with pytest.raises(AssertionError, match=r"B4 without its F; kept: \[\]"):
        stage.backward(4, hidden())
    stage.forward(0, hidden())
    with pytest.raises(AssertionError, match="a second F0 before its backward"):
        stage.forward(0, hidden())
    with pytest.raises(AssertionError, match="B0: ends False, gradient False"):
        stage.backward(0, None)
