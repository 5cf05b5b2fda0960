"""What `--check-config` prints: resolved configuration, rank grid, pipeline, parameters per rank (floor 0)."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from megatron.core.models.gpt.stage_layers import StageLayersError, layer_map_lines
from megatron.core.models.gpt.vocabulary_size import padded_vocabulary
from megatron.core.pipeline_parallel.plan.ir import PlanError
from megatron.core.pipeline_parallel.plan.pipeline_summary import facts_lines, pipeline_facts
from megatron.core.pipeline_parallel.plan.spec import ScheduleSpec
from megatron.core.safe_files import read_json
from megatron.core.transport.rank_grid import AXES, RankGrid, RankGridError
from megatron.core.words import NOT_KNOWN, counted, size_text
from megatron.estimate.description import ModelDescription
from megatron.estimate.model_costs import ModelCosts, ParameterCount, UnitWeights
from megatron.estimate.run_estimate import RunEstimate, estimate_json, table_lines
from megatron.training.config.config import Config
from megatron.training.config.flag_table import spellings
from megatron.training.config.problems import Problem
from megatron.training.config.resolve import known_vocabulary
from megatron.training.config.rule_table import refusal, spelled
from megatron.training.config.rules_training import MAX_VOCABULARY_BYTES, unusable_files
from megatron.training.config.saved_config import NOT_HERE, is_elsewhere, shape_elsewhere

if TYPE_CHECKING:
    from megatron.training.planner import Planner

_SHOWN_GROUPS = 8
MOST_LAYERS = 4096  # that are built to say what ranks hold: some seconds
_OTHER_MODELS = {  # headings of docs/roadmap.md, as verdicts on flags name them
    f"roadmap: {heading}"
    for heading in (
        "mixture of experts",
        "multi-latent attention",
        "multi-token prediction",
        "model variants",
    )
}
_T = TypeVar("_T")
Estimator = Callable[[Config, "Planner"], RunEstimate]  # raises PlanError
_Section = tuple[Any, list[str]]  # of the JSON object and of the text


@dataclasses.dataclass(frozen=True)
class Report:
    """Everything the check found. sections: what the JSON object has under each name, and the lines of the text. spec:
    of the pipeline, None where there is none. unknown: why nothing is known of the model's computations, empty where it
    is of this version and its shape is here. estimate: of what ranks hold, None where that is not known."""

    config: Config
    sections: dict[str, _Section]
    spec: ScheduleSpec | None = None
    unknown: str = ""
    estimate: RunEstimate | None = None


def build_report(
    config: Config, problems: Sequence[Problem], undescribed: str = "", estimated: Estimator | None = None
) -> Report:
    """Compute what can be computed of a configuration, sound or not. undescribed: why nobody has looked at its model;
    problems and an incomplete shape say so by themselves. estimated: says what ranks of a described model hold."""
    grid, part, spec = _or_none(config.grid), _or_none(config.world_part), None
    experts = None if part is None else part.experts
    config = with_vocabulary(config)
    absent = shape_elsewhere(config.checkpoint)
    unknown = NOT_HERE if absent else _unbuilt(problems)
    if config.model.num_layers is not None and not absent and not config.staged_model.is_open:
        planner = _or_none(config.planner)
        spec = None if planner is None else planner.spec
        if planner is not None and (ddp := planner.sharded(config.ddp)) != config.ddp:
            config = config.replace(data_parallel_sharding_strategy=ddp.data_parallel_sharding_strategy)
    warnings, files = config.warnings, _not_found(config)
    estimate = None if problems or estimated is None else _estimate(config, estimated)
    values, kept = config.flat() | _plain(config.extra), ("rule", "flags", "message", "fix")
    sections: dict[str, _Section] = {
        "config": (values, []),
        "origin": ({name: config.origin.get(name, "default") for name in values}, []),
        "grid": _grids(grid, experts),
        "sharding": _sharding(config),
        "pipeline": _pipeline(config, spec, unknown),
        "parameters": _parameters(
            grid, _count(config, spec), unknown or _undescribed(config, problems, undescribed)
        ),
        "estimate": (None, []) if estimate is None else (estimate_json(estimate), table_lines(estimate)),
        "exchanges": _exchanges(config, spec),
        "problems": ([{name: getattr(problem, name) for name in kept} for problem in problems], []),
        "warnings": (warnings, [f"warning: {warning}" for warning in warnings]),
        "notes": (config.notes, [f"note: {note}" for note in config.notes]),
        "not_found": (files, [f"not found: {path}" for path in files]),
    }
    return Report(config, sections, spec, unknown, estimate)


def render_json(report: Report) -> str:
    """One JSON object: config, origin, grid, sharding, pipeline, parameters, estimate, problems, warnings, notes,
    not_found."""
    return json.dumps({name: facts for name, (facts, _) in report.sections.items()}) + "\n"


def render_text(report: Report) -> str:
    """The configuration as YAML, then grid, parameters, files and warnings as YAML comments: one file to keep."""
    order = "grid sharding pipeline parameters exchanges estimate not_found warnings notes".split()
    lines = [f"# {line}" for name in order for line in report.sections[name][1]]
    return report.config.to_yaml() + "\n".join(lines) + "\n"


def _estimate(config: Config, estimated: Estimator) -> RunEstimate | None:
    """What ranks hold; None of a model that is not described or has very many layers, and where there is no plan."""
    if not isinstance(config.description, ModelDescription) or len(config.description.layers) > MOST_LAYERS:
        return None
    if (planner := _or_none(config.planner)) is None:
        return None
    return _or_none(functools.partial(estimated, config, planner))


def _or_none(make: Callable[[], _T]) -> _T | None:
    """None where ranks do not divide, nor layers over stages, or where nothing fits."""
    try:
        return make()
    except (RankGridError, StageLayersError, PlanError):
        return None


def _plain(extra: Mapping[str, Any]) -> dict[str, Any]:
    """A user's own values as JSON can hold them."""
    return {
        name: value if isinstance(value, bool | int | float | str | list | tuple | None) else str(value)
        for name, value in extra.items()
    }


def with_vocabulary(config: Config) -> Config:
    """With the padded vocabulary where it can be told without building the tokenizer."""
    multiple, tp = config.model.make_vocab_size_divisible_by, config.parallel.tensor_model_parallel_size
    if config.model.padded_vocab_size is not None or multiple < 1 or tp < 1:
        return config
    vocabulary = _vocabulary(config)
    if vocabulary is None:
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


def _not_found(config: Config) -> list[str]:
    """Files named by flags that are not on this machine, as "--flag PATH"."""
    values, (missing, _) = config.flat(), unusable_files(config)
    for name in ("data_path", "train_data_path", "valid_data_path", "test_data_path"):
        files = (prefix + end for prefix in corpora(values[name] or ()) for end in (".bin", ".idx"))
        missing += [f"{spelled(name)} {file}" for file in files if not os.path.exists(file)]
    if is_elsewhere(values["load"]):
        missing.append(f"--load {values['load']}")
    return missing


def corpora(words: Sequence[str]) -> list[str]:
    """The corpora that --data-path names: in pairs, every other word is a weight."""
    return [word for word in words if len(words) % 2 or not _is_number(word)]


def _is_number(word: str) -> bool:
    return refusal(lambda: float(word), ValueError) is None


def _grids(grid: RankGrid | None, experts: RankGrid | None) -> _Section:
    facts, lines = _grid("rank grid", grid)
    of_experts, more = _grid("rank grid of experts", experts)
    if facts is None:
        return None, ["rank grid: the ranks do not divide", *more]
    return facts | {"expert": of_experts}, lines + more


def _grid(title: str, grid: RankGrid | None) -> tuple[dict[str, Any] | None, list[str]]:
    if grid is None:
        return None, []
    sizes = {axis: grid.size(axis) for axis in AXES}
    groups = {axis: grid.groups(axis) for axis in AXES if grid.size(axis) > 1}
    facts = {"world_size": grid.world_size, "order": grid.order, "sizes": sizes, "groups": groups}
    told = ", ".join(f"{axis} {size}" for axis, size in sizes.items())
    lines = [f"{title}: {counted(grid.world_size, 'rank')}, order {grid.order}: {told}"]
    for axis, of_axis in groups.items():
        shown = ", ".join(map(_ranks, of_axis[:_SHOWN_GROUPS]))
        more = f", ... {len(of_axis)} groups" if len(of_axis) > _SHOWN_GROUPS else ""
        lines.append(f"  {axis}: {shown}{more}")
    return facts, lines


def _ranks(group: tuple[int, ...]) -> str:
    few = len(group) <= _SHOWN_GROUPS
    return str(list(group)) if few else f"[{group[0]}, {group[1]}, ... {group[-1]}]"


def _sharding(config: Config) -> _Section:
    """The row of the sharding table, and into how many parts data parallel ranks cut what; None where flags or ranks do
    not fit (see the problems)."""
    row, place, strategy = config.sharding, config.shard_place, config.ddp.data_parallel_sharding_strategy
    if row is None or place is None:
        return None, []
    cuts = {"weights": row.weights, "gradients": row.main_grads, "the optimizer's state": row.optimizer}
    ways = {what: place.ways(cut) for what, cut in cuts.items()}
    facts = {"strategy": strategy, "instances": place.outer_size, "ways": ways, "expert_ways": None}
    lines = [f"sharding: {strategy}: a rank holds {_held(ways)}"]
    if (experts := config.expert_place) is not None:
        facts["expert_ways"] = of_experts = {what: experts.ways(cut) for what, cut in cuts.items()}
        lines.append(f"  of its experts {_held(of_experts)}")
    return facts, lines


def _held(ways: Mapping[str, int]) -> str:
    return ", ".join(f"1/{parts} of {what}" for what, parts in ways.items())


def _unbuilt(problems: Sequence[Problem]) -> str:
    """That another model than this one would be counted, by the flags that ask for what is not there."""
    refused = {flag for problem in problems if problem.rule == "not-supported" for flag in problem.flags}
    entries = (spellings()[flag] for flag in sorted(refused))
    flags = [one.spelling for one in entries if one.why in _OTHER_MODELS and not one.setting_of]
    return f"not supported yet: {', '.join(flags)}" if flags else ""


def _pipeline(config: Config, spec: ScheduleSpec | None, unknown: str) -> _Section:
    if spec is None:
        return None, []
    # Of one step after the ramp.
    num_microbatches = None if config.batch_schedule_or_none() is None else config.last_num_microbatches
    layers = [f"  {line.removeprefix(' > ')}" for line in layer_map_lines(spec.stages, spec.placement)]
    known = not unknown  # by whose computations stages are weighed
    facts = pipeline_facts(spec, num_microbatches, with_bubble=known)
    return facts, [*facts_lines(facts), *layers]


def _parameters(grid: RankGrid | None, count: ParameterCount | None, why: str) -> _Section:
    """why: they are not known."""
    facts: dict[str, Any] = {
        "total": None,
        "experts": None,
        "active": None,
        "per_rank": None,
        "experts_per_rank": None,
        "why": why or None,
    }
    lines: list[str] = []
    stages: Sequence[UnitWeights] = () if count is None else count.of_ranks
    if count is not None:
        facts |= {"total": count.total, "experts": count.experts, "active": count.active}
        lines.append(f"parameters: {count.total:,} in all")
    if count is not None and count.experts:
        lines.append(
            f"  {count.experts:,} in experts; {count.active:,} active: all but experts that a token does not meet"
        )
    if grid is not None and stages:
        stride, ranks = grid.strides["pp"], grid.world_size // grid.pp
        here = [stages[rank // stride % grid.pp] for rank in range(grid.world_size)]
        facts["per_rank"], facts["experts_per_rank"] = list(map(sum, here)), [one.experts for one in here]
        lines.append("parameters per rank:")
        for at, held in enumerate(stages):
            which = f"each of {counted(ranks, 'rank')}" if ranks > 1 else f"rank {grid.rank({'pp': at})}"
            experts = f", {held.experts:,} of them in experts" if held.experts else ""
            lines.append(f"  pipeline rank {at} ({which}): {sum(held):,}{experts}")
    return facts, lines + ([f"parameters {NOT_KNOWN}: {why}"] if count is None else [])


def _exchanges(config: Config, spec: ScheduleSpec | None) -> _Section:
    """Of a rank of each pipeline rank with those that have its tokens' experts, by step; None where there are none."""
    part, costs = _or_none(config.world_part), config.model_costs
    if part is None or part.experts is None or not isinstance(costs, ModelCosts) or spec is None:
        return None, []
    splits, count = spec.splits_backward, config.last_num_microbatches
    moved = [
        count * costs.exchanged_bytes(spec.held_by(rank), splits=splits)
        for rank in range(spec.placement.num_ranks)
    ]
    told = "exchanges with experts on other ranks, at even load"
    return {"bytes_per_step": moved}, [
        f"{told}: {size_text(max(moved))} a step on the pipeline rank with the most"
    ]


def _count(config: Config, spec: ScheduleSpec | None) -> ParameterCount | None:
    """Parameters of the model, and of a rank of each pipeline rank; None where it is not described."""
    costs = config.model_costs
    return None if costs is None or spec is None else costs.count(spec.stages, spec.placement)


def _undescribed(config: Config, problems: Sequence[Problem], why: str) -> str:
    """Why nobody has looked at the model: problems, and a shape that is not complete, before anything else."""
    model = config.model
    heads = (model.num_attention_heads, model.kv_channels)
    sizes = (model.num_layers, model.hidden_size, model.ffn_hidden_size, *heads, model.seq_length)
    if any(size is None or size < 1 for size in sizes):
        return "the model's shape is not complete"
    if problems:
        return "the launch line is not valid: see the problems"
    return "the tokenizer's files are not here; give --vocab-size" if model.padded_vocab_size is None else why
