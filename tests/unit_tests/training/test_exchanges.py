"""What the log says of exchanges between tokens and experts on other ranks."""

import pytest

from megatron.core.transport.traffic import TrafficCounter
from megatron.training.report.exchanges import Exchanges, fullest


@pytest.mark.parametrize(
    ("counts", "parts", "expected"),
    [([4, 4, 4, 4], 2, 1.0), ([8, 0, 4, 4], 2, 1.0), ([8, 4, 2, 2], 2, 1.5), ([16, 0, 0, 0], 4, 4.0)],
)
def test_rows_of_the_fullest_rank_are_those_of_its_experts(counts, parts, expected):
    assert fullest(counts, parts) == expected


def test_an_interval_is_told_by_step_beside_what_was_planned():
    traffic = TrafficCounter()
    traffic.count("all_to_all", 10_000)  # before the interval
    exchanges = Exchanges(3, traffic, ("all_to_all",), parts=2, planned=1024)
    for _ in range(2):
        exchanges.add_iteration(4)
        for size in (1024, 2048, 3072):
            traffic.count("all_to_all", size)
        traffic.count("all_gather", 999)  # counts of rows
        traffic.waited_s += 0.25
    assert exchanges.lines({0: [5, 5, 5, 5], 2: [9, 3, 2, 2], 3: [0, 0, 0, 0]}) == (
        " > exchanges with experts, of rank 3: 3 calls a step, 6 KiB (planned 4 KiB at even load), waited 250 ms; the "
        "fullest rank had 1.5 x the mean rows, in layer 2",
    )
    exchanges.reset()
    assert exchanges.lines({}) == ()
    exchanges.add_iteration(4)
    assert exchanges.lines({})[0].startswith(" > exchanges with experts, of rank 3: 0 calls a step, 0 bytes")


def test_what_the_wire_takes_by_itself_stands_beside_how_long_was_waited():
    traffic = TrafficCounter()
    exchanges = Exchanges(0, traffic, ("all_to_all",), parts=2, planned=1 << 20, seconds_per_byte=1e-8)
    exchanges.add_iteration(4)
    traffic.waited_s += 0.25
    told = ", waited 250 ms (the wire by itself takes 41.94 ms for what is planned)"
    assert exchanges.lines({})[0].endswith(told)


def test_nothing_is_told_where_nothing_is_exchanged():
    exchanges = Exchanges(0, TrafficCounter())
    exchanges.add_iteration(1)
    assert exchanges.lines({0: [1, 2]}) == ()
