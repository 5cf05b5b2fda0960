"""Which sends are complete once a message has arrived, as the plan says it.

A rank computes in the order of its row. What it sends after a computation is proof that it has received that
computation's input. So the sender of that input may forget it without asking the transport, which may not know (gloo)
before it is waited for.
"""

from __future__ import annotations

from megatron.core.pipeline_parallel.plan.ir import BW, RECV_B, RECV_F, SEND_B, SEND_F, B, F, Plan

Key = tuple[int, int, int]  # (kind of transfer, stage at that end, microbatch)

_INPUT_OF = {F: RECV_F, B: RECV_B, BW: RECV_B}
_STEP = {SEND_F: 1, RECV_F: -1, SEND_B: -1, RECV_B: 1}  # from this end's stage to the other end's
_OTHER = {SEND_F: RECV_F, RECV_F: SEND_F, SEND_B: RECV_B, RECV_B: SEND_B}


def send_completion(plan: Plan, rank: int) -> dict[Key, tuple[Key, ...]]:
    """For each receive of a rank's row: the sends of this row that its arrival proves complete.

    plan: verified, with its transfers. Arrivals are taken where they are waited for, before the computation that needs
    them, and each send is under the first one that proves it. Sends that no arrival proves (those of an
    evaluation in one direction, the last gradients) are in none.
    """
    row = plan.rows[rank]
    found: dict[Key, tuple[Key, ...]] = {}
    for peer in sorted({op[6] for op in row if op[0] in _OTHER}):
        other = plan.rows[peer]
        used_at = {(_INPUT_OF[op[0]], op[1], op[2]): at for at, op in enumerate(other) if op[0] in _INPUT_OF}
        sent_at = {op[:3]: at for at, op in enumerate(other) if op[0] in (SEND_F, SEND_B)}
        mine = [op for op in row if op[6] == peer]
        sends = sorted((used_at[_other_end(op[:3])], op[:3]) for op in mine if op[0] in (SEND_F, SEND_B))
        receives = {op[:3] for op in mine if op[0] in (RECV_F, RECV_B)}
        first = 0
        for key in ((_INPUT_OF[op[0]], op[1], op[2]) for op in row if op[0] in _INPUT_OF):
            if key not in receives:
                continue
            end, at = first, sent_at[_other_end(key)]
            while end < len(sends) and sends[end][0] < at:
                end += 1
            if end > first:
                found[key] = tuple(send for _, send in sends[first:end])
                first = end
    return found


def _other_end(key: Key) -> Key:
    """A transfer as its other end's row has it."""
    kind, stage, microbatch = key
    return _OTHER[kind], stage + _STEP[kind], microbatch
