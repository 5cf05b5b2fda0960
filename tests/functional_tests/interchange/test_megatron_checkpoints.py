"""Megatron-LM's checkpoints imported as a user does it: the model's own weights, and its settings."""

import argparse
import dataclasses

import torch
import torch.distributed.checkpoint as dcp

from megatron.core.models.gpt.gpt import GPTModel
from megatron.core.transformer.model_config import TransformerConfig
from tests.harness import launch
from tools.checkpoint import main
from tools.generation.model import load_model

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
    }
    torch.save({"args": argparse.Namespace(**args), "iteration": 7}, folder / "common.pt")
    assert main(["import", "--megatron", str(folder.parent), "--save", str(tmp_path / "ours")]) == 0
    loaded, settings = load_model(str(tmp_path / "ours"), None, "cpu")
    for name, value in loaded.named_parameters():
        assert torch.equal(value, weights[name]), name
    assert settings.model.rotary_base == 500000
    words = [*launch.TINY, "--load", str(tmp_path / "ours"), "--use-checkpoint-args", "--finetune"]
    words += ["--train-iters", "1", "--seq-length", "16"]
    run = launch.ok(launch.run_forked(words, cwd=tmp_path))
    assert "loading checkpoint" in run.output


def test_what_is_no_checkpoint_is_refused(tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    assert main(["import", "--megatron", str(tmp_path / "empty"), "--save", str(tmp_path / "ours")]) == 3
    assert "no folder mp_rank_*" in capsys.readouterr().err
    (tmp_path / "empty" / "latest_checkpointed_iteration.txt").write_text("../../x")
    assert main(["import", "--megatron", str(tmp_path / "empty"), "--save", str(tmp_path / "ours")]) == 3
    assert "expected an iteration" in capsys.readouterr().err
    assert not (tmp_path / "ours").exists()
