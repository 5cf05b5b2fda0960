"""Operations in the middle of computations come where the plan has them, told by hooks of real modules and by W."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from megatron.core.distributed.unit_events import UnitEvents
from megatron.core.module import ModelError
from megatron.core.peer_loss import PeerLostError
from megatron.core.pipeline_parallel.plan.ir import Plan, PlanError, parse_row
from megatron.core.pipeline_parallel.plan.placement import LINEAR, LOOPED, Placement
from megatron.core.pipeline_parallel.plan.units import StageUnits, UnitCosts
from megatron.core.pipeline_parallel.runtime.executor import Executor, Go, Validation
from megatron.core.pipeline_parallel.runtime.stage import ModelStage
from megatron.core.pipeline_parallel.runtime.unit_boundaries import UnitBoundaries
from megatron.core.weight_grad import WeightGradAccumulator

NAMES = ("embedding", "layers.0", "layers.1", "head")


def units_of(forward=((0,), (1,), (2,), (3,)), backward=None, names=NAMES):
    """The embedding's backward reads no weights."""
    costs = tuple(UnitCosts(name, backward_reads=name != "embedding") for name in names)
    return StageUnits(costs, forward, forward[::-1] if backward is None else backward)


class Log(list):
    """What happens, in order: calls of a GradSync, and what others add."""

    def __getattr__(self, name):
        if name.startswith("_"):
            raise AttributeError(name)

        def call(chunk, unit):
            self.append(f"{name} {chunk}.{unit}")

        return call


class TellingStage:
    """A stage whose computations begin units as they are told to: by chunk, (kind, units in the order of their
    beginning)."""

    splits = True

    def __init__(self, log, boundaries, chunk=0, **orders):
        self.log, self.boundaries, self.chunk = log, boundaries, chunk
        self.orders = {"F": (0, 1, 2, 3), "B": (3, 2, 1, 0), "W": (3, 2, 1, 0)} | orders

    def forward(self, microbatch, hidden):
        self._run(f"F{microbatch}", self.orders["F"])
        return torch.zeros(1)

    def backward(self, microbatch, grad):
        self._run(f"BW{microbatch}", self.orders["B"])
        return torch.zeros(1)

    def backward_input(self, microbatch, grad):
        self._run(f"B{microbatch}", self.orders["B"])
        return torch.zeros(1)

    def backward_weight(self, microbatch, units=None):
        part = range(4) if units is None else range(*units)
        name = f"W{microbatch}" + ("" if units is None else f"[{units[0]}:{units[1]}]")
        self._run(name, [unit for unit in self.orders["W"] if unit in part])

    def check_empty(self):
        pass

    def _run(self, name, order):
        self.log.append(f"{name} called")
        for unit in order:
            self.boundaries.unit_begins(self.chunk, unit)
            self.log.append(f"{name} in {unit}")
        self.log.append(f"{name} over")


class NoChannel:
    def post(self, messages):
        assert not messages, f"no other rank, and messages {messages}"
        return []

    def drain(self):
        pass


def one_rank(text, *, log=None, units=None, chunks=1, microbatches=1, senses=True, orders=(), **executor):
    """An executor of a row by hand, and its log. orders: of units, by chunk."""
    log = Log() if log is None else log
    boundaries = UnitBoundaries()
    stages = {
        chunk: TellingStage(log, boundaries, chunk, **(orders[chunk] if orders else {}))
        for chunk in range(chunks)
    }
    units = units or {chunk: units_of() for chunk in range(chunks)}
    plan = Plan("by hand", Placement(LOOPED, 1, chunks), microbatches, (parse_row(text.split()),))
    executor = {"boundaries": boundaries if senses else None, **executor}
    return Executor(plan, 0, stages, NoChannel(), log, units=units, **executor), log


ALL_FORWARD = (
    "0UNSHARD[0:2] 0UNSHARD[2:3].1 0RESHARD[0:1].2 0UNSHARD[3:4].2 0RESHARD[1:2].3 0F0 0RESHARD[2:3]"
)


def test_operations_come_where_the_row_has_them_and_waits_before_their_units():
    """Naive ZeRO-3: of the layers at most two are whole, the head stays for its backward."""
    executor, log = one_rank(
        f"{ALL_FORWARD} 0UNSHARD[2:3] 0UNSHARD[1:2].1 0RESHARD[3:4].2 0RESHARD[2:3].3 0RESHARD[1:2].4 0B0"
        " 0REDUCE[3:4].2 0REDUCE[2:3].3 0REDUCE[1:2].4 0W0 0REDUCE[0:1] 0HSDP_ALL_REDUCE[0:4]"
    )
    for _ in range(2):  # steps
        log.clear()
        assert executor.run()
        assert log == [
            *("unshard 0.0", "unshard 0.1"),
            *("unshard 0.2", "wait 0.0", "F0 called", "F0 in 0"),
            *("reshard 0.0", "unshard 0.3", "wait 0.1", "F0 in 1"),
            *("reshard 0.1", "wait 0.2", "F0 in 2"),
            *("wait 0.3", "F0 in 3", "F0 over"),
            *("reshard 0.2", "unshard 0.2"),
            *("unshard 0.1", "B0 called", "B0 in 3"),
            *("reshard 0.3", "wait 0.2", "B0 in 2"),
            *("reshard 0.2", "wait 0.1", "B0 in 1"),
            *("reshard 0.1", "B0 in 0", "B0 over"),  # its weights are not read
            *("W0 called", "W0 in 3"),
            *("reduce 0.3", "W0 in 2"),
            *("reduce 0.2", "W0 in 1"),
            *("reduce 0.1", "W0 in 0", "W0 over"),
            *("reduce 0.0", *(f"sum_outer 0.{unit}" for unit in range(4))),
        ]


def test_stages_that_sense_nothing_begin_everything_before_their_call():
    executor, log = one_rank("0UNSHARD 0F0 0REDUCE[3:4].2 0REDUCE[0:3].4 0BW0", senses=False)
    executor.run()
    assert log[:9] == [*(f"unshard 0.{u}" for u in range(4)), *(f"wait 0.{u}" for u in range(4)), "F0 called"]
    assert [line for line in log[9:] if " in " not in line] == [
        *("F0 over", "reduce 0.3", "reduce 0.0", "reduce 0.1", "reduce 0.2", "BW0 called", "BW0 over")
    ]


def test_units_that_nothing_told_of_begin_at_the_end():
    executor, log = one_rank("0UNSHARD 0RESHARD[1:3].4 0F0 0BW0", orders=({"F": (0, 3), "B": (3,)},))
    executor.run()
    assert log[5:] == [
        *(
            "F0 called",
            "F0 in 0",
            "wait 0.1",
            "reshard 0.1",
            "wait 0.2",
            "reshard 0.2",
            "wait 0.3",
            "F0 in 3",
            "F0 over",
        ),
        *("BW0 called", "BW0 in 3", "BW0 over"),
    ]


def test_a_unit_may_come_twice_and_units_that_are_recomputed_together_are_waited_for_together():
    tied = units_of(((0,), (1,), (2,), (0,)), ((0,), (1, 2), (0,)), names=("embedding_and_head", *NAMES[1:3]))
    executor, log = one_rank(
        "0UNSHARD 0RESHARD[1:3].4 0F0 0UNSHARD[1:3].1 0RESHARD[1:3].3 0REDUCE[1:3].3 0BW0 0REDUCE[0:1]",
        units={0: tied},
        orders=({"F": (0, 1, 2, 0), "B": (0, 1, 2, 1, 0)},),
    )
    executor.run()
    assert log == [
        *(
            "unshard 0.0",
            "unshard 0.1",
            "unshard 0.2",
            "wait 0.0",
            "F0 called",
            "F0 in 0",
            "wait 0.1",
            "F0 in 1",
        ),
        *("wait 0.2", "F0 in 2", "reshard 0.1", "reshard 0.2", "F0 in 0", "F0 over"),
        *("unshard 0.1", "unshard 0.2", "BW0 called", "BW0 in 0"),
        *("wait 0.1", "wait 0.2", "BW0 in 1", "BW0 in 2", "BW0 in 1"),
        *("reshard 0.1", "reshard 0.2", "reduce 0.1", "reduce 0.2", "BW0 in 0", "BW0 over", "reduce 0.0"),
    ]


def test_a_unit_of_two_stages_is_one():
    """A V's tied matrix: gathered for the first chunk's lookup, read by the last one's head."""
    first = units_of(((0,), (1,)), names=("embedding", "layers.0"))
    last = units_of(((0,), (1, 2)), names=("layers.1", "head", "embedding"))
    executor, log = one_rank(
        "0UNSHARD 0F0 1UNSHARD[0:2] 1F0 1BW0 1RESHARD[0:2] 0BW0 0RESHARD",
        chunks=2,
        units={0: first, 1: last},
        orders=({"F": (0, 1), "B": (1, 0)}, {"F": (0, 1), "B": (1, 0)}),
    )
    executor.run()
    told = [line for line in log if line.split()[0] in ("unshard", "wait", "reshard")]
    assert told == [
        *("unshard 0.0", "unshard 0.1", "wait 0.0", "wait 0.1"),
        *("unshard 1.0", "unshard 1.1", "wait 1.0", "wait 1.1"),  # the embedding is there
        *("reshard 1.0", "reshard 1.1", "reshard 0.0", "reshard 0.1"),
    ]


def test_overlapped_computations_have_operations_of_their_own():
    executor, log = one_rank(
        "0UNSHARD 0F0 1F0 1BW0 0RESHARD[1:2].3 (0F1;0UNSHARD[1:2];0REDUCE[3:4].2;0BW0) 1F1 1BW1 0BW1",
        chunks=2,
        microbatches=2,
    )
    executor.run()
    at = log.index("F1 in 1")
    assert log[at:][:12] == [
        *("F1 in 1", "reshard 0.1", "F1 in 2", "F1 in 3", "F1 over", "unshard 0.1"),
        *("BW0 called", "BW0 in 3", "reduce 0.3", "BW0 in 2", "wait 0.1", "BW0 in 1"),
    ]


def test_w_by_parts():
    executor, log = one_rank(
        "0F0 0B0 0REDUCE[3:4].2 0W0[2:4] 0REDUCE[2:3] 0REDUCE[1:2].2 0W0[0:2] 0REDUCE[0:1]"
    )
    executor.run()
    assert log[log.index("B0 over") + 1 :] == [
        *("W0[2:4] called", "W0[2:4] in 3", "reduce 0.3", "W0[2:4] in 2", "W0[2:4] over", "reduce 0.2"),
        *("W0[0:2] called", "W0[0:2] in 1", "reduce 0.1", "W0[0:2] in 0", "W0[0:2] over", "reduce 0.0"),
    ]


@pytest.mark.parametrize("order", [(0, 2, 1, 3), (0, 1, 2, 3, 1)])
def test_a_unit_out_of_order_is_the_models_mistake_once_its_weights_are_gone(order):
    late = one_rank(f"{ALL_FORWARD} 0RESHARD[3:4] 0BW0", orders=({"F": order},))[0]
    with pytest.raises(ModelError, match=r"0F0: unit 'layers\.0' runs after '.*weights are freed") as caught:
        late.run(3)
    assert "--fsdp-unit-modules" in str(caught.value)
    assert caught.value.__notes__ == ["pipeline rank 0, stage 0, iteration 3, 0F0"]
    kept, log = one_rank("0UNSHARD 0F0 0BW0", orders=({"F": order},))
    kept.run()  # they are there
    assert log.count("F0 in 1") == order.count(1)


def test_a_gradient_behind_its_sum_is_the_models_mistake():
    executor, _ = one_rank("0F0 0REDUCE[3:4].2 0BW0", orders=({"B": (3, 2, 3, 1, 0)},))
    with pytest.raises(ModelError, match=r"0BW0: unit 'head' runs after 'layers\.1'.*gradients are summed"):
        executor.run()
    executor, _ = one_rank("0F0 0REDUCE[3:4].3 0BW0", orders=({"B": (3, 2, 3, 1, 0)},))
    executor.run()


def test_what_comes_before_validate_is_repeated_over_fresh_gathers():
    decisions = [Go.ON, Go.AGAIN, Go.STOP]
    log = Log()

    def decide():
        log.append("decided")
        return decisions.pop(0)

    executor, _ = one_rank(
        "0UNSHARD[0:3] 0RESHARD[0:1].2 0F0 0UNSHARD[3:4] 0VALIDATE 0F1 0REDUCE[2:4].3 0BW0 0BW1 0REDUCE",
        log=log,
        microbatches=2,
        orders=({"F": (0, 1, 2)},),
        validation=Validation(decide, lambda stage, microbatch: log.append(f"forget {stage}F{microbatch}")),
    )
    forward = [
        *("unshard 0.0", "unshard 0.1", "unshard 0.2"),
        *(
            "wait 0.0",
            "F0 called",
            "F0 in 0",
            "reshard 0.0",
            "wait 0.1",
            "F0 in 1",
            "wait 0.2",
            "F0 in 2",
            "F0 over",
        ),
        *("unshard 0.3",),
    ]
    runs = []
    for done in (True, True, False):
        log.clear()
        assert executor.run() is done
        runs.append(list(log))
    once, again, stopped = runs
    behind = once[len(forward) + 1 :]
    assert once[: len(forward) + 1] == [*forward, "decided"]
    assert behind[:5] == ["F1 called", "F1 in 0", "F1 in 1", "F1 in 2", "F1 over"]
    assert again == [*forward, "decided", "forget 0F0", *forward, *behind]
    assert stopped == [*forward, "decided", "forget 0F0"]


def test_what_the_row_has_wrong_is_said_at_the_start():
    with pytest.raises(PlanError, match=r"0REDUCE\[0:1\]\.1: no computation comes behind it"):
        one_rank("0F0 0BW0 0REDUCE[0:1].1")
    with pytest.raises(PlanError, match=r"0UNSHARD\[0:1\]\.5 waits for access 5 of 0F0, which has 4"):
        one_rank("0UNSHARD[0:1].5 0F0 0BW0")
    with pytest.raises(PlanError, match=r"0UNSHARD\[2:5\]: stage 0 has 4 units"):
        one_rank("0UNSHARD[2:5] 0F0 0BW0")
    with pytest.raises(PlanError, match=r"0W0\[0:2\]: stages compute whole microbatches"):
        one_rank("0F0 0B0 0W0[0:2] 0W0[2:4]")  # nothing knows units


class Lost(Log):
    """Peers are lost in one of the calls."""

    def __init__(self, call):
        super().__init__()
        self.call = call

    def append(self, line):
        super().append(line)
        if line == self.call:
            raise PeerLostError("all_gather", "dp_gather", (0, 1), 0, 2.0, "timed out")


@pytest.mark.parametrize(
    ("call", "told"),
    [
        ("unshard 0.3", "stage 0, iteration 5, 0F0: 0UNSHARD[3:4].2, unit 'head': lost a peer in all_gather"),
        ("wait 0.1", "stage 0, iteration 5, 0F0: waiting for 0UNSHARD[0:2], unit 'layers.0': lost a peer"),
        ("reshard 0.2", "stage 0, iteration 5: 0RESHARD[2:3], unit 'layers.1': lost a peer"),
    ],
)
def test_a_lost_peer_is_told_with_operation_and_unit(call, told):
    executor, _ = one_rank(f"{ALL_FORWARD} 0BW0", log=Lost(call))
    with pytest.raises(PeerLostError) as caught:
        executor.run(5)
    assert str(caught.value).startswith(f"rank 0: {told}")
    assert executor._boundaries._crossing is None  # nobody runs operations outside of a row


class Clock:
    """A recorder whose clock others move."""

    def __init__(self):
        self.time, self.told = 0.0, {}

    def now(self):
        return self.time

    def begin_step(self, plan, rank, iteration):
        self.told.clear()

    def record(self, place, *times):
        assert place not in self.told
        self.told[place] = times

    def repeated(self):
        pass

    def end_step(self):
        pass


def test_operations_are_recorded_with_their_own_times_and_are_no_computation():
    clock = Clock()

    class Timed(Log):
        def append(self, line):
            super().append(line)
            costs = {"unshard": 1, "wait": 10, "reshard": 2, "reduce": 3}
            clock.time += costs.get(line.split()[0], 100 if " in " in line else 0)

    executor, _ = one_rank(
        "0UNSHARD[0:2] 0UNSHARD[2:3].2 0RESHARD[0:1].2 0F0 0REDUCE[1:4].4 0BW0", log=Timed(), recorder=clock
    )
    executor.run()
    assert clock.told == {
        0: (0, 2 + 10 + 100 + 1 + 2 + 10, 20),  # to the end of the last wait; each was waited for
        1: (112, 112 + 1 + 2 + 10 + 100 + 10, 10),
        2: (113, 115, 0),
        3: (2, 2 + 10 + 100 + 13 + 100 + 10 + 100 + 100, 0, 33),
        4: (735, 744, 0),
        5: (435, 844, 0, 9),
    }


# Real modules ------------------------------------------------------------------------------------


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
    return UnitEvents([*chunks, [(unit, [block]) for unit, block in enumerate(model.blocks)]], listener)


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
    events.remove()
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
    UnitEvents([[(0, [two]), (1, [two.block])]], heard)
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
