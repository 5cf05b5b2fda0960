"""Whole forked runs beside each other: each different one once, what it printed and saved, compared bit for bit or but
for rounding; copies of their checkpoints; launch lines that are refused before torch is imported."""

from __future__ import annotations

import functools
import json
import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.harness import launch

VALIDATION = re.compile(r" validation loss at (iteration \d+(?: on \w+ set)?) \| lm loss value: (\S+)")


class Run:
    """A finished run, its lines and what it saved into ck."""

    def __init__(self, folder: Path, finished: launch.Finished) -> None:
        self.folder, self.output = folder, finished.output
        self.printed = finished.losses()  # iteration -> "loss grad-norm"
        self.validation: list[tuple[str, str]] = VALIDATION.findall(finished.output)

    @property
    def lines(self) -> list[str]:
        """Everything that is said of each iteration, but for the times."""
        found = re.findall(r"^ \[[^\]]*\] (iteration .*)$", self.output, re.MULTILINE)
        return [re.sub(r"elapsed time per iteration \(ms\): \S+ \| ", "", line) for line in found]

    @property
    def numbers(self) -> dict[int, list[float]]:
        """Loss and gradient norm of each iteration."""
        return {n: [float(word) for word in text.split()] for n, text in self.printed.items()}

    @property
    def plan(self) -> dict[str, Any]:
        """As told at the start."""
        told: dict[str, Any] = json.loads(re.findall(r"^ > plan: (\{.*\})$", self.output, re.MULTILINE)[0])
        return told

    @functools.cached_property
    def digests(self) -> dict[str, str]:
        """Of the newest checkpoint."""
        newest = (self.folder / "ck" / "latest_checkpointed_iteration.txt").read_text()
        return launch.digests(self.folder / "ck", int(newest))


def runs_of(
    base: Sequence[str], new_folder: Callable[[str], Path], *, left_out_with_data: Sequence[str] = ()
) -> Callable[..., Run]:
    """run(ranks, flags, script, data=, base=): the base with more flags, each different run once.

    data: a corpus instead of the base's own; left_out_with_data: the flags that it replaces.
    """

    @functools.cache
    def run(
        ranks: int,
        flags: str,
        script: str = launch.GPT,
        data: Path | None = None,
        base: tuple[str, ...] = tuple(base),
    ) -> Run:
        folder = new_folder("run")
        words = [*base, *flags.split()]
        if data is not None:
            words = [word for word in words if word not in left_out_with_data] + ["--data-path", str(data)]
        return Run(folder, launch.ok(launch.run_forked(words, ranks=ranks, script=script, cwd=folder)))

    return run


def assert_same_bits(one: Run, other: Run) -> None:
    """Every line but for the times, evaluations, and every tensor of the checkpoint."""
    assert one.lines
    assert other.lines == one.lines
    assert other.validation == one.validation
    assert other.digests == one.digests


def assert_same_but_for_rounding(one: Run, other: Run, rel: float = 2e-6) -> None:
    """Losses, gradient norms and evaluations, of which seven digits are printed; the names of the tensors saved."""
    assert one.printed
    assert list(other.printed) == list(one.printed)
    for iteration, expected in one.numbers.items():
        assert other.numbers[iteration] == pytest.approx(expected, rel=rel), iteration
    for (where, expected_loss), (found_where, loss) in zip(one.validation, other.validation, strict=True):
        assert found_where == where
        assert float(loss) == pytest.approx(float(expected_loss), rel=rel), where
    assert set(other.digests) == set(one.digests)


def copy_checkpoint(source: Path, target: Path, iteration: int) -> None:
    """A run's checkpoint of an iteration, as if a run in the target folder had ended there."""
    name = f"iter_{iteration:07d}"
    shutil.copytree(source / "ck" / name, target / "ck" / name)
    (target / "ck" / "latest_checkpointed_iteration.txt").write_text(str(iteration))


def common_state(folder: Path, iteration: int) -> dict[str, Any]:
    """What a checkpoint holds besides tensors."""
    manifest = json.loads((folder / "ck" / f"iter_{iteration:07d}" / "manifest.json").read_text())
    common: dict[str, Any] = manifest["common"]
    return common


def refused_before_torch(words: Sequence[str], *, ranks: int, folder: Path) -> str:
    """What a run of so many ranks says that ends with status 2; a torch that cannot be imported is not missed."""
    (folder / "torch.py").write_text("raise SystemExit('torch was imported')")
    size = str(ranks)
    env = {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": size,
        "LOCAL_WORLD_SIZE": size,
        "PYTHONPATH": str(folder),
    }
    output = launch.ended(launch.run(words, cwd=folder, env=env), 2).output
    assert "torch was imported" not in output
    assert "Traceback" not in output
    return output
