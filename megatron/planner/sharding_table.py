"""What each sharding strategy keeps and sends: bytes between steps, collectives of a step. Closed forms only.

Sources: "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models" (Rajbhandari et al., 2020, arXiv
1910.02054) for states and volumes; the slides of Megatron-Core's custom FSDP for the table by strategy.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum

from megatron.planner.communication import WireBytes
from megatron.planner.quantities import CommunicationError, require_count, require_positive

MAIN_WEIGHT_BYTES = 4
ADAM_MOMENT_BYTES = 8


class Strategy(Enum):
    """The spellings of --data-parallel-sharding-strategy: nothing sharded, ZeRO-1, ZeRO-2, ZeRO-3."""

    NO_SHARD = "no_shard"
    OPTIM = "optim"
    OPTIM_GRADS = "optim_grads"
    OPTIM_GRADS_PARAMS = "optim_grads_params"


@dataclass(frozen=True)
class StateBytes:
    """Bytes a parameter of what stays between steps; bf16 training with Adam unless told otherwise.

    fp32 training has no separate main weights: main_weight_bytes 0.
    """

    param_bytes: float = 2
    grad_bytes: float = 4
    main_weight_bytes: float = MAIN_WEIGHT_BYTES
    moment_bytes: float = ADAM_MOMENT_BYTES

    def __post_init__(self) -> None:
        require_positive(param_bytes=self.param_bytes, grad_bytes=self.grad_bytes)
        for field in ("main_weight_bytes", "moment_bytes"):
            value = getattr(self, field)
            if not 0 <= value < math.inf:
                raise CommunicationError(field, f"must be finite and at least 0, not {value:g}")

    @property
    def optimizer_bytes(self) -> float:
        """K of the ZeRO paper: 12 with Adam and fp32 main weights."""
        return self.main_weight_bytes + self.moment_bytes


def persistent_bytes_per_param(
    strategy: Strategy,
    shard_size: int,
    states: StateBytes | None = None,
    *,
    outer_size: int = 1,
    outer_optim: bool = False,
) -> float:
    """Bytes a parameter that a rank keeps, without padding: ZeRO's 2 + 2 + K, with the gradient's bytes as they are.

    shard_size: ranks over which a copy is sharded (N). outer_size: copies (R); with outer_optim (HFSDP) the optimizer
    is sharded over the copies too, otherwise (HSDP) they change nothing. Raises CommunicationError.
    """
    require_count(shard_size=shard_size, outer_size=outer_size)
    if outer_optim and strategy is not Strategy.OPTIM_GRADS_PARAMS:
        raise CommunicationError("outer_optim", f"needs optim_grads_params, not {strategy.value}")
    states = states or StateBytes()
    order = list(Strategy)
    sharded = order.index(strategy)  # 1: optimizer, 2: gradients too, 3: weights too
    optimizer = states.optimizer_bytes / (shard_size if sharded >= 1 else 1)
    grads = states.grad_bytes / (shard_size if sharded >= 2 else 1)
    weights = states.param_bytes / (shard_size if sharded >= 3 else 1)
    return weights + grads + optimizer / (outer_size if outer_optim else 1)


def persistent_bytes(
    num_params: float,
    strategy: Strategy,
    shard_size: int,
    states: StateBytes | None = None,
    *,
    outer_size: int = 1,
    outer_optim: bool = False,
) -> float:
    """`persistent_bytes_per_param` of a whole model."""
    require_positive(num_params=num_params)
    per_param = persistent_bytes_per_param(
        strategy, shard_size, states, outer_size=outer_size, outer_optim=outer_optim
    )
    return num_params * per_param


def transient_unit_bytes(unit_params: float, wire: WireBytes | None = None, num_units: int = 2) -> float:
    """Gathered weights and unreduced gradients of the units alive at once: num_units * (2 + g) * U."""
    require_positive(unit_params=unit_params)
    require_count(num_units=num_units)
    wire = wire or WireBytes()
    return num_units * unit_params * (wire.param_bytes + wire.grad_bytes)


@dataclass(frozen=True)
class Buckets:
    """How a model is cut: units (layers), and the rest (embedding, head) that stays gathered over a step.

    With the embedding and the head as units of their own there is no rest. Raises CommunicationError.
    """

    num_units: int
    num_others: int
    unit_params: float
    other_params: float

    def __post_init__(self) -> None:
        require_count(0, num_units=self.num_units, num_others=self.num_others)
        for field, number in (("unit_params", self.num_units), ("other_params", self.num_others)):
            value = getattr(self, field)
            if not 0 <= value < math.inf or (value > 0) != (number > 0):
                raise CommunicationError(field, f"of {value:g} does not fit {number} buckets")

    @property
    def num_params(self) -> float:
        """All parameters."""
        return self.unit_params + self.other_params


@dataclass(frozen=True)
class Collectives:
    """Calls and payloads of one optimizer step. A payload is the whole bucket's, of which a ring moves (N-1)/N.

    Calls over the outer axis (HSDP, HFSDP) are counted apart: their payload is a shard's.
    """

    all_gather_calls: int = 0
    reduce_scatter_calls: int = 0
    all_reduce_calls: int = 0
    all_gather_bytes: float = 0.0
    reduce_scatter_bytes: float = 0.0
    all_reduce_bytes: float = 0.0

    @property
    def payload_bytes(self) -> float:
        """Bytes as a ring passes them round: an all-reduce goes round twice."""
        return self.all_gather_bytes + self.reduce_scatter_bytes + 2 * self.all_reduce_bytes

    def sent_bytes_per_rank(self, group_size: int) -> float:
        """(N-1)/N of the payload."""
        require_count(group_size=group_size)
        return self.payload_bytes * (group_size - 1) / group_size


def step_collectives(
    strategy: Strategy,
    buckets: Buckets,
    num_microbatches: int,
    wire: WireBytes | None = None,
    *,
    shard_size: int = 2,
    reshard_after_forward: bool = True,
) -> Collectives:
    """Calls and payloads over the shard group; recompute adds none. Nothing is sent by one rank alone.

    n units, m others, GA microbatches: no_shard n+m all-reduces; optim n+m gathers, n+m reduce-scatters; optim_grads
    n+m and GA(n+m); optim_grads_params 2 GA n + m (GA n + m where weights stay from forward to backward) and GA(n+m).
    Raises CommunicationError.
    """
    require_count(num_microbatches=num_microbatches, shard_size=shard_size)
    if shard_size == 1:
        return Collectives()
    wire = wire or WireBytes()
    calls, params = buckets.num_units + buckets.num_others, buckets.num_params
    if strategy is Strategy.NO_SHARD:
        return Collectives(all_reduce_calls=calls, all_reduce_bytes=wire.grad_bytes * params)
    reductions = 1 if strategy is Strategy.OPTIM else num_microbatches
    gathers = 1
    if strategy is Strategy.OPTIM_GRADS_PARAMS:
        gathers = num_microbatches * (2 if reshard_after_forward else 1)
    return Collectives(
        all_gather_calls=gathers * buckets.num_units + buckets.num_others,
        all_gather_bytes=wire.param_bytes * (gathers * buckets.unit_params + buckets.other_params),
        reduce_scatter_calls=reductions * calls,
        reduce_scatter_bytes=wire.grad_bytes * reductions * params,
    )


def collectives_in_words(strategy: Strategy) -> str:
    """How often the whole model is sent in a step of GA microbatches (slides)."""
    return {
        Strategy.NO_SHARD: "1 AR",
        Strategy.OPTIM: "1 AR (= RS + AG)",
        Strategy.OPTIM_GRADS: "1 AG + GA RS",
        Strategy.OPTIM_GRADS_PARAMS: "2 GA AG + GA RS",
    }[strategy]
