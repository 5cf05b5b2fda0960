"""Whether the communication of fully sharded training hides behind its computing. Closed forms only.

Source: the tables on communication hiding in the slides of Megatron-Core's custom FSDP ("the slides").

A parameter costs 2 FLOP a token forward and 4 backward, and 2 more where recomputation runs the forward again.
With everything sharded it is gathered once before either pass (recompute and backward share one gather), and its
gradient is reduce-scattered once a backward pass.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron.planner.quantities import CommunicationError, require_count, require_positive

FORWARD_FLOP_PER_PARAM = 2
BACKWARD_FLOP_PER_PARAM = 4
# The layer of the slides, in units of hidden_size**2: attention and the two halves of the MLP.
ATTENTION_PARAMS_PER_H2 = 3
MLP_PARAMS_PER_H2 = 8


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
        require_positive(flop_per_s=self.flop_per_s, bandwidth_bytes_per_s=self.bandwidth_bytes_per_s)

    @classmethod
    def of_node(cls, flop_per_s: float, node_bandwidth_bytes_per_s: float, tp_size: int) -> Rates:
        """The slides' rule: a node's bandwidth divided by TP."""
        require_count(tp_size=tp_size)
        require_positive(node_bandwidth_bytes_per_s=node_bandwidth_bytes_per_s)
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
        require_positive(param_bytes=self.param_bytes, grad_bytes=self.grad_bytes)


@dataclass(frozen=True)
class Experts:
    """Experts of a layer, over `ep_size` ranks, `top_k` of them for each token. Raises CommunicationError."""

    num_experts: int
    top_k: int = 1
    ep_size: int = 1

    def __post_init__(self) -> None:
        require_count(num_experts=self.num_experts, top_k=self.top_k, ep_size=self.ep_size)
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
    require_count(seq_length=seq_length, micro_batch_size=micro_batch_size, cp_size=cp_size)
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
    require_count(hidden_size=hidden_size, tp_size=tp_size)
    require_positive(tokens=tokens)
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
