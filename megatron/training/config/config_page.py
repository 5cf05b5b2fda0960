"""What `--check-config` shows on a terminal: the twelve lines one wants first (floor 0)."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from typing import Any

from megatron.core.pipeline_parallel.plan.schedules import SCHEDULES
from megatron.core.words import NOT_KNOWN, counted, decimal, scaled, size_text
from megatron.estimate.run_estimate import fit_text
from megatron.training.config.check_config import MOST_LAYERS, Report, corpora
from megatron.training.config.config import FIELDS, Config, train_step_flops
from megatron.training.config.problems import WHOLE_WORDS
from megatron.training.config.saved_config import shape_elsewhere

_AXES = {"tp": "tensor", "cp": "context", "ep": "expert", "dp": "data", "pp": "pipeline"}
_LABEL = 13  # characters
_ORDER = "model parameters ranks sharding pipeline memory batch training compute optimizer data checkpoints".split()

Facts = Mapping[str, Any]  # by section of the report


def render_page(report: Report, width: int) -> str:
    """The page: twelve lines, whether the launch line is valid, what was not found, warnings and notes. width: of the
    terminal, in characters."""
    config, facts = report.config, {name: facts for name, (facts, _) in report.sections.items()}
    first = {**_model(config, facts), **_ranks(facts), **_length(report), **_rest(config)}
    first |= {"memory": _memory(report), "pipeline": _pipeline(report)}
    number, why = len(facts["problems"]), facts["parameters"]["why"]
    because = report.unknown or ("see the problems" if number else why or "the flags do not say enough")
    page = [f" {label:<{_LABEL}}{first[label] or f'{NOT_KNOWN}: {because}'}" for label in _ORDER]
    verdict = "valid: no problems found"
    if number:
        verdict = f"not valid: {counted(number, 'problem')}, told below"
    elif facts["not_found"]:
        verdict += "; files are not found on this machine"
    page.append(f" {'launch line':<{_LABEL}}{verdict}")
    page += [f" {line}" for name in ("not_found", "warnings", "notes") for line in report.sections[name][1]]
    page.append(f" --full shows all {len(FIELDS)} settings and where each comes from")
    indent = " " * (_LABEL + 1)
    after = _ORDER.index("memory") + 1
    page[after:after] = [f"{indent}{line}" for line in report.sections["estimate"][1]]
    return "".join(
        f"{textwrap.fill(line, width, subsequent_indent=indent, **WHOLE_WORDS)}\n" for line in page
    )


def _model(config: Config, facts: Facts) -> dict[str, str]:
    m, counts = config.model, facts["parameters"]
    sizes = (m.num_layers, m.hidden_size, m.num_attention_heads, m.seq_length, m.padded_vocab_size)
    layers, hidden, heads, length, vocabulary = ("?" if size is None else f"{size:,}" for size in sizes)
    known = [] if counts["total"] is None else [f"{counts['total']:,}"]
    if counts["per_rank"] and max(counts["per_rank"]) != counts["total"]:
        known.append(f"at most {max(counts['per_rank']):,} in a rank's part of the model")
    if counts["why"] is not None:
        known.append(counts["why"] if known else f"{NOT_KNOWN}: {counts['why']}")
    shape = f"layers {layers} x {hidden}, heads {heads}, sequence {length}, vocabulary {vocabulary}"
    return {
        "model": "" if shape_elsewhere(config.checkpoint) else shape,
        "parameters": "; ".join(known),
    }


def _ranks(facts: Facts) -> dict[str, str]:
    """How many, and how they share the model. Empty where they do not divide."""
    grid, cut = facts["grid"], facts["sharding"]
    told = dict.fromkeys(("ranks", "sharding"), "")
    if grid is not None:
        sizes = [f"{_AXES[axis]} {size}" for axis, size in grid["sizes"].items() if size > 1]
        told["ranks"] = " = ".join([f"{grid['world_size']:,}", *([" x ".join(sizes)] if sizes else [])])
    if cut is not None:
        held = [f"1/{parts} of {what}" for what, parts in cut["ways"].items() if parts > 1]
        told["sharding"] = (
            f"{cut['strategy']}: a rank holds {', '.join(held) or 'all of its part of the model'}"
        )
    return told


def _pipeline(report: Report) -> str:
    """With what the schedule is, beside its name."""
    told = next(iter(report.sections["pipeline"][1]), "").removeprefix("pipeline: ")
    name, _, rest = told.partition(", ")
    return f"{name} ({SCHEDULES[name].about}), {rest}" if name in SCHEDULES else told


def _memory(report: Report) -> str:
    """Of the fullest rank."""
    if (estimate := report.estimate) is None:
        many = (report.config.model.num_layers or 0) > MOST_LAYERS
        return f"{NOT_KNOWN}: more than {MOST_LAYERS:,} layers are not built for it" if many else ""
    peak, every = estimate.fullest, report.config.last_num_microbatches
    looked_at = f" (by {estimate.microbatches} of {every} microbatches)" * (estimate.microbatches != every)
    where = f"{peak.operation}, {peak.unit}" if peak.unit else peak.operation
    return (
        f"at most {size_text(peak.total, digits=3)} a rank, in {where}{looked_at}: {fit_text(estimate)}; not in it: "
        "what libraries and the allocator keep"
    )


def _length(report: Report) -> dict[str, str]:
    """Of a step and of the run. Empty where the flags make no batches, and of what is not known of the model."""
    config = report.config
    t, length = config.training, config.model.seq_length
    schedule, size = config.batch_schedule_or_none(), t.global_batch_size or 0
    if schedule is None:
        return dict.fromkeys(("batch", "training", "compute"), "")
    steps = config.total_iterations
    samples, replicas = (
        t.train_samples or schedule.samples_of(steps),
        counted(config.data_parallel_size, "replica"),
    )
    microbatches = counted(config.last_num_microbatches, "microbatch")
    unknown = report.unknown or not config.is_complete
    flops = 0.0 if unknown else train_step_flops(config, size)
    batch, run, tokens = counted(size, "sample"), counted(samples, "sample"), f"tokens {NOT_KNOWN}"
    step = f"{batch} a step, {tokens}" if length is None else f"{batch} = {size * length:,} tokens a step"
    tokens = tokens if length is None else f"{samples * length:,} tokens"
    each = scaled(flops / config.world_size, "FLOP")
    return {
        "batch": f"{step}: {replicas} x {microbatches} of {t.micro_batch_size:,}",
        "training": f"{counted(steps, 'step')}, {run}, {tokens}",
        "compute": f"{scaled(flops, 'FLOP')} a step, {each} on each rank" if flops else "",
    }


def _rest(config: Config) -> dict[str, str]:
    o, d, c = config.optimizer, config.data, config.checkpoint
    rates = f"lr {decimal(o.lr, 12) if o.lr else '?'}" + (
        "" if o.lr_decay_style == "constant" else f" to {decimal(o.min_lr, 12)}"
    )
    prefixes = corpora(d.data_path or d.train_data_path or ())
    data = "mock data" if d.mock_data else ", ".join([*prefixes[:2], *(["..."] if len(prefixes) > 2 else [])])
    every = f" every {counted(c.save_interval, 'step')}" if c.save_interval else ""
    tokenizer: str = config.tokenizer.tokenizer_type or "no tokenizer"
    if shape_elsewhere(c):
        tokenizer = f"tokenizer {NOT_KNOWN}"
    folders = [*([f"to {c.save}{every}"] if c.save else []), *([f"from {c.load}"] if c.load else [])]
    return {
        "optimizer": f"{o.optimizer}, {rates}, {o.lr_decay_style}; {config.params_flag} weights",
        "data": f"{data or 'none'}; {tokenizer}",
        "checkpoints": "; ".join(folders) or "none",
    }
