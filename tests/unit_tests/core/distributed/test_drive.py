"""What follows from the hooks' events: which of gathers, frees and reductions, in which order."""

from __future__ import annotations

import dataclasses

import pytest

from megatron.core.distributed.drive import Drive
from megatron.core.distributed.sharding import sharding_of
from megatron.core.module import ModelError


@dataclasses.dataclass
class AUnit:
    name: str = "a unit"
    backward_reads: bool = True
    lasts: bool = False


class Log:
    """Answers every call by noting it."""

    def __init__(self, name: str, calls: list[tuple]) -> None:
        self._name, self._calls = name, calls

    def __getattr__(self, method: str):
        return lambda *args, **kwargs: self._calls.append((self._name, method, *args, *kwargs.values()))


class Engine:
    def __init__(self) -> None:
        self.units = [AUnit(backward_reads=False), AUnit(), AUnit(lasts=True)]
        self.more_microbatches = False
        self.sharding = sharding_of("optim_grads_params")
        self.reached = 0

    def backward_reached(self) -> None:
        self.reached += 1


def driven() -> tuple[Drive, list[tuple], Engine]:
    calls: list[tuple] = []
    engine = Engine()
    return Drive(engine, Log("reduction", calls), Log("weights", calls)), calls, engine


def told(calls: list[tuple], event) -> list[tuple]:
    calls.clear()
    event()
    return list(calls)


def test_a_forward():
    drive, calls, engine = driven()
    engine.more_microbatches = True
    assert told(calls, lambda: drive.begin_forward(training=True)) == [("weights", "begin", True, True)]
    assert told(calls, lambda: drive.enter_forward(1, recomputing=False)) == [
        ("reduction", "forward_reached", 1),
        ("weights", "need", 1),
    ]
    assert told(calls, lambda: drive.leave_forward(1, recomputing=False)) == [
        ("weights", "leave_forward", 1, True)
    ]
    assert told(calls, lambda: drive.end_forward(training=True)) == []


def test_an_evaluation_leaves_nothing_gathered():
    drive, calls, _ = driven()
    assert told(calls, lambda: drive.begin_forward(training=False)) == [("weights", "begin", False, False)]
    assert told(calls, lambda: drive.enter_forward(1, recomputing=False)) == [("weights", "need", 1)], (
        "not in the order of reductions"
    )
    assert told(calls, lambda: drive.leave_forward(1, recomputing=False)) == [
        ("weights", "leave_forward", 1, False)
    ]
    assert told(calls, lambda: drive.end_forward(training=False)) == [("weights", "leave_evaluation")]


def test_a_recomputation_is_no_new_place_in_the_order():
    drive, calls, _ = driven()
    assert told(calls, lambda: drive.enter_forward(1, recomputing=True)) == [("weights", "need", 1)]
    assert told(calls, lambda: drive.leave_forward(1, recomputing=True)) == [
        ("weights", "leave_recompute", 1)
    ]


def test_a_backward_makes_room_before_it_gathers_and_gathers_only_what_is_read():
    drive, calls, engine = driven()
    assert told(calls, lambda: drive.enter_backward(1, differentiable=False)) == [
        ("reduction", "make_room", 1),
        ("weights", "need", 1),
    ]
    assert told(calls, lambda: drive.enter_backward(0, differentiable=False)) == [
        ("reduction", "make_room", 0)
    ]
    assert engine.reached == 2, "a backward may come to units and contribute nothing"


def test_a_backward_that_another_one_goes_through_takes_no_part_in_the_step():
    drive, calls, engine = driven()
    with pytest.raises(
        ModelError, match=r"unit 'a unit': create_graph=True .*use optim_grads, optim or no_shard"
    ):
        drive.enter_backward(1, differentiable=True)
    engine.sharding = sharding_of("optim_grads")
    assert told(calls, lambda: drive.enter_backward(1, differentiable=True)) == []
    assert engine.reached == 0


def test_passed():
    drive, calls, _ = driven()
    assert told(calls, lambda: drive.passed(1, last=True)) == [
        ("reduction", "passed", 1),
        ("weights", "passed", 1),
    ]
    assert told(calls, lambda: drive.passed(1, last=False)) == [("weights", "passed", 1)], "of several calls"
    assert told(calls, lambda: drive.passed(2, last=False)) == [], "a unit that lasts, to its last one"
    assert told(calls, lambda: drive.passed(2, last=True)) == [
        ("reduction", "passed", 2),
        ("weights", "passed", 2),
    ]
