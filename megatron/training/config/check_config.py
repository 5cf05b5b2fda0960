"""What `--check-config` prints: resolved configuration, rank grid, pipeline, parameters per rank (floor 0)."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from megatron.core.models.gpt.parameter_count import count_parameters, padded_vocabulary
from megatron.core.models.gpt.stage_layers import StageLayersError, layer_map_lines
from megatron.core.optional import available
from megatron.core.pipeline_parallel.plan.facts import facts_lines, pipeline_facts
from megatron.core.pipeline_parallel.plan.ir import PlanError
from megatron.core.pipeline_parallel.plan.spec import ScheduleSpec
from megatron.core.safe_files import read_json
from megatron.core.transport.rank_grid import AXES, RankGrid, RankGridError
from megatron.training.config.config import Config
from megatron.training.config.problems import Problem
from megatron.training.config.resolve import known_vocabulary
from megatron.training.config.rules_training import MAX_VOCABULARY_BYTES, unusable_files

_SHOWN_GROUPS = 8
_T = TypeVar("_T")


@dataclasses.dataclass(frozen=True)
class Parameters:
    """total: of the model. per_rank: one number a rank. why: what is missing where they are None."""

    total: int | None = None
    per_rank: tuple[int, ...] | None = None
    why: str | None = None


@dataclasses.dataclass(frozen=True)
class Report:
    """Everything the check found, before it is printed."""

    config: Config
    grid: RankGrid | None
    expert_grid: RankGrid | None
    pipeline: ScheduleSpec | None
    parameters: Parameters
    problems: tuple[Problem, ...]
    warnings: tuple[str, ...]
    not_found: tuple[str, ...]


def build_report(config: Config, problems: Sequence[Problem]) -> Report:
    """Compute what can be computed of a configuration, sound or not."""
    grid, several = _or_none(config.grid), config.parallel.expert_model_parallel_size != 1
    expert_grid = _or_none(config.expert_grid) if several else None
    config, pipeline = _with_vocabulary(config), None
    if config.model.num_layers is not None:
        config = _or_none(config.chosen) or config
        pipeline = _or_none(lambda: config.schedule_spec)
    warnings = list(config.warnings)
    if config.model.transformer_impl == "transformer_engine":
        installed = available("transformer_engine")
        state = "its layers are not supported yet" if installed else "not installed here"
        warnings.append(
            f"--transformer-impl transformer_engine: {state}; pass --transformer-impl local, or install "
            "Transformer Engine (pip install 'transformer_engine[pytorch]')"
        )
    return Report(
        config=config,
        grid=grid,
        expert_grid=expert_grid,
        pipeline=pipeline,
        parameters=_parameters(config, grid, pipeline, problems),
        problems=tuple(problems),
        warnings=tuple(warnings),
        not_found=tuple(_not_found(config)),
    )


def _or_none(make: Callable[[], _T]) -> _T | None:
    """None where ranks do not divide, nor layers over stages, or where nothing fits."""
    try:
        return make()
    except (RankGridError, StageLayersError, PlanError):
        return None


def _num_microbatches(config: Config) -> int | None:
    """Of one step after the ramp, None where the batch does not divide."""
    return None if config.batch_schedule_or_none() is None else config.last_num_microbatches


def _with_vocabulary(config: Config) -> Config:
    """With the padded vocabulary where it can be told without building the tokenizer."""
    if config.model.padded_vocab_size is not None:
        return config
    multiple, tp = config.model.make_vocab_size_divisible_by, config.parallel.tensor_model_parallel_size
    vocabulary = _vocabulary(config)
    if vocabulary is None or multiple < 1 or tp < 1:
        return config
    return config.replace(padded_vocab_size=padded_vocabulary(vocabulary, multiple, tp))


def _vocabulary(config: Config) -> int | None:
    t = config.tokenizer
    known = known_vocabulary(t.tokenizer_type, t.vocab_size)
    if known is None and t.tokenizer_type == "GPT2BPETokenizer" and t.vocab_file is not None:
        try:
            ids = read_json(t.vocab_file, max_bytes=MAX_VOCABULARY_BYTES, follow=True)
        except (OSError, ValueError):
            return t.vocab_size
        return len(ids) if isinstance(ids, dict) else t.vocab_size
    return known if known is not None else t.vocab_size


def _parameters(
    config: Config, grid: RankGrid | None, pipeline: ScheduleSpec | None, problems: Sequence[Problem]
) -> Parameters:
    model = config.model
    needed = (
        model.num_layers,
        model.hidden_size,
        model.num_attention_heads,
        model.ffn_hidden_size,
        model.kv_channels,
    )
    if any(size is None or size < 1 for size in needed) or model.max_position_embeddings is None:
        return Parameters(why="the model's shape is not complete")
    unbuilt = sorted(
        {
            flag
            for problem in problems
            if problem.rule == "not-supported"
            for flag in problem.flags
            if flag in ("--num-experts", "--multi-latent-attention", "--mtp-num-layers")
        }
    )
    if unbuilt:
        return Parameters(why=f"{', '.join(unbuilt)} is not supported yet")
    if model.padded_vocab_size is None:
        return Parameters(why="vocab size unknown: the tokenizer's files are not here; give --vocab-size")
    whole = count_parameters(model, model.padded_vocab_size).total
    if grid is None:
        return Parameters(total=whole, why="the ranks do not divide: see the problems")
    if pipeline is None:
        return Parameters(total=whole, why="layers do not divide over stages: see the problems")
    broken = {problem.rule for problem in problems}
    if broken & {"heads", "query-groups", "heads-tensor-parallel", "ffn-tensor-parallel", "vocabulary"}:
        return Parameters(total=whole, why="the model does not divide over tensor ranks: see the problems")
    count = count_parameters(
        model, model.padded_vocab_size, tp=grid.tp, stages=pipeline.stages, placement=pipeline.placement
    )
    stride = grid.strides["pp"]
    per_rank = tuple(count.per_rank[rank // stride % grid.pp] for rank in range(grid.world_size))
    return Parameters(total=count.total, per_rank=per_rank)


def _not_found(config: Config) -> list[str]:
    """Files named by flags that are not on this machine, as "--flag PATH"."""
    values = config.flat()
    missing, _ = unusable_files(config)
    for name in ("data_path", "train_data_path", "valid_data_path", "test_data_path"):
        for word in values[name] or ():
            if not _is_number(word) or len(values[name]) % 2:
                missing += [
                    f"--{name.replace('_', '-')} {word}{end}"
                    for end in (".bin", ".idx")
                    if not os.path.exists(word + end)
                ]
    if values["load"] is not None and not os.path.exists(values["load"]):
        missing.append(f"--load {values['load']}")
    return missing


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True


def _sharding(report: Report) -> dict[str, Any] | None:
    """The row of the sharding table, and into how many parts data parallel ranks cut what; None where flags or ranks do
    not fit (see the problems)."""
    row, place = report.config.sharding, report.config.shard_place
    if row is None or place is None:
        return None
    cuts = {"weights": row.weights, "gradients": row.main_grads, "the optimizer's state": row.optimizer}
    return {
        "strategy": report.config.ddp.data_parallel_sharding_strategy,
        "instances": place.outer_size,
        "ways": {what: place.ways(cut) for what, cut in cuts.items()},
    }


def _grid_facts(grid: RankGrid | None) -> dict[str, Any] | None:
    if grid is None:
        return None
    return {
        "world_size": grid.world_size,
        "order": grid.order,
        "sizes": {axis: grid.size(axis) for axis in AXES},
        "groups": {axis: grid.groups(axis) for axis in AXES if grid.size(axis) > 1},
    }


def render_json(report: Report) -> str:
    """One JSON object: config, origin, grid, sharding, pipeline, parameters, problems, warnings, notes, not_found."""
    config = report.config
    values = {**config.flat(), **{name: _plain(value) for name, value in config.extra.items()}}
    grid = _grid_facts(report.grid)
    if grid is not None:
        grid["expert"] = _grid_facts(report.expert_grid)
    facts = {
        "config": values,
        "origin": {name: config.origin.get(name, "default") for name in values},
        "grid": grid,
        "sharding": _sharding(report),
        "pipeline": None
        if report.pipeline is None
        else pipeline_facts(report.pipeline, _num_microbatches(config)),
        "parameters": {
            "total": report.parameters.total,
            "per_rank": report.parameters.per_rank,
            "why": report.parameters.why,
        },
        "problems": [
            {"rule": p.rule, "flags": list(p.flags), "message": p.message, "fix": p.fix}
            for p in report.problems
        ],
        "warnings": list(report.warnings),
        "notes": list(config.notes),
        "not_found": list(report.not_found),
    }
    return json.dumps(facts) + "\n"


def _plain(value: Any) -> Any:
    """A user's own value as JSON can hold it."""
    return (
        value if value is None or isinstance(value, bool | int | float | str | list | tuple) else str(value)
    )


def render_text(report: Report) -> str:
    """The configuration as YAML, then grid, parameters, files and warnings as YAML comments: one file to keep."""
    lines = [f"# {line}" for line in _summary(report)]
    return report.config.to_yaml() + "\n".join(lines) + "\n"


def _summary(report: Report) -> list[str]:
    lines = []
    for title, grid in (("rank grid", report.grid), ("rank grid of experts", report.expert_grid)):
        if grid is not None:
            sizes = ", ".join(f"{axis} {grid.size(axis)}" for axis in AXES)
            lines.append(f"{title}: {grid.world_size} ranks, order {grid.order}: {sizes}")
            lines += [_groups_line(grid, axis) for axis in AXES if grid.size(axis) > 1]
        elif title == "rank grid":
            lines.append("rank grid: the ranks do not divide")
    if (sharding := _sharding(report)) is not None:
        held = ", ".join(f"1/{ways} of {what}" for what, ways in sharding["ways"].items())
        lines.append(f"sharding: {sharding['strategy']}: a rank holds {held}")
    if (spec := report.pipeline) is not None:
        lines += facts_lines(spec, _num_microbatches(report.config))
        lines += [f"  {line.removeprefix(' > ')}" for line in layer_map_lines(spec.stages, spec.placement)]
    parameters = report.parameters
    if parameters.total is not None:
        lines.append(f"parameters: {parameters.total} in all")
    if parameters.per_rank is not None and report.grid is not None:
        lines.append("parameters per rank:")
        lines += _per_rank_lines(report.grid, parameters.per_rank)
    if parameters.why is not None:
        lines.append(f"parameters unknown: {parameters.why}")
    lines += [f"not found: {path}" for path in report.not_found]
    lines += [f"warning: {warning}" for warning in report.warnings]
    lines += [f"note: {note}" for note in report.config.notes]
    return lines


def _groups_line(grid: RankGrid, axis: str) -> str:
    groups = grid.groups(axis)
    shown = ", ".join(_ranks(group) for group in groups[:_SHOWN_GROUPS])
    more = f", ... {len(groups)} groups" if len(groups) > _SHOWN_GROUPS else ""
    return f"  {axis}: {shown}{more}"


def _ranks(group: tuple[int, ...]) -> str:
    if len(group) <= _SHOWN_GROUPS:
        return str(list(group))
    return f"[{group[0]}, {group[1]}, ... {group[-1]}]"


def _per_rank_lines(grid: RankGrid, per_rank: tuple[int, ...]) -> list[str]:
    """One line a pipeline rank: all tensor and data parallel ranks of one hold equally many."""
    lines = []
    for pp_rank in range(grid.pp):
        first = grid.rank({"pp": pp_rank})
        count = grid.world_size // grid.pp
        which = f"each of {count} ranks" if count > 1 else f"rank {first}"
        lines.append(f"  pipeline rank {pp_rank} ({which}): {per_rank[first]}")
    return lines
