"""Environments beside `.venv` for tests against other people's packages: `make test-wheels`.

An environment has the wheels of its row and borrows torch and the packages of development from the Python that runs
the tests, by a `.pth` file, so it takes seconds. It is kept in `.venv-wheels/NAME` until its row, the lenders or Python
change. The package `megatron` is ours in some and megatron-core's in others: no process can have both.

A test asks its fixture `wheels` for an environment by name, runs a script of this folder in it, and compares what the
script writes, mostly files of numbers, with what this process has computed with our package:

    def test_losses_are_theirs(wheels, tmp_path):
        env = wheels("megatron-core-0.16.1")
        env.run("megatron_core_run.py", "train", tmp_path / "theirs.json")
        assert ours() == pytest.approx(json.loads((tmp_path / "theirs.json").read_text()))

Scripts are not collected; they may import each other, and modules of tests/harness and extras/zbpp_light/examples by
their own names (`import ranks`), which need no package `megatron`. Wheels come from the package index. Where it cannot
be reached a test is skipped with pip's message; as root in CI, where everything has to run, it fails.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path
from typing import NoReturn

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = Path(__file__).resolve().parent
KEPT_IN = ROOT / ".venv-wheels"
MADE = "made.json"  # what an environment was made of; written last


@dataclasses.dataclass(frozen=True)
class Row:
    """requirements: of pip. checkout: whether `import megatron` is this checkout's. dependencies: whether pip installs
    what the requirements need and nobody lends."""

    requirements: tuple[str, ...]
    checkout: bool = False
    dependencies: bool = False


ENVIRONMENTS = {
    # Its writer of checkpoints needs psutil.
    "megatron-core-0.16.1": Row(("megatron-core==0.16.1", "psutil==7.2.2")),
    # Its model of Hugging Face's needs accelerate.
    "lm-eval-0.4.13": Row(("lm-eval==0.4.13", "accelerate==1.15.0"), checkout=True, dependencies=True),
}


class UnavailableError(Exception):
    """An environment cannot be made here; why."""


@dataclasses.dataclass(frozen=True)
class Environment:
    """folder: of the environment."""

    folder: Path

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"

    def run(self, script: str, *words: object, cwd: Path | None = None, timeout_s: float = 100.0) -> str:
        """What a script of this folder prints. Raises AssertionError with all it printed unless it ends with 0."""
        unwanted = ("PYTHONPATH", "PYTHONHOME")
        variables = {name: value for name, value in os.environ.items() if name not in unwanted}
        folders = (SCRIPTS, ROOT / "tests" / "harness", ROOT / "extras" / "zbpp_light" / "examples")
        paths = os.pathsep.join(map(str, folders))
        done = subprocess.run(
            [self.python, SCRIPTS / script, *map(str, words)],
            cwd=cwd,
            env={
                **variables,
                "PYTHONPATH": paths,
                "OMP_NUM_THREADS": "1",
                "HF_HUB_OFFLINE": "1",
                "TORCHDYNAMO_DISABLE": "1",  # megatron-core compiles its activations, for longer than they run here
            },
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
        assert done.returncode == 0, f"{script} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}"
        return done.stdout


def environment(name: str) -> Environment:
    """The environment of a row, made if it is not there as it has to be. Raises UnavailableError."""
    row, made = ENVIRONMENTS[name], Environment(KEPT_IN / name)
    facts = {"row": dataclasses.asdict(row), "lenders": _lenders(), "python": sys.version}
    wanted = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
    marker = made.folder / MADE
    if marker.exists() and marker.read_text() == wanted:
        return made
    shutil.rmtree(made.folder, ignore_errors=True)
    venv.create(made.folder, with_pip=False, symlinks=True)
    asked = "import sysconfig; print(sysconfig.get_path('purelib'))"
    packages = Path(subprocess.check_output([made.python, "-c", asked], text=True).strip())
    # A .pth file of a folder that a .pth file names is not read: an editable install of ours is not borrowed.
    borrowed = [*_lenders(), *([str(ROOT)] if row.checkout else [])]
    (packages / "borrowed.pth").write_text("".join(f"{path}\n" for path in borrowed))
    pip = [
        sys.executable,
        "-m",
        "pip",
        "--disable-pip-version-check",
        "--python",
        str(made.python),
        "install",
    ]
    # Without bytecode of all that is installed: what is imported gets its own.
    options = ["-q", "--no-compile", "--only-binary", ":all:", "--no-deps"]
    if row.dependencies:  # of which some are no wheels
        options = ["-q", "--no-compile", "--prefer-binary", "-c", str(ROOT / "requirements.lock")]
    done = subprocess.run([*pip, *options, *row.requirements], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise UnavailableError(f"{name}: pip: {(done.stderr or done.stdout).strip()[-1000:]}")
    marker.write_text(wanted)
    return made


def unavailable(why: str) -> NoReturn:
    """Skips the test; as root in CI, where everything has to run, it fails."""
    if os.environ.get("CI") and os.getuid() == 0:
        pytest.fail(why)
    pytest.skip(why)


def _lenders() -> list[str]:
    """Folders of packages that this process imports from."""
    return [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]


if __name__ == "__main__":
    for each in sys.argv[1:] or ENVIRONMENTS:
        print(environment(each).folder)
