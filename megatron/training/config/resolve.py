"""What the user said -> a complete configuration: every derived size, the same way Megatron derives it (floor 0).

derived.csv has what follows from what, in the order in which it is looked at: the setting, in which case (unset: only
where it has no value; not given: only where the user has not said it), when, its value, and what is told of it: a
warning, or a note. Without a setting something is told only. Settings under `no effect` do nothing beside the others,
and Megatron (or its zero-bubble fork) takes them all the same: those that were given are told of; `dropped` ones are
put back to their defaults, because they are looked at without what they go with. What is wrong with a value, and what
contradicts another, the rules tell. `expressions` says how conditions, values and messages are read; the functions in
them are those of this module.

Pure but for the facts passed in (`Machine`): nothing here reads files, environment or devices.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import math
import os.path
from collections.abc import Callable, Mapping
from typing import Any

from megatron.core.distributed.custom_fsdp import sharding
from megatron.core.models.gpt.stage_layers import StageLayersError
from megatron.core.models.gpt.vocabulary_size import padded_vocabulary
from megatron.core.optimizer.schedule_lengths import schedule_lengths
from megatron.core.parallelism_config import asked_schedules
from megatron.core.pipeline_parallel.plan.schedules import AUTO, SCHEDULES
from megatron.core.sharding_table import grads_are_sharded, weights_are_sharded
from megatron.core.transformer.layer_table import expert_pattern
from megatron.core.transport.rank_grid import RankGridError, check_instances
from megatron.core.words import counted, size_text
from megatron.training.config.config import DEFAULT_ORIGIN, FIELDS, Config
from megatron.training.config.expressions import Names, filled, parsed, rows, value_of
from megatron.training.config.rule_table import Context, refusal, spelled
from megatron.training.config.state_bytes import SPEEDS
from megatron.training.staged_model import stages_of

BYTE_VOCABULARY = 257  # of the built-in byte tokenizer: 256 bytes and the end of a document
# Each names text that a tokenizer has written. Mock data and a provider of the user's own only have ids.
CORPORA = (
    *("data_path", "data_args_path", "per_split_data_args_path"),
    *("train_data_path", "valid_data_path", "test_data_path"),
)


@dataclasses.dataclass(frozen=True)
class Machine:
    """Facts about where the run is: ranks of the launcher, a GPU or not, memory of the machine (None: not known), and
    how many ranks share it."""

    world_size: int = 1
    has_gpu: bool = False
    memory_bytes: int | None = None
    ranks_here: int = 1


@dataclasses.dataclass
class Settings(Context):
    """A configuration as far as it is derived, and what is told of it. Facts about the machine are attributes too."""

    config: Config
    machine: Machine
    warnings: list[str]
    notes: list[str] = dataclasses.field(default_factory=list)

    def __getattr__(self, name: str) -> Any:
        return super().__getattr__(name) if name in FIELDS else getattr(self.machine, name)

    def derive(self, name: str, value: Any, origin: str = "derived") -> None:
        if getattr(self, name) != value:
            self.config = self.config.replace(origin=origin, **{name: value})

    def tell(self, message: str) -> None:
        told = message.removeprefix("note: ")
        (self.warnings if told == message else self.notes).append(told)


def resolve(
    values: Mapping[str, Any],
    origin: Mapping[str, str],
    machine: Machine,
    *,
    extra: Mapping[str, Any] | None = None,
    warnings: tuple[str, ...] = (),
) -> Config:
    """Fill everything that follows from other values. Never fails: what makes no sense is left for the rules."""
    origins = dict.fromkeys(FIELDS, DEFAULT_ORIGIN) | dict(origin)
    config = Config.from_flat(values, extra=dict(extra or {}), origin=origins)
    s = Settings(config, machine, list(warnings))
    if s.world_size is None:
        s.derive("world_size", machine.world_size, "launcher")
    names = s.named(FUNCTIONS)
    for row in rows("derived.csv"):
        name, only = row["name"], row["only"]
        stays = (only == "unset" and getattr(s, name) is not None) or (only == "not given" and s.given(name))
        if not stays and (found := not row["when"] or value_of(parsed(row["when"]), names)):
            _apply(row, s, found, names)
    return dataclasses.replace(s.config, warnings=tuple(s.warnings), notes=tuple(s.notes))


def _apply(row: Mapping[str, str], s: Settings, found: Any, names: Names) -> None:
    """One row of the table, whose condition has come to `found`."""
    message = filled(row["message"], names, s.told, found)
    if row["only"] not in ("no effect", "dropped"):
        if message:
            s.tell(message)
        if row["value"]:
            s.derive(row["name"], value_of(parsed(row["value"]), names))
        return
    for name in row["name"].split():
        value = getattr(s, name)
        if s.given(name) and s.differs(name):
            shown = " ".join(map(str, value)) if isinstance(value, tuple) else str(value)
            s.tell(f"{spelled(name)}{'' if value is True else ' ' + shown} has no effect {message}")
            if row["only"] == "dropped":
                s.derive(name, FIELDS[name][1].default)


# Functions of this table, and of the rules


def memory_share(c: Context) -> str:
    whole, share = (size_text(size) for size in (c.memory_bytes, c.memory_bytes // c.ranks_here))
    ranks = counted(c.ranks_here, "rank")
    return f"{share}: of the {whole} that this machine or its control group has, for {ranks} here"


def tflops(c: Context) -> float:
    return SPEEDS[c.distributed_backend][0]


def gb_per_s(c: Context) -> float:
    return SPEEDS[c.distributed_backend][1]


def model_size(c: Context, name: str) -> Any:
    return getattr(c.config.model.resolved(), name)


def schedule(c: Context) -> str | None:
    """What the flags of schedules ask for, else what the number of chunks says; a plan of a file has its own."""
    if c.pipeline_schedule_file is not None:
        return None
    if asked := list(asked_schedules(c.config.parallel).values()):
        return asked[0]
    if c.rank_memory_limit is not None:
        return AUTO
    chunked = interleaves(c)
    return None if chunked is None else "interleaved" if chunked else "1f1b"


def interleaves(c: Context) -> bool | None:
    """Whether a rank has several stages; None where layers do not divide over stages."""
    parallel, layers = c.config.parallel, c.num_layers
    if layers is None or c.pipeline_schedule_file is not None:
        return None
    with contextlib.suppress(StageLayersError):  # a rule tells
        stages = stages_of(parallel, layers, c.pipeline_schedule)
        return len(stages) > parallel.pipeline_model_parallel_size
    return None


def running(c: Context) -> str | None:
    """The schedule's name; a file says it by itself."""
    return c.pipeline_schedule if c.pipeline_schedule_file is None else "of the file"


def what_runs(c: Context) -> str:
    if c.pipeline_schedule_file is not None:
        return "with --pipeline-schedule-file: the file says what is run"
    return f"with the schedule {c.pipeline_schedule}"


def fixed_order(c: Context) -> bool:
    """Whether the schedule is known and not one that is searched."""
    name = running(c)
    return name is not None and (name not in SCHEDULES or not SCHEDULES[name].searched)


def takes_groups(c: Context) -> bool:
    row = SCHEDULES.get(running(c) or "")
    return row is not None and row.group_size == "microbatch_group_size_per_vp_stage"


def weights_sharded(c: Context) -> bool:
    return weights_are_sharded(c.data_parallel_sharding_strategy)


def grads_sharded(c: Context) -> bool:
    return grads_are_sharded(c.data_parallel_sharding_strategy)


def accumulated_dtype(c: Context) -> str:
    return sharding.main_grads_dtype(c.config.params_flag, c.config.ddp)


def grid_fault(c: Context) -> str | None:
    return refusal(c.config.grid, RankGridError)


def instances_fault(c: Context) -> str | None:
    instances = c.num_distributed_optimizer_instances
    if instances < 1 or grid_fault(c):
        return None  # has a rule of its own
    return refusal(lambda: check_instances(c.config.grid(), instances), RankGridError)


def data_parallel_size(c: Context) -> int | None:
    return None if grid_fault(c) else c.config.data_parallel_size


def unfinished_schedules(c: Context) -> str | None:
    """Say so when a ramp keeps a run that is counted in iterations from the end of its schedule."""
    constant, batches = c.weight_decay_incr_style == "constant", c.config.batch_schedule_or_none()
    if not c.train_iters or (c.lr_decay_iters or 0) > c.train_iters or batches is None:
        return None  # of a batch a rule tells
    if constant and c.lr_decay_style == "constant":
        return None
    o, iterations, batch = c.config.optimizer, c.train_iters, c.global_batch_size
    lengths = schedule_lengths(o, train_iters=iterations, train_samples=None, global_batch_size=batch)
    schedule = lengths.decay_samples if constant else max(lengths.decay_samples, lengths.total_samples)
    run = batches.samples_of(iterations)
    if run >= schedule:
        return None
    return (
        "--train-iters with --rampup-batch-size: the schedules count every iteration as a full batch, "
        f"{schedule} samples, but the run trains on {run}: they do not reach their end; give --train-samples "
        "and --lr-decay-samples, or a smaller --lr-decay-iters"
    )


def names_corpus(c: Context) -> bool:
    return any(getattr(c, name) for name in CORPORA)


def padded_vocabulary_size(c: Context) -> int | None:
    vocabulary = known_vocabulary(c.tokenizer_type, c.vocab_size)
    multiple, ranks = c.make_vocab_size_divisible_by, c.tensor_model_parallel_size
    if vocabulary is None or multiple < 1 or ranks < 1:
        return None
    return padded_vocabulary(vocabulary, multiple, ranks)


def idle_modules(c: Context) -> str | None:
    """Those of --recompute-modules that drop nothing, each with why; None where all do."""
    sparse, pattern = bool(c.num_experts), tuple[int, ...]()
    with contextlib.suppress(ValueError):  # a rule tells
        pattern = expert_pattern(c.config.model) if sparse and c.num_layers else ()
    why = {
        "moe_act": "what the experts' activation gives is never kept, only what it is given",
        "moe": "" if sparse else "without --num-experts",
        "shared_experts": ""
        if sparse and c.moe_shared_expert_intermediate_size
        else "without shared experts",
        "mlp": "every layer has experts" if pattern and all(pattern) else "",
    }
    idle = [f"{name} ({why[name]})" for name in c.recompute_modules if why.get(name)]
    return f"--recompute-modules: no effect of {', '.join(idle)}" if idle else None


def metrics_in_save(c: Context) -> str:
    return os.path.join(c.save, "metrics.jsonl")


def converted_to(c: Context) -> str:
    return f"{c.ckpt_convert_save}/{c.ckpt_convert_format}"  # as Megatron


def kept_every(c: Context) -> int | None:
    """Iterations between the checkpoints that --save-retain-interval keeps, where some that it names are not saved."""
    retain, interval = c.save_retain_interval, c.save_interval
    if c.save is None or not retain or not interval or min(retain, interval) < 1:
        return None
    return None if retain % interval == 0 else math.lcm(retain, interval)


def known_vocabulary(tokenizer_type: str | None, vocab_size: int | None) -> int | None:
    """Ids of a tokenizer whose files need not be read; None for others.

    NullTokenizer adds the end of a document to `--vocab-size` (as Megatron did up to 0.16).
    """
    if tokenizer_type == "ByteTokenizer":
        return BYTE_VOCABULARY
    return vocab_size + 1 if tokenizer_type == "NullTokenizer" and vocab_size is not None else None


def missing_ranks(c: Context) -> str:
    return ", ".join(str(rank) for rank in c.profile_ranks if rank >= c.world_size)


FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    name: one for name, one in vars().items() if inspect.isfunction(one) and one.__module__ == __name__
}
