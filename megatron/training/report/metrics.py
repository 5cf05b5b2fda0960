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


@dataclasses.dataclass(frozen=True)
class IterationRecord:
    """What is said of one iteration; FIELDS says how. What is None is left out.

    losses: mean over the interval per name, "lm loss" first. elapsed_s: wall seconds per iteration. rollbacks:
    optimizer steps of the interval that post-validation has taken back. throughput_tflops: model TFLOP/s per device.
    energy_j, power_w: per device, where the device can tell. tokens_per_s: of all ranks together.
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
    skipped_samples: int | None = None
    throughput_tflops: float | None = None
    energy_j: float | None = None
    power_w: float | None = None
    decoupled_learning_rate: float | None = None
    grad_norm: float | None = None
    num_zeros: int | None = None
    params_norm: float | None = None
    rollbacks: int | None = None
    tokens_per_s: float | None = None

    @property
    def elapsed_ms(self) -> float:
        return self.elapsed_s * 1000.0


# In the order of the line: the record's attribute, its text in the iteration line, its tag in TensorBoard, wandb,
# MLflow and metrics.jsonl (Megatron's, but for `tokens-per-second` and `skipped-iterations`).
FIELDS: tuple[tuple[str, str | None, str | None], ...] = (
    ("consumed_samples", "consumed samples: {:12d}", None),
    ("skipped_samples", "skipped samples: {:12d}", None),
    ("elapsed_ms", "elapsed time per iteration (ms): {:.1f}", None),
    ("throughput_tflops", "throughput per GPU (TFLOP/s/GPU): {:.1f}", "throughput"),
    ("energy_j", "energy per GPU (J/iter/GPU): {:.1f}", None),
    ("power_w", "power per GPU (W/GPU): {:.1f}", None),
    ("learning_rate", "learning rate: {:.6E}", "learning-rate"),
    ("decoupled_learning_rate", "decoupled learning rate: {:.6E}", "decoupled-learning-rate"),
    ("global_batch_size", "global batch size: {:5d}", "batch-size"),
    ("losses", None, None),
    ("loss_scale", "loss scale: {:.1f}", "loss-scale"),
    ("elapsed_s", None, "iteration-time"),
    ("grad_norm", "grad norm: {:.6E}", "grad-norm"),
    ("num_zeros", "num zeros: {:d}", "num-zeros"),
    ("params_norm", "params norm: {:.6E}", "params-norm"),
    ("rollbacks", "rollbacks: {:d}", "rollbacks"),
    ("skipped_iterations", "number of skipped iterations: {:3d}", "skipped-iterations"),
    ("nan_iterations", "number of nan iterations: {:3d}", "nan-iterations"),
    ("tokens_per_s", None, "tokens-per-second"),
)
MEMORY_TAGS = ("mem-reserved-bytes", "mem-allocated-bytes", "mem-max-allocated-bytes")
_OPTIONAL = {field.name for field in dataclasses.fields(IterationRecord) if field.default is None}


def iteration_line(record: IterationRecord) -> str:
    """The iteration line of the last rank. A loss that is NaN or negative is left out, as Megatron does: parsers count
    on it."""
    when = record.when.strftime("%Y-%m-%d %H:%M:%S.%f")
    parts = [f" [{when}] iteration {record.iteration:8d}/{record.train_iters:8d}"]
    for name, text, _ in FIELDS:
        value = getattr(record, name)
        if name == "losses":
            parts += [f"{loss}: {mean:.6E}" for loss, mean in value.items() if mean >= 0.0]
        elif text is not None and value is not None:
            parts.append(text.format(value))
    return " | ".join(parts) + " |"


def iteration_scalars(record: IterationRecord) -> dict[str, float]:
    """The same numbers by tag: losses, what is always there, the rest.

    Losses are given as they are, NaN included: a curve with a hole must be explained by its data.
    """
    tagged = [(name, tag) for name, _, tag in FIELDS if tag is not None]
    tagged.sort(key=lambda field: field[0] in _OPTIONAL)
    values = {tag: getattr(record, name) for name, tag in tagged}
    return {**record.losses, **{tag: value for tag, value in values.items() if value is not None}}


class IntervalTotals:
    """Sums between two iteration lines.

    A printed loss is the mean over the interval's non-skipped iterations of each iteration's token mean,
    which is what Megatron prints; when every iteration is skipped there is no loss to print.
    """

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
        every token was masked.

        tokens: tokens processed, for tokens/s. A skipped iteration with a non-finite loss counts as a NaN iteration.
        """
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


def memory_line(rank: int, iterations: int, memory: MemoryFigures) -> str:
    """Memory of one rank, in units of 2^20 bytes."""
    names = ("allocated", "max allocated", "reserved", "max reserved")
    figures = (getattr(memory, f"{name.replace(' ', '_')}_bytes") / 2**20 for name in names)
    fields = (f" | {name}: {figure:.2f}" for name, figure in zip(names, figures, strict=True))
    return f"[Rank {rank}] (after {iterations} iterations) memory (MB)" + "".join(fields)


def memory_scalars(memory: MemoryFigures) -> dict[str, float]:
    """Megatron's TensorBoard tags for memory."""
    return {tag: getattr(memory, tag.removeprefix("mem-").replace("-", "_")) for tag in MEMORY_TAGS}


# --- lines of start, end, checkpoints


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
    return [
        f"> building train, validation, and test datasets for {dataset_name} ...",
        " > datasets target sizes (minimum size):",
        *(f"    {split + ':':<12}{size}" for split, size in sizes.items()),
    ]


def datasets_done_line(dataset_name: str) -> str:
    """After the data sets are built."""
    return f"> finished creating {dataset_name} datasets ..."


def datetime_line(text: str, when: datetime) -> str:
    """`[text] datetime: ...`; the shape of start-up marks and of exits."""
    return f"[{text}] datetime: {when.strftime('%Y-%m-%d %H:%M:%S')} "


def training_start_lines(when: datetime) -> list[str]:
    """The two lines before the first iteration."""
    return ["training ...", datetime_line("before the start of training step", when)]


def exit_line(why: str, when: datetime) -> str:
    """why: "at iteration 9", "after 2.5 minutes", "after receiving SIGTERM."."""
    return datetime_line(f"exiting program {why}", when)


def model_parallel_place(tp_rank: int, tp_size: int, pp_rank: int, pp_size: int) -> str:
    """A rank's place in the model, counted from 1."""
    return f"[ t {tp_rank + 1}/{tp_size}, p {pp_rank + 1}/{pp_size} ]"


def saving_line(iteration: int, directory: str, checkpoint_format: str) -> str:
    """Before a checkpoint is written."""
    return f"saving checkpoint at iteration {iteration:7d} to {directory} in {checkpoint_format} format"


def saved_line(iteration: int, directory: str, place: str) -> str:
    """After a checkpoint is committed. place: `model_parallel_place`."""
    return f"  successfully saved checkpoint from iteration {iteration:7d} to {directory} {place}"


def loaded_line(iteration: int, directory: str, place: str) -> str:
    """After a checkpoint is loaded. place: `model_parallel_place`."""
    return f"  successfully loaded checkpoint from {directory} {place} at iteration {iteration}"


@dataclasses.dataclass(frozen=True)
class PlanRecord:
    """What the run is going to do, for scripts: the pipeline plan and the sharding.

    ops_per_rank: per pipeline rank, how often each of F, B, W, BW is run in one step.
    persistent_bytes_per_rank: weights, gradients and optimizer state kept between steps, per global rank.
    post_validation: "off", or how steps are taken back that are validated afterwards. units_per_rank: units of the
    model whose weights are gathered on their own, per global rank; snapshot_bytes_per_rank: what is kept for
    post-validation; both () and not in the line where there is no such thing.
    """

    schedule: str
    hash: str
    ops_per_rank: tuple[Mapping[str, int], ...]
    sharding: str
    persistent_bytes_per_rank: tuple[int, ...]
    post_validation: str = "off"
    units_per_rank: tuple[int, ...] = ()
    snapshot_bytes_per_rank: tuple[int, ...] = ()

    def line(self) -> str:
        """` > plan: {json}` on one line, keys in the record's order."""
        return " > plan: " + json.dumps({key: value for key, value in vars(self).items() if value != ()})


def memory_lines(when: str, table: Sequence[str]) -> list[str]:
    """--log-fsdp-ledger: the engine's table of what it holds, indented under a heading."""
    return [f" > bytes of the sharding engine on rank 0, {when}:", *(f"   {row}" for row in table)]
