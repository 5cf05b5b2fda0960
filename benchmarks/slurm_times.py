#!/usr/bin/env python3
"""Seconds from sbatch to the first step, and from a kill -9 to the first step behind it, under Slurm.

    python benchmarks/slurm_times.py [--repeats N]      # as root, on a machine with Slurm: tests/slurm/cluster.py

Two nodes of this machine, a rank each, a tiny GPT. What the seconds are spent on is read from the files that a run
leaves: until the batch script starts launchers; until these have imported torch and start ranks; until the ranks train;
the first step. Behind the kill of a rank launchers are there already.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.slurm.cluster import Cluster, Job, ready
from tests.slurm.runs import reaches, started

PARTS = ("until srun", "launchers start ranks", "ranks begin to train", "first step")


def parts(attempt: Path, number: int, metrics: Path, since: float) -> list[float]:
    """Seconds of PARTS behind `since`. attempt: of the batch script. number: how often launchers had started its ranks
    again."""
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    begun = next(line["time"] for line in lines if line.get("event") == "start" and line["time"] > since)
    step = next(line["time"] for line in lines if "lm loss" in line and line["time"] > begun)
    launched = max(since, (attempt / "environment.txt").stat().st_mtime)
    started = max(path.stat().st_mtime for path in attempt.glob(f"node-*/*/attempt_{number}"))
    return [after - before for before, after in itertools.pairwise([since, launched, started, begun, step])]


def measured(slurm: Cluster, folder: Path) -> dict[str, list[float]]:
    """Seconds of PARTS behind sbatch, the kill of a rank, and the kill of a launcher."""
    metrics, since = folder / "ck" / "metrics.jsonl", time.time()
    job: Job = started(slurm, folder)
    logs = folder / "ck" / f"slurm-{job.id}"
    reaches(job, folder, 2)
    times = [since]
    for iteration, pid in ((6, lambda: job.ranks("n2")[0]), (10, lambda: job.launcher("n2"))):
        times.append(time.time())
        os.kill(pid(), signal.SIGKILL)
        reaches(job, folder, iteration)
    job.wait()
    first, again = sorted(logs.iterdir())
    rows = zip((first, first, again), (0, 1, 0), times, strict=True)
    names = ("sbatch", "`kill -9` of a rank", "`kill -9` of a launcher")
    return dict(
        zip(names, (parts(attempt, number, metrics, since) for attempt, number, since in rows), strict=True)
    )


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--repeats", type=int, default=3)
    repeats = parser.parse_args().repeats
    if why := ready():
        sys.exit(why)
    with tempfile.TemporaryDirectory(prefix="slurm-times-") as where:
        folder = Path(where)
        folder.chmod(0o755)
        cluster = folder / "cluster"
        cluster.mkdir()
        with Cluster(cluster) as slurm:
            found = []
            for repeat in range(repeats):
                run = folder / str(repeat)
                run.mkdir()
                found.append(measured(slurm, run))
    print(f"| from | to the first step | {' | '.join(PARTS)} |\n|---|---|{'---|' * len(PARTS)}")
    for name in found[0]:
        medians = [statistics.median(column) for column in zip(*(one[name] for one in found), strict=True)]
        total = statistics.median(sum(one[name]) for one in found)
        print(f"| {name} | {total:.1f} s | {' | '.join(f'{part:.1f}' for part in medians)} |")
    print(f"load {os.getloadavg()[0]:.0f} on {os.cpu_count()} cores, median of {repeats}")


if __name__ == "__main__":
    main()
