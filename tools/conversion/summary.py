"""What a checkpoint is of, in a few lines: model, parameters, tokens seen, last loss, layout; without torch."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron.core.dist_checkpointing.catalog import Found
from megatron.core.transformer.model_config import ACTIVATIONS
from megatron.core.words import counted, printable_json, size_text
from megatron.training.report.metrics_file import read_metrics
from tools.reports.run_record import layout

LOSS, HELD_OUT = "lm loss", "lm loss validation"
_LAYER = re.compile(r"(.*\.layers\.)([0-9]{1,6})(\..*)")
_SIZES = {  # by the axis in a manifest, the setting
    "tp": "tensor_model_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "cp": "context_parallel_size",
}


def summary(found: Found) -> dict[str, Any]:
    """JSON values; None for what the checkpoint and the metrics beside it do not say.

    tokens: consumed samples times the sequence length that the run had last.
    """
    manifest = found.manifest
    stated = manifest.common.get("config")
    config: Mapping[str, Any] = printable_json(stated) if isinstance(stated, dict) else {}
    weights = {name: one for name, one in manifest.tensors.items() if name.startswith("model.")}
    length = config.get("seq_length")
    sizes = {setting: manifest.topology.get(axis, 1) for axis, setting in _SIZES.items()}
    loss, why = _losses(found.directory.parent / "metrics.jsonl", manifest.iteration)
    return {
        "model": _model(config),
        "tokenizer": config.get("tokenizer_type"),
        "parameters": sum(math.prod(one.shape) for one in weights.values()),
        "dtypes": sorted({one.dtype for one in weights.values()}),
        "tokens": manifest.consumed_train_samples * length if isinstance(length, int) else None,
        "seq_length": length,
        "train_iters": config.get("train_iters"),
        **loss,
        "losses_unknown": why,
        "layout": layout({"world_size": manifest.world_size, "config": {**config, **sizes}}),
    }


def summary_lines(facts: Mapping[str, Any]) -> list[str]:
    """Of what `contents.describe` has read."""
    told = facts["summary"]
    ranks = counted(facts["world_size"], "rank")
    samples, length, ends = facts["consumed_train_samples"], told["seq_length"], told["train_iters"]
    seen = "not known: no sequence length is stated"
    if told["tokens"] is not None:
        seen = f"{told['tokens']:,}: {counted(samples, 'sample')} of {length:,}"
        seen += f", iteration {facts['iteration']:,} of {ends:,}" if isinstance(ends, int) else ""
    rows = {
        "model": told["model"] or "not described: a trainer of its own has saved it",
        "tokenizer": told["tokenizer"] or "none stated",
        "parameters": f"{told['parameters']:,} in {' and '.join(told['dtypes']) or 'no tensors'}",
        "tokens seen": seen,
        "last loss": _loss_text(told),
        "layout": ranks if facts["world_size"] == 1 else f"{ranks}: {told['layout']}",
        "size": size_text(sum(file["bytes"] for file in facts["files"].values())),
        "written by": f"megatron-zero {facts['code_version']}, torch {facts['torch_version']}",
    }
    return [f"{name:<11}  {value}" for name, value in rows.items()]


def folded(tensors: Mapping[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Tensors by name, where layers that follow each other with equal ones are one: `layers.0-3.mlp...`."""
    layers: dict[tuple[str, str], list[tuple[int, dict[str, Any]]]] = {}
    for name, tensor in tensors.items():
        if match := _LAYER.fullmatch(name):
            layers.setdefault((match[1], match[3]), []).append((int(match[2]), tensor))
    lines: dict[str, dict[str, Any]] = {}
    for name, tensor in tensors.items():
        match = _LAYER.fullmatch(name)
        if match is None:
            lines[name] = tensor
            continue
        alike: list[tuple[int, int, dict[str, Any]]] = []
        for number, one in sorted(layers.pop((match[1], match[3]), []), key=lambda layer: layer[0]):
            if alike and alike[-1][1] == number - 1 and alike[-1][2] == one:
                alike[-1] = (alike[-1][0], number, one)
            else:
                alike.append((number, number, one))
        for first, last, one in alike:
            span = str(first) if first == last else f"{first}-{last}"
            lines[f"{match[1]}{span}{match[3]}"] = one
    return lines


def _model(config: Mapping[str, Any]) -> str | None:
    """A GPT in words; None where the configuration is of no GPT of ours."""
    if not isinstance(config.get("num_layers"), int):
        return None
    heads, groups = config.get("num_attention_heads"), config.get("num_query_groups")
    activation = next((name for name in ACTIVATIONS if config.get(name)), "gelu")
    parts = [
        f"GPT, {config['num_layers']} layers",
        f"hidden {config.get('hidden_size')}",
        f"{activation} MLP {config.get('ffn_hidden_size')}",
        f"{heads} heads" if groups in (None, heads) else f"{heads} heads, {groups} of keys and values",
        f"{config.get('normalization')}",
        f"{config.get('position_embedding_type')} positions",
        f"vocabulary {config.get('padded_vocab_size')}",
    ]
    return ", ".join(parts)


def _losses(metrics: Path, iteration: int) -> tuple[dict[str, Any], str | None]:
    """The last loss of training and validation up to an iteration, each with its own; or why there are none."""
    last: dict[str, Any] = {"loss": None, "validation_loss": None}
    try:
        for record in read_metrics(metrics):
            if record["iteration"] > iteration or "event" in record:
                continue
            for key, name in ((LOSS, "loss"), (HELD_OUT, "validation_loss")):
                if key in record:
                    value = record[key]
                    number = value if math.isfinite(value) else str(value)
                    last[name] = {"iteration": record["iteration"], "value": number}
    except OSError as error:
        return last, f"{metrics}: {error.strerror}"
    except ValueError as error:
        return last, str(error)
    return last, None if last["loss"] else f"{metrics} has none up to iteration {iteration}"


def _loss_text(told: Mapping[str, Any]) -> str:
    def text(loss: Mapping[str, Any]) -> str:
        value = loss["value"]
        return (
            f"{value if isinstance(value, str) else format(value, '.4f')} at iteration {loss['iteration']:,}"
        )

    if told["loss"] is None:
        return f"not known: {told['losses_unknown']}"
    held_out = told["validation_loss"]
    return text(told["loss"]) + (f", validation {text(held_out)}" if held_out else "")
