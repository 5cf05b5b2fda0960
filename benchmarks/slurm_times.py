#!/usr/bin/env python3
"""Seconds from sbatch to the first step, and from the kill -9 of a rank to the next attempt's first step, under Slurm.

    python benchmarks/slurm_times.py [--repeats N]      # as root, on a machine with Slurm: tests/slurm/cluster.py

Two nodes of this machine, a rank each, a tiny GPT. What the seconds are spent on is read from the files that a run
leaves: until the batch script starts launchers; until they have imported torch; until the ranks train; the first step.
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

PARTS = ("until srun", "launcher imports", "rank begins to train", "first step")


def parts(attempt: Path, metrics: Path, since: float) -> list[float]:
    """Seconds of PARTS, of an attempt that began after `since`."""
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    begun = next(line["time"] for line in lines if line.get("event") == "start" and line["time"] > since)
    step = next(line["time"] for line in lines if "lm loss" in line and line["time"] > since)
    launched = (attempt / "environment.txt").stat().st_mtime
    imported = max(path.stat().st_mtime for path in attempt.glob("node-*"))
    times = [since, launched, imported, begun, step]
    return [after - before for before, after in itertools.pairwise(times)]


def measured(slurm: Cluster, folder: Path) -> dict[str, list[float]]:
    """Seconds of PARTS for a job's first attempt, and for the one after a kill."""
    metrics, since = folder / "ck" / "metrics.jsonl", time.time()
    job: Job = started(slurm, folder)
    reaches(job, folder, 3)
    logs = folder / "ck" / f"slurm-{job.id}"
    first = parts(logs / "attempt-0.0", metrics, since)
    killed = time.time()
    os.kill(job.ranks("n2")[0], signal.SIGKILL)
    job.wait()
    return {"sbatch": first, "kill -9": parts(logs / "attempt-0.1", metrics, killed)}


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
