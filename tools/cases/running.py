"""Running a case: its runs one after the other in a folder, and what their logs say."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from megatron.core import safe_files
from megatron.core.dist_checkpointing.catalog import TRACKER_NAME
from tools.cases import moments
from tools.cases.case import ROOT, Case, CaseError, Line, Run, RunFailedError, filled
from tools.cases.golden import RunFigures, Values, digest, read_logs
from tools.cases.judge import Judgement, bits, judged
from tools.cases.launchers import Launch, launch
from tools.cases.toy_data import make_toy_data

DATA = "DATA_PATH"


class Runner:
    """Of one case, in a folder of its own. environ: this process's. say: progress, a line at a time."""

    def __init__(
        self,
        case: Case,
        folder: Path,
        launcher: str,
        *,
        environ: Mapping[str, str],
        nodes: int,
        say: Callable[[str], None],
    ) -> None:
        self.case, self.folder, self.launcher, self.nodes, self._say = case, folder, launcher, nodes, say
        self._environ = environ
        self.variables = {**environ, **_folders(folder)}
        if DATA not in environ:
            self.variables[DATA] = str(folder.parent / "data")
        if case.type in ("ckpt-resume", "frozen-resume"):
            self.variables["CHECKPOINT_LOAD_PATH"] = self.variables["CHECKPOINT_SAVE_PATH"]

    def run(self) -> tuple[RunFigures, list[Judgement]]:
        """What the logs say; and what its type compares beside golden values. Raises CaseError."""
        case, values, image, verdicts = self.case, Values(), None, []
        save = Path(self.variables["CHECKPOINT_SAVE_PATH"])
        folders = []
        for number, run in enumerate(case.runs, start=1):
            if case.type == "frozen-resume" and number == 1:
                shutil.copytree(case.frozen, save, dirs_exist_ok=True)
            if case.type == "ckpt-resume" and number == 2:
                _rewind(save, case)
            if case.type == "checkpoint-consistency":
                save = self.folder / f"checkpoints_{number}"
                self.variables["CHECKPOINT_SAVE_PATH"] = str(save)
            seen, image = self._run(run, number, save)
            values |= {
                name if number == 1 else f"{name} (run {number})": points for name, points in seen.items()
            }
            folders.append(save)
        figures = RunFigures(values, image, self.launcher, digest(case))
        if case.type == "checkpoint-consistency":
            verdicts = moments.compare(folders)
        elif case.compares_its_runs:
            verdicts = _second_half(values, judged(figures, case.metrics))
        return figures, verdicts

    def _run(self, run: Run, number: int, save: Path) -> tuple[Values, Mapping[str, object] | None]:
        case, variables = self.case, self.variables
        if run.convert is not None:
            self._convert(run.convert)
        asked = any(f"${{{DATA}}}" in word for line in run.flags.values() for word in line.words)
        if asked and DATA not in self._environ:
            make_toy_data(Path(variables[DATA]))
        words = run.words(variables)
        env = {name: " ".join(filled(line, variables)) for name, line in case.env.items()}
        env.setdefault("OMP_NUM_THREADS", self._environ.get("OMP_NUM_THREADS", "1"))
        self._say(f"{case.name}: run {number} of {len(case.runs)}, {run.ranks} ranks, {self.launcher}")
        job = Launch(case.script, words, run.ranks, env, self.folder, save, self.nodes)
        status, output = launch(self.launcher, job, self._environ)
        if status:
            last = "\n".join(output.splitlines()[-30:])
            raise RunFailedError(f"{case.path}: run {number} has ended with status {status}:\n{last}")
        named = [words[words.index(flag) + 1] for flag in ("--metrics-file", "--save") if flag in words]
        own = [str(path) for path in sorted(self.folder.glob("runs/*"), reverse=True)]
        logs = self.folder / next(iter([*named, *own, str(save)]))
        return read_logs(logs, newest_start=number > 1)

    def _convert(self, line: Line) -> None:
        words = [word for part in filled(line, self.variables) for word in part.split()]
        command = [sys.executable, str(ROOT / "tools" / "checkpoint.py"), *words]
        done = subprocess.run(command, cwd=self.folder, capture_output=True, text=True)
        if done.returncode:
            raise CaseError(f"{line.path}, line {line.number}: {' '.join(words)}: {done.stderr.strip()}")


def _folders(folder: Path) -> dict[str, str]:
    """The variables of Megatron's cases that name folders."""
    save = str(folder / "checkpoints")
    return {
        "CHECKPOINT_SAVE_PATH": save,
        "CHECKPOINT_LOAD_PATH": str(folder / "load"),
        "TENSORBOARD_PATH": str(folder / "tensorboard"),
        "DATA_CACHE_PATH": str(folder / "cache"),
        "OUTPUT_PATH": str(folder),
    }


def _rewind(save: Path, case: Case) -> None:
    """Take the newest checkpoint away, as if the run had ended at the one before."""
    saved = sorted(save.glob("iter_*"))
    if len(saved) < 2:
        raise CaseError(
            f"{case.path}: the first run has saved {len(saved)} checkpoints: a resume needs two, --save-interval"
        )
    shutil.rmtree(saved[-1])
    safe_files.publish_text(save / TRACKER_NAME, str(int(saved[-2].name.removeprefix("iter_"))))


def _second_half(values: Values, metrics: list[str]) -> list[Judgement]:
    """The resumed run's values beside those of the run that went through."""
    made = []
    for name in metrics:
        again = f"{name} (run 2)"
        if again in values and name in values and name != "iteration-time":
            first = {step: value for step, value in values[name].items() if step in values[again]}
            made.append(bits(f"{name}, resumed", first, values[again]))
    return made
