"""Megatron's log lines as text, and the sums behind them. Pure: no torch, no printing, no clocks.

Every function returns the line; the loop prints it. Field order, names and widths are those that scripts
written for Megatron-LM parse (docs/logging.md lists them with the one difference: norms have the loss's
`%.6E`, because `%.3f` cannot tell two runs apart).
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megatron.core.device import MemoryFigures  # its module imports torch, which this one needs not

PERPLEXITY_EXPONENT_LIMIT = (
    20.0  # as Megatron: exp(min(20, loss)), so that an untrained model prints a number
)


@dataclasses.dataclass(frozen=True)
class IterationRecord:
    """What one iteration line says. A field that is None is left out of the line.

    losses: mean over the interval per name, "lm loss" first. elapsed_s: wall seconds per iteration. rollbacks:
    optimizer steps of the interval that post-validation has taken back.
    throughput_tflops: model TFLOP/s per device. energy_j, power_w: per device, where the device can tell.
    """

    iteration: int
    train_iters: int
    consumed_samples: int
    elapsed_s: float
    learning_rate: float
    global_batch_size: int
    losses: Mapping[str, float]
    loss_scale: float
    skipped_iterations: int
    nan_iterations: int
    when: datetime
    skipped_samples: int = 0
    throughput_tflops: float | None = None
    energy_j: float | None = None
    power_w: float | None = None
    decoupled_learning_rate: float | None = None
    grad_norm: float | None = None
    num_zeros: int | None = None
    params_norm: float | None = None
    rollbacks: int | None = None


def is_printable_loss(value: float) -> bool:
    """Megatron leaves a loss out of the line when it is NaN or negative: parsers count on it."""
    return value >= 0.0  # False for NaN


def iteration_line(record: IterationRecord) -> str:
    """The iteration line of the last rank."""
    r = record
    fields = [
        f" [{r.when.strftime('%Y-%m-%d %H:%M:%S.%f')}] iteration {r.iteration:8d}/{r.train_iters:8d}",
        f"consumed samples: {r.consumed_samples:12d}",
    ]
    if r.skipped_samples > 0:
        fields.append(f"skipped samples: {r.skipped_samples:12d}")
    fields.append(f"elapsed time per iteration (ms): {r.elapsed_s * 1000.0:.1f}")
    if r.throughput_tflops is not None:
        fields.append(f"throughput per GPU (TFLOP/s/GPU): {r.throughput_tflops:.1f}")
    if r.energy_j is not None:
        fields.append(f"energy per GPU (J/iter/GPU): {r.energy_j:.1f}")
    if r.power_w is not None:
        fields.append(f"power per GPU (W/GPU): {r.power_w:.1f}")
    fields.append(f"learning rate: {r.learning_rate:.6E}")
    if r.decoupled_learning_rate is not None:
        fields.append(f"decoupled learning rate: {r.decoupled_learning_rate:.6E}")
    fields.append(f"global batch size: {r.global_batch_size:5d}")
    fields += [f"{name}: {value:.6E}" for name, value in r.losses.items() if is_printable_loss(value)]
    fields.append(f"loss scale: {r.loss_scale:.1f}")
    if r.grad_norm is not None:
        fields.append(f"grad norm: {r.grad_norm:.6E}")
    if r.num_zeros is not None:
        fields.append(f"num zeros: {r.num_zeros:d}")
    if r.params_norm is not None:
        fields.append(f"params norm: {r.params_norm:.6E}")
    if r.rollbacks is not None:
        fields.append(f"rollbacks: {r.rollbacks:d}")
    fields.append(f"number of skipped iterations: {r.skipped_iterations:3d}")
    fields.append(f"number of nan iterations: {r.nan_iterations:3d}")
    return " | ".join(fields) + " |"


def iteration_scalars(record: IterationRecord, *, tokens_per_s: float | None = None) -> dict[str, float]:
    """The same numbers under Megatron's TensorBoard tags (`tokens-per-second` and `skipped-iterations` are ours).

    Losses are given as they are, NaN included: a curve with a hole must be explained by its data.
    """
    optional: dict[str, float | None] = {
        "throughput": record.throughput_tflops,
        "decoupled-learning-rate": record.decoupled_learning_rate,
        "grad-norm": record.grad_norm,
        "num-zeros": record.num_zeros,
        "params-norm": record.params_norm,
        "rollbacks": record.rollbacks,
        "tokens-per-second": tokens_per_s,
    }
    return {
        **record.losses,
        "learning-rate": record.learning_rate,
        "batch-size": record.global_batch_size,
        "loss-scale": record.loss_scale,
        "iteration-time": record.elapsed_s,
        "skipped-iterations": record.skipped_iterations,
        "nan-iterations": record.nan_iterations,
        **{tag: value for tag, value in optional.items() if value is not None},
    }


class IntervalTotals:
    """Sums between two iteration lines.

    A printed loss is the mean over the interval's non-skipped iterations of each iteration's token mean,
    which is what Megatron prints; when every iteration is skipped there is no loss to print.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Start the next interval."""
        self.iterations = 0
        self.skipped_iterations = 0
        self.nan_iterations = 0
        self.rollbacks = 0
        self.tokens = 0
        self._means: dict[str, float] = {}
        self._counts: dict[str, int] = {}

    def add_iteration(
        self,
        losses: Mapping[str, tuple[float, float]],
        *,
        skipped: bool = False,
        tokens: int = 0,
        rolled_back: bool = False,
    ) -> None:
        """Count one iteration. losses: name -> (sum over loss tokens of the global batch, number of them).

        tokens: tokens processed, for tokens/s. A skipped iteration with a non-finite loss counts as a NaN iteration.
        """
        self.iterations += 1
        self.rollbacks += rolled_back
        self.tokens += tokens
        means = {name: token_mean(total, count) for name, (total, count) in losses.items()}
        if skipped:
            self.skipped_iterations += 1
            self.nan_iterations += any(not math.isfinite(mean) for mean in means.values())
            return
        for name, mean in means.items():
            self._means[name] = self._means.get(name, 0.0) + mean
            self._counts[name] = self._counts.get(name, 0) + 1

    def losses(self) -> dict[str, float]:
        """Mean per name over the non-skipped iterations, in the order in which names first came."""
        return {name: total / self._counts[name] for name, total in self._means.items()}


def token_mean(total: float, count: float) -> float:
    """total / count; NaN where every token was masked, as there is no loss to speak of."""
    return total / count if count else math.nan


def perplexity(loss: float) -> float:
    """exp(min(20, loss))."""
    return math.exp(min(PERPLEXITY_EXPONENT_LIMIT, loss))


def validation_lines(
    where: str, losses: Mapping[str, float], *, set_name: str = "", samples: str = ""
) -> list[str]:
    """The validation line between two rules of dashes, and what was read for it above.

    where: "iteration 40", "iteration 40 on validation set", "iteration 40 on test set".
    set_name: "0", "1", "name" when there are several validation sets; becomes the suffix `-name`. samples: as
    "samples 0 to 79 of the validation set".
    """
    suffix = f"-{set_name}" if set_name else ""
    text = f" validation{suffix} loss at {where} | "
    for name, loss in losses.items():
        text += f"{name} value: {loss:.6E} | {name} PPL: {perplexity(loss):.6E} | "
    rule = "-" * (len(text) + 1)
    return [*([f" > evaluated on {samples}"] if samples else []), rule, text, rule]


def validation_scalars(
    losses: Mapping[str, float], *, set_name: str = "", split: str = "validation"
) -> dict[str, float]:
    """`lm loss validation`, `lm loss validation ppl`; `validation-name` when there are several sets; `test`."""
    suffix = f"-{set_name}" if set_name else ""
    scalars: dict[str, float] = {}
    for name, loss in losses.items():
        scalars[f"{name} {split}{suffix}"] = loss
        scalars[f"{name} {split}{suffix} ppl"] = perplexity(loss)
    return scalars


def memory_line(rank: int, iterations: int, memory: MemoryFigures) -> str:
    """Memory of one rank, in units of 2^20 bytes."""
    mib = 1 << 20
    return (
        f"[Rank {rank}] (after {iterations} iterations) memory (MB)"
        f" | allocated: {memory.allocated_bytes / mib:.2f}"
        f" | max allocated: {memory.max_allocated_bytes / mib:.2f}"
        f" | reserved: {memory.reserved_bytes / mib:.2f}"
        f" | max reserved: {memory.max_reserved_bytes / mib:.2f}"
    )


def memory_scalars(memory: MemoryFigures) -> dict[str, float]:
    """Megatron's TensorBoard tags for memory."""
    return {
        "mem-reserved-bytes": memory.reserved_bytes,
        "mem-allocated-bytes": memory.allocated_bytes,
        "mem-max-allocated-bytes": memory.max_allocated_bytes,
    }


def parameter_count_line(tp_rank: int, pp_rank: int, count: int) -> str:
    """Parameters held by one (tensor, pipeline) rank."""
    return (
        f" > number of parameters on (tensor, pipeline) model parallel rank ({tp_rank}, {pp_rank}): {count}"
    )


def padded_vocab_line(size: int, padded_size: int) -> str:
    """How far the vocabulary was padded."""
    return f" > padded vocab (size: {size}) with {padded_size - size} dummy tokens (new size: {padded_size})"


def threads_line(threads: int, cores: int, local_world_size: int, *, said_by: str | None = None) -> str:
    """How many threads each rank computes with. said_by: the flag or variable that says so, else cores are shared."""
    origin = "" if said_by is None else f"; {said_by}"
    return f" > threads per rank: {threads} ({cores} cores, {local_world_size} local ranks{origin})"


def dataset_lines(dataset_name: str, sizes: Mapping[str, int]) -> list[str]:
    """Before the data sets are built. sizes: split -> samples asked for."""
    lines = [f"> building train, validation, and test datasets for {dataset_name} ..."]
    lines.append(" > datasets target sizes (minimum size):")
    return lines + [f"    {split + ':':<12}{size}" for split, size in sizes.items()]


def datasets_done_line(dataset_name: str) -> str:
    """After the data sets are built."""
    return f"> finished creating {dataset_name} datasets ..."


def datetime_line(text: str, when: datetime) -> str:
    """`[text] datetime: ...`; the shape of start-up marks and of exits."""
    return f"[{text}] datetime: {when.strftime('%Y-%m-%d %H:%M:%S')} "


def training_start_lines(when: datetime) -> list[str]:
    """The two lines before the first iteration."""
    return ["training ...", datetime_line("before the start of training step", when)]


def exit_interval_line(iteration: int, when: datetime) -> str:
    """Left by --exit-interval."""
    return datetime_line(f"exiting program at iteration {iteration}", when)


def exit_duration_line(minutes: float, when: datetime) -> str:
    """Left by --exit-duration-in-mins."""
    return datetime_line(f"exiting program after {minutes} minutes", when)


def exit_signal_line(signal_name: str, when: datetime) -> str:
    """Left by a signal, after saving."""
    return datetime_line(f"exiting program after receiving {signal_name}.", when)


@dataclasses.dataclass(frozen=True)
class ModelParallelPlace:
    """This rank's place in the model: `[ t 1/T, p 1/P ]`, counted from 1."""

    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1

    def __str__(self) -> str:
        return f"[ t {self.tp_rank + 1}/{self.tp_size}, p {self.pp_rank + 1}/{self.pp_size} ]"


def saving_line(iteration: int, directory: str, checkpoint_format: str) -> str:
    """Before a checkpoint is written."""
    return f"saving checkpoint at iteration {iteration:7d} to {directory} in {checkpoint_format} format"


def saved_line(iteration: int, directory: str, place: ModelParallelPlace) -> str:
    """After a checkpoint is committed."""
    return f"  successfully saved checkpoint from iteration {iteration:7d} to {directory} {place}"


def loaded_line(iteration: int, directory: str, place: ModelParallelPlace) -> str:
    """After a checkpoint is loaded."""
    return f"  successfully loaded checkpoint from {directory} {place} at iteration {iteration}"


@dataclasses.dataclass(frozen=True)
class PlanRecord:
    """What the run is going to do, for scripts: the pipeline plan and the sharding.

    ops_per_rank: per pipeline rank, how often each of F, B, W, BW is run in one step.
    persistent_bytes_per_rank: weights, gradients and optimizer state kept between steps, per global rank.
    units_per_rank: units of the model whose weights are gathered on their own, per global rank; () where all are whole,
    and then not in the line. post_validation: "off", or how steps are taken back that are validated afterwards;
    snapshot_bytes_per_rank: what is kept for that, per global rank, () without.
    """

    schedule: str
    hash: str
    ops_per_rank: tuple[Mapping[str, int], ...]
    sharding: str
    persistent_bytes_per_rank: tuple[int, ...]
    post_validation: str = "off"
    units_per_rank: tuple[int, ...] = ()
    snapshot_bytes_per_rank: tuple[int, ...] = ()


def plan_line(plan: PlanRecord) -> str:
    """` > plan: {json}` on one line, keys in the record's order."""
    record = {
        "schedule": plan.schedule,
        "hash": plan.hash,
        "ops_per_rank": [dict(ops) for ops in plan.ops_per_rank],
        "sharding": plan.sharding,
        "persistent_bytes_per_rank": list(plan.persistent_bytes_per_rank),
        "post_validation": plan.post_validation,
        **({"units_per_rank": list(plan.units_per_rank)} if plan.units_per_rank else {}),
        **(
            {"snapshot_bytes_per_rank": list(plan.snapshot_bytes_per_rank)}
            if plan.snapshot_bytes_per_rank
            else {}
        ),
    }
    return " > plan: " + json.dumps(record, allow_nan=False)


def memory_lines(when: str, table: Sequence[str]) -> list[str]:
    """--log-fsdp-ledger: the engine's table of what it holds, indented under a heading."""
    return [f" > bytes of the sharding engine on rank 0, {when}:", *(f"   {row}" for row in table)]
