"""Megatron's log lines as text, and the sums behind them. Pure: no torch, no printing, no clocks.

Field order, names and widths are those that scripts written for Megatron-LM parse, with one difference: norms have the
loss's `%.6E`, because `%.3f` cannot tell two runs apart.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any

from megatron.core.machine import MemoryFigures
from megatron.core.words import between, counted, size_text

if TYPE_CHECKING:
    from megatron.core.pipeline_parallel.plan.measuring.replan import Bubbles


def _said(text: str | None = None, tag: str | None = None, *, times: int = 1, **options: Any) -> Any:
    return dataclasses.field(metadata={"text": text, "tag": tag, "times": times}, **options)


@dataclasses.dataclass(frozen=True, kw_only=True)
class IterationRecord:
    """What is said of one iteration, in the order of its line: each field with its text in that line and its tag in
    TensorBoard, wandb, MLflow and metrics.jsonl (Megatron's, but for `tokens-per-second` and `skipped-iterations`).
    What is None is left out.

    losses: mean over the interval per name, "lm loss" first. elapsed_s: wall seconds per iteration. rollbacks:
    optimizer steps of the interval that post-validation has taken back. throughput_tflops: model TFLOP/s per device.
    tokens_per_s: of all ranks together. On a terminal's line
    alone (`screen`): bubbles of the iteration, memory_bytes that this rank has held at most, eta in words.
    """

    when: datetime
    iteration: int
    train_iters: int
    consumed_samples: int = _said("consumed samples: {:12d}")
    skipped_samples: int | None = _said("skipped samples: {:12d}", default=None)
    elapsed_s: float = _said("elapsed time per iteration (ms): {:.1f}", "iteration-time", times=1000)
    throughput_tflops: float | None = _said(
        "throughput per GPU (TFLOP/s/GPU): {:.{places}f}", "throughput", default=None
    )
    learning_rate: float = _said("learning rate: {:.6E}", "learning-rate")
    decoupled_learning_rate: float | None = _said(
        "decoupled learning rate: {:.6E}", "decoupled-learning-rate", default=None
    )
    global_batch_size: int = _said("global batch size: {:5d}", "batch-size")
    losses: Mapping[str, float]
    loss_scale: float = _said("loss scale: {:.1f}", "loss-scale")
    grad_norm: float | None = _said("grad norm: {:.6E}", "grad-norm", default=None)
    num_zeros: int | None = _said("num zeros: {:d}", "num-zeros", default=None)
    params_norm: float | None = _said("params norm: {:.6E}", "params-norm", default=None)
    rollbacks: int | None = _said("rollbacks: {:d}", "rollbacks", default=None)
    skipped_iterations: int = _said("number of skipped iterations: {:3d}", "skipped-iterations")
    nan_iterations: int = _said("number of nan iterations: {:3d}", "nan-iterations")
    tokens_per_s: float | None = _said(tag="tokens-per-second", default=None)
    bubbles: Bubbles | None = None
    memory_bytes: int | None = None
    eta: str | None = None


_FIELDS = dataclasses.fields(IterationRecord)
# Attribute -> tag: what every record has, then what it may have.
TAGS: dict[str, str] = {
    field.name: field.metadata["tag"]
    for field in sorted(_FIELDS, key=lambda field: field.default is None)
    if field.metadata.get("tag")
}
MEMORY_TAGS = ("mem-reserved-bytes", "mem-allocated-bytes", "mem-max-allocated-bytes")


def iteration_line(record: IterationRecord) -> str:
    """The iteration line of the last rank. A loss that is NaN or negative is left out, as Megatron does: parsers count
    on it."""
    when = record.when.strftime("%Y-%m-%d %H:%M:%S.%f")
    parts = [f" [{when}] iteration {record.iteration:8d}/{record.train_iters:8d}"]
    for field in _FIELDS:
        text, value = field.metadata.get("text"), getattr(record, field.name)
        if field.name == "losses":
            parts += [f"{loss}: {mean:.6E}" for loss, mean in value.items() if mean >= 0.0]
        elif text is not None and value is not None:
            # A rate has three digits where it is small.
            places = 2 - math.floor(math.log10(value)) if 0 < value < 10 else 1
            parts.append(text.format(value * field.metadata["times"], places=places))
    return " | ".join(parts) + " |"


def iteration_scalars(record: IterationRecord) -> dict[str, float]:
    """The same numbers by tag: losses, what is always there, the rest.

    Losses are given as they are, NaN included: a curve with a hole must be explained by its data.
    """
    values = {tag: getattr(record, name) for name, tag in TAGS.items()}
    return {**record.losses, **{tag: value for tag, value in values.items() if value is not None}}


# Other lines, to be formatted. threads: cores, ranks in words; `said_by` is "" or "; --threads-per-rank". place: of a
# rank, counted from 1.
PARAMETER_COUNT = (
    " > number of parameters on (tensor, pipeline) model parallel rank ({tp_rank}, {pp_rank}): {count}"
)
PADDED_VOCAB = " > padded vocab (size: {size}) with {dummies} dummy tokens (new size: {padded})"
FAKE = (
    "WARNING: --fake-process-group: rank {rank} of {ranks} runs by itself, nothing is sent and nobody waited for: "
    "losses, gradient norms and weights mean nothing, its memory and its computing are those of that rank"
)
THREADS = " > threads per rank: {threads} ({cores}, {ranks}{said_by})"
DATASETS_DONE = "> finished creating {name} datasets ..."
PLACE = "[ t {tp}/{tp_size}, p {pp}/{pp_size} ]"
SAVING = "saving checkpoint at iteration {iteration:7d} to {directory} in {format} format"
SAVED = "  successfully saved checkpoint from iteration {iteration:7d} to {directory} {place}"
LOADED = "  successfully loaded checkpoint from {directory} {place} at iteration {iteration}"


class IntervalTotals:
    """Sums between two iteration lines. A printed loss is the mean over the interval's non-skipped iterations of each
    iteration's token mean, as Megatron's; when every iteration is skipped there is no loss to print."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Start the next interval."""
        self.iterations = self.skipped_iterations = self.nan_iterations = self.rollbacks = self.tokens = 0
        self._means: dict[str, list[float]] = {}  # name -> [sum of means, number of them]

    def add_iteration(
        self,
        losses: Mapping[str, tuple[float, float]],
        *,
        skipped: bool = False,
        tokens: int = 0,
        rolled_back: bool = False,
    ) -> None:
        """Count one iteration. losses: name -> (sum over loss tokens of the global batch, number of them); NaN where
        every token was masked. tokens: processed. A skipped iteration with a non-finite loss is a NaN iteration."""
        self.iterations += 1
        self.rollbacks += rolled_back
        self.tokens += tokens
        means = {name: total / count if count else math.nan for name, (total, count) in losses.items()}
        if skipped:
            self.skipped_iterations += 1
            self.nan_iterations += not all(map(math.isfinite, means.values()))
            return
        for name, mean in means.items():
            entry = self._means.setdefault(name, [0.0, 0])
            entry[0] += mean
            entry[1] += 1

    def losses(self) -> dict[str, float]:
        """Mean per name over the non-skipped iterations, in the order in which names first came."""
        return {name: total / count for name, (total, count) in self._means.items()}


def perplexity(loss: float) -> float:
    """exp(min(20, loss)), as Megatron, so that an untrained model prints a number."""
    return math.exp(min(20.0, loss))


def validation_lines(
    where: str, losses: Mapping[str, float], *, set_name: str = "", samples: str = ""
) -> list[str]:
    """The validation line between two rules of dashes, and what was read for it above.

    where: "iteration 40", "iteration 40 on validation set", "iteration 40 on test set".
    set_name: "0", "1", "name" when there are several validation sets; becomes the suffix `-name`. samples: as
    "samples 0 to 79 of the validation set".
    """
    text = f" validation{_suffix(set_name)} loss at {where} | "
    for name, loss in losses.items():
        text += f"{name} value: {loss:.6E} | {name} PPL: {perplexity(loss):.6E} | "
    rule = "-" * (len(text) + 1)
    return [*([f" > evaluated on {samples}"] if samples else []), rule, text, rule]


def validation_scalars(
    losses: Mapping[str, float], *, set_name: str = "", split: str = "validation"
) -> dict[str, float]:
    """`lm loss validation`, `lm loss validation ppl`; `validation-name` when there are several sets; `test`."""
    scalars: dict[str, float] = {}
    for name, loss in losses.items():
        tag = f"{name} {split}{_suffix(set_name)}"
        scalars |= {tag: loss, f"{tag} ppl": perplexity(loss)}
    return scalars


def _suffix(set_name: str) -> str:
    return f"-{set_name}" if set_name else ""


def memory_line(rank: int, iterations: int, memory: MemoryFigures, used_bytes: int | None = None) -> str:
    """Memory of one rank, in units of 2^20 bytes. used_bytes: of the whole device, by all processes."""
    names = ("allocated", "max allocated", "reserved", "max reserved")
    figures = (getattr(memory, f"{name.replace(' ', '_')}_bytes") / 2**20 for name in names)
    fields = [f" | {name}: {figure:.2f}" for name, figure in zip(names, figures, strict=True)]
    fields += [] if used_bytes is None else [f" | total device memory used: {used_bytes / 2**20:.2f}"]
    return f"[Rank {rank}] (after {iterations} iterations) memory (MB)" + "".join(fields)


def memory_scalars(memory: MemoryFigures) -> dict[str, float]:
    """Megatron's TensorBoard tags for memory."""
    return {tag: getattr(memory, tag.removeprefix("mem-").replace("-", "_")) for tag in MEMORY_TAGS}


def dataset_lines(dataset_name: str, sizes: Mapping[str, int]) -> list[str]:
    """Before the data sets are built. sizes: split -> samples asked for."""
    return [
        f"> building train, validation, and test datasets for {dataset_name} ...",
        " > datasets target sizes (minimum size):",
        *(f"    {split + ':':<12}{size}" for split, size in sizes.items()),
    ]


def datetime_line(text: str, when: datetime) -> str:
    """`[text] datetime: ...`: before the first step, and where a program exits."""
    return f"[{text}] datetime: {when.strftime('%Y-%m-%d %H:%M:%S')} "


def plan_line(plan: Mapping[str, Any]) -> str:
    """What the run is going to do, for scripts: ` > plan: {json}` on one line. Empty tuples are left out."""
    return " > plan: " + json.dumps({key: value for key, value in plan.items() if value != ()})


def plan_in_words(plan: Mapping[str, Any]) -> str:
    """The same for a person, in two lines."""
    held = between([size_text(size, digits=3) for size in sorted(plan["persistent_bytes_per_rank"])])
    asked = f"schedule {plan['schedule']}, sharding {plan['sharding']}"
    return f" > plan: {asked}\n > memory: {held} a rank: weights, gradients, optimizer states"


def parameters_in_words(total: int, by_rank: Sequence[int]) -> str:
    """by_rank: of each model parallel rank, what they share counted on each."""
    parts = f", split in {len(by_rank):,} parts of {between([f'{count:,}' for count in sorted(by_rank)])}"
    return f" > model: {counted(total, 'parameter')}{parts if len(by_rank) > 1 else ''}"


def theoretical_memory_line(rank: int, at_rest: int, most: int) -> str:
    """--report-theoretical-memory, as Megatron writes it, of each pipeline rank."""
    sizes = {"weight and optimizer": at_rest, "activation": most - at_rest, "total": most}
    told = ", ".join(f"{name}={size / 2**20:.2f} MB" for name, size in sizes.items())
    return f"Theoretical memory footprints of pipeline rank {rank}: {told}"


def memory_by_kind_line(
    iteration: int, rank: int, planned: Mapping[str, int], measured: Mapping[str, int]
) -> str:
    """The most of each kind of bytes, whenever, planned and measured."""
    both = [kind for kind in planned if kind in measured]
    told = [f"{kind} {size_text(planned[kind])} / {size_text(measured[kind])}" for kind in both]
    lines = [f"memory of pipeline rank {rank} by iteration {iteration}"]
    if both:
        lines[0] += f", planned / measured: {', '.join(told)}"
    for what, sizes in (("not measured", planned), ("in no plan", measured)):
        rest = [f"{kind} {size_text(size)}" for kind, size in sizes.items() if kind not in both]
        lines += [f"{what}: {', '.join(rest)}"] * bool(rest)
    return f" {'; '.join(lines)}"


def memory_lines(when: str, table: Sequence[str]) -> list[str]:
    """--log-fsdp-ledger: the engine's table of what it holds, indented under a heading."""
    return [f" > bytes of the sharding engine on rank 0, {when}:", *(f"   {row}" for row in table)]
