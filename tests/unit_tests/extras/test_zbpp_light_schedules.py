"""zbpp_light's schedules against this project's own: orders, times, messages."""

import random

import pytest
from zbpp_light import schedules

from megatron.core.pipeline_parallel.plan.costs import CostModel
from megatron.core.pipeline_parallel.plan.generators import linear
from megatron.core.pipeline_parallel.plan.ir import NAMES
from megatron.core.pipeline_parallel.plan.request import Request
from megatron.core.pipeline_parallel.plan.simulate import simulate

OURS = {"zb-h1": linear.zb_h1, "zb-h2": linear.zb_h2, "1f1b": linear.one_f_one_b}

SIZES = [
    (p, m)
    for p in (1, 2, 3, 4, 5, 6, 7, 8, 12, 16)
    for m in (1, 2, 3, 4, 5, 7, 8, 9, 11, 12, 16, 17, 23, 24, 31, 32, 33, 48, 63, 64)
]


def own_plan(name, p, m):
    return OURS[name](Request(p, m))


def own_rows(name, p, m):
    return tuple(tuple((NAMES[op[0]], op[2]) for op in row) for row in own_plan(name, p, m).rows)


def test_two_hundred_sizes():
    assert len(SIZES) == 200
    assert sum(m < p for p, m in SIZES) > 40


def test_rows_are_this_projects():
    for p, m in SIZES:
        rows = schedules.make(p, m)
        assert rows == own_rows("zb-h1", p, m), (p, m)
        schedules.check(rows, m)


@pytest.mark.parametrize("name", OURS)
def test_bubbles_are_the_simulators(name):
    for p, m in SIZES[::7]:
        plan = own_plan(name, p, m)
        simulation = simulate(plan, CostModel.of_ranks(plan.placement))
        timing = schedules.check(own_rows(name, p, m), m)
        assert timing.bubble_apart == pytest.approx(simulation.bubble_rate), (p, m)


def test_the_papers_bubbles():
    """arXiv 2401.10241, table 1: (p-1)(F+B+W), (p-1)(F+B-W) and, where ranks do not wait for each other, none."""
    assert schedules.timed(own_rows("1f1b", 4, 8)).bubble == pytest.approx(9 / 33)
    assert schedules.timed(schedules.make(4, 8)).bubble == pytest.approx(3 / 27)
    assert schedules.timed(own_rows("zb-h2", 4, 8)).bubble_apart == pytest.approx(0)
    assert schedules.timed(own_rows("zb-h2", 4, 8)).bubble == pytest.approx(3 / 27)


def test_what_waits_and_what_is_held():
    rows = schedules.make(4, 8)
    assert [schedules.most(row, "B", "W") for row in rows] == [1, 2, 3, 4]
    assert [schedules.most(row, "F", "B", "BW") for row in rows] == [4, 3, 2, 1]
    assert [schedules.most(row, "F", "W") for row in rows] == [4, 4, 4, 4]


def shuffled_rows(source, p, m):
    """Rows of one step in any order that a pipeline can run: of what is ready somewhere, one at a time."""
    done = [{"F": 0, "B": 0, "W": 0} for _ in range(p)]
    rows = [[] for _ in range(p)]
    while any(len(row) < 3 * m for row in rows):
        ready = []
        for s, counts in enumerate(done):
            if counts["F"] < (m if s == 0 else done[s - 1]["F"]):
                ready.append((s, "F"))
            if counts["B"] < min(counts["F"], m if s == p - 1 else done[s + 1]["B"]):
                ready.append((s, "B"))
            if counts["W"] < counts["B"]:
                ready.append((s, "W"))
        s, kind = source.choice(ready)
        rows[s].append((kind, done[s][kind]))
        done[s][kind] += 1
    return tuple(map(tuple, rows))


def test_messages_in_the_order_of_both_ends():
    """An end posts all messages before its own send, and before its receive: none of them may be a send that comes
    later in its row."""
    source = random.Random(1)
    for _ in range(60):
        p, m = source.randint(2, 6), source.randint(1, 8)
        rows = shuffled_rows(source, p, m)
        schedules.check(rows, m)
        timing = schedules.timed(rows)
        for stage in range(p - 1):
            order = [(kind, i) for _, kind, i in schedules.between(timing, stage, m)]
            assert sorted(order) == sorted((kind, i) for kind in "FB" for i in range(m))
            place = {message: i for i, message in enumerate(order)}
            for row, sends, receives in ((rows[stage], "F", "B"), (rows[stage + 1], "B", "F")):
                posted = -1
                for op in row:
                    if op[0] == sends:
                        assert place[op] > posted, (rows, op)
                        posted = place[op]
                    elif op[0] == receives:
                        own = [message for message in order[: place[op]] if message[0] == sends]
                        assert all(row.index(message) < row.index(op) for message in own), (rows, op)


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ([("F", 0), ("B", 0)], r"stage 0 has W of microbatches \[\]: each of 1 stands once"),
        ([("B", 0), ("F", 0), ("W", 0)], "B0 would wait for ever"),
        ([("F", 0), ("W", 0), ("B", 0)], "W0 would wait for ever"),
        ([("F", 0), ("F", 0), ("B", 0), ("W", 0)], r"F of microbatches \[0, 0\]"),
        ([("F", 1), ("BW", 1)], r"F of microbatches \[1\]"),
        ([("F", 0), ("BW", 0), ("W", 0)], r"W of microbatches \[0, 0\]"),
    ],
)
def test_wrong_rows(row, words):
    with pytest.raises(ValueError, match=words):
        schedules.check((tuple(row),), 1)


def test_deadlock_is_named():
    rows = ((("F", 0), ("F", 1), ("BW", 0), ("BW", 1)), (("F", 0), ("F", 1), ("BW", 0), ("BW", 1)))
    schedules.timed(rows)
    waiting = ((("F", 0), ("BW", 0), ("F", 1), ("BW", 1)), rows[1])
    with pytest.raises(ValueError, match="stage 0: BW0 would wait for ever"):
        schedules.timed(waiting)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("zb-h3", "did you mean zb-h"),
        ("1F1B", "did you mean 1f1b"),
        ("zb-1p", "plan=FILE"),
        ("1f1b", "only zb-h1 is made here"),
        ("", "no schedule ''"),
        (None, "None"),
    ],
)
def test_unknown_schedules(name, words):
    with pytest.raises(ValueError, match=words):
        schedules.known(name)
