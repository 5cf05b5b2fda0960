"""The four examples of CONTRIBUTING.md work as they are printed, each on a copy of the project."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness import launch

ROOT = Path(__file__).resolve().parents[3]
SECTION = (ROOT / "CONTRIBUTING.md").read_text().split("## Four examples\n")[1].split("\n## ")[0]
EXAMPLES = dict(re.findall(r"^### (.+?)\n(.*?)(?=^### |\Z)", SECTION, re.MULTILINE | re.DOTALL))
# A file that the text names, or a block of code, which is of the file that was named last.
FILE = re.compile(r"(?:^# |`)(megatron/[\w/]+\.py)", re.MULTILINE)
PART = re.compile(r"`((?:megatron|tests)/[\w/]+\.py)`:|```(python|diff)\n(.*?)```", re.DOTALL)
TINY = " ".join(
    re.search(r'^TINY="(.*?)"', SECTION, re.MULTILINE | re.DOTALL)[1].replace("\\\n", " ").split()
)
LINT_IMPORTS = "from importlinter.cli import lint_imports_command; lint_imports_command()"
CONCERNED = (
    *(
        "tests/unit_tests/core/pipeline_parallel/plan",
        "tests/unit_tests/tools",
        "tests/unit_tests/docs/test_docs.py",
    ),
    *("tests/unit_tests/test_house_rules.py", "tests/unit_tests/core/distributed"),
    *(
        f"tests/unit_tests/training/test_{name}.py"
        for name in ("schedule_table", "rules_pipeline", "flag_table")
    ),
)
SAID = {
    "A schedule": '"eager-1f1b"',
    "A flag": "lm loss",
    "A sharding strategy": "hybrid over 2 ranks",
    "An architecture of Hugging Face": "......",  # names and shapes, both ways, logits
}


def apply(example: str, root: Path) -> None:
    """Write new files, and put the lines of a diff where its other lines are."""
    for named, kind, code in PART.findall(example):
        if named:
            file = root / named
        elif kind == "python":  # a new file, which its first line names
            (root / code.split("\n")[0].removeprefix("# ")).write_text(code)
        else:
            lines = code.splitlines(keepends=True)
            old, new = ("".join(line[1:] for line in lines if line[0] != sign) for sign in "+-")
            text = file.read_text()
            assert text.count(old) == 1, old
            file.write_text(text.replace(old, new))


def environment(root: Path) -> dict[str, str]:
    """Of commands in the copy, which find it before anything else, and compile its files once."""
    return {
        **os.environ,
        "PYTHONPATH": str(root),
        "OMP_NUM_THREADS": "1",
        "PYTHONDONTWRITEBYTECODE": "",
    }


def trained(words: list[str], root: Path) -> str:
    """What ranks of the copy say that are started as the launcher starts them."""
    launcher, number, ranks, behind, script, *flags = words
    assert (launcher, number, behind) == ("tools/launch.py", "--nproc-per-node", "--")
    return launch.ok(launch.run_forked(flags, ranks=int(ranks), script=str(root / script), cwd=root)).output


def planned(words: list[str], root: Path) -> str:
    """What a script of the copy says that needs no torch."""
    env = environment(root)
    done = subprocess.run(
        [sys.executable, *words], cwd=root, env=env, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def recipe(target):
    """The commands of a target of the Makefile, with this environment's programs."""
    lines = (ROOT / "Makefile").read_text().split(f"\n{target}: ")[1].split("\n\n")[0].splitlines()[1:]
    programs = {"python": [sys.executable], "lint-imports": [sys.executable, "-c", LINT_IMPORTS]}
    for line in lines:
        program, *words = line.strip().removeprefix("$(BIN)/").split()
        yield [*programs.get(program, [sys.executable, "-m", program]), *words]


def done(words, root):
    """A command, run in the copy."""
    env = environment(root)
    ended = subprocess.run(words, cwd=root, env=env, capture_output=True, text=True, timeout=600, check=False)
    assert ended.returncode == 0, f"{shlex.join(words)}\n{ended.stdout}{ended.stderr}"


def copied(name, root):
    """The project with an example in it."""
    words = ["git", "ls-files", "-co", "--exclude-standard"]
    listed = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True)
    for file in filter(os.path.isfile, (ROOT / path for path in listed.stdout.split("\n") if path)):
        target = root / file.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, target)
    apply(EXAMPLES[name], root)


@pytest.mark.grid
@pytest.mark.parametrize(
    "name", [name if name == "A flag" else pytest.param(name, marks=pytest.mark.grid) for name in SAID]
)
def test_the_example_runs_and_passes_what_make_lint_checks(name, tmp_path):
    copied(name, tmp_path)
    output = ""
    for line in re.search(r"```bash\n(.*?)```", EXAMPLES[name], re.DOTALL)[1].splitlines():
        program, *words = shlex.split(line.replace("$TINY", TINY))
        if program == "make":
            for command in recipe(words[0]):
                done(command, tmp_path)
            continue
        output = trained(words, tmp_path) if "tools/launch.py" in words else planned(words, tmp_path)
    assert SAID[name] in output
    assert len(re.findall(r"lm loss: \d", output)) == 2 * ("tools/launch.py" in EXAMPLES[name])
    for command in recipe("lint"):
        if "mypy" in command:  # what imports torch takes a minute
            files = [
                file
                for file in FILE.findall(EXAMPLES[name])
                if "import torch" not in (tmp_path / file).read_text()
            ]
            command += [*files, "--follow-imports=silent"]
        if "ruff" in command or "--check" in command or name == "A schedule":
            done(command, tmp_path)


@pytest.mark.full
@pytest.mark.parametrize("name", SAID)
def test_the_example_passes_the_tests_concerned(name, tmp_path):
    copied(name, tmp_path)
    for command in recipe("docs"):
        done(command, tmp_path)
    done(
        [sys.executable, "-m", "pytest", "-q", "-m", "not full", "-p", "no:cacheprovider", *CONCERNED],
        tmp_path,
    )
