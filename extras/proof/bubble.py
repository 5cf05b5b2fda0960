#!/usr/bin/env python3
"""How much of a step is bubble, with stages that sleep: Megatron's own 1F1B beside zbpp_light and zb_h1.patch.

    python extras/proof/bubble.py --stages 4 --microbatches 8
    python extras/proof/bubble.py --stages 8 --microbatches 24 --release 0.16.1

F, B and W sleep for a quarter of a second each, so other load on the machine changes little. Everything else is
Megatron's: its linear layer, its schedule or ours on top, its process groups (gloo). A step is timed from the start of
the first operation to the end of the last, on the rank where that is longest; the bubble is the share in which this
rank does none of its work: (step - m (F + B + W)) / step. The patch is measured with the release that it was made for.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import apply_patch  # noqa: E402
import plans  # noqa: E402
import releases  # noqa: E402
from release_process import ReleaseProcess  # noqa: E402

SCHEDULES = ("zb-h1", "zb-1p", "zb-2p")


def report(
    release: str, stages: int, microbatches: int, seconds: float, steps: int
) -> Iterator[tuple[str, float, str]]:
    """Who, the bubble measured, and the schedule whose planned bubble stands beside it."""
    step_s = (microbatches + 3 * stages) * 3 * seconds
    with tempfile.TemporaryDirectory() as folder, ReleaseProcess(release) as process:
        contestants = [plans.arguments(name, stages, microbatches, Path(folder)) for name in SCHEDULES]
        found = bubbles(
            process, stages, microbatches, seconds, steps, [None, *contestants], 60 + 5 * steps * step_s
        )
    names = ("Megatron's 1F1B", *(f"zbpp_light, {name}" for name in SCHEDULES))
    yield from zip(names, found, ("1f1b", *SCHEDULES), strict=True)
    if release == apply_patch.PATCHED_RELEASE:
        with ReleaseProcess(release, megatron=str(apply_patch.patched())) as process:
            (share,) = bubbles(process, stages, microbatches, seconds, steps, [None], 60 + 2 * steps * step_s)
        yield apply_patch.PATCH.name, share, "zb-h1"


def bubbles(
    process: ReleaseProcess,
    stages: int,
    microbatches: int,
    seconds: float,
    steps: int,
    contestants: Sequence[dict[str, str] | None],
    timeout: float,
) -> list[float]:
    """The least of each contestant's steps, as a share."""
    settings = {"seconds": seconds, "microbatches": microbatches, "contestants": contestants, "steps": steps}
    by_rank = process.run("sleeping:measure", stages, timeout=timeout, **settings)
    assert len({each["gradient"] for each in by_rank[0]}) == 1, f"other gradients: {by_rank[0]}"
    work = microbatches * 3 * seconds
    shares = []
    for ranks in zip(*by_rank, strict=True):
        of_steps = zip(*(rank["steps"] for rank in ranks), strict=True)
        cost = min(max(end - start for start, end in step) for step in of_steps)
        shares.append((cost - work) / cost)
    return shares


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0], allow_abbrev=False)
    parser.add_argument("--release", choices=releases.RELEASES, default=releases.NEWEST)
    parser.add_argument("--stages", type=int, default=4)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--ms", type=float, default=250.0, help="of each of F, B and W (default 250)")
    parser.add_argument("--steps", type=int, default=2, help="the best counts (default 2)")
    options = parser.parse_args(words)
    stages, microbatches = options.stages, options.microbatches
    print(f"megatron-core {options.release}, p {stages}, m {microbatches}, F = B = W = {options.ms:g} ms")
    for name, share, schedule in report(
        options.release, stages, microbatches, options.ms / 1000, options.steps
    ):
        planned = plans.simulated(schedule, stages, microbatches)["bubble_rate"]
        print(f"{name:<18} {100 * share:5.1f} %   (planned {100 * planned:4.1f} %)", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
