"""The one function that computes weight gradients, against autograd; the sink around it."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch.nn import functional

from megatron.core.weight_grad import WeightGradAccumulator, accumulate_wgrad


def random(*shape, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64).to(
        dtype
    )


@pytest.mark.parametrize("leading", [(6,), (2, 3), (2, 3, 4)])
def test_matrix_lookup_and_bias_equal_autograd(leading):
    weight = random(5, 4).requires_grad_()
    bias = random(5).requires_grad_()
    x, dy = random(*leading, 4), random(*leading, 5)
    functional.linear(x, weight, bias).backward(dy)
    main = torch.ones(5, 4, dtype=torch.float64)
    accumulate_wgrad(main, x, dy)
    torch.testing.assert_close(main - 1, weight.grad, rtol=1e-12, atol=1e-12)
    main_bias = torch.ones(5, dtype=torch.float64)
    accumulate_wgrad(main_bias, None, dy)
    torch.testing.assert_close(main_bias - 1, bias.grad, rtol=1e-12, atol=1e-12)

    table = random(7, 5).requires_grad_()
    indices = torch.randint(7, leading, generator=torch.Generator().manual_seed(0))
    functional.embedding(indices, table).backward(dy)
    main_table = torch.ones(7, 5, dtype=torch.float64)
    accumulate_wgrad(main_table, indices, dy)
    torch.testing.assert_close(main_table - 1, table.grad, rtol=1e-12, atol=1e-12)


def test_a_finished_bias_gradient_is_added_as_it_is():
    main = torch.ones(5)
    accumulate_wgrad(main, None, torch.arange(5.0))
    assert main.tolist() == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_contributions_are_added_in_fp32(dtype):
    x, dy = random(8, 4, dtype=dtype), random(8, 5, dtype=dtype)
    main = torch.zeros(5, 4)
    for _ in range(1000):
        accumulate_wgrad(main, x, dy)
    # Adding up in 16 bits would stop growing long before.
    torch.testing.assert_close(main, 1000 * (dy.t() @ x).float(), rtol=1e-4, atol=1e-2)
    table = torch.zeros(3, 5)
    accumulate_wgrad(table, torch.tensor([1] * 8), dy)
    torch.testing.assert_close(table[1], dy.float().sum(0))
    bias = torch.zeros(5)
    accumulate_wgrad(bias, None, dy)
    torch.testing.assert_close(bias, dy.float().sum(0))


def test_one_gemm_a_microbatch_is_bit_identical_however_it_is_scheduled():
    """Deferring contributions changes nothing, as long as they come in microbatch order."""
    contributions = [
        (random(8, 4, dtype=torch.float32) + i, random(8, 5, dtype=torch.float32)) for i in range(4)
    ]
    at_once, deferred = torch.zeros(5, 4), torch.zeros(5, 4)
    queue = []
    for x, dy in contributions:
        accumulate_wgrad(at_once, x, dy)
        queue.append((x, dy))
    for x, dy in queue:
        accumulate_wgrad(deferred, x, dy)
    assert torch.equal(at_once, deferred)


def test_sink_accumulates_and_tells_its_listener():
    heard = []

    class Listener:
        def grad_begins(self, key):
            return False

        def grad_ready(self, key, microbatch):
            heard.append((key, microbatch))

    sink = WeightGradAccumulator()
    buffer = torch.zeros(5, 4)
    sink.bind({"w": buffer}, Listener())
    sink.microbatch = 3
    sink.put("w", torch.ones(2, 4), torch.ones(2, 5))
    assert buffer.unique().tolist() == [2.0]
    assert heard == [("w", 3)]
    with pytest.raises(AssertionError, match=r"no gradient buffer bound for 'other'; bound: \['w'\]"):
        sink.put("other", None, torch.ones(5))


def test_a_contribution_goes_to_the_gradient_that_its_listener_puts_in_place():
    """As loops of one's own have them, whose optimizers drop gradients: what was there before holds anything."""
    sink, bias = WeightGradAccumulator(), torch.zeros(5)

    class Listener:
        def grad_begins(self, key):
            sink.main_grads[key] = torch.full_like(sink.main_grads[key], torch.nan)
            return True

        def grad_ready(self, key, microbatch):
            pass

    sink.bind({"w": torch.zeros(5, 4), "b": bias}, Listener())
    sink.put("w", torch.ones(2, 4), torch.ones(2, 5))
    sink.put("b", None, torch.ones(2, 5))
    assert [sink.main_grads[key].unique().tolist() for key in "wb"] == [[2.0], [2.0]]
    assert bias.unique().tolist() == [0.0]


def test_sink_can_allocate_its_own_buffers():
    sink = WeightGradAccumulator()
    sink.bind_new({"b": (3,)}, torch.float64, torch.device("cpu"))
    sink.put("b", None, torch.ones(4, 3, dtype=torch.float64))
    assert sink.main_grads["b"].tolist() == [4.0, 4.0, 4.0]


def test_shapes_that_do_not_fit_show_both():
    with pytest.raises(AssertionError, match=r"main_grad torch.Size\(\[4, 5\]\), dy torch.Size\(\[8, 5\]\)"):
        accumulate_wgrad(torch.zeros(4, 5), torch.zeros(8, 4), torch.zeros(8, 5))


class Part:
    """An operand held in two halves; its log says when it was gathered."""

    def __init__(self, name, whole, log):
        self.name, self.value, self.log, self.started = name, whole, log, False

    def start(self):
        if not self.started:
            self.started = True
            self.log.append(f"start {self.name}")

    def whole(self):
        self.start()
        self.log.append(f"whole {self.name}")
        return self.value


def split_sink(log):
    class Listener:
        def grad_begins(self, key):
            return False

        def grad_ready(self, key, microbatch):
            log.append((key, microbatch))

    sink = WeightGradAccumulator()
    shapes = {"w": (5, 4), "b": (5,), "norm": (5,), "table": (7, 5)}
    sink.bind({key: torch.zeros(shape) for key, shape in shapes.items()}, Listener())
    return sink


def put_all(sink, microbatch):
    dy = random(2, 3, 5, dtype=torch.float32) + microbatch
    sink.put("table", torch.tensor([[0, 1, 6], [6, 6, 2]]), dy)
    sink.put("w", random(2, 3, 4, dtype=torch.float32) - microbatch, dy)
    sink.put("b", None, dy)
    sink.put("norm", None, dy.flatten(0, -2).sum(0))


def test_a_split_backward_files_everything_and_adds_the_same_bits():
    log = []
    sink, plain = split_sink(log), split_sink([])
    for microbatch in range(3):
        with plain.backward(microbatch):
            assert not plain.deferring
            put_all(plain, microbatch)
    for microbatch in range(3):
        with sink.backward(microbatch, split=True):
            assert sink.deferring
            put_all(sink, microbatch)
        assert not sink.deferring
        sink.microbatch = 17  # a forward in between says so
    assert log == []  # nothing is added in B, what is finished neither
    assert not any(grad.any() for grad in sink.main_grads.values())
    with pytest.raises(AssertionError, match=r"microbatches \[0, 1, 2\] were never computed"):
        sink.check_flushed()
    for microbatch in range(3):
        sink.flush(microbatch)
    assert log == [(key, microbatch) for microbatch in range(3) for key in ("table", "w", "b", "norm")]
    sink.check_flushed()
    for key, grad in plain.main_grads.items():
        assert torch.equal(grad, sink.main_grads[key]), key


def test_w_frees_each_contribution_and_refuses_what_was_not_filed():
    sink = split_sink([])
    x = torch.ones(2, 4)
    kept = weakref.ref(x)
    with sink.backward(1, split=True):
        sink.put("w", x, torch.ones(2, 5))
    del x
    assert kept() is not None
    sink.flush(1)
    assert kept() is None
    with pytest.raises(AssertionError, match=r"W of microbatch 1 without its B; filed: \[\]"):
        sink.flush(1)
    with sink.backward(2, split=True), pytest.raises(AssertionError, match="inside the B of 2"):  # noqa: SIM117
        with sink.backward(3):
            pass
    with pytest.raises(AssertionError, match="a second B of microbatch 2"), sink.backward(2, split=True):
        pass


def test_parts_are_gathered_when_the_gradient_is_computed_the_next_one_behind_the_gemm():
    log = []
    sink = split_sink(log)
    sink.put("w", Part("now", torch.ones(2, 4), log), torch.ones(2, 5))
    assert log == ["start now", "whole now", ("w", 0)]
    log.clear()
    with sink.backward(0, split=True):
        for name in "xyz":
            sink.put("w", Part(name, torch.ones(2, 4), log), torch.ones(2, 5))
            sink.put("b", None, torch.ones(2, 5))
    assert log == []
    sink.flush(0)
    assert log == [
        *("start x", "start y", "whole x", ("w", 0), ("b", 0)),
        *("start z", "whole y", ("w", 0), ("b", 0)),
        *("whole z", ("w", 0), ("b", 0)),
    ]
    assert sink.main_grads["w"].unique().tolist() == [8.0]


def test_w_by_units_computes_theirs_in_the_order_filed_and_tells_which_begins():
    log = []
    sink = split_sink(log)
    sink.report_units({"table": 0, "norm": 1, "w": 1, "b": 2}, lambda unit: log.append(f"unit {unit}"))
    with sink.backward(4, split=True):
        sink.put("b", None, torch.ones(2, 5))
        sink.put("w", Part("x", torch.ones(2, 4), log), torch.ones(2, 5))
        sink.put("w", Part("y", torch.ones(2, 4), log), torch.ones(2, 5))
        sink.put("norm", None, torch.ones(5))
        sink.put("table", torch.tensor([0]), torch.ones(1, 5))
    sink.flush(4, (0, 1))
    assert log == ["unit 0", ("table", 4)]
    log.clear()
    sink.flush(4, (1, 3))
    assert log == [
        *(
            "start x",
            "unit 2",
            ("b", 4),
            "start y",
            "unit 1",
            "whole x",
            ("w", 4),
            "whole y",
            ("w", 4),
            ("norm", 4),
        )
    ]
    sink.flush(4, (0, 1))  # nothing is left
    sink.check_flushed()
    with pytest.raises(AssertionError, match="W of microbatch 4 without its B"):
        sink.flush(4)
    with sink.backward(0, split=True):
        sink.put("b", None, torch.ones(2, 5))
    sink.flush(0, (0, 2))
    with pytest.raises(AssertionError, match=r"microbatches \[0\] were never computed"):
        sink.check_flushed()


class Fresh:
    """A listener that hears of first contributions only, which overwrite."""

    def __init__(self, keys):
        self.fresh = set(keys)

    def grad_begins(self, key):
        self.fresh.discard(key)
        return True


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_put_adds_by_itself_has_the_bits_of_the_sum(dtype):
    """The first contribution overwrites whatever is there, others are added, in the buffers' dtype or another one."""
    shapes = {"w": (5, 4), "b": (5,), "norm": (5,)}
    sink = WeightGradAccumulator()
    grads = {key: torch.full(shape, torch.nan) for key, shape in shapes.items()}
    expected = {key: torch.zeros(shape) for key, shape in shapes.items()}
    sink.bind(grads, Fresh(shapes))
    for microbatch in range(3):
        x, dy = random(6, 4, dtype=dtype) + microbatch, random(6, 5, dtype=dtype)
        for key, operands in {"w": (x, dy), "b": (None, dy), "norm": (None, dy[0])}.items():
            sink.put(key, *operands)
            accumulate_wgrad(expected[key], *operands)
    for key, grad in grads.items():
        assert torch.equal(grad, expected[key]), key
