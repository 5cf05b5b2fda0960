"""Which pipeline schedule the flags ask for, what stages it has, what it costs and may hold (floor 0)."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.models.gpt.stage_costs import ModelCosts
from megatron.core.models.gpt.stage_layers import StageLayersError, StageSpec, split_stages
from megatron.core.pipeline_parallel.plan.auto import Choice, Words, choose
from megatron.core.pipeline_parallel.plan.costs import CostModel
from megatron.core.pipeline_parallel.plan.ir import PlanError
from megatron.core.pipeline_parallel.plan.placement import LINEAR, LOOPED, V_SHAPED, Placement
from megatron.core.pipeline_parallel.plan.request import Request
from megatron.core.pipeline_parallel.plan.schedules import AUTO, SCHEDULES
from megatron.training import pipeline_lines
from megatron.training.config import Config

V_BY_MEMORY = {"zb": "zbv", "half": "v-half", "min": "v-min"}


def asked_schedules(parallel: ModelParallelConfig) -> dict[str, str]:
    """Flags that name a schedule in other words than --pipeline-schedule -> its name."""
    asked = {}
    if parallel.zero_bubble_v_schedule:
        asked["--zero-bubble-v-schedule"] = V_BY_MEMORY[parallel.zero_bubble_v_schedule_mem_setup]
    elif parallel.enable_zero_bubble:
        pending = parallel.zero_bubble_max_pending_backward
        twice = pending is not None and pending >= 2 * parallel.pipeline_model_parallel_size
        asked["--enable-zero-bubble"] = "zb-2p" if twice else "zb-1p"
    if parallel.enable_1f1b_v:
        asked["--enable-1f1b-v"] = "1f1b-v"
    if parallel.interleave_group_size > 0:
        asked["--interleave-group-size"] = "gis"
    return asked


def told_schedule(config: Config, runs: str | None = None) -> str:
    """The flag that asks for the schedule. runs: what is run, for flags that leave that to a choice or to a file."""
    parallel, name = config.parallel, config.parallel.pipeline_schedule
    if parallel.pipeline_schedule_file is not None:
        told = f"--pipeline-schedule-file {parallel.pipeline_schedule_file}"
        return told if runs is None else f"{told} (schedule {runs})"
    for flag, asked in asked_schedules(parallel).items():
        if asked == name:
            return f"{flag} (schedule {name})"
    told = f"--pipeline-schedule {name}"
    return f"{told} (which has chosen {runs})" if name == AUTO and runs is not None else told


def stages_of(parallel: ModelParallelConfig, num_layers: int, schedule: str | None) -> tuple[StageSpec, ...]:
    """The stages of a schedule by name; None: of the flags alone. Raises StageLayersError."""
    row = SCHEDULES.get(schedule or "")
    if row is None or row.placement != V_SHAPED:  # then the flags say how many chunks
        return split_stages(parallel, num_layers, kind=None if row is None else row.placement)
    return split_stages(parallel, num_layers, chunks=row.chunks, kind=row.placement)


@dataclasses.dataclass(frozen=True)
class Layout:
    """Stages, where they lie, and what they cost.

    group_size: microbatches that interleaving takes in turn, None without. estimated: costs are those of the model
    (times in layers, activations in bytes); else equal stages with F = B = W, each rank's activations 1.
    keeps_gathered: under sequence parallel F keeps gathered inputs for W; costs are those of that.
    """

    schedule: str
    placement: Placement
    stages: tuple[StageSpec, ...]
    group_size: int | None
    costs: CostModel
    estimated: bool
    keeps_gathered: bool = False

    def request(self, num_microbatches: int, limits: tuple[float, ...] | None) -> Request:
        """What the schedule's generator is asked for."""
        p = self.placement
        chunks = p.num_chunks if p.kind != V_SHAPED else None
        return Request(p.num_ranks, num_microbatches, chunks, self.group_size, self.costs, limits)

    @property
    def whole_stage(self) -> float:
        """Activations of one microbatch on the rank that has the most of them, all its chunks together: of each chunk
        the larger one of what F leaves and what is held between B and W."""
        return self.costs.whole_stage(self.placement)


def layout_of(config: Config, schedule: str, *, placement: Placement | None = None) -> Layout:
    """placement: of a saved plan, which decides on the stages then. Raises StageLayersError."""
    parallel, num_layers = config.parallel, config.model.num_layers
    assert num_layers is not None, "the rules ask for --num-layers"
    if placement is not None:
        stages = split_stages(parallel, num_layers, chunks=placement.num_chunks, kind=placement.kind)
    else:
        stages = stages_of(parallel, num_layers, schedule)
        placement = _placement(parallel, schedule, stages)
    row, group = SCHEDULES.get(schedule), None
    if row is not None and row.group_size is not None and placement.num_chunks > 1:
        group = getattr(parallel, row.group_size) or parallel.pipeline_model_parallel_size
    limited = parallel.pipeline_memory_limit is not None or parallel.pipeline_schedule == AUTO
    model = model_costs(config) if limited or (row is not None and row.searched) else None
    costs = CostModel.of_ranks(placement) if model is None else model.of_stages(stages)
    return Layout(schedule, placement, stages, group, costs, model is not None)


def _placement(parallel: ModelParallelConfig, schedule: str, stages: Sequence[StageSpec]) -> Placement:
    ranks = parallel.pipeline_model_parallel_size
    num_chunks = len(stages) // ranks
    kind = LINEAR if num_chunks == 1 else LOOPED
    row = SCHEDULES.get(schedule)
    return Placement(V_SHAPED if row is not None and row.placement == V_SHAPED else kind, ranks, num_chunks)


def model_costs(config: Config) -> ModelCosts | None:
    """What costs are estimated from; None where the configuration is not complete, which rules tell."""
    model, batch = config.model, config.training.micro_batch_size
    vocabulary = model.padded_vocab_size
    sizes = (
        model.hidden_size,
        model.num_attention_heads,
        model.ffn_hidden_size,
        model.kv_channels,
        model.num_query_groups,
        model.seq_length,
        batch,
        vocabulary,
        config.parallel.tensor_model_parallel_size,
    )
    if any(size is None or size < 1 for size in sizes):
        return None
    assert batch is not None, sizes
    assert vocabulary is not None, sizes
    return ModelCosts(
        model,
        vocabulary,
        batch,
        config.params_dtype,
        config.parallel.tensor_model_parallel_size,
        config.parallel.sequence_parallel,
        config.parallel.distributed_backend == "nccl",
    )


def limits_of_flags(config: Config, layout: Layout) -> tuple[float, ...] | None:
    """By rank, in the unit of the layout's costs; None: the schedule's own.

    A limit in bytes counts once activations are known in bytes.
    """
    parallel = config.parallel
    ranks = layout.placement.num_ranks
    if parallel.pipeline_memory_limit is not None:
        return (float(parallel.pipeline_memory_limit),) * ranks if layout.estimated else None
    if parallel.zero_bubble_max_pending_backward is not None:
        return (parallel.zero_bubble_max_pending_backward * layout.whole_stage,) * ranks
    return None


def with_gathered_inputs(
    config: Config, layout: Layout, limits: tuple[float, ...], num_microbatches: int
) -> Layout:
    """The same schedule with what sequence parallel has gathered kept from F to W, where all ranks have memory for that
    and the step takes no longer; else the layout as it is. limits: in bytes."""
    model = model_costs(config)
    if not config.parallel.sequence_parallel or not layout.estimated or not SCHEDULES[layout.schedule].splits:
        return layout
    assert model is not None, "estimated costs of an incomplete model"
    kept = dataclasses.replace(model, keeps_gathered=True).of_stages(layout.stages)
    other = dataclasses.replace(layout, costs=kept, keeps_gathered=True)
    requests = tuple(
        (name, one.request(num_microbatches, limits)) for name, one in (("again", layout), ("kept", other))
    )
    try:
        choice = _chosen(requests, num_microbatches, limits, layout.schedule)
    except PlanError:
        return layout  # neither fits, which whoever plans will say
    return other if choice.best.name == "kept" else layout


@dataclasses.dataclass(frozen=True)
class Chosen:
    """--pipeline-schedule auto: the layout of what was chosen, the limits, and a line a candidate that says why."""

    layout: Layout
    limits: tuple[float, ...]
    lines: tuple[str, ...]


def choose_layout(config: Config, num_microbatches: int) -> Chosen:
    """The fastest schedule for steps of so many microbatches.

    Without a limit every rank may hold what 1F1B holds on the first: what the F's of p microbatches leave. Raises
    StageLayersError where no schedule's stages fit the layers, PlanError where none fits the limit.
    """
    layouts, impossible = _candidates(config)
    first = next(iter(layouts.values()))
    limits = limits_of_flags(config, first)
    if limits is None:
        limits = first.costs.left_by_forwards(first.placement, first.placement.num_ranks)
    requests = tuple((name, one.request(num_microbatches, limits)) for name, one in layouts.items())
    words = Words(pipeline_lines.told_layers, pipeline_lines.told_bytes) if first.estimated else Words()
    choice = _chosen(requests, num_microbatches, limits, words=words)
    return Chosen(layouts[choice.best.name], limits, (*choice.lines(), *impossible))


def choose_again(
    config: Config,
    current: Layout,
    costs: CostModel,
    limits: tuple[float, ...],
    num_microbatches: int,
    *,
    splits: bool,
) -> Chosen:
    """The fastest schedule by these costs among those whose stages are the current one's, on the same ranks.

    splits: the model's backwards can be split. Raises PlanError where none fits.
    """
    layouts = {
        name: dataclasses.replace(
            one, costs=costs, estimated=current.estimated, keeps_gathered=current.keeps_gathered
        )
        for name, one in _candidates(config)[0].items()
        if (one.placement, one.stages) == (current.placement, current.stages)
        and (splits or not SCHEDULES[name].splits)
    }
    requests = tuple((name, one.request(num_microbatches, limits)) for name, one in layouts.items())
    words = Words(pipeline_lines.told_ns)
    if current.estimated:
        words = dataclasses.replace(words, activation=pipeline_lines.told_bytes)
    choice = _chosen(requests, num_microbatches, limits, words=words)
    return Chosen(layouts[choice.best.name], limits, tuple(choice.lines()))


def _candidates(config: Config) -> tuple[dict[str, Layout], list[str]]:
    """Layouts by schedule, and a line for each that has none."""
    parallel = config.parallel
    layouts: dict[str, Layout] = {}
    errors: list[tuple[str, StageLayersError]] = []
    for name, row in SCHEDULES.items():
        if row.like is not None or (parallel.pipeline_model_parallel_size == 1 and name != "1f1b"):
            continue
        try:
            one = layout_of(config, name)
            if row.placement == LOOPED and one.placement.num_chunks == 1:
                # no flag says how many chunks
                one = layout_of(config.replace(num_virtual_stages_per_pipeline_rank=row.chunks), name)
        except StageLayersError as error:
            errors.append((name, error))
            continue
        if row.placement != LINEAR or one.placement.num_chunks == 1:
            layouts[name] = one
    if not layouts:
        raise errors[0][1]
    return layouts, [f"{name}: not possible: {error}" for name, error in errors]


@functools.lru_cache(maxsize=8)
def _chosen(
    requests: tuple[tuple[str, Request], ...],
    num_microbatches: int,
    limits: tuple[float, ...],
    schedule: str | None = None,
    words: Words = Words(),  # noqa: B008 - frozen
) -> Choice:
    """Kept: every chunk's model provider asks, and a search takes its time. schedule: of all; None: they are named by
    theirs."""
    generators = {name: SCHEDULES[schedule or name].generate for name, _ in requests}
    request = Request(len(limits), num_microbatches, memory_limit=limits)
    return choose(generators, request, requests=dict(requests), words=words)
