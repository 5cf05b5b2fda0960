"""Which sends are complete once a message has arrived, and how many of the others are under way at once (floor 0).

A rank computes in the order of its row. What it sends after a computation is proof that it has received that
computation's input. So the sender of that input may forget it without asking the transport, which may not know (gloo)
before it is waited for.
"""

from __future__ import annotations

import bisect

from megatron.core.pipeline_parallel.plan import ir
from megatron.core.pipeline_parallel.plan.ir import BW, B, F, Plan

Key = tuple[int, int, int]  # (kind of transfer, stage at that end, microbatch)

_INPUT_OF = {F: ir.RECV_F, B: ir.RECV_B, BW: ir.RECV_B}


def send_completion(plan: Plan, rank: int) -> dict[Key, tuple[Key, ...]]:
    """For each receive of a rank's row: the sends of this row that its arrival proves complete.

    plan: verified, with its transfers. Arrivals are taken where they are waited for, before the computation that needs
    them, and each send is under the first one that proves it. Sends that no arrival proves (those of an
    evaluation in one direction, the last gradients) are in none.
    """
    row = plan.rows[rank]
    found: dict[Key, tuple[Key, ...]] = {}
    for peer in sorted({op[6] for op in row if ir.IS_TRANSFER[op[0]]}):
        other = plan.rows[peer]
        used_at = {(_INPUT_OF[op[0]], op[1], op[2]): at for at, op in enumerate(other) if op[0] in _INPUT_OF}
        # By message: where the peer sends it, or uses it.
        at_peer = {op[7]: used_at.get(op[:3], at) for at, op in enumerate(other) if ir.IS_TRANSFER[op[0]]}
        messages = [(at_peer[op[7]], op[:3]) for op in row if ir.IS_TRANSFER[op[0]] and op[6] == peer]
        sends = sorted(one for one in messages if one[1][0] in (ir.SEND_F, ir.SEND_B))
        sent_at = {key: at for at, key in messages}
        first = 0
        for key in ((_INPUT_OF[op[0]], op[1], op[2]) for op in row if op[0] in _INPUT_OF):
            end = bisect.bisect_left(sends, (sent_at.get(key, -1),))
            if end > first:
                found[key] = tuple(send for _, send in sends[first:end])
                first = end
    return found


def most_sends(num_ranks: int) -> int:
    """That may be under way behind a transfer without a proof that they are complete; the oldest are waited for."""
    return 2 * num_ranks
