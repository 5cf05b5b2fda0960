#!/usr/bin/env python3
"""Trains the cases under releases of megatron-core, by Megatron's own 1F1B and by ours, and compares bit by bit.

python extras/proof/prove.py                                # every release, two and four ranks: half an hour
python extras/proof/prove.py --release 0.16.1 --ranks 2
python extras/proof/prove.py --release 0.19.2 --case "four stages" --schedule zb-2p
python extras/proof/prove.py --patch                        # zb_h1.patch against the release it was made for
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import apply_patch  # noqa: E402
import plans  # noqa: E402
import releases  # noqa: E402
from cases import EVERY, FOUR_RANKS, TWO_RANKS, Case  # noqa: E402
from release_process import CaseError, ReleaseProcess  # noqa: E402

SCHEDULES = ("zb-h1", "zb-1p", "zb-2p")
SAME = ("losses", "norms", "evaluations", "weights")
# The patch has one schedule and refuses overlap.
PATCH_CASES = (
    "gpt2 tied, DDP", "fused accumulation", "experts without overlap", "one microbatch on two stages", "four stages",
    "tensor 2 x pipeline 2, sequence parallel", "tensor 2 x pipeline 2, llama, distributed optimizer",
    "tensor 2 x pipeline 2, fused accumulation",
)  # fmt: skip


def differences(case: Case, process: ReleaseProcess, schedules: Sequence[str], folder: Path) -> list[str]:
    """What is not 1F1B's, bit by bit. Raises CaseError where a training does not run."""
    arguments = [
        plans.arguments(schedule, case.pipeline, case.microbatches, folder) for schedule in schedules
    ]
    own, *others = process.records(case, [None, *arguments])
    return [
        line for name, records in zip(schedules, others, strict=True) for line in compared(name, own, records)
    ]


def compared(name: str, own: list[dict[str, Any]], other: list[dict[str, Any]]) -> list[str]:
    """Lines for each rank and each figure that is not equal."""
    lines = []
    for rank, (expected, found) in enumerate(zip(own, other, strict=True)):
        assert expected["losses"], f"1F1B itself has no figures: {expected}"
        assert "nan" not in expected["norms"], f"1F1B itself has no figures: {expected}"
        assert {*expected["norms"]} != {"inf"}, f"1F1B itself left out all steps: {expected}"
        for key in SAME:
            if expected[key] != found[key]:
                lines.append(f"{name}, rank {rank}, {key}: {_first(expected[key], found[key])}")
    return lines


def _first(expected: Any, found: Any) -> str:
    """The first step that differs, or the value."""
    if not isinstance(expected, list):
        return f"{found} instead of {expected}"
    assert len(expected) == len(found), f"{len(found)} figures instead of {len(expected)}"
    step = next(step for step, both in enumerate(zip(expected, found, strict=True)) if both[0] != both[1])
    return f"step {step}: {float.fromhex(found[step])!r} instead of {float.fromhex(expected[step])!r}"


def main(words: Sequence[str] | None = None) -> int:
    """0, or 1 where something differs or does not run."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0], allow_abbrev=False)
    parser.add_argument("--release", nargs="+", choices=releases.RELEASES, default=releases.RELEASES)
    parser.add_argument("--ranks", type=int, choices=(2, 4), help="none: both")
    parser.add_argument("--case", nargs="+", choices=EVERY, help="none: all")
    parser.add_argument("--schedule", nargs="+", default=SCHEDULES)
    parser.add_argument("--patch", action="store_true", help="zb_h1.patch instead of the package")
    options = parser.parse_args(words)
    chosen = [EVERY[name] for name in options.case or ()] or [*TWO_RANKS, *FOUR_RANKS]
    if options.patch:
        return _print(prove_patch())
    cases = [case for case in chosen if options.ranks in (None, case.ranks)]
    return max(_print(prove(release, cases, options.schedule)) for release in options.release)


def prove(release: str, cases: Sequence[Case], schedules: Sequence[str]) -> Any:
    """A line for each case, with whether it is as it should be."""
    with tempfile.TemporaryDirectory() as folder, ReleaseProcess(release) as process:
        for case in cases:
            where = f"megatron-core {release}, {case.ranks} ranks, {case.name}"
            try:
                found = differences(case, process, schedules, Path(folder))
            except CaseError as error:
                yield f"{where}: does not run\n{error}", False
                continue
            what = f"{case.steps} steps of {', '.join(schedules)} have 1F1B's bits"
            yield (f"{where}: {what}" if not found else "\n".join([f"{where}:", *found])), not found


def prove_patch() -> Any:
    """The patched copy of a release against the release."""
    release = apply_patch.PATCHED_RELEASE
    changed = str(apply_patch.patched())
    with ReleaseProcess(release) as own, ReleaseProcess(release, megatron=changed) as other:
        for name in PATCH_CASES:
            case = EVERY[name]
            found = compared("the patch", *(process.records(case, [None])[0] for process in (own, other)))
            where = f"megatron-core {release} with {apply_patch.PATCH.name}, {case.ranks} ranks, {name}"
            what = f"{case.steps} steps have 1F1B's bits"
            yield (f"{where}: {what}" if not found else "\n".join([f"{where}:", *found])), not found


def _print(lines: Any) -> int:
    status = 0
    for line, right in lines:
        print(line, flush=True)
        status = status or int(not right)
    return status


if __name__ == "__main__":
    sys.exit(main())
