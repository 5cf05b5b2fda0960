"""Positions in a config.json: the rotation by its two spellings, windows, lengths (floor 0, pure)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron.core.transformer.model_config import TransformerConfig
from megatron.interchange.fields import Field, Json, SettingError, integer_of, number_of, shown, truth_of

_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def window(enabled_by: str | None = None) -> Field:
    """Positions that attend beyond a window are refused; `--max-position-embeddings` may end before it. enabled_by: a
    field without which the window does not count."""

    def read(json: Json, given: Json) -> dict[str, Any]:
        off = enabled_by is not None and not truth_of(json, enabled_by, False)
        if off or json.get("sliding_window") is None:
            return {}
        width = integer_of(json, "sliding_window")
        positions = given.get("max_position_embeddings") or integer_of(json, "max_position_embeddings")
        if positions > width:
            raise SettingError(
                f"sliding_window {width} of {positions} positions: windows are planned, see docs/roadmap.md, "
                f"'attention windows'; within the window the model is the same: --max-position-embeddings {width}"
            )
        return {}

    means = "null, or at least as many positions as `--max-position-embeddings`"
    means += f"; without effect where `{enabled_by}` is false" if enabled_by else ""
    return Field(("sliding_window",), means, read, lambda config: {"sliding_window": None})


def _read_layer_types(json: Json, given: Json) -> dict[str, Any]:
    kinds = set(json.get("layer_types") or ()) - {"full_attention"}
    if kinds and not truth_of(json, "use_sliding_window", False):
        raise SettingError(f"layer_types: {', '.join(sorted(map(str, kinds)))}: only full_attention is built")
    return {}


# Of Qwen: which layers have a window, if any.
SOME_WINDOWS = (
    window(enabled_by="use_sliding_window"),
    Field(
        ("use_sliding_window", "max_window_layers", "layer_types"),
        "`full_attention` in every layer, or a window as above",
        _read_layer_types,
        lambda config: {"use_sliding_window": False},
    ),
)


def _read_original(json: Json, given: Json) -> dict[str, Any]:
    positions = integer_of(json, "max_position_embeddings")
    original = integer_of(json, "original_max_position_embeddings", positions)
    if original != positions:
        raise SettingError(
            f"original_max_position_embeddings {original} of {positions}: long rope is not built"
        )
    return {}


# Of Phi-3: positions beyond it need factors of long rope.
ORIGINAL_POSITIONS = Field(
    ("original_max_position_embeddings",),
    "that of `max_position_embeddings` alone: long rope is not built",
    _read_original,
    lambda config: {"original_max_position_embeddings": config.max_position_embeddings},
)


def _read_rope(json: Json, given: Json) -> dict[str, Any]:
    stated = _both_spellings(json)
    kind = stated.get("rope_type", stated.get("type", "default"))
    ours = {
        "rotary_base": integer_of(stated, "rope_theta", 10000),
        "rotary_percent": number_of(stated, "partial_rotary_factor", 1.0),
        "use_rope_scaling": kind == "llama3",
    }
    if kind == "linear":
        ours["rotary_seq_len_interpolation_factor"] = integer_of(stated, "factor")
    elif kind == "llama3":
        ours["rope_scaling_factor"] = number_of(stated, "factor")
        for key, value in _LLAMA3.items():
            if number_of(stated, key) != value:
                raise SettingError(
                    f"{key} {shown(stated.get(key))}: --use-rope-scaling has {value}, and no flag"
                )
    elif kind != "default":
        raise SettingError(f"rope_type {shown(kind)}: this model has default, linear and llama3")
    return ours


def _both_spellings(json: Json) -> dict[str, Any]:
    """They must not differ."""
    tables = []
    for key in ("rope_scaling", "rope_parameters"):
        table = json.get(key) or {}
        if not isinstance(table, Mapping):
            raise SettingError(f"{key}: expected an object, found {shown(table)}")
        tables.append(dict(table))
    older = {key: json[key] for key in ("rope_theta", "partial_rotary_factor") if key in json} | tables[0]
    for key in older.keys() & tables[1].keys():
        if older[key] != tables[1][key]:
            raise SettingError(
                f"{key}: {tables[1][key]!r} in rope_parameters, {older[key]!r} in the older field"
            )
    return older | tables[1]


def _write_rope(config: TransformerConfig) -> dict[str, Any]:
    theta, interpolation = float(config.rotary_base), config.rotary_seq_len_interpolation_factor
    scaling: dict[str, Any] | None = None
    if config.use_rope_scaling:
        scaling = {"rope_type": "llama3", "factor": config.rope_scaling_factor, **_LLAMA3}
    elif interpolation is not None:
        scaling = {"rope_type": "linear", "factor": float(interpolation)}
    partial = {} if config.rotary_percent == 1.0 else {"partial_rotary_factor": config.rotary_percent}
    today = {"rope_type": "default", **(scaling or {}), "rope_theta": theta, **partial}
    return {"rope_parameters": today, "rope_theta": theta, "rope_scaling": scaling, **partial}


# In `rope_parameters` (transformers from 5 on) and in `rope_theta`, `rope_scaling` (before).
ROPE = Field(
    ("rope_parameters", "rope_theta", "rope_scaling", "partial_rotary_factor"),
    "`--rotary-base`, `--rotary-percent`; type linear: `--rotary-seq-len-interpolation-factor`; type llama3: "
    "`--use-rope-scaling --rope-scaling-factor` with factors 1 and 4 of 8192 positions; both spellings are written",
    _read_rope,
    _write_rope,
)
