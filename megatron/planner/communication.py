"""What sharded training sends, what it keeps, and whether the sending hides behind computing. Closed forms only.

Sources, by the names used below:
- slides: the tables on communication hiding of Megatron-Core's custom FSDP.
- ZeRO: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", 2020.
- ZeRO-Infinity: Rajbhandari et al., "ZeRO-Infinity: Breaking the GPU Memory Wall", 2021, sections 3 and 4.

A parameter costs 2 FLOP a token forward and 4 backward, and 2 more where recomputation runs the forward again.
With everything sharded it is gathered once before either pass (recompute and backward share one gather), and its
gradient is reduce-scattered once a backward pass.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum

FORWARD_FLOP_PER_PARAM = 2
BACKWARD_FLOP_PER_PARAM = 4
# The layer of the slides, in units of hidden_size**2: attention and the two halves of the MLP.
ATTENTION_PARAMS_PER_H2 = 3
MLP_PARAMS_PER_H2 = 8
MAIN_WEIGHT_BYTES = 4
ADAM_MOMENT_BYTES = 8


class CommunicationError(ValueError):
    """A quantity that no training has. `field` is the argument at fault."""

    def __init__(self, field: str, why: str) -> None:
        super().__init__(f"{field} {why}")
        self.field = field
        self.why = why


class Strategy(Enum):
    """The spellings of --data-parallel-sharding-strategy: nothing sharded, ZeRO-1, ZeRO-2, ZeRO-3."""

    NO_SHARD = "no_shard"
    OPTIM = "optim"
    OPTIM_GRADS = "optim_grads"
    OPTIM_GRADS_PARAMS = "optim_grads_params"


def _positive(**quantities: float) -> None:
    for field, value in quantities.items():
        if not 0 < value < math.inf:
            raise CommunicationError(field, f"must be finite and more than 0, not {value:g}")


def _count(least: int = 1, **quantities: int) -> None:
    for field, value in quantities.items():
        if value < least:
            raise CommunicationError(field, f"must be at least {least}, not {value}")


@dataclass(frozen=True)
class Rates:
    """What one rank achieves, not what is printed on the box.

    bandwidth_bytes_per_s is the rate at which one rank takes in gathered weights. The slides credit a rank with its
    node's whole network, as one copy enters a node and the links inside fan it out, shared by the tensor parallel
    ranks, each of which needs a shard of its own: `of_node`. Raises CommunicationError.
    """

    flop_per_s: float
    bandwidth_bytes_per_s: float

    def __post_init__(self) -> None:
        _positive(flop_per_s=self.flop_per_s, bandwidth_bytes_per_s=self.bandwidth_bytes_per_s)

    @classmethod
    def of_node(cls, flop_per_s: float, node_bandwidth_bytes_per_s: float, tp_size: int) -> Rates:
        """The slides' rule: a node's bandwidth divided by TP."""
        _count(tp_size=tp_size)
        _positive(node_bandwidth_bytes_per_s=node_bandwidth_bytes_per_s)
        return cls(flop_per_s, node_bandwidth_bytes_per_s / tp_size)

    @property
    def flop_per_byte(self) -> float:
        """F/BW of the slides."""
        return self.flop_per_s / self.bandwidth_bytes_per_s


@dataclass(frozen=True)
class WireBytes:
    """Bytes an element on the wire: gathered weights, reduced gradients. Raises CommunicationError."""

    param_bytes: float = 2
    grad_bytes: float = 4

    def __post_init__(self) -> None:
        _positive(param_bytes=self.param_bytes, grad_bytes=self.grad_bytes)


@dataclass(frozen=True)
class Experts:
    """Experts of a layer, over `ep_size` ranks, `top_k` of them for each token. Raises CommunicationError."""

    num_experts: int
    top_k: int = 1
    ep_size: int = 1

    def __post_init__(self) -> None:
        _count(num_experts=self.num_experts, top_k=self.top_k, ep_size=self.ep_size)
        if self.top_k > self.num_experts:
            raise CommunicationError("top_k", f"of {self.top_k} is more than the {self.num_experts} experts")
        if self.num_experts % self.ep_size:
            raise CommunicationError(
                "ep_size", f"of {self.ep_size} does not divide {self.num_experts} experts"
            )

    @property
    def params_per_active(self) -> float:
        """num_experts / (ep * top_k): weights gathered for each weight that a token meets (slides)."""
        return self.num_experts / (self.ep_size * self.top_k)


def forward_min_tokens(rates: Rates, wire: WireBytes | None = None, experts: Experts | None = None) -> float:
    """Tokens a rank that hide the forward gather: param_bytes/2 * F/BW; of experts times num_experts/(ep*top_k).

    Slides: F/BW with 2-byte weights.
    """
    wire = wire or WireBytes()
    share = experts.params_per_active if experts else 1.0
    return share * wire.param_bytes / FORWARD_FLOP_PER_PARAM * rates.flop_per_byte


def backward_min_tokens(
    rates: Rates,
    wire: WireBytes | None = None,
    experts: Experts | None = None,
    *,
    recompute: bool = False,
) -> float:
    """Tokens a rank that hide the backward gather and reduce-scatter: (param_bytes+grad_bytes)/4 * F/BW.

    Slides: 1.5 F/BW with bf16 weights and fp32 gradients; with bf16 gradients it is F/BW. Full recompute divides by 6
    instead of 4, as one gather serves the repeated forward too. Of experts times num_experts/(ep*top_k).
    """
    wire = wire or WireBytes()
    share = experts.params_per_active if experts else 1.0
    flop = BACKWARD_FLOP_PER_PARAM + (FORWARD_FLOP_PER_PARAM if recompute else 0)
    return share * (wire.param_bytes + wire.grad_bytes) / flop * rates.flop_per_byte


def tokens_per_rank(seq_length: int, micro_batch_size: int = 1, cp_size: int = 1) -> float:
    """SL/cp * mbs of the slides."""
    _count(seq_length=seq_length, micro_batch_size=micro_batch_size, cp_size=cp_size)
    return seq_length / cp_size * micro_batch_size


@dataclass(frozen=True)
class Phase:
    """One pass over one part of a layer: computing and communicating run side by side, the longer one counts."""

    part: str
    phase: str
    compute_s: float
    communication_s: float
    useful_flop: float
    need_tokens: float
    have_tokens: float

    @property
    def ratio(self) -> float:
        """Needed over present tokens, which is communication over computing. At most 1: hidden."""
        return self.need_tokens / self.have_tokens

    @property
    def hidden(self) -> bool:
        """Whether no communication shows."""
        return self.ratio <= 1

    @property
    def exposed_s(self) -> float:
        """Communication that outlasts the computing."""
        return max(0.0, self.communication_s - self.compute_s)

    @property
    def wall_s(self) -> float:
        """The longer of the two."""
        return max(self.compute_s, self.communication_s)


@dataclass(frozen=True)
class LayerHiding:
    """A layer's phases under full sharding, for one microbatch of one rank."""

    phases: tuple[Phase, ...]
    rates: Rates

    @property
    def wall_s(self) -> float:
        """Forward and backward of the layer."""
        return sum(phase.wall_s for phase in self.phases)

    @property
    def exposed_fraction(self) -> float:
        """Share of the time in which a rank only waits for communication."""
        return sum(phase.exposed_s for phase in self.phases) / self.wall_s

    @property
    def useful_fraction(self) -> float:
        """Model FLOP (recompute is none) over what `flop_per_s` would do in the time.

        The case study of the slides: 0.75, 0.837 and 0.435.
        """
        return sum(phase.useful_flop for phase in self.phases) / self.rates.flop_per_s / self.wall_s


def layer_hiding(
    hidden_size: int,
    tokens: float,
    rates: Rates,
    *,
    wire: WireBytes | None = None,
    experts: Experts | None = None,
    tp_size: int = 1,
    recompute: bool = False,
) -> LayerHiding:
    """The slides' layer, 11 h^2 parameters (3 attention, 8 MLP), or 3 h^2 and `experts` of 8 h^2 each.

    Computing of n parameters: 2 n/tp * tokens FLOP forward and 4 backward (6 with recompute), top_k times for
    experts; sending: param_bytes n/tp, and grad_bytes n/tp backward, num_experts/ep times for experts. Ratios do
    not depend on the hidden size, times do. Raises CommunicationError.
    """
    _count(hidden_size=hidden_size, tp_size=tp_size)
    _positive(tokens=tokens)
    wire = wire or WireBytes()
    part_params = [("layer", ATTENTION_PARAMS_PER_H2 + MLP_PARAMS_PER_H2)]
    if experts is not None:
        part_params = [("attention", ATTENTION_PARAMS_PER_H2), ("experts", MLP_PARAMS_PER_H2)]
    phases = []
    for part, params_per_h2 in part_params:
        routed = experts if part == "experts" else None
        active = params_per_h2 * hidden_size**2 / tp_size * (routed.top_k if routed else 1)
        gathered = active * (routed.params_per_active if routed else 1.0)
        for phase in ("forward", "backward"):
            forward = phase == "forward"
            useful = (FORWARD_FLOP_PER_PARAM if forward else BACKWARD_FLOP_PER_PARAM) * active * tokens
            again = FORWARD_FLOP_PER_PARAM * active * tokens if recompute and not forward else 0.0
            sent = gathered * (wire.param_bytes + (0 if forward else wire.grad_bytes))
            need = (
                forward_min_tokens(rates, wire, routed)
                if forward
                else backward_min_tokens(rates, wire, routed, recompute=recompute)
            )
            compute_s = (useful + again) / rates.flop_per_s
            sent_s = sent / rates.bandwidth_bytes_per_s
            phases.append(Phase(part, phase, compute_s, sent_s, useful, need, tokens))
    return LayerHiding(tuple(phases), rates)


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
        _positive(param_bytes=self.param_bytes, grad_bytes=self.grad_bytes)
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
    """Bytes a parameter that a rank keeps, without padding (ZeRO, figure 1; the gradient's bytes as they are).

    shard_size: ranks over which a copy is sharded (N). outer_size: copies (R); with outer_optim (HFSDP) the optimizer
    is sharded over the copies too, otherwise (HSDP) they change nothing. Raises CommunicationError.
    """
    _count(shard_size=shard_size, outer_size=outer_size)
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
    _positive(num_params=num_params)
    per_param = persistent_bytes_per_param(
        strategy, shard_size, states, outer_size=outer_size, outer_optim=outer_optim
    )
    return num_params * per_param


def transient_unit_bytes(unit_params: float, wire: WireBytes | None = None, num_units: int = 2) -> float:
    """Gathered weights and unreduced gradients of the units alive at once: num_units * (2 + g) * U."""
    _positive(unit_params=unit_params)
    _count(num_units=num_units)
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
        _count(0, num_units=self.num_units, num_others=self.num_others)
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
        _count(group_size=group_size)
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
    _count(num_microbatches=num_microbatches, shard_size=shard_size)
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


def outer_collectives(
    num_params: float, shard_size: int, wire: WireBytes | None = None, *, outer_size: int, outer_optim: bool
) -> Collectives:
    """Over the copies of HSDP: one all-reduce of the gradient's shard, on the last microbatch. HFSDP (outer_optim):
    one reduce-scatter then, and one gather of the weights' shard at the first forward."""
    _positive(num_params=num_params)
    _count(shard_size=shard_size, outer_size=outer_size)
    wire = wire or WireBytes()
    if outer_size == 1:
        return Collectives()
    grad_bytes = wire.grad_bytes * num_params / shard_size
    if not outer_optim:
        return Collectives(all_reduce_calls=1, all_reduce_bytes=grad_bytes)
    return Collectives(
        all_gather_calls=1,
        all_gather_bytes=wire.param_bytes * num_params / shard_size,
        reduce_scatter_calls=1,
        reduce_scatter_bytes=grad_bytes,
    )


def collectives_in_words(strategy: Strategy) -> str:
    """How often the whole model is sent in a step of GA microbatches (slides)."""
    return {
        Strategy.NO_SHARD: "1 AR",
        Strategy.OPTIM: "1 AR (= RS + AG)",
        Strategy.OPTIM_GRADS: "1 AG + GA RS",
        Strategy.OPTIM_GRADS_PARAMS: "2 GA AG + GA RS",
    }[strategy]


def zero_volume_elements(strategy: Strategy, num_params: float) -> float:
    """Elements a rank sends in a step of one microbatch: 2, 2, 2 and 3 a parameter (ZeRO, section 7)."""
    _positive(num_params=num_params)
    return (3 if strategy is Strategy.OPTIM_GRADS_PARAMS else 2) * num_params


def param_grad_intensity(seq_length: float, batch_size: float) -> float:
    """FLOP a byte of weights and gradients moved: seq * bsz (ZeRO-Infinity, section 4.1)."""
    _positive(seq_length=seq_length, batch_size=batch_size)
    return seq_length * batch_size


def optimizer_intensity(seq_length: float, batch_size: float) -> float:
    """FLOP a byte of optimizer states moved: seq * bsz / 4 (ZeRO-Infinity, section 4.1)."""
    return param_grad_intensity(seq_length, batch_size) / 4


def checkpoint_intensity(hidden_size: float, checkpoint_interval: float = 1) -> float:
    """FLOP a byte of activation checkpoints moved: 24 * hd * ci (ZeRO-Infinity, section 4.1)."""
    _positive(hidden_size=hidden_size, checkpoint_interval=checkpoint_interval)
    return 24 * hidden_size * checkpoint_interval


def efficiency(flop_per_byte: float, bandwidth_bytes_per_s: float, peak_flop_per_s: float) -> float:
    """ait*bw / (ait*bw + peak), nothing overlapped (ZeRO-Infinity, section 4)."""
    _positive(
        flop_per_byte=flop_per_byte,
        bandwidth_bytes_per_s=bandwidth_bytes_per_s,
        peak_flop_per_s=peak_flop_per_s,
    )
    fed = flop_per_byte * bandwidth_bytes_per_s
    return fed / (fed + peak_flop_per_s)


def bandwidth_for(wanted_efficiency: float, flop_per_byte: float, peak_flop_per_s: float) -> float:
    """Bytes/s at which `efficiency` is `wanted_efficiency`, between 0 and 1."""
    _positive(flop_per_byte=flop_per_byte, peak_flop_per_s=peak_flop_per_s)
    if not 0 < wanted_efficiency < 1:
        raise CommunicationError("wanted_efficiency", f"must be between 0 and 1, not {wanted_efficiency:g}")
    return peak_flop_per_s / flop_per_byte * wanted_efficiency / (1 - wanted_efficiency)


def transformer_params(num_layers: int, hidden_size: int) -> int:
    """12 * nl * hd^2 (ZeRO-Infinity, section 3, equation 1)."""
    _count(num_layers=num_layers, hidden_size=hidden_size)
    return 12 * num_layers * hidden_size**2


def checkpoint_bytes(
    num_layers: int, hidden_size: int, seq_length: int, batch_size: int, checkpoint_interval: int = 1
) -> float:
    """2 * bsz * seq * hd * nl / ci: a 2-byte checkpoint every ci layers (ZeRO-Infinity, equation 3)."""
    _count(num_layers=num_layers, hidden_size=hidden_size, seq_length=seq_length)
    _count(batch_size=batch_size, checkpoint_interval=checkpoint_interval)
    return 2 * batch_size * seq_length * hidden_size * num_layers / checkpoint_interval


def working_state_bytes(hidden_size: int) -> int:
    """4 * hd * 4hd: 2-byte weights and gradients of the largest linear layer (ZeRO-Infinity, equation 4)."""
    _count(hidden_size=hidden_size)
    return 4 * hidden_size * 4 * hidden_size


def working_activation_bytes(
    hidden_size: int, num_heads: int, seq_length: int, batch_size: int, checkpoint_interval: int = 1
) -> int:
    """bsz * seq * ci * (16*hd + 2*heads*seq), between two checkpoints (ZeRO-Infinity, equation 5)."""
    _count(hidden_size=hidden_size, num_heads=num_heads, seq_length=seq_length)
    _count(batch_size=batch_size, checkpoint_interval=checkpoint_interval)
    return batch_size * seq_length * checkpoint_interval * (16 * hidden_size + 2 * num_heads * seq_length)
