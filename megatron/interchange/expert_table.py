"""Hugging Face's mixtures of experts: settings, and tensors, of which an expert has its own there (floor 0, pure)"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from megatron.core.transformer.layer_table import expert_layers
from megatron.core.transformer.model_config import TransformerConfig
from megatron.interchange.fields import Field, Json, SettingError, flag, integer, integer_of, shown, truth_of
from megatron.interchange.moves import Move, all_rows, of_expert, stacked, whole

_NUMBER = ("num_local_experts", "num_experts")
_MOST_LAYERS = 1 << 12  # lists in flags are no longer


class MlpNames(NamedTuple):
    """What an architecture calls the parts of a layer's MLP, and of its experts'. block: in front of a mixture's."""

    block: str = "mlp."
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    shared: str = "shared_expert"


MLP_NAMES = MlpNames()  # of most


def mlp(config: TransformerConfig, ours: str, theirs: str, names: MlpNames, width: int) -> Iterator[Move]:
    """A gated MLP. ours, theirs: its prefixes."""
    hidden = config.hidden_size
    gate_up = [all_rows(f"{theirs}{name}.weight", width) for name in (names.gate, names.up)]
    yield from stacked(f"{ours}linear_fc1.weight", gate_up, (hidden,))
    yield from whole(f"{ours}linear_fc2.weight", f"{theirs}{names.down}.weight", hidden, width)


def experts(config: TransformerConfig, ours: str, theirs: str, names: MlpNames) -> Iterator[Move]:
    """A layer's router, its experts, and its shared expert, if any. ours, theirs: prefixes of the layer's MLP."""
    hidden, number, shared = (
        config.hidden_size,
        config.num_experts,
        config.moe_shared_expert_intermediate_size,
    )
    assert number is not None, "a layer of experts in a model without"
    yield from whole(f"{ours}router.weight", f"{theirs}gate.weight", number, hidden)
    for expert in range(number):
        prefix, width = f"{theirs}experts.{expert}.", config.moe_ffn_hidden_size
        yield from of_expert(expert, number, mlp(config, f"{ours}experts.", prefix, names, width))
    if shared is not None:
        yield from mlp(config, f"{ours}shared_experts.", f"{theirs}{names.shared}.", names, shared)
    if shared is not None and config.moe_shared_expert_gate:
        gate = f"{theirs}{names.shared}_gate.weight"
        yield from whole(f"{ours}shared_experts.gate_weight", gate, 1, hidden)


def _read_number(json: Json, given: Json) -> dict[str, Any]:
    stated = {key: integer_of(json, key) for key in _NUMBER if json.get(key) is not None}
    if len(set(stated.values())) != 1:
        raise SettingError(f"{' or '.join(_NUMBER)}: expected one number of experts, found {shown(stated)}")
    return {"num_experts": next(iter(stated.values()))}


def _read_normalised(json: Json, given: Json) -> dict[str, Any]:
    return {"moe_router_pre_softmax": not truth_of(json, "norm_topk_prob", False)}


# Weights of the chosen experts sum to 1.
NORMALISED = Field(
    ("norm_topk_prob",),
    f"without {flag('moe_router_pre_softmax')}, false where it is left out",
    _read_normalised,
    lambda config: {"norm_topk_prob": not config.moe_router_pre_softmax},
)


def routed(key: str) -> tuple[Field, ...]:
    """How many experts there are, and how many a token meets. key: of the number, that is written; both are read."""
    return (
        Field(_NUMBER, flag("num_experts"), _read_number, lambda config: {key: config.num_experts}),
        integer("num_experts_per_tok", "moe_router_topk"),
        # A run says how it balances.
        Field(
            ("router_aux_loss_coef", "output_router_logits"),
            f"not taken, not written: {flag('moe_aux_loss_coeff')} is of a loss of another scale (docs/moe.md)",
            lambda json, given: {},
            lambda config: {},
        ),
    )


def _read_layers(json: Json, given: Json) -> dict[str, Any]:
    layers, step = integer_of(json, "num_hidden_layers"), integer_of(json, "decoder_sparse_step", 1)
    dense = json.get("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(type(one) is int and 0 <= one < layers for one in dense):
        raise SettingError(f"mlp_only_layers: expected layers below {layers}, found {shown(dense)}")
    if layers > _MOST_LAYERS:
        raise SettingError(
            f"num_hidden_layers {layers}: more than {_MOST_LAYERS} layers of a mixture of experts"
        )
    pattern = [int((layer + 1) % step == 0 and layer not in dense) for layer in range(layers)]
    if not any(pattern):
        raise SettingError(
            f"decoder_sparse_step {step}, mlp_only_layers {shown(dense)}: no layer has experts"
        )
    return {"moe_layer_freq": "1" if all(pattern) else str(pattern).replace(" ", "")}


def _write_layers(config: TransformerConfig) -> dict[str, Any]:
    of_experts = expert_layers(config)
    dense = [layer for layer in range(config.num_layers) if layer not in of_experts]
    return {"decoder_sparse_step": 1, "mlp_only_layers": dense}


# Which layers have experts, and the widths of both kinds.
SOME_LAYERS = (
    Field(
        ("decoder_sparse_step", "mlp_only_layers"),
        f"{flag('moe_layer_freq')}; a step of 1 is written",
        _read_layers,
        _write_layers,
    ),
    integer("moe_intermediate_size", "moe_ffn_hidden_size"),
    NORMALISED,
)


def _read_width(json: Json, given: Json) -> dict[str, Any]:
    return dict.fromkeys(("ffn_hidden_size", "moe_ffn_hidden_size"), integer_of(json, "intermediate_size"))


# Of a model whose layers all have experts.
EXPERT_WIDTH = Field(
    ("intermediate_size",),
    f"{flag('moe_ffn_hidden_size')}",
    _read_width,
    lambda config: {"intermediate_size": config.moe_ffn_hidden_size},
)
