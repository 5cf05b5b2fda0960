"""A short problem's order made long: its steady state repeated."""

from __future__ import annotations

from megatron.core.pipeline_parallel.plan.search.problem import Order

# A steady state may take this many microbatches to come back to itself.
_LONGEST_CYCLE = 6


def extend(order: Order, num_chunks: int, more: int) -> Order | None:
    """The order for `more` microbatches more; None where some rank never settles.

    In the middle of a good order each rank repeats one sequence that has every operation of its stages once (or a few
    times). Rows with the same cycle, extended alike, stay consistent.
    """
    for length in range(1, _LONGEST_CYCLE + 1):
        if more % length == 0:
            rows = [_longer(row, 3 * num_chunks * length, length, more // length) for row in order]
            good = [row for row in rows if row is not None]
            if len(good) == len(order):
                return good
    return None


def _longer(row: list[int], cycle: int, each: int, copies: int) -> list[int] | None:
    """The row with its steady state repeated `copies` times more."""
    best, best_start, run = 0, 0, 0
    for place in range(len(row) - cycle):
        run = run + 1 if row[place] == row[place + cycle] else 0
        if run > best:
            best, best_start = run, place + 1 - run
    if best < cycle:
        return None
    unit = row[best_start : best_start + cycle]
    if any(unit.count(code) != each for code in set(row)):
        return None
    return row[:best_start] + unit * copies + row[best_start:]
