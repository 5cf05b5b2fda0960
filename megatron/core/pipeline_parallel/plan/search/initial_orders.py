"""Where the search starts: orders constructed from what ranks may hold and from what a microbatch waits for.

On the linear placement ZB-H1, ZB-H2 and 1F1B say how many F's each rank runs ahead and how many W's it lets wait for
1F1B's memory, twice that, and none; list schedules say it for any limit and costs. On the V a block repeats: that of
ZB-V, that of V-Half, that of V-Min, and one laid out for the costs.

[Experiment: starts] Gaps to the bound after one cooling, in points on average, by another seed (77) than the table's.
zb-2p, P = 32, M = 2P and 4P, the five costs with a gap: ZB-H2 0.03, 1F1B 0.09, ZB-H1 0.17; list schedules of ten
patiences 0.07 to 0.21. zbv, P = 8, 18 costs: ZB-V 0.56, the block 1.11, V-Min 1.47, V-Half 1.52, the best of these and
of blocks that were delayed in three ways 0.41.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator

from megatron.core.pipeline_parallel.plan.generators.linear import one_f_one_b, zb_h1, zb_h2
from megatron.core.pipeline_parallel.plan.ir import Plan
from megatron.core.pipeline_parallel.plan.request import Request
from megatron.core.pipeline_parallel.plan.search.blocks import Block, repeat
from megatron.core.pipeline_parallel.plan.search.list_schedule import Patience, list_schedule
from megatron.core.pipeline_parallel.plan.search.problem import Order, OrderProblem, order_of

# Steps by which a period is stretched until a block fits where memory allows no shorter one; then more coarsely.
_STRETCHES = (*(1 + 0.04 * step for step in range(1, 25)), *(2 * 1.25**step for step in range(20)))
_LOOSEST = 3  # stretched blocks: a longer one may fill its gaps better

# The middle one of five that are known; the best of ten on a line (see the experiment); F's and W's first, the optimum
# where B's grow (a random V of 3 ranks and 3 microbatches, 28.16 instead of 29.26).
PATIENCES = (Patience(0.3, 0.3), Patience(1.0, 0.0), Patience(-1.0, -1.0))


# The order of a problem with any number of microbatches; it may stop, or hold too much.
Start = Callable[[OrderProblem], Order]


def starts(problem: OrderProblem) -> Iterator[Start]:
    """The promising ones first."""
    if problem.placement.num_chunks == 1:
        for generate in (zb_h2, zb_h1, one_f_one_b):
            yield functools.partial(_fixed, generate=generate)
    else:
        yield unit_zbv
        for half in (True, False):
            yield v_block(problem.placement.num_ranks, half=half).order
        yield from _blocks(problem)
    for patience in PATIENCES:
        yield functools.partial(list_schedule, patience=patience)


def _fixed(problem: OrderProblem, generate: Callable[[Request], Plan]) -> Order:
    return order_of(generate(Request(problem.placement.num_ranks, problem.num_microbatches)))


def _blocks(problem: OrderProblem) -> Iterator[Start]:
    """The block that repeats every work of a rank; where memory does not allow that, the shortest ones that it does."""
    work = problem.work / problem.num_microbatches
    fitting = (
        (stretch, block)
        for stretch in (1.0, *_STRETCHES)
        if work > 0 and (block := repeat(problem, stretch * work)) is not None and block.fits(problem)
    )
    for stretch, block in itertools.islice(fitting, _LOOSEST):
        yield block.order
        if stretch == 1.0:
            break


# The V at equal times ------------------------------------------------------------------------------------


def unit_zbv(problem: OrderProblem) -> Order:
    """ZB-V at F = B = W (torch's ZBV, 2.x): counted steps by rank, made for 2p - 1 microbatches at least, then cut."""
    num_ranks, num_stages, total = problem.placement.num_ranks, problem.num_stages, problem.num_microbatches
    made = max(2 * num_ranks - 1, total)
    rows = []
    for rank, (down, up) in enumerate(problem.stages()):
        f0, b0, w0 = down, num_stages + down, 2 * num_stages + down
        f1, b1, w1 = up, num_stages + up, 2 * num_stages + up
        row = [f0] * (2 * (num_ranks - rank) - 1) + [f1, f0] * rank + [f1, b1, w1] * (num_ranks - rank)
        steady, with_f0 = made - num_ranks, made - (2 * num_ranks - 1 - rank)
        row += [f0, b0, w0, f1, b1, w1] * with_f0 + [b0, w0, f1, b1, w1] * (steady - with_f0)
        row += [b0, b1] * rank + [b0, w0] * (num_ranks - rank) + [w1] * rank
        row += [w0] * (made - row.count(w0))
        left = dict.fromkeys(row, total)
        kept = []
        for code in row:
            left[code] -= 1
            if left[code] >= 0:
                kept.append(code)
        rows.append(kept)
    return rows


@functools.lru_cache(maxsize=8)
def v_block(num_ranks: int, half: bool) -> Block:
    """V-Half's or V-Min's block at F = B = W = 1 of a chunk (arXiv 2405.15362): six slots a rank, W's in free ones."""
    p, period = num_ranks, 6
    num_stages = 2 * p
    offsets = [0.0] * (3 * num_stages)
    for i in range(p):
        v = (3 if p % 2 == 0 else 0) if half else (2 if p % 3 == 0 else 0)
        slots = (2 * i, 3 * p - i - 2, 3 * p + v + 2 * i - 1, 6 * p + v - i - 2)
        if not half:
            slots = (i, 2 * p - 1 - i, 2 * p + v + i, 4 * p + v - 1 - i)
        down, up = i, num_stages - 1 - i
        for code, slot in zip((down, up, num_stages + up, num_stages + down), slots, strict=True):
            offsets[code] = float(slot)
        taken = {slot % period for slot in slots}
        for stage, slot in ((up, slots[2]), (down, slots[3])):
            free = next(one for one in range(slot + 1, slot + 1 + period) if one % period not in taken)
            taken.add(free % period)
            offsets[2 * num_stages + stage] = float(free)
    return Block(offsets, float(period))


def v_block_peak(num_ranks: int, half: bool) -> float:
    """What a rank holds at most while the block repeats, in whole-stage activations."""
    return float(num_ranks // 2 + 1 if half else (num_ranks + 4) // 3)
