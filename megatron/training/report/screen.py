"""What a run looks like on a terminal: one short line a report, and a bar. Pure: `guard/console.py` shows them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from megatron.core.words import scaled, size_text
from megatron.training.report.metrics import IterationRecord, perplexity

_BETWEEN = "  "
_BAR = (10, 30)  # characters
_WIDE = 120  # characters: a terminal on which names and numbers are written out

Columns = Iterable[tuple[int, str]]  # (how important, 0 is most; text), in the order in which they are shown


def fitted(columns: Columns, width: int, between: str = _BETWEEN) -> str:
    """The columns that fit into a line of so many characters: the least important one goes first."""
    left = [(rank, text) for rank, text in columns if text]
    while len(line := between.join(text for _, text in left)) > width and len(left) > 1:
        left.remove(max(left))
    return line[:width]


def short_line(record: IterationRecord, width: int) -> str:
    """A report in one line that a terminal of so many characters does not wrap."""
    return fitted(_columns(record, width >= _WIDE), width - 1)


def _columns(record: IterationRecord, wide: bool) -> list[tuple[int, str]]:
    """wide: in full. Numbers are padded, so that those of several lines stand below each other."""
    total, bubbles, speed = f"{record.train_iters}", record.bubbles, record.tokens_per_s
    losses = [f"{name.removeprefix('lm ')} {value:6.4f}" for name, value in record.losses.items()]
    columns = [
        (0, f" step {record.iteration:{len(total)}d}/{total}"),
        (1, losses[0] if losses else "loss n/a"),
    ]
    if record.skipped_iterations:
        nan = f" ({record.nan_iterations} NaN)" if record.nan_iterations else ""
        columns.append((2, f"{record.skipped_iterations} skipped{nan}"))
    if record.grad_norm is not None:
        norm = f"{record.grad_norm:6.{3 if record.grad_norm < 1000 else 0}f}"
        columns.append((3, f"{'grad norm' if wide else 'grad'} {norm}"))
    if speed is not None:
        columns.append((4, f"{speed:9,.0f} tokens/s" if wide else f"{speed:6,.0f} tok/s"))
    if record.throughput_tflops is not None:
        columns.append((8, f"{scaled(1e12 * record.throughput_tflops, 'FLOP/s'):>12} a rank"))
    if record.memory_bytes is not None:
        columns.append((6, f"{'memory ' if wide else ''}{size_text(record.memory_bytes, digits=3):>8}"))
    if bubbles is not None:
        planned = f" (plan {bubbles.planned:.1%})" if wide else ""
        columns.append((5, f"bubble {bubbles.measured:5.1%}{planned}"))
    return [*columns, (7, f"ETA {record.eta}" if record.eta else ""), *((9, loss) for loss in losses[1:])]


def validation_line(where: str, name: str, losses: Mapping[str, float]) -> str:
    """An evaluation in one line. name: of the validation set, where there are several."""
    told = (
        f"{loss.removeprefix('lm ')} {value:.4f}, perplexity {perplexity(value):.4g}"
        for loss, value in losses.items()
    )
    return f" validation{name and '-' + name} at {where}: {'; '.join(told)}"


def bar_line(share: float, columns: Columns, width: int, *, ascii_only: bool) -> str:
    """A bar, and behind it what there is room for. share: of the run that is done."""
    full, empty = ("#", ".") if ascii_only else ("█", "░")
    text = fitted(columns, width - 3 - _BAR[0], " | ")
    size = max(_BAR[0], min(_BAR[1], width - 3 - len(text)))
    done = round(size * share)
    return f" {full * done}{empty * (size - done)} {text}"
