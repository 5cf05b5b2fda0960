"""Gradients of sinks and of autograd reach the same accumulators; the listener hears of each, and may be collected."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn

from megatron.core.distributed.custom_fsdp.data_parallel_config import DistributedDataParallelConfig
from megatron.core.distributed.custom_fsdp.flat_buffer import FlatBuffer
from megatron.core.distributed.custom_fsdp.gradient_sources import connect
from megatron.core.module import ModelChunks, ModelError
from megatron.core.param_meta import GradRoute, ParamMeta
from megatron.core.sharding_table import ShardPlace, sharding_of
from megatron.core.weight_grad import WeightGradAccumulator


class Hears:
    """Remembers what it is told; a key's first contribution overwrites."""

    def __init__(self) -> None:
        self.heard: list[tuple[str, str]] = []

    def grad_begins(self, key: str) -> bool:
        first = ("begins", key) not in self.heard
        self.heard.append(("begins", key))
        return first

    def grad_ready(self, key: str, microbatch: int) -> None:
        self.heard.append(("ready", key))


class Two(nn.Module):
    """`plain` goes through autograd, `ours` through the sink."""

    def __init__(self) -> None:
        super().__init__()
        self.plain = nn.Parameter(torch.ones(3))
        self.ours = nn.Parameter(torch.ones(2, 3))
        self.frozen = nn.Parameter(torch.ones(1), requires_grad=False)


def meta(route: GradRoute = GradRoute.SINK) -> dict[str, ParamMeta]:
    return {
        "plain": ParamMeta("plain", (3,)),
        "ours": ParamMeta("ours", (2, 3), route=route),
        "frozen": ParamMeta("frozen", (1,)),
    }


def buffer_of(chunks: ModelChunks, facts: dict[str, ParamMeta]) -> FlatBuffer:
    return FlatBuffer(
        chunks.parameters,
        facts,
        DistributedDataParallelConfig(),
        sharding=sharding_of("no_shard"),
        place=ShardPlace(),
        device=torch.device("cpu"),
    )


def built(sinks, scale: float = 1.0, facts: dict[str, ParamMeta] | None = None):
    chunks = ModelChunks((Two(),))
    buffer = buffer_of(chunks, facts or meta())
    listener = Hears()
    hooks = connect(chunks, buffer, sinks, listener, scale=scale)
    return chunks.modules[0], buffer, listener, hooks


def test_both_ways_lead_to_the_buffer():
    sink = WeightGradAccumulator()
    model, buffer, listener, hooks = built(sink, scale=0.5)
    assert len(hooks) == 1, "frozen parameters report nothing, what a sink has comes from there"
    buffer.main_grad("plain").fill_(9.0)
    buffer.main_grad("ours").fill_(9.0)
    for _ in range(2):
        (model.plain * torch.tensor([1.0, 2.0, 4.0])).sum().backward()
        sink.put("ours", torch.ones(1, 3), torch.tensor([[2.0, 6.0]]))
    assert buffer.main_grad("plain").tolist() == [1.0, 2.0, 4.0], "overwritten, then added, each scaled"
    assert buffer.main_grad("ours").tolist() == [[2.0] * 3, [6.0] * 3]
    assert model.plain.grad is None
    each = [("begins", "plain"), ("ready", "plain"), ("begins", "ours"), ("ready", "ours")]
    assert listener.heard == each * 2


def test_without_a_sink_autograd_brings_everything():
    model, buffer, listener, hooks = built(None)
    assert len(hooks) == 2
    (model.plain.sum() * 3 + model.ours.sum() * 5).backward()
    assert (buffer.main_grad("plain").sum(), buffer.main_grad("ours").sum()) == (9.0, 30.0)
    assert sorted(key for word, key in listener.heard if word == "ready") == ["ours", "plain"]


def test_a_parameter_of_a_sinks_chunk_may_come_by_autograd():
    sink = WeightGradAccumulator()
    model, buffer, listener, _ = built(sink, facts=meta(GradRoute.AUTOGRAD))
    model.ours.sum().backward()
    assert buffer.main_grad("ours").sum() == 6.0
    assert listener.heard == [("begins", "ours"), ("ready", "ours")]


def test_in_a_split_backward_autograds_gradients_wait_for_w_too():
    sink = WeightGradAccumulator()
    model, buffer, listener, _ = built(sink, facts=meta(GradRoute.AUTOGRAD))
    for microbatch in (3, 4):
        with sink.backward(microbatch, split=True):
            (model.ours.sum() * microbatch).backward()
    assert model.ours.grad is None
    assert not buffer.main_grad("ours").any()
    assert listener.heard == []
    sink.flush(3)
    assert buffer.main_grad("ours").sum() == 18.0
    sink.flush(4)
    assert buffer.main_grad("ours").sum() == 42.0
    assert listener.heard == [("begins", "ours"), ("ready", "ours")] * 2


def test_a_tensor_of_two_chunks_is_reported_by_each():
    first, second = nn.Module(), nn.Module()
    first.plain = second.plain = nn.Parameter(torch.ones(3))
    chunks = ModelChunks((first, second))
    facts = {"plain": ParamMeta("plain", (3,))}
    listener = Hears()
    assert len(connect(chunks, buffer_of(chunks, facts), None, listener)) == 1
    first.plain.sum().backward()
    second.plain.sum().backward()
    assert listener.heard == [("begins", "plain"), ("ready", "plain")] * 2
    with pytest.raises(AssertionError, match=r"plain: of chunks \[0, 1\] only some have a sink"):
        connect(chunks, buffer_of(chunks, facts), [WeightGradAccumulator(), None], listener)
    with pytest.raises(AssertionError, match="1 sinks for 2 chunks"):
        connect(chunks, buffer_of(chunks, facts), [None], listener)


def test_hooks_of_parameters_hold_no_engine():
    """Python's collector does not look into them: an engine that they held would never be freed."""
    model, _, listener, _ = built(None)
    listener.model = model  # as an engine has
    gone = weakref.ref(listener)
    del listener
    gc.collect()
    assert gone() is None
    with pytest.raises(AssertionError, match="a gradient for plain: the engine around the module is gone"):
        model.plain.sum().backward()


def test_a_gradient_with_a_graph_is_refused_and_nothing_of_it_stays():
    model, buffer, listener, _ = built(None)
    buffer.main_grad("plain").fill_(9.0)
    with pytest.raises(
        ModelError, match=r"parameter 'plain' comes with create_graph=True.*gradients of inputs"
    ):
        (model.plain.square().sum()).backward(create_graph=True)
    assert (model.plain.grad, buffer.main_grad("plain").sum(), listener.heard) == (None, 27.0, [])


def test_what_the_listener_refuses_does_not_stay_either():
    """It would be added to the parameter's next gradient."""
    model, _, listener, _ = built(None)

    def refuse(key: str) -> bool:
        raise ModelError(f"{key} came too late")

    listener.grad_begins = refuse
    with pytest.raises(ModelError, match="plain came too late"):
        model.plain.sum().backward()
    assert model.plain.grad is None
