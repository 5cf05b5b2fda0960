"""The three examples of CONTRIBUTING.md work as they are printed, each on a copy of the package."""

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
SECTION = (ROOT / "CONTRIBUTING.md").read_text().split("## Three examples\n")[1].split("\n## ")[0]
EXAMPLES = dict(re.findall(r"^### (.+?)\n(.*?)(?=^### |\Z)", SECTION, re.MULTILINE | re.DOTALL))
# A file that the text names, or a block of code, which is of the file that was named last.
PART = re.compile(r"`(megatron/[\w/]+\.py)`:|```(python|diff)\n(.*?)```", re.DOTALL)
TINY = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 2 --seq-length 16 --max-position-embeddings 16 "
    "--micro-batch-size 1 --global-batch-size 8 --train-iters 2 --lr 1e-2 --mock-data --eval-iters 0 "
    "--tokenizer-type NullTokenizer --vocab-size 61 --log-interval 1"
)
SAID = {"A schedule": '"eager-1f1b"', "A flag": "lm loss", "A sharding strategy": "hybrid over 2 ranks"}


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


def trained(words: list[str], root: Path) -> str:
    """What ranks of the copy say that are started as torchrun starts them."""
    standalone, number, ranks, script, *flags = words
    assert (standalone, number) == ("--standalone", "--nproc-per-node")
    return launch.ok(launch.run_forked(flags, ranks=int(ranks), script=str(root / script), cwd=root)).output


def planned(words: list[str], root: Path) -> str:
    """What a script of the copy says that needs no torch."""
    env = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *words], cwd=root, env=env, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.mark.parametrize("name", SAID)
def test_the_example_runs(name, tmp_path):
    for part in ("megatron", "tools", "pretrain_gpt.py"):
        copy = shutil.copytree if (ROOT / part).is_dir() else shutil.copy
        copy(ROOT / part, tmp_path / part)
    apply(EXAMPLES[name], tmp_path)
    output = ""
    for line in re.search(r"```bash\n(.*?)```", EXAMPLES[name], re.DOTALL)[1].splitlines():
        program, *words = shlex.split(line.replace("$TINY", TINY))
        output = trained(words, tmp_path) if program == "torchrun" else planned(words, tmp_path)
    assert SAID[name] in output
    assert len(re.findall(r"lm loss: \d", output)) == 2
