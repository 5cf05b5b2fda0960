"""Runs inside a release: `ReleaseProcess` starts it with the release's folder on the path. What to run comes in, line
by line, and what it gave goes out."""

from __future__ import annotations

import dataclasses
import importlib
import json
import sys
import traceback
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(HERE), str(HERE.parent / "zbpp_light" / "examples")]
sys.path += [str(ROOT / "tests"), str(ROOT / "tests" / "wheels")]

import torch  # noqa: E402

torch.set_num_threads(1)

import cpu_shims  # noqa: E402

cpu_shims.install()

import torch._dynamo  # noqa: E402  optimizers import it at their first step: once, before ranks are forked
from harness.ranks import RankContext, rank_outcomes  # noqa: E402


def main() -> None:
    """A line of JSON in: {function: "module:name", ranks, arguments, timeout}; one out: what became of each rank."""
    replies, sys.stdout = sys.stdout, sys.stderr
    for line in sys.stdin:
        asked = json.loads(line)
        try:
            module, _, name = asked["function"].partition(":")
            function = getattr(
                importlib.import_module(module), name
            )  # before the fork: ranks share what is imported

            def on_rank(ctx: RankContext) -> object:
                return function(ctx, **asked["arguments"])  # noqa: B023  of this line

            outcomes = rank_outcomes(on_rank, asked["ranks"], timeout=asked["timeout"])
            reply = {"outcomes": [dataclasses.asdict(outcome) for outcome in outcomes]}
        except Exception:
            reply = {"error": traceback.format_exc()}
        print(json.dumps(reply), file=replies, flush=True)


if __name__ == "__main__":
    main()
