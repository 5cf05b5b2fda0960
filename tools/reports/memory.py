"""What the fullest pipeline rank held of each kind of bytes, beside what was planned: the chart of a run's `memory`
event."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from megatron.core.words import size_text
from tools.drawing.page import Key, Picture, element, percent, text
from tools.reports.run_record import RunRecord

_ROW, _BROAD, _NARROW, _WORDS = 24, 16, 6, 0.72  # pixels; and the share of the plot that bars have


def planned_and_measured(run: RunRecord) -> Picture | None:
    """A pair of bars a kind, the largest first. Of the last start that has said both; None where none has."""
    events = (one for one in reversed(run.events) if one["event"] == "memory")
    if (event := next(events, None)) is None:
        return None
    planned, measured = (_sizes(event.get(name)) for name in ("planned", "measured"))
    kinds = sorted({*planned, *measured}, key=lambda kind: (-max(_both(kind, planned, measured)), kind))
    most = max((max(_both(kind, planned, measured)) for kind in kinds), default=0)
    if not most:
        return None
    labels, plot = list[str](), list[str]()
    for row, kind in enumerate(kinds):
        y, sizes = row * _ROW, _both(kind, planned, measured)
        told = [size_text(of[kind]) if kind in of else none for of, none in ((planned, "-"), (measured, "-"))]
        labels.append(text(kind, 112, y + 15, text_anchor="end", class_="tick"))
        for size, high, style in zip(sizes, (_BROAD, _NARROW), ("p0", "s0"), strict=True):
            width, top = percent(_WORDS * size / most), y + (_ROW - high) / 2
            plot.append(element("rect", y=top, width=width, height=high, fill="var(--c)", class_=style))
        plot.append(text(" / ".join(told), percent(_WORDS * max(sizes) / most + 0.01), y + 15, class_="tick"))
    keys = (Key("planned", "var(--p0)"), Key("measured", "var(--s0)"))
    note = (
        "The most of each kind, whenever in a step. Measured: weights, gradients and states by the engine's count; "
        "activations by what the device, or the heap, has risen by. A kind that one side has alone has a dash."
    )
    title = f"Pipeline rank {event.get('rank')}, the fullest, by kind: planned / measured"
    return Picture(title, "".join(labels), "".join(plot), _ROW * len(kinds), keys, 116, 280, note)


def _sizes(told: Any) -> dict[str, float]:
    """Of a record, which may hold anything."""
    pairs = told.items() if isinstance(told, Mapping) else ()
    return {str(kind): size for kind, size in pairs if type(size) in (int, float) and 0 < size < math.inf}


def _both(kind: str, planned: Mapping[str, float], measured: Mapping[str, float]) -> tuple[float, float]:
    return planned.get(kind, 0), measured.get(kind, 0)
