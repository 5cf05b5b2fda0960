"""Positions in a config.json: the rotation by its two spellings, windows, lengths (floor 0, pure)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from megatron.core.transformer.model_config import TransformerConfig
from megatron.interchange.fields import Json, SettingError, integer, number, shown, truth

_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


@dataclasses.dataclass(frozen=True)
class Window:
    """Positions that attend beyond a window are refused; `--max-position-embeddings` may end before it. enabled_by: a
    field without which the window does not count."""

    enabled_by: str | None = None
    theirs = ("sliding_window",)

    def read(self, json: Json, given: Mapping[str, Any]) -> dict[str, Any]:
        off = self.enabled_by is not None and not truth(json, self.enabled_by, False)
        if off or json.get("sliding_window") is None:
            return {}
        window = integer(json, "sliding_window")
        positions = given.get("max_position_embeddings") or integer(json, "max_position_embeddings")
        if positions > window:
            raise SettingError(
                f"sliding_window {window} of {positions} positions: windows are planned, see docs/roadmap.md, "
                f"'attention windows'; within the window the model is the same: --max-position-embeddings {window}"
            )
        return {}

    def write(self, config: TransformerConfig, vocab_size: int) -> dict[str, Any]:
        return {"sliding_window": None}


@dataclasses.dataclass(frozen=True)
class FullAttention:
    """`layer_types` and `max_window_layers`: which layers have a window, where windows count at all."""

    theirs = ("use_sliding_window", "max_window_layers", "layer_types")

    def read(self, json: Json, given: Mapping[str, Any]) -> dict[str, Any]:
        kinds = set(json.get("layer_types") or ()) - {"full_attention"}
        if kinds and not truth(json, "use_sliding_window", False):
            raise SettingError(
                f"layer_types: {', '.join(sorted(map(str, kinds)))}: only full_attention is built"
            )
        return {}

    def write(self, config: TransformerConfig, vocab_size: int) -> dict[str, Any]:
        return {"use_sliding_window": False}


@dataclasses.dataclass(frozen=True)
class Original:
    """`original_max_position_embeddings` of Phi-3: positions beyond it need long rope factors."""

    theirs = ("original_max_position_embeddings",)

    def read(self, json: Json, given: Mapping[str, Any]) -> dict[str, Any]:
        positions = integer(json, "max_position_embeddings")
        original = integer(json, "original_max_position_embeddings", positions)
        if original != positions:
            raise SettingError(
                f"original_max_position_embeddings {original} of {positions}: long rope is not built"
            )
        return {}

    def write(self, config: TransformerConfig, vocab_size: int) -> dict[str, Any]:
        return {"original_max_position_embeddings": config.max_position_embeddings}


@dataclasses.dataclass(frozen=True)
class Rope:
    """The rotation, in `rope_parameters` (transformers from 5 on) and in `rope_theta`, `rope_scaling` (before)."""

    theirs = ("rope_parameters", "rope_theta", "rope_scaling", "partial_rotary_factor")

    def read(self, json: Json, given: Mapping[str, Any]) -> dict[str, Any]:
        stated = self._stated(json)
        kind = stated.get("rope_type", stated.get("type", "default"))
        ours = {
            "rotary_base": integer(stated, "rope_theta", 10000),
            "rotary_percent": number(stated, "partial_rotary_factor", 1.0),
            "use_rope_scaling": kind == "llama3",
        }
        if kind == "linear":
            ours["rotary_seq_len_interpolation_factor"] = integer(stated, "factor")
        elif kind == "llama3":
            ours["rope_scaling_factor"] = number(stated, "factor")
            for key, value in _LLAMA3.items():
                if number(stated, key) != value:
                    raise SettingError(
                        f"{key} {shown(stated.get(key))}: --use-rope-scaling has {value}, and no flag"
                    )
        elif kind != "default":
            raise SettingError(f"rope_type {shown(kind)}: this model has default, linear and llama3")
        return ours

    def _stated(self, json: Json) -> dict[str, Any]:
        """Both spellings together; they must not differ."""
        older = {key: json[key] for key in ("rope_theta", "partial_rotary_factor") if key in json}
        both = (older | self._table(json, "rope_scaling"), self._table(json, "rope_parameters"))
        for key in both[0].keys() & both[1].keys():
            if both[0][key] != both[1][key]:
                raise SettingError(
                    f"{key}: {both[1][key]!r} in rope_parameters, {both[0][key]!r} in the older field"
                )
        return both[0] | both[1]

    def _table(self, json: Json, key: str) -> dict[str, Any]:
        table = json.get(key) or {}
        if not isinstance(table, Mapping):
            raise SettingError(f"{key}: expected an object, found {shown(table)}")
        return dict(table)

    def write(self, config: TransformerConfig, vocab_size: int) -> dict[str, Any]:
        if config.position_embedding_type != "rope" or config.rotary_interleaved:
            raise SettingError(
                "rope_parameters: needs --position-embedding-type rope without --rotary-interleaved"
            )
        theta, interpolation = float(config.rotary_base), config.rotary_seq_len_interpolation_factor
        scaling: dict[str, Any] | None = None
        if config.use_rope_scaling and interpolation is not None:
            raise SettingError(
                "rope_parameters: one of --use-rope-scaling and --rotary-seq-len-interpolation-factor"
            )
        if config.use_rope_scaling:
            scaling = {"rope_type": "llama3", "factor": config.rope_scaling_factor, **_LLAMA3}
        elif interpolation is not None:
            scaling = {"rope_type": "linear", "factor": float(interpolation)}
        today = {"rope_type": "default", **(scaling or {}), "rope_theta": theta}
        older: dict[str, Any] = {"rope_theta": theta, "rope_scaling": scaling}
        if config.rotary_percent != 1.0:
            today["partial_rotary_factor"] = older["partial_rotary_factor"] = config.rotary_percent
        return {"rope_parameters": today, **older}
