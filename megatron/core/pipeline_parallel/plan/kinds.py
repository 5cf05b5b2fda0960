"""The kinds of operations in one table, and tuples by kind for loops over whole plans."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Kind(enum.IntEnum):
    """What an operation does. A generator of a schedule writes only computations, passes add the others."""

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


COMPUTE, PIPELINE, DATA_PARALLEL, VALIDATION = "compute", "pipeline", "data_parallel", "validation"


@dataclass(frozen=True)
class KindInfo:
    """One kind.

    lane: what it runs on: COMPUTE the stages, PIPELINE messages between stages, DATA_PARALLEL collectives over data
    parallel ranks, VALIDATION the decision on the optimizer's step. reads_weights, writes_grads: of its stage, where it
    is a computation. repeated_on_again: whether, standing before VALIDATE, it is done again once a step was taken back.
    """

    kind: Kind
    lane: str
    reads_weights: bool = False
    writes_grads: bool = False
    repeated_on_again: bool = False

    @property
    def has_microbatch(self) -> bool:
        """Whether it is about one microbatch: computations and their messages are."""
        return self.lane in (COMPUTE, PIPELINE)


KINDS = (
    KindInfo(Kind.F, COMPUTE, reads_weights=True, repeated_on_again=True),
    KindInfo(Kind.B, COMPUTE, reads_weights=True),
    KindInfo(Kind.W, COMPUTE, writes_grads=True),
    KindInfo(Kind.BW, COMPUTE, reads_weights=True, writes_grads=True),
    KindInfo(Kind.SEND_F, PIPELINE, repeated_on_again=True),
    KindInfo(Kind.RECV_F, PIPELINE, repeated_on_again=True),
    KindInfo(Kind.SEND_B, PIPELINE),
    KindInfo(Kind.RECV_B, PIPELINE),
    KindInfo(Kind.UNSHARD, DATA_PARALLEL, repeated_on_again=True),
    KindInfo(Kind.RESHARD, DATA_PARALLEL, repeated_on_again=True),
    KindInfo(Kind.REDUCE, DATA_PARALLEL),
    KindInfo(Kind.SEND_STATE, VALIDATION),
    KindInfo(Kind.RECV_STATE, VALIDATION),
    KindInfo(Kind.VALIDATE, VALIDATION),
    KindInfo(Kind.STEP, VALIDATION),
    KindInfo(Kind.HSDP_ALL_REDUCE, DATA_PARALLEL),
)
assert [info.kind for info in KINDS] == list(Kind), "one row a kind, by number"

# By kind.
NAMES = tuple(info.kind.name for info in KINDS)
IS_COMPUTE = tuple(info.lane == COMPUTE for info in KINDS)
IS_TRANSFER = tuple(info.lane == PIPELINE for info in KINDS)
IS_DATA_PARALLEL = tuple(info.lane == DATA_PARALLEL for info in KINDS)
IS_VALIDATION = tuple(info.lane == VALIDATION for info in KINDS)
HAS_MICROBATCH = tuple(info.has_microbatch for info in KINDS)
READS_WEIGHTS = tuple(info.reads_weights for info in KINDS)
WRITES_GRADS = tuple(info.writes_grads for info in KINDS)
REPEATED_ON_AGAIN = tuple(info.repeated_on_again for info in KINDS)
