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
import functools
import inspect
import math
import os.path
from collections.abc import Callable, Mapping
from typing import Any

from megatron.core.distributed.sharding import main_grads_dtype
from megatron.core.model_parallel_config import asked_schedules
from megatron.core.models.gpt.parameter_count import padded_vocabulary
from megatron.core.models.gpt.stage_layers import StageLayersError
from megatron.core.models.gpt.stage_schedule import stages_of
from megatron.core.optimizer.schedule_lengths import schedule_lengths
from megatron.core.pipeline_parallel.plan.schedules import AUTO, SCHEDULES
from megatron.core.sharding_table import grads_are_sharded, weights_are_sharded
from megatron.core.transport.rank_grid import RankGridError
from megatron.core.transport.rank_groups import check_instances
from megatron.training.config.config import DEFAULT_ORIGIN, FIELDS, Config, is_given
from megatron.training.config.expressions import filled, parsed, rows, value_of
from megatron.training.config.rule_table import differs as differs_from_default
from megatron.training.config.rule_table import refusal, spelled
from megatron.training.config.state_bytes import SPEEDS

BYTE_VOCABULARY = 257  # of the built-in byte tokenizer: 256 bytes and the end of a document
# Each names text that a tokenizer has written. Mock data and a provider of the user's own only have ids.
CORPORA = (
    *("data_path", "data_args_path", "per_split_data_args_path"),
    *("train_data_path", "valid_data_path", "test_data_path"),
)


@dataclasses.dataclass(frozen=True)
class Machine:
    """Facts about where the run is: ranks of the launcher, a GPU or not, memory for a rank where they share the
    machine's."""

    world_size: int = 1
    has_gpu: bool = False
    rank_memory_bytes: int | None = None


@dataclasses.dataclass
class Settings:
    """Values by destination name with their origins, as far as they are derived, and what is told of them."""

    values: dict[str, Any]
    origin: dict[str, str]
    machine: Machine
    warnings: list[str]
    notes: list[str] = dataclasses.field(default_factory=list)

    @property
    def config(self) -> Config:
        return Config.from_flat(self.values)

    def derive(self, name: str, value: Any, origin: str = "derived") -> None:
        if self.values[name] != value:
            self.values[name], self.origin[name] = value, origin

    def named(self, name: str) -> Any:
        """The value of a name in the table, or the function."""
        if name in FIELDS:
            return self.values[name]
        function = _FUNCTIONS.get(name)
        return getattr(self.machine, name) if function is None else functools.partial(function, self)

    def filled(self, message: str, found: Any = None) -> str:
        return filled(message, self.named, lambda name: f"{spelled(name)} {self.values[name]}", found)

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
    defaults = {name: field.default for name, (_, field) in FIELDS.items()}
    origins = dict.fromkeys(FIELDS, DEFAULT_ORIGIN) | dict(origin)
    s = Settings(defaults | dict(values), origins, machine, list(warnings))
    if s.values["world_size"] is None:
        s.derive("world_size", machine.world_size, "launcher")
    for row in rows("derived.csv"):
        _apply(row, s)
    return Config.from_flat(
        s.values, extra=extra, origin=s.origin, warnings=tuple(s.warnings), notes=tuple(s.notes)
    )


def _apply(row: Mapping[str, str], s: Settings) -> None:
    """One row of the table."""
    name, only = row["name"], row["only"]
    found = not row["when"] or value_of(parsed(row["when"]), s.named)
    if (
        not found
        or (only == "unset" and s.values[name] is not None)
        or (only == "not given" and given(s, name))
    ):
        return
    message = s.filled(row["message"], found)
    if only in ("no effect", "dropped"):
        for idle in (one for one in name.split() if given(s, one) and differs(s, one)):
            value = s.values[idle]
            shown = " ".join(map(str, value)) if isinstance(value, tuple) else str(value)
            s.tell(f"{spelled(idle)}{'' if value is True else ' ' + shown} has no effect {message}")
            if only == "dropped":
                s.derive(idle, FIELDS[idle][1].default)
        return
    if message:
        s.tell(message)
    if row["value"]:
        s.derive(name, value_of(parsed(row["value"]), s.named))


# The functions of the table


def given(s: Settings, name: str) -> bool:
    return is_given(s.origin[name])


def differs(s: Settings, name: str) -> bool:
    return differs_from_default(name, s.values[name])


def tflops(s: Settings) -> float:
    return SPEEDS[s.values["distributed_backend"]][0]


def gb_per_s(s: Settings) -> float:
    return SPEEDS[s.values["distributed_backend"]][1]


def model_size(s: Settings, name: str) -> Any:
    with contextlib.suppress(ValueError, ZeroDivisionError, TypeError):  # rules tell
        return getattr(s.config.model.resolved(), name)
    return s.values[name]


def schedule(s: Settings) -> str | None:
    """What the flags of schedules ask for, else what the number of chunks says; a plan of a file has its own."""
    if s.values["num_layers"] is None or s.values["pipeline_schedule_file"] is not None:
        return None
    if asked := list(asked_schedules(s.config.parallel).values()):
        return asked[0]
    if s.values["rank_memory_limit"] is not None:
        return AUTO
    chunked = interleaves(s)
    return None if chunked is None else "interleaved" if chunked else "1f1b"


def interleaves(s: Settings) -> bool | None:
    """Whether a rank has several stages; None where layers do not divide over stages."""
    parallel, layers = s.config.parallel, s.values["num_layers"]
    if layers is None or s.values["pipeline_schedule_file"] is not None:
        return None
    with contextlib.suppress(StageLayersError):  # a rule tells
        stages = stages_of(parallel, layers, s.values["pipeline_schedule"])
        return len(stages) > parallel.pipeline_model_parallel_size
    return None


def running(s: Settings) -> str | None:
    """The schedule's name; a file says it by itself."""
    return s.values["pipeline_schedule"] if s.values["pipeline_schedule_file"] is None else "of the file"


def what_runs(s: Settings) -> str:
    if s.values["pipeline_schedule_file"] is not None:
        return "with --pipeline-schedule-file: the file says what is run"
    return f"with the schedule {s.values['pipeline_schedule']}"


def fixed_order(s: Settings) -> bool:
    """Whether the schedule is known and not one that is searched."""
    name = running(s)
    return name is not None and (name not in SCHEDULES or not SCHEDULES[name].searched)


def takes_groups(s: Settings) -> bool:
    row = SCHEDULES.get(running(s) or "")
    return row is not None and row.group_size == "microbatch_group_size_per_vp_stage"


def weights_sharded(s: Settings) -> bool:
    return weights_are_sharded(s.values["data_parallel_sharding_strategy"])


def grads_sharded(s: Settings) -> bool:
    return grads_are_sharded(s.values["data_parallel_sharding_strategy"])


def grads_dtype(s: Settings) -> str:
    return main_grads_dtype(s.config.params_flag, s.config.ddp)


def instances_divide(s: Settings) -> bool:
    grid, instances = s.config.grid, s.values["num_distributed_optimizer_instances"]
    return refusal(lambda: check_instances(grid(), instances), RankGridError) is None


def data_parallel_size(s: Settings) -> int | None:
    with contextlib.suppress(RankGridError):  # a rule tells
        return s.config.data_parallel_size
    return None


def unfinished_schedules(s: Settings) -> str | None:
    """Say so when a ramp keeps a run that is counted in iterations from the end of its schedule."""
    v, config = s.values, s.config
    constant, batches = v["weight_decay_incr_style"] == "constant", config.batch_schedule_or_none()
    if not v["train_iters"] or (v["lr_decay_iters"] or 0) > v["train_iters"] or batches is None:
        return None  # of a batch a rule tells
    if constant and v["lr_decay_style"] == "constant":
        return None
    run, batch = batches.samples_of(v["train_iters"]), v["global_batch_size"]
    o, iterations = config.optimizer, v["train_iters"]
    lengths = schedule_lengths(o, train_iters=iterations, train_samples=None, global_batch_size=batch)
    schedule = lengths.decay_samples if constant else max(lengths.decay_samples, lengths.total_samples)
    if run >= schedule:
        return None
    return (
        "--train-iters with --rampup-batch-size: the schedules count every iteration as a full batch, "
        f"{schedule} samples, but the run trains on {run}: they do not reach their end; give --train-samples "
        "and --lr-decay-samples, or a smaller --lr-decay-iters"
    )


def names_corpus(s: Settings) -> bool:
    return any(s.values[name] for name in CORPORA)


def padded_vocabulary_size(s: Settings) -> int | None:
    vocabulary = known_vocabulary(s.values["tokenizer_type"], s.values["vocab_size"])
    multiple, ranks = s.values["make_vocab_size_divisible_by"], s.values["tensor_model_parallel_size"]
    if vocabulary is None or multiple < 1 or ranks < 1:
        return None
    return padded_vocabulary(vocabulary, multiple, ranks)


def metrics_in_save(s: Settings) -> str:
    return os.path.join(s.values["save"], "metrics.jsonl")


def kept_every(s: Settings) -> int | None:
    """Iterations between the checkpoints that --save-retain-interval keeps, where some that it names are not saved."""
    retain, interval = s.values["save_retain_interval"], s.values["save_interval"]
    if s.values["save"] is None or not retain or not interval or min(retain, interval) < 1:
        return None
    return None if retain % interval == 0 else math.lcm(retain, interval)


def known_vocabulary(tokenizer_type: str | None, vocab_size: int | None) -> int | None:
    """Ids of a tokenizer whose files need not be read; None for others.

    NullTokenizer adds the end of a document to `--vocab-size` (as Megatron did up to 0.16).
    """
    if tokenizer_type == "ByteTokenizer":
        return BYTE_VOCABULARY
    return vocab_size + 1 if tokenizer_type == "NullTokenizer" and vocab_size is not None else None


_FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    name: one for name, one in vars().items() if inspect.isfunction(one) and one.__module__ == __name__
}
