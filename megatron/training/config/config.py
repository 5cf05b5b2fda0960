"""The whole configuration of a run: one field a group, and where every value came from (floor 0)."""

from __future__ import annotations

import dataclasses
import difflib
import json
import typing
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from megatron.core.datasets.gpt_dataset_config import DataConfig, indices_folder
from megatron.core.distributed.custom_fsdp.data_parallel_config import DistributedDataParallelConfig
from megatron.core.optimizer.optimization_config import OptimizerConfig
from megatron.core.parallelism_config import ModelParallelConfig
from megatron.core.pipeline_parallel.plan.held.state_bytes import RankBudget, StateBytes
from megatron.core.pipeline_parallel.plan.held.units import StageUnits
from megatron.core.pipeline_parallel.plan.spec import ScheduleSpec
from megatron.core.sharding_table import Sharding, ShardPlace, sharding_of
from megatron.core.tokenizers.tokenizer_config import TokenizerConfig
from megatron.core.transformer.layer_table import layer_table
from megatron.core.transformer.model_config import TransformerConfig
from megatron.core.transport import rank_grid
from megatron.core.transport.rank_grid import RankGrid, RankGridError, WorldPart
from megatron.estimate.description import ModelDescription
from megatron.estimate.exchange_wire import ExchangeWire
from megatron.estimate.model_costs import ModelCosts
from megatron.estimate.own_description import OwnCosts, OwnDescription, costs_of
from megatron.estimate.unit_work import CPU, GPU
from megatron.training.config import training_config
from megatron.training.config.microbatches import BatchSchedule, BatchScheduleError
from megatron.training.config.state_bytes import rank_budget, state_bytes
from megatron.training.staged_model import StagedModel

if TYPE_CHECKING:
    from megatron.training.planner import Planner

DEFAULT_ORIGIN = "default"
# difflib's likeness from which on a guess helps; below it lie names that share letters, not a meaning.
CLOSE_ENOUGH = 0.7
MAX_GUESSES = 20  # unknown names whose likely meaning is looked up; more of them are a wrong file, not slips


@dataclasses.dataclass(frozen=True)
class Config:
    """A resolved configuration: groups of flags, and what is told of them.

    extra: values of the user's own flags. origin: for each name "default", "flag", "FILE:LINE", "derived",
    "checkpoint", "args_defaults" or "launcher". warnings, notes: told once by rank 0. description: of the model, None
    before somebody has looked at it, for which torch is needed. decided: a schedule that is taken in place of a choice,
    while a model is looked at for it. exchange_wire: as a run has measured it.
    """

    model: TransformerConfig
    parallel: ModelParallelConfig
    ddp: DistributedDataParallelConfig
    optimizer: OptimizerConfig
    data: DataConfig
    tokenizer: TokenizerConfig
    training: training_config.TrainingConfig
    evaluation: training_config.EvaluationConfig
    checkpoint: training_config.CheckpointConfig
    logging: training_config.LoggingConfig
    profiling: training_config.ProfilingConfig
    reliability: training_config.ReliabilityConfig
    extra: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    origin: Mapping[str, str] = dataclasses.field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    description: ModelDescription | OwnDescription | None = None
    decided: ScheduleSpec | None = None
    exchange_wire: ExchangeWire | None = None

    @classmethod
    def from_flat(cls, values: Mapping[str, Any], **told: Any) -> Config:
        """From destination names, the rest at their defaults. Lists become tuples. told: extra, origin, warnings,
        notes. Unknown names: ValueError."""
        unknown = sorted(set(values) - set(FIELDS))
        if unknown:
            guesses = {name: closest_name(name, FIELDS) for name in unknown}
            meant = (f"{name} (did you mean {close}?)" if close else name for name, close in guesses.items())
            raise ValueError(f"unknown settings: {', '.join(meant)}")
        given = _by_group(values)
        return cls(**{group: of_group(**given.get(group, {})) for group, of_group in GROUPS.items()}, **told)

    def flat(self) -> dict[str, Any]:
        """Every setting under its destination name, the user's own flags left out."""
        return {name: getattr(getattr(self, group), name) for name, (group, _) in FIELDS.items()}

    def replace(self, *, origin: str = "derived", **values: Any) -> Config:
        """A copy with some settings changed, named by destination, and with their origin."""
        changed = _by_group(values).items()
        groups = {group: dataclasses.replace(getattr(self, group), **told) for group, told in changed}
        return dataclasses.replace(self, **groups, origin={**self.origin, **dict.fromkeys(values, origin)})

    def given(self, name: str) -> bool:
        return is_given(self.origin.get(name, DEFAULT_ORIGIN))

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.training.world_size or 1

    @property
    def rank_order(self) -> str:
        by_pipeline = self.parallel.use_tp_pp_dp_mapping
        return rank_grid.TP_PP_DP_ORDER if by_pipeline else rank_grid.DEFAULT_ORDER

    def grid(self) -> RankGrid:
        """Dense ranks. Raises RankGridError."""
        p = self.parallel
        sizes = {"tp": p.tensor_model_parallel_size, "cp": p.context_parallel_size}
        pp = p.pipeline_model_parallel_size
        return rank_grid.dense_grid(self.world_size, **sizes, pp=pp, order=self.rank_order)

    def expert_grid(self) -> RankGrid:
        """The same ranks as experts see them. Raises RankGridError."""
        p = self.parallel
        etp = p.expert_tensor_parallel_size or p.tensor_model_parallel_size
        sizes = {"ep": p.expert_model_parallel_size, "pp": p.pipeline_model_parallel_size}
        return rank_grid.expert_grid(self.world_size, etp=etp, **sizes, order=self.rank_order)

    def world_part(self) -> WorldPart:
        """All ranks, on the grid of dense layers and, where they lie in another way, on that of experts. Raises
        RankGridError."""
        grid, experts = self.grid(), self.expert_grid()
        instances = self.ddp.num_distributed_optimizer_instances
        own = experts if self.model.num_experts is not None and experts != grid else None
        return WorldPart(tuple(range(self.world_size)), grid, instances, own)

    @property
    def data_parallel_size(self) -> int:
        """Replicas of the model. Raises RankGridError where the ranks do not divide."""
        return self.grid().dp

    @property
    def sharding(self) -> Sharding | None:
        """What ranks cut; None where the outer strategy does not go with the inner one, which a rule tells."""
        try:
            return sharding_of(self.ddp.data_parallel_sharding_strategy, self.ddp.outer_dp_sharding_strategy)
        except ValueError:
            return None

    @property
    def shard_place(self) -> ShardPlace | None:
        """Over how many ranks states are cut, on the first; None where ranks do not divide, which rules tell."""
        try:
            return self._place_on(self.grid())
        except RankGridError:
            return None

    @property
    def expert_place(self) -> ShardPlace | None:
        """The same of experts; None where they have no grid of their own too."""
        try:
            experts = self.world_part().experts
        except RankGridError:
            return None
        return None if experts is None else self._place_on(experts)

    def _place_on(self, grid: RankGrid) -> ShardPlace | None:
        instances = self.ddp.num_distributed_optimizer_instances
        if instances < 1 or grid.dp % instances:
            return None
        return ShardPlace(inner_size=grid.dp // instances, outer_size=instances)

    @property
    def params_dtype(self) -> str:
        """Of the weights that the model computes with, as torch has it: "float32", "bfloat16", ..."""
        return {"fp64": "float64", "bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}[self.params_flag]

    @property
    def params_flag(self) -> str:
        """The same as flags have it: "fp32", "bf16", "fp16" or "fp64"."""
        o = self.optimizer
        return "fp64" if o.fp64 else "bf16" if o.bf16 else "fp16" if o.fp16 else "fp32"

    def batch_schedule(self) -> BatchSchedule:
        """Global batch and microbatches over the run. Raises BatchScheduleError or RankGridError."""
        t, ramp = self.training, self.training.rampup_batch_size
        sizes = {"--micro-batch-size": t.micro_batch_size, "--global-batch-size": t.global_batch_size}
        for flag, size in sizes.items():
            if not size or size < 1:
                raise BatchScheduleError(f"{flag} {size}: must be at least 1")
        return BatchSchedule(
            micro_batch_size=t.micro_batch_size,
            data_parallel_size=self.data_parallel_size,
            target=t.global_batch_size,
            rampup=None if ramp is None else (ramp[0], ramp[1], ramp[2]),
            decrease_if_needed=t.decrease_batch_size_if_needed,
        )

    def batch_schedule_or_none(self) -> BatchSchedule | None:
        """None where the flags make no schedule, which rules of its own tell."""
        try:
            return self.batch_schedule()
        except (BatchScheduleError, RankGridError):
            return None

    def planner(self) -> Planner:
        """Of the run, which is to have one. Raises StageLayersError or PlanError where there is no plan.

        Searched orders, those of later plans too, are kept beside dataset indices, but for --check-config.
        """
        from megatron.training.planner import Planner  # parsing flags imports no search

        return Planner(self.staged_model, self.rank_budget, self.decided)

    @property
    def staged_model(self) -> StagedModel:
        """What schedules are made for."""
        data = self.data
        paths = () if data.mock_data else data.data_path or data.train_data_path or ()
        folder = data.data_cache_path or (indices_folder(paths[-1]) if paths else None)
        assert self.model.num_layers is not None, "the rules ask for --num-layers"
        return StagedModel(
            self.parallel,
            self.model.num_layers,
            self.model_costs,
            self.last_num_microbatches,
            self.training.global_batch_size,
            self.data.reset_attention_mask,
            None if self.training.check_config else folder,
        )

    @property
    def rank_budget(self) -> RankBudget | None:
        """What --rank-memory-limit decides under; None without it, or where ranks do not divide, which rules tell."""
        place, experts = self.shard_place, self.expert_place
        return (
            None if place is None else rank_budget(self.parallel, self.ddp, place, self.params_flag, experts)
        )

    @property
    def state_bytes(self) -> StateBytes | None:
        """What parameters take on a rank; None where ranks or strategies do not fit, which rules tell."""
        row, place = self.sharding, self.shard_place
        if row is None or place is None:
            return None
        copies, experts = self.parallel.keeps_copies, self.expert_place
        return state_bytes(self.ddp, row, place, self.params_flag, copies=copies, experts=experts)

    def units_of(self, spec: ScheduleSpec) -> tuple[StageUnits, ...]:
        """Of every stage, as the model was described."""
        costs, sizes = self.model_costs, self.state_bytes
        assert costs is not None, "units of a model that nobody has described"
        assert sizes is not None, "units without ranks that share them"
        return costs.stage_units(spec.stages, spec.placement, sizes)

    @property
    def is_complete(self) -> bool:
        """Whether flags say all that the model is built from; rules tell what they do not."""
        model, batch, p = self.model, self.training.micro_batch_size, self.parallel
        heads = (model.num_attention_heads, model.kv_channels, model.num_query_groups)
        shape = (model.num_layers, model.hidden_size, model.ffn_hidden_size, *heads, model.seq_length)
        sizes = (*shape, model.padded_vocab_size, p.tensor_model_parallel_size, batch)
        return all(size is not None and size >= 1 for size in sizes)

    @property
    def model_costs(self) -> ModelCosts | OwnCosts | None:
        """What costs are estimated from; None before the model is described."""
        if self.description is None:
            return None
        rates = GPU if self.parallel.distributed_backend == "nccl" else CPU
        if self.exchange_wire is not None:
            rates = rates._replace(exchanged=self.exchange_wire.flops_per_byte)
        return costs_of(self.description, self.model, rates)

    @property
    def last_num_microbatches(self) -> int:
        """Of one step after the ramp; one a pipeline rank where the flags make no batch, which rules tell."""
        schedule = self.batch_schedule_or_none()
        if schedule is None:
            return max(1, self.parallel.pipeline_model_parallel_size)
        return schedule.num_microbatches(schedule.rampup[2] + 1 if schedule.rampup is not None else 0)

    @property
    def total_iterations(self) -> int:
        """Optimizer steps of the whole run, from --train-iters or --train-samples; 0 for neither."""
        if (samples := self.training.train_samples) is not None:
            return self.batch_schedule().iterations_for(samples)
        return self.training.train_iters or 0

    def to_yaml(self) -> str:
        """YAML that `--yaml-cfg` reads back, each value's origin behind it as a comment."""
        lines, sections = [], {group: dataclasses.asdict(getattr(self, group)) for group in GROUPS}
        if self.extra:
            sections["extra"] = dict(sorted(self.extra.items()))
        for group, values in sections.items():
            lines.append(f"{group}:")
            for name, value in values.items():
                lines.append(f"  {name}: {_scalar(value)}  # {self.origin.get(name, DEFAULT_ORIGIN)}")
        return "\n".join(lines) + "\n"


# Of flags, by the names that sections of YAML have; every setting with its group, by its destination name.
GROUPS: Mapping[str, type[Any]] = {
    name: cls for name, cls in typing.get_type_hints(Config).items() if isinstance(cls, type)
}
FIELDS: Mapping[str, tuple[str, dataclasses.Field[Any]]] = {
    field.name: (group, field) for group, cls in GROUPS.items() for field in dataclasses.fields(cls)
}
assert len(FIELDS) == sum(len(dataclasses.fields(cls)) for cls in GROUPS.values()), "a name is in two groups"


def _by_group(values: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    groups: dict[str, dict[str, Any]] = {}
    for name, value in values.items():
        groups.setdefault(FIELDS[name][0], {})[name] = tuple(value) if isinstance(value, list) else value
    return groups


def is_given(origin: str) -> bool:
    """Whether a value was set by the user (flag, file or args_defaults), not by default or derivation."""
    return origin not in (DEFAULT_ORIGIN, "derived", "launcher")


def _scalar(value: Any) -> str:
    """One value in YAML's flow style, which is JSON but for the floats."""
    if isinstance(value, float):
        text = repr(value)
        # YAML 1.1 takes 1e-05 for a string; it wants the dot.
        return text.replace("e", ".0e") if "e" in text and "." not in text else text
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_scalar, value)) + "]"
    if value is None or isinstance(value, bool | int | str):
        return json.dumps(value)
    return json.dumps(str(value))


def closest_name(name: str, names: Iterable[str]) -> str | None:
    """What an unknown setting may mean."""
    return next(iter(difflib.get_close_matches(name, names, n=1, cutoff=CLOSE_ENOUGH)), None)


def flops_per_token(model: TransformerConfig, padded_vocab_size: int, seq_length: int) -> float:
    """Forward and backward of one token: 3 passes x 2 operations x (GEMMs + causal half of attention + logits).

    A gated MLP counts 1.5 times, of experts those that a token meets. Recompute is not counted, nor are routers, nor is
    anything that is no matrix product.
    """
    h, query = model.hidden_size, model.num_attention_heads * model.kv_channels
    key_value = 2 * model.num_query_groups * model.kv_channels
    projections = h * (query + key_value) + query * h
    width = sum(kind.active_width for kind in layer_table(model))
    mlp = 2 * h * width * (1.5 if model.gated_linear_unit else 1.0)
    attention = seq_length * query  # scores and weighted sum, s * query each, half of them masked
    return 3.0 * 2.0 * (model.num_layers * (projections + attention) + mlp + h * padded_vocab_size)


def train_step_flops(config: Config, batch_size: int) -> float:
    """Operations of one optimizer step over `batch_size` samples. The padded vocabulary must be known."""
    model = config.model
    assert model.padded_vocab_size is not None, "padded_vocab_size is unknown before the tokenizer is built"
    return batch_size * model.seq_length * flops_per_token(model, model.padded_vocab_size, model.seq_length)
