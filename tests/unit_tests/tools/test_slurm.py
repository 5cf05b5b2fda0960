"""`megatron-zero slurm`: the script of a launch line, checked without Slurm and without torch."""

import subprocess
import sys
from pathlib import Path

import pytest

from tools import slurm

ROOT = Path(__file__).resolve().parents[3]
TEMPLATE = (ROOT / "examples" / "slurm" / "train.sbatch").read_text()
LINE = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32 "
    "--micro-batch-size 2 --global-batch-size 64 --train-iters 10 --lr 1e-3 --mock-data --tokenizer-type ByteTokenizer "
    "--pipeline-model-parallel-size 2 --save-interval 5"
).split()


def called(monkeypatch, capsys, *words):
    """(status, output, errors)."""
    monkeypatch.setattr(sys, "argv", ["slurm.py", *words])
    status = slurm.main()
    said = capsys.readouterr()
    return status, said.out, said.err


def test_the_script_is_train_sbatch_with_these_flags(monkeypatch, capsys):
    flags = [
        "--nodes=4",
        "--gpus-per-node",
        "h100:8",
        "-t",
        "1:00:00",
        "--requeue",
        "--qos=long",
        "--container",
        "run it",
    ]
    status, output, errors = called(monkeypatch, capsys, *flags, "--", *LINE, "--save", "a b")
    assert (status, errors) == (0, "")
    lines = output.splitlines()
    wanted = [
        "--nodes=4",
        "--gpus-per-node=h100:8",
        "--time=1:00:00",
        "--requeue",
        "--qos=long",
        "--signal=TERM@300",
    ]
    for flag in wanted:
        assert lines.count(f"#SBATCH {flag}") == 1
    assert not [line for line in lines if line.startswith("#SBATCH --container")]
    assert {"RANKS_PER_NODE=8", "CONTAINER='run it'"} <= set(lines)
    assert f"set -- 'a b' {' '.join(LINE)} --save 'a b'" in lines
    # All else is the example's.
    ours = ("#SBATCH", "RANKS_PER_NODE=8", "CONTAINER='run", "LAUNCH=", "set -- ")
    rest = [line for line in lines if not line.startswith(ours)]
    assert rest == [line for line in TEMPLATE.splitlines() if not line.startswith("#SBATCH")]
    assert subprocess.run(["bash", "-n"], input=output, text=True, check=False).returncode == 0


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--nodes", "2", "--", *LINE], "--save DIR is missing behind the --"),
        (["--nodes", "2", *LINE], "the launch line stands behind a --"),
        (["--nodes", "2-4", "--", *LINE, "--save", "ck"], "--nodes 2-4: expected a number, 1 or more"),
        (["4", "--", *LINE, "--save", "ck"], "'4' is the value of no flag"),
        (["--ranks-per-node", "--", *LINE, "--save", "ck"], "--ranks-per-node needs a value"),
        (["--nodes", "3", "--", *LINE, "--save", "ck"], "pipeline-model-parallel-size"),
        (["--", *LINE, "--save", "ck", "--num-layer", "2"], "did you mean --num-layers?"),
    ],
)
def test_what_is_wrong_is_told_and_no_script_printed(monkeypatch, capsys, words, why):
    status, output, errors = called(monkeypatch, capsys, *words)
    assert (status, output) == (2, "")
    assert why in errors


def test_without_sbatch(monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    status, output, errors = called(monkeypatch, capsys, "--submit", "--", *LINE, "--save", "ck")
    assert status == 2
    assert "#SBATCH --nodes=2" in output
    assert "there is no sbatch on this machine" in errors
