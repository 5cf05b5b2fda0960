"""The kinds of operations in one table, and tuples by kind for loops over whole plans."""

from __future__ import annotations

import enum


class Kind(enum.IntEnum):
    """What an operation does. A generator of a schedule writes only computations, passes add the others. Saved plans
    hold these numbers and names."""

    F = 0
    B = 1
    W = 2
    BW = 3
    SEND_F = 4
    RECV_F = 5
    SEND_B = 6
    RECV_B = 7
    UNSHARD = 8
    RESHARD = 9
    REDUCE = 10
    SEND_STATE = 11
    RECV_STATE = 12
    VALIDATE = 13
    STEP = 14
    HSDP_ALL_REDUCE = 15


def _holds(*kinds: Kind) -> tuple[bool, ...]:
    return tuple(kind in kinds for kind in Kind)


# By kind. What runs it: the stage, messages between stages, collectives over data parallel ranks, the decision on the
# optimizer's step.
NAMES = tuple(kind.name for kind in Kind)
IS_COMPUTE = _holds(Kind.F, Kind.B, Kind.W, Kind.BW)
IS_TRANSFER = _holds(Kind.SEND_F, Kind.RECV_F, Kind.SEND_B, Kind.RECV_B)
IS_DATA_PARALLEL = _holds(Kind.UNSHARD, Kind.RESHARD, Kind.REDUCE, Kind.HSDP_ALL_REDUCE)
IS_VALIDATION = _holds(Kind.SEND_STATE, Kind.RECV_STATE, Kind.VALIDATE, Kind.STEP)
HAS_MICROBATCH = tuple(map(max, IS_COMPUTE, IS_TRANSFER))
# What a computation does with its stage's weights and gradients.
READS_WEIGHTS = _holds(Kind.F, Kind.B, Kind.BW)
WRITES_GRADS = _holds(Kind.W, Kind.BW)
# Whether, standing before VALIDATE, it is done again once a step was taken back.
REPEATED_ON_AGAIN = _holds(Kind.F, Kind.SEND_F, Kind.RECV_F, Kind.UNSHARD, Kind.RESHARD)
