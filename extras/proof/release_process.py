"""A process under a release of megatron-core, which borrows torch from this one and answers case after case."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import releases
from cases import Case

HERE = Path(__file__).resolve().parent


def environment(release: str, megatron: str | None = None) -> dict[str, str]:
    """`python -S` with this on its path has the release, the package and what torch was installed beside: nothing else.
    Without -S this project's own `megatron` could hide the release's. megatron: a folder instead of the wheel's."""
    import torch

    beside_torch = Path(torch.__file__).resolve().parents[1]
    wheel, *others = releases.path_of(release)
    path = [megatron or wheel, *others, str(HERE.parent / "zbpp_light"), str(beside_torch)]
    kept = {name: value for name, value in os.environ.items() if name != "ZBPP_LIGHT"}
    # Megatron compiles its activations, for minutes on a cold machine: they are computed as they stand.
    eager = {"TORCHDYNAMO_DISABLE": "1", "OMP_NUM_THREADS": "1"}
    return {**kept, **eager, "PYTHONPATH": os.pathsep.join(path)}


class ReleaseProcess:
    """`with ReleaseProcess("0.16.1") as process: process.records(case, [None, {"schedule": "zb-h1"}])`. A
    process runs many cases: what is imported is imported once."""

    def __init__(self, release: str, megatron: str | None = None) -> None:
        self.release, self.megatron = release, megatron
        self._said = tempfile.TemporaryFile("w+")  # noqa: SIM115  closed in __exit__

    def __enter__(self) -> ReleaseProcess:
        self._process = subprocess.Popen(
            [sys.executable, "-S", str(HERE / "under_release.py")],
            env=environment(self.release, self.megatron),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._said,
            text=True,
        )
        return self

    def __exit__(self, *exc: object) -> None:
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()
        self._said.close()

    def run(self, function: str, ranks: int, *, timeout: float = 300, **arguments: Any) -> list[Any]:
        """`function(ctx, **arguments)` on forked ranks; what it gave, by rank. `function` is "module:name", of this
        folder or tests/wheels. Raises CaseError with the tracebacks of the ranks that failed."""
        outcomes = self.outcomes(function, ranks, timeout=timeout, **arguments)
        failed = [
            f"rank {each['rank']}: {each['died'] or each['error']}"
            for each in outcomes
            if not succeeded(each)
        ]
        if failed:
            raise CaseError("\n".join([f"{function} under megatron-core {self.release}:", *failed]))
        return [each["value"] for each in outcomes]

    def outcomes(
        self, function: str, ranks: int, *, timeout: float, **arguments: Any
    ) -> list[dict[str, Any]]:
        """Like `run` where ranks are meant to fail: {rank, value, error (its traceback), died (how)} of each. All ranks
        have the whole time, whatever becomes of others."""
        asked = {"function": function, "ranks": ranks, "arguments": arguments, "timeout": timeout}
        with contextlib.suppress(BrokenPipeError):  # it has said why
            self._process.stdin.write(json.dumps(asked) + "\n")
            self._process.stdin.flush()
        line = self._process.stdout.readline()
        reply = json.loads(line or "{}")
        if "outcomes" not in reply:
            raise CaseError(
                f"{function} under megatron-core {self.release}:\n{reply.get('error') or self.said()}"
            )
        outcomes: list[dict[str, Any]] = reply["outcomes"]
        return outcomes

    def records(
        self, case: Case, schedules: Sequence[dict[str, str] | None], *, memory: bool = False
    ) -> list[list[dict[str, Any]]]:
        """Records of a case (`training.Record`) by schedule, by rank. A schedule: arguments of `patch_megatron`, or
        None for Megatron's own."""
        arguments = {"case": dataclasses.asdict(case), "schedules": schedules, "measure_memory": memory}
        by_rank = self.run("training:train_each", case.ranks, **arguments)
        return [list(of_schedule) for of_schedule in zip(*by_rank, strict=True)]

    def said(self) -> str:
        """What it and its ranks have printed so far."""
        self._said.seek(0)
        return self._said.read()


def succeeded(outcome: dict[str, Any]) -> bool:
    return outcome["error"] is None and outcome["died"] is None


class CaseError(Exception):
    """A case did not run; the message has the rank's traceback."""
