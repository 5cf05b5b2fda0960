"""Runs inside a release: `prove.py` starts it with the release's folder on the path. Cases come in, records go out."""

from __future__ import annotations

import dataclasses
import json
import sys
import traceback
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "zbpp_light" / "examples")]
sys.path += [str(HERE.parent / "zbpp_light"), str(HERE.parents[1] / "tests")]

import torch  # noqa: E402

torch.set_num_threads(1)

import cpu_shims  # noqa: E402

cpu_shims.install()

from cases import Case  # noqa: E402
from harness.ranks import RankContext, run_ranks  # noqa: E402


def on_rank(ctx: RankContext, case: Case, schedules: list[list[Any]], measure_memory: bool) -> list[dict[str, Any]]:
    """The case once for each schedule, one after the other on the same ranks."""
    import training

    records = []
    for schedule, plan in schedules:
        if schedule != "megatron":
            import zbpp_light

            zbpp_light.patch_megatron(**({"plan": plan} if plan else {"schedule": schedule}))
        try:
            records.append(dataclasses.asdict(training.train(case, measure_memory=measure_memory)))
        finally:
            if schedule != "megatron":
                zbpp_light.unpatch_megatron()
    return records


def main() -> None:
    """A line of JSON in: {case, schedules: [[name, plan or null]], memory}; a line out: {records by rank} or {error}."""
    import training  # noqa: F401  before the fork: ranks share what is imported
    import torch._dynamo  # which optimizers import at their first step

    replies = sys.stdout
    sys.stdout = sys.stderr
    for line in sys.stdin:
        asked = json.loads(line)
        case = Case(**asked["case"])
        try:
            by_rank = run_ranks(
                on_rank, case.ranks, case, asked["schedules"], asked.get("memory", False), timeout=asked["timeout"]
            )
            reply = {"records": by_rank}
        except Exception:
            reply = {"error": traceback.format_exc()}
        print(json.dumps(reply), file=replies, flush=True)


if __name__ == "__main__":
    main()
