"""Orders that are known, as candidates: 1F1B, ZB-H1, ZB-H2, the unit ZBV order, and the repeating V blocks.

Counts and offsets are those of arXiv 2401.10241 and 2405.15362 and of torch's ZBV (2.x).
"""

from __future__ import annotations

from megatron.core.pipeline_parallel.plan.costs import CostModel
from megatron.core.pipeline_parallel.plan.placement import V_SHAPED, Placement
from megatron.core.pipeline_parallel.plan.search.blocks import Block
from megatron.core.pipeline_parallel.plan.search.problem import Order, Problem, peaks

_PERIOD = 6


def one_f_one_b(problem: Problem) -> Order:
    """1F1B; each W right behind its B."""
    num_ranks, total = problem.placement.num_ranks, problem.num_microbatches
    rows = []
    for stage in range(num_ranks):
        forward, backward = stage, [num_ranks + stage, 2 * num_ranks + stage]
        ahead = min(num_ranks - 1 - stage, total)
        rows.append([forward] * ahead + [forward, *backward] * (total - ahead) + backward * ahead)
    return rows


def zb_h(problem: Problem, times: int) -> Order:
    """ZB-H1 (times 1) and ZB-H2 (times 2): forwards ahead, then B, F and a W that lags by rank."""
    num_ranks, total = problem.placement.num_ranks, problem.num_microbatches
    rows = []
    for stage in range(num_ranks):
        forward, backward, weight = stage, num_ranks + stage, 2 * num_ranks + stage
        ahead = min(times * (num_ranks - stage) - (times - 1), total)
        lag = min(times * stage, total)
        row = [forward] * ahead
        for done in range(total):
            row.append(backward)
            row += [weight] * (done >= lag) + [forward] * (ahead + done < total)
        rows.append(row + [weight] * lag)
    return rows


def unit_zbv(problem: Problem) -> Order:
    """The ZBV order for F = B = W: counted steps by rank, made for at least 2p - 1 microbatches and then cut."""
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
        rows.append(_cut(row, total))
    return rows


def _cut(row: list[int], total: int) -> list[int]:
    """The row without the microbatches that do not exist."""
    done: dict[int, int] = {}
    kept = []
    for code in row:
        done[code] = done.get(code, 0) + 1
        if done[code] <= total:
            kept.append(code)
    return kept


def v_block(num_ranks: int, half: bool) -> Block:
    """The V-Half or V-Min block for F = B = W = 1 of a chunk: six slots a rank, the W's in what F and B leave free."""
    p = num_ranks
    num_stages = 2 * p
    offsets = [0.0] * (3 * num_stages)
    for i in range(p):
        if half:
            v = 3 if p % 2 == 0 else 0
            slots = (2 * i, 3 * p - i - 2, 3 * p + v + 2 * i - 1, 6 * p + v - i - 2)
        else:
            v = 2 if p % 3 == 0 else 0
            slots = (i, 2 * p - 1 - i, 2 * p + v + i, 4 * p + v - 1 - i)
        down, up = i, num_stages - 1 - i
        for code, slot in zip((down, up, num_stages + up, num_stages + down), slots, strict=True):
            offsets[code] = float(slot)
        taken = {slot % _PERIOD for slot in slots}
        for stage, slot in ((up, slots[2]), (down, slots[3])):
            slot += 1
            while slot % _PERIOD in taken:
                slot += 1
            taken.add(slot % _PERIOD)
            offsets[2 * num_stages + stage] = float(slot)
    return Block(offsets, float(_PERIOD))


def v_block_peak(num_ranks: int, half: bool) -> float:
    """What a rank holds at most when the block repeats, in whole-stage activations."""
    placement = Placement(V_SHAPED, num_ranks, 2)
    endless = (float("inf"),) * num_ranks
    problem = Problem(placement, 2 * num_ranks + 2, CostModel.of_ranks(placement), endless)
    return max(peaks(problem, v_block(num_ranks, half).order(problem)))
