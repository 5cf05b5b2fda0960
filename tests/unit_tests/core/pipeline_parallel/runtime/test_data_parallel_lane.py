"""Operations in the middle of computations come where the plan has them, and weights are there."""

from __future__ import annotations

import pytest

from megatron.core.module import ModelError
from megatron.core.pipeline_parallel.plan.ir import Plan, PlanError, parse_row
from megatron.core.pipeline_parallel.plan.placement import LOOPED, Placement
from megatron.core.pipeline_parallel.post_validation.state import Go, Validation
from megatron.core.pipeline_parallel.runtime.data_parallel_lane import UnitBoundaries
from megatron.core.pipeline_parallel.runtime.executor import Executor
from megatron.core.transport.peer_loss import PeerLostError
from tests.harness.telling_stages import NAMES, Log, NoChannel, TellingStage, units_of


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
    assert executor._boundaries.crossing is None  # nobody runs operations outside of a row


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
