"""tools/checkpoint.py inspect"""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megatron.core.dist_checkpointing.saving import save
from tests.harness.pieces import whole_tensors
from tools.checkpoint import main

REPOSITORY = Path(__file__).resolve().parents[3]


@pytest.fixture
def root(tmp_path):
    for iteration in (5, 6):
        tensors = {"w": torch.ones(3, 4), "s": torch.tensor(1.0, dtype=torch.bfloat16)}
        save(
            tmp_path,
            iteration,
            whole_tensors(tensors, "model."),
            {"consumed_train_samples": iteration * 8},
            {},
        )
    return tmp_path


def test_json(root, capsys):
    assert main(["inspect", str(root), "--json", "--verify"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["iteration"], facts["consumed_train_samples"], facts["verified"]) == (6, 48, True)
    assert facts["tensors"]["model.w"] == {"dtype": "F32", "shape": [3, 4], "chunks": 1}
    assert facts["total_bytes"] == 3 * 4 * 4 + 2


def test_table(root, capsys):
    assert main(["inspect", str(root), "--ckpt-step", "5"]) == 0
    out = capsys.readouterr().out
    assert "iteration 5, 40 samples" in out
    assert "model.w   F32  3 x 4" in out
    assert "model.s  BF16  scalar" in out


def test_a_flipped_bit_is_found_by_verify(root, capsys):
    path = root / "iter_0000006" / "shard_00000.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert main(["inspect", str(root)]) == 0
    assert main(["inspect", str(root), "--verify"]) == 3
    error = capsys.readouterr().err
    assert f"{path}: SHA-256 is" in error


def test_nothing_there(tmp_path, capsys):
    assert main(["inspect", str(tmp_path)]) == 3
    assert "no checkpoint in" in capsys.readouterr().err


def test_the_folder_alone_is_told_the_word(root, capsys):
    """`megatron-zero checkpoint DIR` showed a checkpoint before there were other words."""
    with pytest.raises(SystemExit, match="2"):
        main([str(root)])
    assert f"did you mean  inspect {root}  ?" in capsys.readouterr().err


def test_listing_brings_no_torch(root):
    code = (
        "import sys; from tools.checkpoint import main; "
        f"assert main(['inspect', {str(root)!r}]) == 0; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=REPOSITORY, capture_output=True)
