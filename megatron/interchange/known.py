"""The architectures that can be read and written, by `model_type` of config.json (floor 0)"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

from megatron.core.transformer.model_config import TransformerConfig
from megatron.interchange.architecture import Architecture, HFModel, InterchangeError
from megatron.interchange.architectures import (
    gemma,
    gpt2,
    llama,
    mistral,
    mixtral,
    phi3,
    qwen2,
    qwen2_moe,
    qwen3,
    qwen3_moe,
)

# The first that can express a model is what it is exported as where nobody says.
ARCHITECTURES: dict[str, Architecture] = {
    module.ARCHITECTURE.model_type: module.ARCHITECTURE
    for module in (llama, gpt2, qwen2, qwen3, gemma, mistral, phi3, mixtral, qwen2_moe, qwen3_moe)
}


def architecture(model_type: Any) -> Architecture:
    """Raises InterchangeError for one that is not known."""
    if model_type not in ARCHITECTURES:
        near = difflib.get_close_matches(str(model_type), ARCHITECTURES, n=1)
        guess = f" (nearest: {near[0]})" if near else ""
        raise InterchangeError(
            f"model_type {model_type!r:.80}: not known{guess}; known: {', '.join(ARCHITECTURES)}"
        )
    return ARCHITECTURES[model_type]


def read_config(json: Mapping[str, Any], given: Mapping[str, Any] | None = None) -> HFModel:
    """What a config.json says. given: our fields that flags give. Raises InterchangeError."""
    return architecture(json.get("model_type")).read(json, given)


def expressing(config: TransformerConfig, vocab_size: int) -> Architecture:
    """The architecture that a model of ours is exported as. Raises InterchangeError where none can express it."""
    reasons = []
    for candidate in ARCHITECTURES.values():
        try:
            candidate.write(config, vocab_size)
            return candidate
        except InterchangeError as error:
            reasons.append(str(error))
    raise InterchangeError("; ".join(reasons))
