"""Shape and arithmetic of the model (floor 0)."""

import dataclasses
import math
from typing import Annotated, Literal

from megatron.core.config_base import FLOAT, Bounds, Ids, Layers, Length, Rate, Size, arg
from megatron.core.list_expression import parse_list_expression

GATED = ("swiglu", "quick_geglu", "geglu", "geglu_tanh")
# Flags of which one at most says what the MLP computes; none: GELU.
ACTIVATIONS = (*GATED, "squared_relu", "openai_gelu")
SQRT_HIDDEN = "sqrt_hidden"
_WITH_ROPE = ("position_embedding_type", "rope")
_WITHOUT_BIASES = ("add_bias_linear", False)
_MOST_EXPERTS = 2**14
Experts = Annotated[int, Bounds(0, _MOST_EXPERTS)]


def number_or_sqrt_hidden(word: str) -> float | str:
    """`sqrt_hidden`, else a number. Raises ValueError."""
    if word == SQRT_HIDDEN:
        return word
    try:
        number = float(word)
    except ValueError:
        number = math.nan
    if not math.isfinite(number) or number == 0:
        raise ValueError(f"expects a finite number that is not 0, or {SQRT_HIDDEN}, got {word!r}")
    return number


def number_or_list(word: str) -> str:
    """The word, which is a number or a list expression. Raises ValueError."""
    parse_list_expression(word)
    return word


@dataclasses.dataclass(frozen=True)
class TransformerConfig:
    """One decoder-only transformer. `resolved()` fills the sizes that follow from others."""

    # Shape
    num_layers: Layers = arg(None, "decoder layers", required=True, weights=True)
    hidden_size: Size = arg(None, "width h of the model", required=True, weights=True)
    num_attention_heads: Size = arg(None, "query heads", required=True, weights=True)
    seq_length: Length = arg(
        None, "training sequence length", unit="tokens", required=True, from_checkpoint="unset"
    )
    max_position_embeddings: Length = arg(
        None,
        "rows of the learned position table, upper bound of the sequence length",
        unit="tokens",
        derived="--seq-length",
        weights=("position_embedding_type", "learned_absolute"),
    )
    ffn_hidden_size: Length = arg(
        None, "MLP width", derived="4 h; with --swiglu floor(8h/3 / 64) * 64", weights=True
    )
    kv_channels: Size = arg(None, "dimension of one head", derived="hidden size / heads", weights=True)
    group_query_attention: bool = arg(
        False, "several query heads share one key and value head", from_checkpoint="always"
    )
    num_query_groups: Size = arg(
        1,
        "key and value heads, with --group-query-attention (without it: as many as query heads)",
        weights=True,
    )
    # Embeddings and positions
    position_embedding_type: Literal["learned_absolute", "rope", "none"] = arg(
        "learned_absolute", "how positions enter the model", weights=True
    )
    use_rotary_position_embeddings: bool = arg(False, "older spelling of --position-embedding-type rope")
    rotary_base: int = arg(10000, "base (theta) of the rotation frequencies", weights=_WITH_ROPE)
    rotary_percent: float = arg(1.0, "share of the head dimension that is rotated", weights=_WITH_ROPE)
    rotary_interleaved: bool = arg(False, "rotate pairs (2i, 2i+1) instead of halves", weights=_WITH_ROPE)
    rotary_seq_len_interpolation_factor: Size | None = arg(
        None, "divide positions by this factor", weights=_WITH_ROPE
    )
    use_rope_scaling: bool = arg(False, "frequency scaling of Llama 3.1", weights=_WITH_ROPE)
    rope_scaling_factor: Annotated[float, Bounds(1.0, 2.0**20)] = arg(
        8.0, "factor of --use-rope-scaling", weights=("use_rope_scaling", True)
    )
    untie_embeddings_and_output_weights: bool = arg(False, "separate output matrix", weights=True)
    embedding_multiplier: (
        Annotated[float, Bounds(-FLOAT.most, FLOAT.most)] | Literal["sqrt_hidden"] | None
    ) = arg(
        None,
        "factor of the word embeddings, not of the output layer: a number, or sqrt_hidden (Gemma: the root of the "
        "hidden size, rounded to the weights' dtype)",
        parse=number_or_sqrt_hidden,
        ours=True,
        weights=True,
    )
    make_vocab_size_divisible_by: Size = arg(
        128, "pad the vocabulary to a multiple of this x TP", unit="ids", from_checkpoint="always"
    )
    padded_vocab_size: Ids | None = arg(
        None, "vocabulary after padding, instead of padding by rule", unit="ids", weights=True
    )
    # Norms and activations
    normalization: Literal["LayerNorm", "RMSNorm"] = arg(
        "LayerNorm", "norm of the residual branches", weights=True
    )
    norm_epsilon: float = arg(
        1e-5, "added to the variance", flags=("--norm-epsilon", "--layernorm-epsilon"), weights=True
    )
    apply_layernorm_1p: bool = arg(False, "norm weights are stored as (w - 1)", weights=True)
    qk_layernorm: bool = arg(False, "norm over each head of queries and keys", weights=True)
    swiglu: bool = arg(False, "gated SiLU MLP", weights=True)
    quick_geglu: bool = arg(False, "gated MLP with x * sigmoid(1.702 x)", weights=True)
    geglu: bool = arg(False, "gated MLP with exact (erf) GELU", ours=True, weights=True)
    geglu_tanh: bool = arg(
        False, "gated MLP with the tanh approximation of GELU, as Gemma's", ours=True, weights=True
    )
    squared_relu: bool = arg(False, "squared ReLU instead of GELU", weights=True)
    openai_gelu: bool = arg(False, "tanh approximation of GELU", weights=True)
    add_bias_linear: bool = arg(
        True, "no biases in linear layers", flags=("--disable-bias-linear",), weights=True
    )
    add_qkv_bias: bool = arg(
        False, "bias in the QKV projection even without other biases", weights=_WITHOUT_BIASES
    )
    add_attention_output_bias: bool = arg(
        False,
        "bias in the attention's output projection even without other biases",
        ours=True,
        weights=_WITHOUT_BIASES,
    )
    # Experts
    num_experts: Experts | None = arg(
        None, "experts of a layer, in place of its MLP; 0 for none", weights=True
    )
    moe_layer_freq: str = arg(
        "1",
        "which layers have experts: every N-th, or a list such as ([0]*3+[1]*58)",
        parse=number_or_list,
        weights=True,
    )
    moe_ffn_hidden_size: Length | None = arg(
        None, "width of each expert", derived="--ffn-hidden-size", weights=True
    )
    moe_shared_expert_intermediate_size: Length | None = arg(
        None, "width of the experts that every token meets, all together", weights=True
    )
    moe_shared_expert_gate: bool = arg(
        False, "what shared experts give times the sigmoid of a product with the token", weights=True
    )
    moe_router_topk: Annotated[int, Bounds(1, _MOST_EXPERTS)] = arg(
        2, "experts that a token meets", weights=True
    )
    moe_router_score_function: Literal["softmax", "sigmoid"] = arg(
        "softmax", "what makes weights of the router's logits", weights=True
    )
    moe_router_pre_softmax: bool = arg(
        False, "softmax over all experts, not over those that are chosen", weights=True
    )
    moe_router_topk_scaling_factor: float | None = arg(
        None, "what the weights of the chosen experts are multiplied by", weights=True
    )
    moe_router_num_groups: Experts | None = arg(
        None, "groups of experts, of which each token meets some only", weights=True
    )
    moe_router_group_topk: Experts | None = arg(None, "groups that a token meets", weights=True)
    moe_router_enable_expert_bias: bool = arg(
        False,
        "each expert's score has a bias where experts are chosen, moved once a step towards equal load",
        weights=True,
    )
    moe_router_bias_update_rate: float = arg(
        1e-3, "how far a step moves the biases of --moe-router-enable-expert-bias"
    )
    moe_router_force_load_balancing: bool = arg(
        False, "choose experts at random, for benchmarks; the router learns as if it had chosen them"
    )
    moe_input_jitter_eps: Rate | None = arg(
        None, "the router's input times numbers from 1 - eps to 1 + eps, in training"
    )
    moe_router_dtype: Literal["fp32", "fp64"] | None = arg(
        None, "arithmetic of the router's product", derived="of the weights", weights=True
    )
    moe_router_load_balancing_type: tuple[
        Literal["aux_loss", "seq_aux_loss", "global_aux_loss", "sinkhorn", "none"], ...
    ] = arg(
        ("aux_loss",),
        "what keeps experts equally busy: losses, each with its coefficient; choosing by sinkhorn; or none",
    )
    moe_aux_loss_coeff: tuple[float, ...] = arg(
        (0.0,), "coefficients of the losses of --moe-router-load-balancing-type"
    )
    moe_z_loss_coeff: float | None = arg(None, "coefficient of the loss that keeps the router's logits small")
    # With as many even shares as there are experts, one has room for all that a microbatch can send it.
    moe_expert_capacity_factor: Annotated[float, Bounds(-1, _MOST_EXPERTS)] | None = arg(
        None, "room of an expert, as a multiple of its even share of a microbatch; negative for all"
    )
    moe_token_drop_policy: Literal["probs", "position"] = arg(
        "probs", "whom a full expert takes: those that weigh most, or the earliest"
    )
    moe_token_dispatcher_type: Literal["allgather", "alltoall", "flex"] = arg(
        "allgather",
        "how tokens come to experts on other ranks: all of them are gathered, or each is sent to where its experts are "
        "(flex: as alltoall)",
    )
    moe_shared_expert_overlap: bool = arg(
        False, "shared experts are computed while tokens travel to experts on other ranks"
    )
    moe_grouped_gemm: bool = arg(False, "the products of a layer's experts as one kernel, where there is one")
    moe_per_layer_logging: bool = arg(False, "numbers of experts in the record by layer, too")
    # Dropout and initial weights
    attention_dropout: Rate = arg(0.1, "dropout on attention probabilities")
    hidden_dropout: Rate = arg(0.1, "dropout on residual branches and the embedding")
    init_method_std: float = arg(0.02, "std of initial weights; residual outputs use std / sqrt(2 layers)")
    init_model_with_meta_device: bool = arg(False, "build the model without memory, then fill its own shard")
    # Arithmetic
    transformer_impl: Literal["local", "transformer_engine", "inference_optimized"] = arg(
        "local", "implementation of the layers"
    )
    attention_backend: Literal["auto", "flash", "fused", "unfused", "local"] = arg(
        "auto", "auto, flash, fused: torch's scaled_dot_product_attention; unfused, local: written out, exact"
    )
    use_flash_attn: bool = arg(False, "older spelling of --attention-backend flash")
    attention_softmax_in_fp32: bool = arg(False, "softmax of the unfused path in fp32")
    apply_query_key_layer_scaling: bool = arg(
        False, "scale QK by 1 / layer number and undo it in an fp32 softmax", from_checkpoint="always"
    )
    fp32_residual_connection: bool = arg(False, "residual stream in fp32")
    calculate_per_token_loss: bool = arg(
        False, "divide by the global token count instead of averaging microbatch means"
    )
    # Recompute
    recompute_granularity: Literal["full", "selective"] | None = arg(
        None, "full: drop whole layers' activations; selective: those of --recompute-modules"
    )
    recompute_method: Literal["uniform", "block"] | None = arg(
        None, "full: uniform chunks of layers, or the first layers of each stage"
    )
    recompute_num_layers: Layers | None = arg(
        None, "layers per recomputed chunk (uniform), or recomputed layers (block)", unit="layers"
    )
    recompute_modules: tuple[
        Literal["core_attn", "layernorm", "mlp", "moe", "moe_act", "shared_experts"], ...
    ] = arg(("core_attn",), "what selective recompute drops: what these parts of a layer keep")
    keep_activation_output: bool = arg(
        False,
        "keep what the MLP's activation function gives, instead of computing it again in the backward: faster where "
        "kernels are short, with the MLP's width more a token and layer to keep",
        ours=True,
    )
    recompute_activations: bool = arg(False, "short for --recompute-granularity selective")
    moe_layer_recompute: bool = arg(
        False, "older spelling: --recompute-granularity selective with moe among --recompute-modules"
    )

    def resolved(self) -> "TransformerConfig":
        """Sizes that follow from others filled in; what is given stays as it is."""
        ffn, channels, groups = self.ffn_hidden_size, self.kv_channels, self.num_query_groups
        if ffn is None and self.hidden_size is not None:
            ffn = (8 * self.hidden_size // 3) // 64 * 64 if self.swiglu else 4 * self.hidden_size
        if channels is None and self.hidden_size is not None and self.num_attention_heads:
            channels = self.hidden_size // self.num_attention_heads
        experts, capacity = self.num_experts or None, self.moe_expert_capacity_factor
        if not self.group_query_attention and self.num_attention_heads is not None:
            groups = self.num_attention_heads
        return dataclasses.replace(
            self,
            ffn_hidden_size=ffn,
            kv_channels=channels,
            num_query_groups=groups,
            num_experts=experts,
            moe_ffn_hidden_size=self.moe_ffn_hidden_size or (ffn if experts else None),
            moe_expert_capacity_factor=None if capacity is None or capacity < 0 else capacity,
        )

    @property
    def gated_linear_unit(self) -> bool:
        """The MLP's first matrix holds a gate half and an up half."""
        return self.activation in GATED

    @property
    def activation(self) -> str | None:
        """The flag that says what the MLP computes; None: GELU. Rules let one pass at most."""
        return next((name for name in ACTIVATIONS if getattr(self, name)), None)

    @property
    def attention_output_bias(self) -> bool:
        """The attention's output projection has a bias."""
        return self.add_bias_linear or self.add_attention_output_bias

    def recomputes(self, module: str) -> bool:
        """Whether what this part of a layer keeps is dropped, and computed again in the backward."""
        return self.recompute_granularity == "selective" and module in self.recompute_modules

    def recompute_chunks(self, num_layers: int) -> list[tuple[int, int, bool]]:
        """(first, end, whether activations are computed again in the backward) of runs of a stage's layers.

        uniform: all layers, in chunks of `recompute_num_layers` of which only the inputs are kept. block: the
        first `recompute_num_layers` layers one by one, the others whole.
        """
        if self.recompute_granularity != "full":
            return [(0, num_layers, False)]
        step = self.recompute_num_layers or 1
        if self.recompute_method == "block":
            dropped = min(step, num_layers)
            return [(at, at + 1, True) for at in range(dropped)] + [(dropped, num_layers, False)]
        return [(at, min(at + step, num_layers), True) for at in range(0, num_layers, step)]
