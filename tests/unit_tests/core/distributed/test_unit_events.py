"""Hooks of real modules tell of units as they begin, and operations of a row run between them."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from megatron.core.distributed.custom_fsdp.unit_events import hook_units
from megatron.core.module import ModelError
from megatron.core.pipeline_parallel.plan.ir import Plan, parse_row
from megatron.core.pipeline_parallel.plan.placement import LINEAR, Placement
from megatron.core.pipeline_parallel.runtime.data_parallel_lane import UnitBoundaries
from megatron.core.pipeline_parallel.runtime.executor import Executor
from megatron.core.pipeline_parallel.runtime.stage import ModelStage
from megatron.core.transport.peer_loss import PeerLostError
from megatron.core.weight_grad import WeightGradAccumulator
from tests.harness.telling_stages import Log, NoChannel, units_of


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x):
        return torch.tanh(self.linear(x))


class Model(nn.Module):
    """recompute: of the blocks 1 and 2 together; None, or checkpoint's use_reentrant."""

    def __init__(self, recompute=None, order=(0, 1, 2, 3)):
        super().__init__()
        torch.manual_seed(1)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.recompute, self.order = recompute, order

    def forward(self, x):
        if self.recompute is None:
            for block in self.order:
                x = self.blocks[block](x)
            return x.sum()
        x = checkpoint(
            lambda x: self.blocks[2](self.blocks[1](x)), self.blocks[0](x), use_reentrant=self.recompute
        )
        return self.blocks[3](x).sum()


class Heard(list):
    def unit_begins(self, chunk, unit):
        self.append((chunk, unit))


def watch(model, listener, chunk=0):
    chunks = [[] for _ in range(chunk)]
    return hook_units([*chunks, [(unit, [block]) for unit, block in enumerate(model.blocks)]], listener)


def without_repeats(heard):
    return [one for at, one in enumerate(heard) if at == 0 or heard[at - 1] != one]


@pytest.mark.parametrize("recompute", [None, True, False])
def test_hooks_tell_of_forwards_backwards_and_recomputations(recompute):
    model, heard = Model(recompute), Heard()
    events = watch(model, heard, chunk=1)
    loss = model(torch.ones(2, 3, requires_grad=True))
    assert heard == [(1, 0), (1, 1), (1, 2), (1, 3)]
    heard.clear()
    loss.backward()
    units = [unit for _, unit in without_repeats(heard)]
    if recompute is None:
        assert units == [3, 2, 1, 0]
    else:
        assert units == ([3, 1, 2, 1, 0] if recompute else [3, 2, 1, 2, 1, 0])
    heard.clear()
    with torch.no_grad():
        model(torch.ones(2, 3, requires_grad=True))
    assert heard == [(1, 0), (1, 1), (1, 2), (1, 3)]
    for handle in events:
        handle.remove()
    heard.clear()
    model(torch.ones(2, 3, requires_grad=True))
    assert heard == []


def test_an_output_of_several_tensors_and_a_module_of_two_units():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.block = Block()

        def forward(self, x):
            y = self.block(x)
            return {"a": [y * 2], "b": (x * 3, None)}

    two, heard = Two(), Heard()
    hook_units([[(0, [two]), (1, [two.block])]], heard)
    out = two(torch.ones(1, 3, requires_grad=True))
    assert heard == [(0, 0), (0, 1)]
    heard.clear()
    (out["a"][0].sum() + out["b"][0].sum()).backward()
    assert without_repeats(heard) == [(0, 0), (0, 1)]


def test_events_hold_neither_model_nor_graph():
    model = Model()
    watch(model, UnitBoundaries())
    model(torch.ones(1, 3)).backward()
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


def run_model(model, row, units, log, microbatches=1, **executor):
    boundaries = UnitBoundaries()
    watch(model, boundaries)

    class Sync(Log):
        def append(self, line):
            log.append(line)

    for unit, block in enumerate(model.blocks):
        block.register_forward_pre_hook(lambda *_, unit=unit: log.append(f"run {unit}"))
        block.linear.weight.register_hook(lambda _, unit=unit: log.append(f"grad {unit}"))
    stage = ModelStage(lambda m, h: model(torch.ones(2, 3)), None, begins=True, ends=True)
    plan = Plan("by hand", Placement(LINEAR, 1), microbatches, (parse_row(row.split()),))
    Executor(
        plan, 0, {0: stage}, NoChannel(), Sync(), units={0: units}, boundaries=boundaries, **executor
    ).run()
    return log


ROW = (
    "0UNSHARD[0:1] 0UNSHARD[1:2].1 0RESHARD[0:1].2 0UNSHARD[2:3].2 0RESHARD[1:2].3 0UNSHARD[3:4].3 0RESHARD[2:3].4"
    " 0F0"
)


def test_a_real_model_runs_between_its_gathers():
    log = run_model(
        Model(),
        f"{ROW} 0UNSHARD[2:3].1 0RESHARD[3:4].2 0REDUCE[3:4].2 0UNSHARD[1:2].2 0RESHARD[2:3].3 0REDUCE[2:3].3"
        " 0UNSHARD[0:1].3 0RESHARD[1:2].4 0REDUCE[1:2].4 0BW0 0RESHARD[0:1] 0REDUCE[0:1]",
        units_of(names=tuple("abcd")),
        [],
    )
    assert log == [
        *("unshard 0.0", "unshard 0.1", "wait 0.0", "run 0"),
        *("reshard 0.0", "unshard 0.2", "wait 0.1", "run 1"),
        *("reshard 0.1", "unshard 0.3", "wait 0.2", "run 2"),
        *("reshard 0.2", "wait 0.3", "run 3"),
        *("unshard 0.2", "grad 3"),
        *("reshard 0.3", "reduce 0.3", "unshard 0.1", "wait 0.2", "grad 2"),
        *("reshard 0.2", "reduce 0.2", "unshard 0.0", "wait 0.1", "grad 1"),
        *("reshard 0.1", "reduce 0.1", "wait 0.0", "grad 0"),
        *("reshard 0.0", "reduce 0.0"),
    ]


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_recomputed_units_are_gathered_once_for_their_recomputation_and_their_backward(use_reentrant):
    units = units_of(((0,), (1,), (2,), (3,)), ((3,), (1, 2), (0,)), names=tuple("abcd"))
    log = run_model(
        Model(use_reentrant),
        f"{ROW} 0UNSHARD[1:3] 0RESHARD[3:4].2 0UNSHARD[0:1].2 0RESHARD[1:3].3 0REDUCE[1:4].3 0BW0 0REDUCE[0:1]",
        units,
        [],
    )
    backward = log[log.index("run 3") + 1 :]
    assert [line for line in backward if "run" not in line] == [
        *("unshard 0.1", "unshard 0.2", "grad 3", "reshard 0.3", "unshard 0.0", "wait 0.1", "wait 0.2"),
        *(
            "grad 2",
            "grad 1",
            "reshard 0.1",
            "reshard 0.2",
            "reduce 0.1",
            "reduce 0.2",
            "reduce 0.3",
            "wait 0.0",
        ),
        *("grad 0", "reduce 0.0"),
    ]
    assert backward.index("run 1") > backward.index("wait 0.2")
    assert backward.count("run 1") == backward.count("run 2") == 1


def test_a_module_that_runs_twice_comes_twice():
    units = units_of(((0,), (1,), (0,), (2,), (3,)), ((3,), (2,), (0,), (1,), (0,)), names=tuple("abcd"))
    row = "0UNSHARD[0:4] 0RESHARD[1:2].3 0F0 0UNSHARD[1:2].3 0REDUCE[1:2].5 0BW0 0REDUCE[0:1] 0REDUCE[2:4]"
    log = run_model(Model(order=(0, 1, 0, 2, 3)), row, units, [])
    assert [line for line in log if "wait" not in line][4:] == [
        *("run 0", "run 1", "reshard 0.1", "run 0", "run 2", "run 3", "grad 3", "grad 2", "unshard 0.1"),
        *("grad 1", "reduce 0.1", "grad 0", "reduce 0.0", "reduce 0.2", "reduce 0.3"),
    ]


def test_a_model_that_runs_in_another_order_is_refused():
    with pytest.raises(ModelError, match="0F0: unit 'b' runs after 'c'"):
        run_model(Model(order=(0, 2, 1, 3)), f"{ROW} 0BW0", units_of(names=tuple("abcd")), [])


def test_a_peer_that_is_lost_inside_a_backward_is_told_with_operation_and_unit():
    """Through autograd, whose hooks do the operation."""

    class Lost(list):
        def append(self, line):
            super().append(line)
            if line == "reduce 0.3":
                raise PeerLostError("reduce_scatter", "dp_reduce", (0, 1), 1, 2.0, "timed out")

    with pytest.raises(
        PeerLostError,
        match=r"^rank 1: stage 0, iteration 0, 0BW0: 0REDUCE\[3:4\]\.2, unit 'd': lost a peer in reduce",
    ):
        run_model(Model(), "0F0 0REDUCE[3:4].2 0BW0", units_of(names=tuple("abcd")), Lost())


def test_w_of_a_sink_tells_of_units_in_the_order_filed():
    log, boundaries = Log(), UnitBoundaries()
    sink = WeightGradAccumulator()
    sink.bind({key: torch.zeros(2) for key in "abcd"})
    sink.report_units({"a": 0, "b": 1, "c": 2, "d": 2}, lambda unit: boundaries.unit_begins(0, unit))

    class Filing(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 1

        @staticmethod
        def backward(ctx, grad):
            for key in "dcba":
                sink.put(key, None, torch.ones(2))
            return grad

    def total(key):
        return int(sink.main_grads[key].sum())

    class Sync(Log):
        def append(self, line):
            log.append(f"{line} with {'/'.join(str(total(key)) for key in 'abcd')}")

    stage = ModelStage(
        lambda m, h: Filing.apply(torch.ones((), requires_grad=True)), sink, begins=True, ends=True
    )
    row = "0F0 0F1 0B0 0REDUCE[2:3].2 0REDUCE[1:2].3 0W0 0REDUCE[0:1] 0B1 0REDUCE[2:3].2 0W1[1:3] 0REDUCE[1:2] 0W1[0:1]"
    plan = Plan("by hand", Placement(LINEAR, 1), 2, (parse_row(row.split()),))
    units = {0: units_of(((0,), (1,), (2,)), names=tuple("abc"))}
    Executor(plan, 0, {0: stage}, NoChannel(), Sync(), units=units, boundaries=boundaries).run()
    assert log == [
        *("reduce 0.2 with 0/0/2/2", "reduce 0.1 with 0/2/2/2", "reduce 0.0 with 2/2/2/2"),
        *("reduce 0.2 with 2/2/4/4", "reduce 0.1 with 2/4/4/4"),
    ]
    assert total("a") == 4
    with pytest.raises(AssertionError, match="'x' is in no unit"):
        sink._unit("x")
