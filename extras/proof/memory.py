#!/usr/bin/env python3
"""The most live bytes of each rank under Megatron's 1F1B, zb-h1 and plans, beside what plans were simulated with.

    python extras/proof/memory.py --release 0.16.1 --layers-a-stage 4

Bytes of tensors, counted in the second training step (`live_bytes.py`): a GPT in fp32, four stages, eight microbatches.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import plans  # noqa: E402
import releases  # noqa: E402
from cases import MEMORY, Case  # noqa: E402
from release_process import ReleaseProcess  # noqa: E402

PLANS = {
    "zb-h1": ("zb-h1",),
    "zb-1p": ("zb-1p",),
    "zb-1p, limit 3": ("zb-1p", "--memory-limit", "3"),
    "zb-2p": ("zb-2p",),
    "zb-2p, limit 5": ("zb-2p", "--memory-limit", "5"),
}


@dataclasses.dataclass(frozen=True)
class Peaks:
    """By rank: bytes measured, and stages' activations simulated."""

    measured: list[int]
    simulated: list[float]


def measure(process: ReleaseProcess, case: Case = MEMORY) -> dict[str, Peaks]:
    """Of 1F1B (Megatron's own) and of each of PLANS."""
    shape = case.pipeline, case.microbatches
    with tempfile.TemporaryDirectory() as folder:
        others = [plans.arguments(name, *shape, Path(folder), *options) for name, *options in PLANS.values()]
        found = process.records(case, [None, *others], memory=True)
    planned = {"1f1b": ("1f1b",), **PLANS}
    return {
        name: Peaks(
            [rank["peak_bytes"] for rank in by_rank],
            plans.simulated(schedule, *shape, *options)["peak_activation"],
        )
        for (name, (schedule, *options)), by_rank in zip(planned.items(), found, strict=True)
    }


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0], allow_abbrev=False)
    parser.add_argument("--release", choices=releases.RELEASES, default=releases.NEWEST)
    parser.add_argument("--layers-a-stage", type=int, default=MEMORY.layers // MEMORY.pipeline)
    options = parser.parse_args(words)
    case = dataclasses.replace(MEMORY, layers=options.layers_a_stage * MEMORY.pipeline)
    with ReleaseProcess(options.release) as process:
        found = measure(process, case)
    least = max(found["1f1b"].measured)
    for name, peaks in found.items():
        kib = ", ".join(f"{peak / 1024:,.0f}" for peak in peaks.measured)
        ratio = max(peaks.simulated) / case.pipeline
        print(f"{name:<14} {kib} KiB: {max(peaks.measured) / least:.2f} of 1F1B's (simulated {ratio:.2f})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
