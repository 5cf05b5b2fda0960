"""What `--check-config` shows on a terminal: the twelve lines one wants first (floor 0)."""

from __future__ import annotations

import textwrap
from typing import Any

from megatron.core.words import counted, scaled, size_text
from megatron.training.config.check_config import Report, corpora
from megatron.training.config.config import FIELDS, Config, train_step_flops
from megatron.training.config.problems import WHOLE_WORDS
from megatron.training.config.state_bytes import state_bytes

_AXES = {"tp": "tensor", "cp": "context", "ep": "expert", "dp": "data", "pp": "pipeline"}
_LABEL = 13  # characters


def render_page(report: Report, width: int) -> str:
    """The page, with what was not found, warnings and notes. width: of the terminal, in characters."""
    config, facts = report.config, {name: facts for name, (facts, _) in report.sections.items()}
    lines = {
        "model": _model(config),
        "parameters": _parameters(facts["parameters"]),
        "ranks": _ranks(facts["grid"]),
        "sharding": _sharding(facts["sharding"]),
        "pipeline": next(iter(report.sections["pipeline"][1]), "").removeprefix("pipeline: "),
        "memory": _memory(config, facts["parameters"]["per_rank"]),
        "batch": _batch(config),
        "training": _training(config),
        "compute": _compute(config),
        "numbers": _numbers(config),
        "data": _data(config),
        "checkpoints": _checkpoints(config),
    }
    page = [f" {label:<{_LABEL}}{text or 'not known: see the problems'}" for label, text in lines.items()]
    page += [f" {line}" for name in ("not_found", "warnings", "notes") for line in report.sections[name][1]]
    page.append(f" --full shows all {len(FIELDS)} settings and where each comes from")
    indent = " " * (_LABEL + 1)
    return "".join(
        f"{textwrap.fill(line, width, subsequent_indent=indent, **WHOLE_WORDS)}\n" for line in page
    )


def _number(value: float | None) -> str:
    return "?" if value is None else f"{value:,}"


def _model(config: Config) -> str:
    m = config.model
    layers = "? layers" if m.num_layers is None else counted(m.num_layers, "layer")
    vocabulary, length = _number(m.padded_vocab_size), _number(m.seq_length)
    heads = "? heads" if m.num_attention_heads is None else counted(m.num_attention_heads, "head")
    return f"{layers} x {_number(m.hidden_size)}, {heads}, sequence {length}, vocabulary {vocabulary}"


def _parameters(facts: dict[str, Any]) -> str:
    total, per_rank = facts["total"], facts["per_rank"]
    told = [] if total is None else [f"{total:,}"]
    if per_rank and max(per_rank) != total:
        told.append(f"at most {max(per_rank):,} on a rank")
    return "; ".join([*told, *([] if facts["why"] is None else [facts["why"]])])


def _ranks(grid: dict[str, Any] | None) -> str:
    if grid is None:
        return ""
    sizes = [f"{_AXES[axis]} {size}" for axis, size in grid["sizes"].items() if size > 1]
    return f"{grid['world_size']:,}{' = ' * bool(sizes)}{' x '.join(sizes)}"


def _sharding(facts: dict[str, Any] | None) -> str:
    if facts is None:
        return ""
    held = [f"1/{parts} of {what}" for what, parts in facts["ways"].items() if parts > 1]
    return f"{facts['strategy']}: a rank holds {', '.join(held) or 'all of its part of the model'}"


def _memory(config: Config, per_rank: list[int] | None) -> str:
    row, place = config.sharding, config.shard_place
    if not per_rank or row is None or place is None:
        return ""
    copies = config.parallel.enable_optimizer_post_validation
    copies = copies and config.parallel.post_validation_rollback == "snapshot"
    sizes = state_bytes(config.ddp, row, place, config.params_flag, copies=copies)
    held = max(per_rank) * sum(size / ways for size, ways in sizes.at_rest)
    return (
        f"{size_text(held, digits=2)} a rank: weights, gradients, optimizer's state; activations come on top"
    )


def _batch(config: Config) -> str:
    size, length = config.training.global_batch_size, config.model.seq_length
    if config.batch_schedule_or_none() is None or size is None:
        return ""
    microbatches = counted(config.last_num_microbatches, "microbatch", "microbatches")
    tokens = "" if length is None else f" = {size * length:,} tokens"
    replicas, each = counted(config.data_parallel_size, "replica"), config.training.micro_batch_size
    return f"{counted(size, 'sample')}{tokens} a step: {replicas} x {microbatches} of {_number(each)}"


def _training(config: Config) -> str:
    if config.batch_schedule_or_none() is None:
        return ""
    samples = config.training.train_samples or config.batch_schedule().samples_of(config.total_iterations)
    tokens = samples * (config.model.seq_length or 0)
    return f"{counted(config.total_iterations, 'step')}, {counted(samples, 'sample')}, {tokens:,} tokens"


def _compute(config: Config) -> str:
    if config.model_costs is None or config.batch_schedule_or_none() is None:
        return ""
    flops = train_step_flops(config, config.training.global_batch_size or 0)
    return f"{scaled(flops, 'FLOP')} a step, {scaled(flops / config.world_size, 'FLOP')} on each rank"


def _numbers(config: Config) -> str:
    o = config.optimizer
    rates = (
        "lr ?"
        if o.lr is None
        else f"lr {o.lr:g}" + ("" if o.lr_decay_style == "constant" else f" to {o.min_lr:g}")
    )
    return f"{config.params_flag} weights, {o.optimizer}, {rates}, {o.lr_decay_style}"


def _data(config: Config) -> str:
    d, tokenizer = config.data, config.tokenizer.tokenizer_type
    prefixes = corpora(d.data_path or d.train_data_path or ())
    what = "mock data" if d.mock_data else ", ".join(prefixes[:2]) + (", ..." if len(prefixes) > 2 else "")
    return f"{what or 'none'}; {tokenizer or 'no tokenizer'}"


def _checkpoints(config: Config) -> str:
    c = config.checkpoint
    every = f" every {counted(c.save_interval, 'step')}" if c.save_interval else ""
    told = [f"to {c.save}{every}"] if c.save else []
    return "; ".join([*told, *([f"from {c.load}"] if c.load else [])]) or "none"
