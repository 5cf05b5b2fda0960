"""Megatron-LM's checkpoints imported as a user does it: the model's own weights, and its settings."""

import argparse
import dataclasses
import json

import pytest
import torch
import torch.distributed.checkpoint as dcp

from megatron.core.models.gpt.gpt import GPTModel
from megatron.core.transformer.model_config import TransformerConfig
from tests.harness import launch
from tests.harness.whole_models import load_model
from tools.checkpoint import main

SHAPE = {
    "num_layers": 3, "hidden_size": 32, "num_attention_heads": 4, "seq_length": 16, "max_position_embeddings": 16,
    "position_embedding_type": "rope", "swiglu": True, "add_bias_linear": False, "normalization": "RMSNorm",
    "group_query_attention": True, "num_query_groups": 2, "rotary_base": 500000, "norm_epsilon": 1e-6,
    "untie_embeddings_and_output_weights": True,
}  # fmt: skip


def test_a_torch_dist_checkpoint_goes_on_here(tmp_path, capsys):
    """Layers in one tensor, norms inside linear layers, as Transformer Engine's specification has them."""
    config = TransformerConfig(**SHAPE).resolved()
    model = GPTModel(config, padded_vocab_size=64, seed=5)
    weights = {name: value.detach().clone() for name, value in model.named_parameters()}
    theirs, layers = {}, range(config.num_layers)
    for name, value in weights.items():
        if ".layers." not in name:
            theirs[name] = value
        elif ".layers.0." in name:
            rest = name.replace(".layers.0.", ".layers.")
            rest = rest.replace(".input_layernorm.", ".self_attention.linear_qkv.layer_norm_")
            rest = rest.replace(".pre_mlp_layernorm.", ".mlp.linear_fc1.layer_norm_")
            each = [weights[name.replace(".layers.0.", f".layers.{n}.")] for n in layers]
            theirs[rest] = torch.stack(each)
    folder = tmp_path / "megatron" / "iter_0000007"
    dcp.save(theirs, storage_writer=dcp.FileSystemWriter(folder), no_dist=True)
    (folder.parent / "latest_checkpointed_iteration.txt").write_text("7")
    args = {
        **dataclasses.asdict(config),
        "tokenizer_type": "NullTokenizer",
        "vocab_size": 63,
        "world_size": 8,
        "consumed_train_samples": 56,
    }
    torch.save({"args": argparse.Namespace(**args), "iteration": 7}, folder / "common.pt")
    assert main(["import", "--megatron", str(folder.parent), "--save", str(tmp_path / "ours")]) == 0
    loaded, settings = load_model(tmp_path / "ours")
    for name, value in loaded.named_parameters():
        assert torch.equal(value, weights[name]), name
    assert settings.model.rotary_base == 500000
    words = [*launch.TINY, "--load", str(tmp_path / "ours"), "--use-checkpoint-args", "--finetune"]
    more = (
        "--seq-length 16 --attention-dropout 0 --hidden-dropout 0 --use-checkpoint-args --train-iters".split()
    )
    run = launch.ok(launch.run_forked([*words, *more, "1"], cwd=tmp_path))
    assert "loading checkpoint" in run.output
    _goes_on_by_load(folder, more, run, tmp_path)
    capsys.readouterr()
    args |= {
        "window_size": (7, 0),
        "softmax_type": "off-by-one",
        "glu_linear_offset": 0.0,
        "softmax_scale": None,
    }
    torch.save({"args": argparse.Namespace(**args), "iteration": 7}, folder / "common.pt")
    assert main(["import", "--megatron", str(folder.parent), "--save", str(tmp_path / "again")]) == 3
    says = (
        "its args say --window-size [7, 0], --softmax-type 'off-by-one': models with it cannot be expressed"
    )
    assert says in capsys.readouterr().err
    refused = launch.run_forked(
        [*words[:-1], *more, "1", "--load", str(folder.parent), "--finetune"], cwd=tmp_path
    )
    assert (refused.status, says in refused.output) == (3, True)


def _goes_on_by_load(folder, more, imported, tmp_path):
    """The same folder without an import, by ranks, with its tracker and without."""
    line = [*launch.TINY, "--load", str(folder.parent), *more]
    tp = ["--tensor-model-parallel-size", "2", "--sequence-parallel"]
    tuned = launch.ok(launch.run_forked([*line, "1", "--finetune", *tp], ranks=2, cwd=tmp_path))
    one, other = (float(run.losses()[1].split()[0]) for run in (imported, tuned))
    assert one == pytest.approx(other, rel=1e-5)
    (folder.parent / "latest_checkpointed_iteration.txt").unlink()
    resumed = launch.ok(
        launch.run_forked(
            [*line, "8", "--no-load-optim", "--save", "ck", "--save-interval", "8"], cwd=tmp_path
        )
    )
    assert list(resumed.losses()) == [8], "it goes on"
    state = json.loads((tmp_path / "ck" / "iter_0000008" / "manifest.json").read_text())["common"][
        "train_state"
    ]
    assert (state["iteration"], state["consumed_train_samples"]) == (8, 56 + 8)
    refused = launch.run_forked([*line, "8"], cwd=tmp_path)
    assert refused.status == 3
    assert "no optimizer state" in refused.output
    assert "--no-load-optim or --finetune" in refused.output


def test_what_is_no_checkpoint_is_refused(tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    assert main(["import", "--megatron", str(tmp_path / "empty"), "--save", str(tmp_path / "ours")]) == 3
    assert "no folder mp_rank_" in capsys.readouterr().err
    (tmp_path / "empty" / "latest_checkpointed_iteration.txt").write_text("../../x")
    assert main(["import", "--megatron", str(tmp_path / "empty"), "--save", str(tmp_path / "ours")]) == 3
    assert "expected an iteration" in capsys.readouterr().err
    assert not (tmp_path / "ours").exists()
