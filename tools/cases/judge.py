"""RunFigures of a run beside golden values: on the same image every bit, across images within tolerances.

Tolerances are Megatron-LM's: 5 % of a loss, 20 % of a number of zeros, of one step in a hundred more, at least of one.
Few zeros scatter by more than that: elements that are zero by rounding alone are counted like
rare events, whose standard deviation is the root of their number, and four of these and four are near. What follows
from the flags alone is the same everywhere. Memory is a ratio of medians, and so is time, which is judged
where that is asked for.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from megatron.core.words import counted, plain, share_text
from megatron.training.report.metrics import MEMORY_TAGS
from tools.cases.case import CaseError
from tools.cases.golden import RunFigures

TIME = "iteration-time"
# By a clock, or of the machine.
_NOT_JUDGED = re.compile(r"-time$|^(planned|measured)-|^(throughput|tokens-per-second|world-size)$| time$")
_OF_FLAGS = re.compile(r"^(estimated-bubble|persistent-bytes|learning-rate|batch-size)$")
_RATIO, _ZEROS, _LOSS, _FLAGS = 0.05, 0.2, 0.05, 1e-6
_ROUNDED = 1e-12  # of a bubble that is none
_MOST_FORGIVEN = 50


class Judgement(NamedTuple):
    """passed: None for what is only shown."""

    metric: str
    passed: bool | None
    text: str


def judged(figures: RunFigures, metrics: Iterable[str] | None) -> list[str]:
    """The metrics of golden values: those that the case names, else all but those of clocks and memory; and the time.
    Raises CaseError where the run lacks one."""
    has = figures.values
    if metrics is None:
        names = [name for name in has if not _NOT_JUDGED.search(base(name)) and base(name) not in MEMORY_TAGS]
    else:
        names = list(metrics)
    if lacking := [name for name in names if name not in has]:
        raise CaseError(f"METRICS: the run has no {', '.join(lacking)}; it has {', '.join(sorted(has))}")
    return sorted({*names, *(name for name in has if base(name) == TIME)})


def verdicts(golden: RunFigures, found: RunFigures, *, judge_time: bool = False) -> list[Judgement]:
    """Of each metric of the golden values."""
    same_image = golden.image is not None and golden.image == found.image
    same_launcher = golden.launcher == found.launcher
    made = []
    for name, expected in golden.values.items():
        values, kind = found.values.get(name), base(name)
        if values is None:
            made.append(Judgement(name, None if kind == TIME else False, "the run lacks it"))
        elif kind == TIME:
            made.append(_ratio(name, expected, values, judge_time))
        elif kind in MEMORY_TAGS:
            made.append(_ratio(name, expected, values, same_launcher))
        elif same_image:
            made.append(bits(name, expected, values))
        else:
            made.append(_near(name, expected, values))
    return made


def base(name: str) -> str:
    """Without the number of its run."""
    return re.sub(r" \(run \d+\)$", "", name)


def bits(name: str, expected: Mapping[int, float], found: Mapping[int, float]) -> Judgement:
    """Every value the same; NaN is NaN."""
    different = [step for step in expected if repr(expected[step]) != repr(found.get(step))]
    if not different:
        return Judgement(name, True, f"every bit of {counted(len(expected), 'value')}")
    step = different[0]
    told = f"step {step}: {expected[step]!r} expected, {found.get(step)!r} found"
    return Judgement(
        name, False, f"{counted(len(different), 'value')} of {len(expected)} differ, first {told}"
    )


def _near(name: str, expected: Mapping[int, float], found: Mapping[int, float]) -> Judgement:
    kind = base(name)
    of_flags = bool(_OF_FLAGS.search(kind))
    share = _FLAGS if of_flags else _ZEROS if kind == "num-zeros" else _LOSS

    def near(value: float) -> float:
        few = 4 * math.sqrt(abs(value)) + 4 if kind == "num-zeros" else _ROUNDED if of_flags else 0.0
        return max(share * abs(value), few)

    forgiven = 0 if of_flags else min(_MOST_FORGIVEN, max(1, len(expected) // 100))
    far = [
        step
        for step, value in expected.items()
        if not (
            step in found and (repr(found[step]) == repr(value) or abs(found[step] - value) <= near(value))
        )
    ]
    within = f"within {share_text(share)}" if share > _FLAGS else "equal"
    text = f"{len(expected) - len(far)} of {counted(len(expected), 'value')} {within}"
    if far:
        text += f", first not: step {far[0]}: {expected[far[0]]!r} expected, {found.get(far[0])!r} found"
    return Judgement(name, len(far) <= forgiven, text)


def _ratio(name: str, expected: Mapping[int, float], found: Mapping[int, float], judge: bool) -> Judgement:
    """Of the medians of the steady steps, which are the second half."""
    was, now = (statistics.median(list(points.values())[len(points) // 2 :]) for points in (expected, found))
    ratio = now / was if was else float("inf")
    text = f"{plain(ratio)} x the golden {plain(was)}, the median of steady steps"
    return Judgement(name, abs(ratio - 1) <= _RATIO if judge else None, text)
