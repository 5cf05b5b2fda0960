"""What is counted is what plans are compared with."""

from __future__ import annotations

from megatron.core.distributed.traffic import Traffic
from megatron.core.distributed.traffic_counter import TrafficCounter
from megatron.core.traffic_counter import Moved


def test_calls_and_bytes_by_kind():
    counter = TrafficCounter()
    counter.count("reduce_scatter", 10)
    counter.count("all_gather", 3)
    counter.count("reduce_scatter", 5)
    assert counter.as_dict() == {"all_gather": (1, 3), "reduce_scatter": (2, 15)}
    assert list(counter.as_dict()) == ["all_gather", "reduce_scatter"], "sorted, for logs"
    assert counter.as_traffic() == Traffic(all_gather=Moved(1, 3), reduce_scatter=Moved(2, 15))
    counter.reset()
    assert (counter.as_dict(), counter.as_traffic()) == ({}, Traffic())


def test_gathers_of_an_evaluation_are_counted_and_no_part_of_a_step():
    counter = TrafficCounter()
    counter.count("evaluation_all_gather", 7)
    counter.count("outer_all_reduce", 4)
    assert counter.as_traffic() == Traffic(outer_all_reduce=Moved(1, 4))
    assert counter.as_dict() == {"evaluation_all_gather": (1, 7), "outer_all_reduce": (1, 4)}
