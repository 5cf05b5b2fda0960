"""The gatherer by itself: what is gathered when, ahead within the bound, for how long it is kept."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import nn

from megatron.core import collectives
from megatron.core.distributed.custom_fsdp.gather import Gatherer, State
from megatron.core.distributed.custom_fsdp.memory import AllocatedMemory, DoubleBuffer, TransientMemory
from megatron.core.distributed.custom_fsdp.reshard_plan import Keep
from megatron.core.distributed.distributed_data_parallel_config import DistributedDataParallelConfig
from megatron.core.distributed.flat_buffer import FlatBuffer
from megatron.core.distributed.ledger import Ledger
from megatron.core.distributed.sharding import ShardPlace, sharding_of
from megatron.core.distributed.traffic_counter import TrafficCounter
from megatron.core.distributed.units import Unit
from megatron.core.param_meta import ParamMeta
from tests.harness.ranks import run_ranks

NUMEL = 256  # of each unit: its bucket on two ranks
FORWARD = (0, 1, 2, 3)


class Waits:
    def __init__(self, log: list[str], what: str) -> None:
        self._log, self._what = log, what

    def wait(self) -> None:
        self._log.append(self._what)


class Gathered:
    """A gatherer over four units of one size whose collectives are only noted, as rank 0 of two."""

    def __init__(
        self,
        monkeypatch,
        ps,
        *,
        bound: int = 2 * NUMEL,
        lookup: bool = False,
        slot_of: dict[str, int | None] | None = None,
        lasts: Sequence[int] = (),
    ) -> None:
        self.ledger, self.traffic, self.log = Ledger(), TrafficCounter(), []
        memory: TransientMemory = AllocatedMemory(self.ledger)
        if slot_of is not None:
            memory = DoubleBuffer(self.ledger, slot_of)
        self.units = [
            Unit(index, f"u{index}", (), (f"w{index}",), index > 0 or not lookup, False, index in lasts)
            for index in FORWARD
        ]
        buffer = toy_buffer(ShardPlace(0, 2), self.units, memory)

        class Two:
            size = 2

        def gather(pairs, group, *, async_op):
            unit = next(
                u for u in self.units if buffer.buckets_of_unit(u.name)[0].full_weights is pairs[0][0]
            )
            self.log.append(f"gather {unit.index}")
            return Waits(self.log, f"wait {unit.index}")

        monkeypatch.setattr(collectives, "all_gather_units", gather)
        order = (*FORWARD, *(unit for unit in (2, 1, 0) if unit or not lookup))
        groups = Two(), ps.dp_outer_group
        self.gatherer = Gatherer(
            self.units, buffer, *groups, memory, self.traffic, bound=bound, last=FORWARD[-1], planned=order
        )

    def since(self) -> str:
        log, self.log[:] = list(self.log), []
        return ", ".join(log)

    def held(self) -> list[int]:
        return [unit for unit in FORWARD if self.gatherer.state(unit) is not State.SHARDED]

    def forward(self, *, training: bool = True) -> None:
        for unit in FORWARD:
            self.gatherer.need(unit)
            self.gatherer.leave_forward(unit, training=training)

    def backward(self) -> None:
        for unit in reversed(FORWARD):
            if self.units[unit].backward_reads:
                self.gatherer.need(unit)
            self.gatherer.passed(unit)

    def microbatch(self, *, last: bool = True) -> str:
        self.gatherer.begin(training=True, repeats=not last)
        self.forward()
        self.backward()
        self.gatherer.end_microbatch(last=last)
        return self.since()


def toy_buffer(place: ShardPlace, units: Sequence[Unit], memory: TransientMemory, outer: str = "no_shard"):
    names = [name for unit in units for name in unit.names]
    return FlatBuffer(
        {name: nn.Parameter(torch.full((200,), float(index))) for index, name in enumerate(names)},
        {name: ParamMeta(name, (200,)) for name in names},
        DistributedDataParallelConfig(),
        sharding=sharding_of("optim_grads_params", outer),
        place=place,
        device=torch.device("cpu"),
        units={name: unit.name for unit in units for name in unit.names},
        new_full=memory.new,
    )


@pytest.fixture
def made(monkeypatch):
    class Ps:
        class dp_outer_group:  # noqa: N801
            size = 1

    return lambda **how: Gathered(monkeypatch, Ps, **how)


def test_the_first_microbatch_is_recorded_and_gathers_on_demand(made):
    run = made()
    assert run.microbatch() == (
        "gather 0, wait 0, gather 1, wait 1, gather 2, wait 2, gather 3, wait 3, "
        "gather 2, wait 2, gather 1, wait 1, gather 0, wait 0"
    ), "3 is not gathered twice: the last of the forward is the first of the backward"
    assert run.held() == []
    assert (run.gatherer.peak_gathered, run.ledger.live("gathered")) == (NUMEL, 0)
    assert run.gatherer.order.demanded == (0, 1, 2, 3, 2, 1, 0)
    assert run.traffic.as_dict() == {"all_gather": (7, 7 * NUMEL * 4)}


def test_later_ones_gather_ahead_within_the_bound(made):
    run = made()
    first = run.microbatch()
    later = run.microbatch()
    assert later == (
        "gather 0, gather 1, wait 0, gather 2, wait 1, gather 3, wait 2, "
        "gather 2, wait 3, gather 1, wait 2, gather 0, wait 1, wait 0"
    )
    assert later.count("gather") == first.count("gather") == 7
    assert run.gatherer.peak_gathered == 2 * NUMEL
    small = made(bound=1)
    small.microbatch()
    assert small.microbatch() == first, "below one unit: no prefetch"
    assert small.gatherer.peak_gathered == NUMEL
    large = made(bound=10 * NUMEL)
    large.microbatch()
    assert large.microbatch().startswith("gather 0, gather 1, gather 2, gather 3, wait 0, wait 1")
    assert large.gatherer.peak_gathered == 4 * NUMEL


def test_what_is_gathered_ahead_of_the_next_microbatch_stays(made):
    run = made()
    run.microbatch(last=False)
    run.gatherer.begin(training=True, repeats=True)
    run.forward()
    run.backward()
    assert run.held() == [0]
    run.gatherer.end_microbatch(last=True)
    assert run.held() == [], "with the last one, all goes"


@pytest.mark.parametrize(
    ("keep", "gathers"),
    [(Keep.NOTHING, (7, 7)), (Keep.TO_BACKWARD, (4, 4)), (Keep.STEP, (4, 0))],
)
def test_policies_keep_units(made, keep, gathers):
    run = made()
    run.gatherer.set_keep([keep] * 4)
    assert run.microbatch(last=False).count("gather") == gathers[0]
    assert (run.held() == [*FORWARD]) is (keep is Keep.STEP)
    assert run.microbatch(last=True).count("gather") == gathers[1]
    assert run.held() == []
    with pytest.raises(AssertionError, match="1 policies for 4 units"):
        run.gatherer.set_keep([keep])


def test_a_backward_that_reads_no_weights_is_not_kept_for(made):
    run = made(lookup=True)
    assert run.microbatch().endswith("gather 1, wait 1")
    run = made(lookup=True)
    run.gatherer.set_keep([Keep.TO_BACKWARD] * 4)
    run.gatherer.begin(training=True, repeats=False)
    run.forward()
    assert run.held() == [1, 2, 3]


def test_a_unit_that_lasts_is_gathered_once(made):
    run = made(lasts=[0])
    assert run.microbatch().count("gather 0") == 1
    assert run.microbatch().count("gather 0") == 1


def test_passed_units_go_when_the_next_one_is_needed(made):
    """Their last operations may come after their last gradient."""
    run = made()
    run.gatherer.begin(training=True, repeats=False)
    run.forward()
    run.gatherer.need(3)
    run.gatherer.passed(3)
    assert run.held() == [3]
    run.gatherer.need(2)
    assert run.held() == [2]
    run.gatherer.passed(2)
    run.gatherer.need(2)
    assert run.held() == [2], "needed again"
    run.gatherer.need(1)
    assert run.held() == [1, 2], "and not passed since"


def test_evaluation_leaves_nothing_and_has_an_order_of_its_own(made):
    run = made()
    run.microbatch()
    run.traffic.reset()
    for _ in range(2):
        run.gatherer.begin(training=False, repeats=False)
        run.forward(training=False)
        run.gatherer.leave_evaluation()
        assert run.held() == []
    assert run.gatherer.order.demanded == FORWARD
    assert run.traffic.as_dict() == {"evaluation_all_gather": (8, 8 * NUMEL * 4)}
    run.gatherer.begin(training=True, repeats=False)
    assert run.gatherer.order.recorded == (0, 1, 2, 3, 2, 1, 0)


def test_units_recomputed_together_are_gathered_once_as_far_as_they_fit(made):
    for bound, again in ((4 * NUMEL, ""), (2 * NUMEL, "gather 0, wait 0")):
        run = made(bound=bound)
        run.gatherer.begin(training=True, repeats=False)
        run.since()
        for unit in (0, 1, 2):
            run.gatherer.need(unit)
            run.gatherer.leave_recompute(unit)
        assert run.held() == ([0, 1, 2] if not again else [1, 2]), "the first is reached last"
        run.since()
        for unit in (2, 1, 0):
            run.gatherer.need(unit)
            run.gatherer.passed(unit)
        assert run.since() == again


def test_new_weights_make_what_is_gathered_worthless(made):
    run = made()
    run.gatherer.begin_fetch(1)
    run.gatherer.need(0)
    assert run.since() == "gather 1, gather 0, wait 0"
    run.gatherer.weights_changed()
    assert run.held() == []
    assert run.since() == "wait 1", "never takes memory away from a collective under way"
    assert run.gatherer.begin_fetch(2) is not None
    assert run.gatherer.begin_fetch(2) is not None, "under way"
    run.gatherer.need(2)
    assert run.gatherer.begin_fetch(2) is None, "there"


def test_slots_taken_in_turns(made):
    run = made(bound=10 * NUMEL, slot_of={"u0": 0, "u1": 1, "u2": 0, "u3": 1})
    run.microbatch()
    later = run.microbatch()
    assert run.gatherer.peak_gathered == 2 * NUMEL, "as many as there are slots"
    assert later.count("gather") == 7
    run.gatherer.begin(training=True, repeats=False)
    run.gatherer.need(0)
    run.gatherer.leave_forward(0, training=True)
    run.gatherer.need(3)  # left in the middle
    run.gatherer.begin(training=True, repeats=False)
    assert run.held() == [], "a new microbatch takes the slots of one that was left"


def test_steps_are_as_planned_unless_something_came_between(made):
    run = made()
    gatherer = run.gatherer

    def step(between=lambda: None) -> bool:
        gatherer.begin_step()
        for last in (False, True):
            gatherer.begin(training=True, repeats=not last)
            run.forward()
            between()
            run.backward()
            gatherer.end_microbatch(last=last)
        return gatherer.as_planned

    def evaluate() -> None:
        gatherer.begin(training=False, repeats=False)
        run.forward(training=False)
        gatherer.leave_evaluation()

    def export() -> None:
        gatherer.fetch(1)
        gatherer.unfetch(1)

    def once_more() -> None:
        gatherer.begin(training=True, repeats=False)
        run.forward()

    assert step()
    evaluate()
    export()
    assert step(), "between steps anything may come"
    assert gatherer.step_peak == 2 * NUMEL
    for between in (evaluate, export, once_more, lambda: gatherer.need(0)):
        assert not step(between), between
        step()  # its record is planned again
        assert step()
    gatherer.begin_fetch(0)
    assert not step(), "something was whole already"


def test_an_evaluation_inside_a_microbatch_leaves_what_training_holds(made):
    run = made(lasts=[1])
    gatherer = run.gatherer
    gatherer.begin(training=True, repeats=False)
    run.forward()
    before = run.held()
    assert before == [1, 3], "what lasts, and the last of the forward, whose backward is next"
    run.since()
    gatherer.begin(training=False, repeats=False)
    run.forward(training=False)
    gatherer.leave_evaluation()
    assert run.since() == "gather 0, wait 0, gather 2, wait 2"
    assert run.held() == before
    run.backward()
    assert gatherer.order.demanded == (0, 1, 2, 3, 2, 1, 0), "back in training's order"
    assert run.since() == "gather 2, wait 2, gather 0, wait 0"


def test_whole_weights_read_outside_of_the_model_are_in_no_order(made):
    run = made(bound=10 * NUMEL)
    gatherer = run.gatherer
    gatherer.begin(training=True, repeats=False)
    run.forward()
    run.traffic.reset()
    for unit in (0, 3):
        gatherer.fetch(unit)
    assert run.held() == [0, 3]
    for unit in (0, 3):
        gatherer.unfetch(unit)
    assert run.held() == [3], "training's own stays"
    assert run.traffic.as_dict() == {"explicit_all_gather": (1, NUMEL * 4)}
    gatherer.fetch(2)
    run.backward()
    gatherer.unfetch(2)
    assert gatherer.order.demanded == (0, 1, 2, 3, 2, 1, 0)


def outer_settle(ctx):
    """HFSDP: what the other instance has updated comes with the first need, once."""
    ps = ctx.make_ps(dp=2, instances=2)
    ledger, traffic = Ledger(), TrafficCounter()
    memory = AllocatedMemory(ledger)
    units = [Unit(i, f"u{i}", (), (f"w{i}",), True, False, False) for i in range(2)]
    inner, outer = ps.dp_reduce_group, ps.dp_outer_group
    place = ShardPlace(inner.rank, inner.size, outer.rank, outer.size)
    buffer = toy_buffer(place, units, memory, "optim")
    gatherer = Gatherer(units, buffer, ps.dp_gather_group, outer, memory, traffic, bound=0, last=1)
    for unit in units:
        part = buffer.buckets_of_unit(unit.name)[0].optimizer_weights
        part.fill_(10.0 * unit.index + ctx.rank)
    gatherer.weights_changed()
    gatherer.need(1)
    halves = buffer.buckets_of_unit("u1")[0].full_weights.view(2, -1)
    found = [sorted(set(half.tolist())) for half in halves]
    gatherer.settle()
    gatherer.need(0)
    gatherer.weights_changed()
    gatherer.settle()
    return found, traffic.as_dict()


def test_the_outer_part_is_gathered_once_after_a_step():
    for found, traffic in run_ranks(outer_settle, 2):
        assert found == [[10.0], [11.0]]
        assert traffic["outer_all_gather"] == (2, 2 * 2 * 256 * 4), (
            "once a step: one call for all units of a dtype"
        )
        assert "all_gather" not in traffic, "an instance of one rank"


def two_ranks(ctx):
    """With real collectives: weights come whole, bit by bit, and go."""
    ledger, traffic = Ledger(), TrafficCounter()
    memory = AllocatedMemory(ledger)
    units = [Unit(i, f"u{i}", (), (f"w{i}",), True, False, False) for i in range(3)]
    buffer = toy_buffer(ShardPlace(ctx.rank, 2), units, memory)
    ps = ctx.ps
    gatherer = Gatherer(
        units, buffer, ps.dp_gather_group, ps.dp_outer_group, memory, traffic, bound=10**6, last=2
    )
    for _ in range(2):
        gatherer.begin(training=True, repeats=False)
        for unit in (0, 1, 2, 2, 1, 0):
            gatherer.need(unit)
            assert buffer.weight(f"w{unit}").tolist() == [float(unit)] * 200
            gatherer.leave_forward(unit, training=True)
        gatherer.end_microbatch(last=True)
    assert ledger.transient_bytes == 0
    assert buffer.buckets[0].full_weights.untyped_storage().nbytes() == 0
    return traffic.as_dict()["all_gather"][0]


def test_weights_come_whole_and_go():
    assert run_ranks(two_ranks, 2) == [10, 10]
