"""What a run looks like on a terminal: one short line a report, and a bar. Pure: `guard/console.py` shows them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from megatron.core.words import column, decimal, plain, scaled
from megatron.training.report.metrics import IterationRecord, perplexity

_BETWEEN = "  "
_BAR = (10, 30)  # characters
_WIDE = 120  # characters: a terminal on which names are written out
_NONE = "-"  # in a column that has no value this time
_LEAST_RATE = 7  # places behind the point of a learning rate

Columns = Iterable[tuple[int, str]]  # (how important, 0 is most; text), in the order in which they are shown


def fitted(columns: Columns, width: int, between: str = _BETWEEN) -> str:
    """Of the columns, the most important ones first, what fits into a line of so many characters."""
    told = [(rank, place, text) for place, (rank, text) in enumerate(columns) if text]
    left: list[tuple[int, str]] = []
    for _, place, text in sorted(told):
        if not left or len(between.join([*(one for _, one in left), text])) <= width:
            left.append((place, text))
    return between.join(text for _, text in sorted(left))[:width]


def short_line(record: IterationRecord, width: int, has: Collection[str]) -> str:
    """A report for a terminal of so many characters. has: fields that lines of this run may have besides those of every
    run.

    Which columns there are, and their widths, depends on the run and on the terminal: those of all lines stand below
    each other. Skipped iterations, which few lines have, stand behind them, or in a row of their own.
    """
    line = fitted(_columns(record, has, width >= _WIDE), width - 1)
    if not record.skipped_iterations:
        return line
    nan = f" ({record.nan_iterations} NaN)" if record.nan_iterations else ""
    skipped = f"{record.skipped_iterations} skipped{nan}"
    return line + (_BETWEEN if len(line + _BETWEEN + skipped) < width else "\n   ") + skipped


def _columns(record: IterationRecord, has: Collection[str], wide: bool) -> list[tuple[int, str]]:
    """wide: in full."""
    total, bubbles = f"{record.train_iters:,}", record.bubbles
    losses = [f"{name.removeprefix('lm ')} {column(value, 6, 4)}" for name, value in record.losses.items()]
    rate = decimal(record.learning_rate, _LEAST_RATE)
    columns = [
        (0, f" step {record.iteration:{len(total)},}/{total}"),
        (1, losses[0] if losses else f"loss {_NONE:>6}"),
        (4, f"lr {rate:<{_LEAST_RATE + 2}}"),
        (2, f"{'grad norm' if wide else 'grad'} {column(record.grad_norm, 5, 3)}"),
        (3, f"{column(record.tokens_per_s, 6, 0)} {'tokens/s' if wide else 'tok/s'}"),
    ]
    if "throughput_tflops" in has:
        speed = record.throughput_tflops
        shown = _NONE if speed is None else scaled(1e12 * speed, "FLOP/s")
        columns.append((8, f"{shown:>12} a rank"))
    held = None if record.memory_bytes is None else record.memory_bytes / 2**30
    columns.append((6, f"{'memory' if wide else 'mem'} {column(held, 5, 2)} GiB"))
    if "bubbles" in has:
        measured, planned = (bubbles.measured, bubbles.planned) if bubbles is not None else (None, None)
        told = f" (plan {_percent(planned)})" if wide else ""
        columns.append((5, f"bubble {_percent(measured)}{told}"))
    if "eta" in has:
        columns.append((7, f"ETA {record.eta or _NONE:>7}"))
    return [*columns, *((9, loss) for loss in losses[1:])]


def _percent(share: float | None) -> str:
    return f"{_NONE:>5}" if share is None else f"{column(100 * share, 4, 1)}%"


def evaluation_line(split: str, name: str, iteration: int, losses: Mapping[str, float]) -> str:
    """An evaluation in one line. name: of the validation set, where there are several."""
    told = (
        f"{loss.removeprefix('lm ')} {column(value, 6, 4).strip()}, perplexity {plain(perplexity(value))}"
        for loss, value in losses.items()
    )
    return f" {split}{name and '-' + name} at iteration {iteration:,}: {'; '.join(told)}"


def bar_line(share: float, columns: Columns, width: int, *, ascii_only: bool) -> str:
    """A bar, and behind it what there is room for. share: of the run that is done."""
    full, empty = ("#", ".") if ascii_only else ("█", "░")
    text = fitted(columns, width - 3 - _BAR[0], " | ")
    size = max(_BAR[0], min(_BAR[1], width - 3 - len(text)))
    done = round(size * share)
    return f" {full * done}{empty * (size - done)} {text}"
