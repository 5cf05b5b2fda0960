"""A process under a release of megatron-core, which borrows torch from this one and answers case after case."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import releases

HERE = Path(__file__).resolve().parent


def environment(release: str, megatron: str | None = None) -> dict[str, str]:
    """`python -S` with this on its path has the release, the package and what torch was installed beside: nothing else.
    Without -S this project's own `megatron` could hide the release's. megatron: a folder that takes the wheel's place."""
    import torch

    beside_torch = Path(torch.__file__).resolve().parents[1]
    wheel, *others = releases.path_of(release)
    path = [megatron or wheel, *others, str(HERE.parent / "zbpp_light"), str(beside_torch)]
    kept = {name: value for name, value in os.environ.items() if name != "ZBPP_LIGHT"}
    # Megatron compiles its activations, for minutes on a cold machine: they are computed as they stand.
    eager = {"TORCHDYNAMO_DISABLE": "1", "OMP_NUM_THREADS": "1"}
    return {**kept, **eager, "PYTHONPATH": os.pathsep.join(path)}


class ReleaseProcess:
    """`with ReleaseProcess("0.16.1") as process: process.records(case, [("megatron", None), ("zb-h1", None)])`."""

    def __init__(self, release: str, megatron: str | None = None) -> None:
        self.release, self.megatron = release, megatron
        self._said = tempfile.TemporaryFile("w+")

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

    def records(
        self, case: Any, schedules: Sequence[tuple[str, str | None]], *, memory: bool = False, timeout: float = 300
    ) -> list[list[dict[str, Any]]]:
        """By schedule, by rank. A plan's file stands beside its schedule's name. Raises CaseError with the traceback of the
        rank that failed."""
        asked = {"case": case.__dict__, "schedules": schedules, "memory": memory, "timeout": timeout}
        try:
            self._process.stdin.write(json.dumps(asked) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # it has said why
        line = self._process.stdout.readline()
        if not line:
            raise CaseError(f"megatron-core {self.release} ended:\n{self.said()}")
        reply = json.loads(line)
        if "error" in reply:
            raise CaseError(f"{case.name} under megatron-core {self.release}:\n{reply['error']}")
        return [list(of_schedule) for of_schedule in zip(*reply["records"], strict=True)]

    def said(self) -> str:
        """What it and its ranks have printed so far."""
        self._said.seek(0)
        return self._said.read()


class CaseError(Exception):
    """A case did not run; the message has the rank's traceback."""
