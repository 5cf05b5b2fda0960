"""Megatron-LM's checkpoints imported as a user does it: the model's own weights, and its settings."""

import argparse
import dataclasses
import json

import pytest
import torch
import torch.distributed.checkpoint as dcp

from megatron.core.models.gpt.gpt import GPTModel
from megatron.core.transformer.model_config import TransformerConfig
from megatron.interchange.foreign_checkpoint import open_megatron
from tests.harness import launch
from tests.harness.stored_values import stored_values
from tests.harness.whole_models import load_model
from tools.checkpoint import main
from tools.conversion import contents, stream, torch_dist

SHAPE = {
    "num_layers": 3, "hidden_size": 32, "num_attention_heads": 4, "seq_length": 16, "max_position_embeddings": 16,
    "position_embedding_type": "rope", "swiglu": True, "add_bias_linear": False, "normalization": "RMSNorm",
    "group_query_attention": True, "num_query_groups": 2, "rotary_base": 500000, "norm_epsilon": 1e-6,
    "untie_embeddings_and_output_weights": True,
}  # fmt: skip


@pytest.mark.grid
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
    assert main(["compare", str(folder.parent), str(tmp_path / "ours")]) == 0
    assert "every tensor is the same" in capsys.readouterr().out
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


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run of ours with 16-bit weights, its optimizer's states and two checkpoints."""
    folder = tmp_path_factory.mktemp("trained")
    words = [*launch.TINY, "--bf16", "--swiglu", "--position-embedding-type", "rope", "--save", "ck"]
    launch.ok(launch.run_forked([*words, "--train-iters", "2", "--save-interval", "1"], cwd=folder))
    return folder


def tensors_of(folder, **opened):
    source = open_megatron(folder, **opened) if "optimizer" in opened else contents.newest(folder)
    return stored_values(source)


def export(folder, to, *more):
    return main(["export", "--load", str(folder / "ck"), "--megatron", str(to), *more])


@pytest.mark.grid
def test_out_and_in_again_changes_no_bit_of_weights_and_optimizer(trained, tmp_path, monkeypatch):
    """Pieces of few rows, several files; what a run goes on to is the same (tests/wheels has megatron-core read it)."""
    monkeypatch.setattr(torch_dist, "PIECE_BYTES", 1000)
    assert export(trained, tmp_path / "out", "--max-shard-size", "30KB") == 0
    assert len(list((tmp_path / "out" / "iter_0000002").glob("__0_*.distcp"))) > 3
    assert not list((tmp_path / "out" / "iter_0000002").glob(".__*"))
    assert main(["import", "--megatron", str(tmp_path / "out"), "--save", str(tmp_path / "again")]) == 0
    before, after = tensors_of(trained / "ck"), tensors_of(tmp_path / "again")
    assert before.keys() == after.keys()
    assert all(torch.equal(value, after[name]) for name, value in before.items())
    runs = []
    for load in (trained / "ck", tmp_path / "again", tmp_path / "out"):
        line = [*launch.TINY, "--bf16", "--use-checkpoint-args", "--use-checkpoint-opt_param-scheduler"]
        line += ["--load", str(load), "--train-iters", "3"]
        runs.append(launch.ok(launch.run_forked(line, cwd=tmp_path)).losses())
    assert runs[0] == runs[1] == runs[2]
    assert list(runs[0]) == [3]


def test_dtypes_and_what_is_left_out(trained, tmp_path, capsys):
    assert export(trained, tmp_path / "refused", "--dtype", "float32") == 3
    assert "--dtype float32 is for weights alone: add --no-load-optim" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
    weights = ["--no-load-optim", "--dtype"]
    assert export(trained, tmp_path / "fp32", *weights, "float32", "--ckpt-step", "1") == 0
    assert (tmp_path / "fp32" / "iter_0000001").exists()
    assert export(trained, tmp_path / "newest", *weights, "float32") == 0
    before = tensors_of(trained / "ck")
    for name, value in tensors_of(tmp_path / "newest", optimizer=True).items():
        main_weight = before[name.replace("model.", "optimizer.main_weight.", 1)]
        assert torch.equal(value, main_weight), name
    into = ["import", "--megatron", str(tmp_path / "newest"), "--save", str(tmp_path / "ours")]
    assert main([*into, "--dtype", "bfloat16"]) == 0
    manifest = json.loads((tmp_path / "ours" / "iter_0000002" / "manifest.json").read_text())
    assert {tensor["dtype"] for tensor in manifest["tensors"].values()} == {"BF16"}
    assert manifest["common"]["train_state"]["consumed_train_samples"] == 16
    assert main([*into, "--dtype", "bfloat16"]) == 0, "finished by the earlier call"
    assert main(into) == 3
    for line in (["export", "--load", "x", "--megatron", "y", "--like", "z"], ["import", "--hf", "x", "--save", "y",
                 "--no-load-optim"]):  # fmt: skip
        with pytest.raises(SystemExit) as ended:
            main(line)
        assert ended.value.code == 2


def test_a_killed_export_goes_on(trained, tmp_path, capsys, monkeypatch):
    """Finished files are not written again, and the result is what one call would have made."""
    small = ["--max-shard-size", "30KB"]
    assert export(trained, tmp_path / "whole", *small) == 0
    written, write = [], stream._write

    def killed_at_the_third(path, *rest):
        if len(written) == 2:
            path.with_name(f".{path.name}.part").write_bytes(b"half")
            raise KeyboardInterrupt
        written.append(path.name)
        return write(path, *rest)

    monkeypatch.setattr(stream, "_write", killed_at_the_third)
    assert export(trained, tmp_path / "out", *small) == 130
    assert not (tmp_path / "out").exists()
    monkeypatch.setattr(stream, "_write", lambda path, *rest: written.append(path.name) or write(path, *rest))
    assert export(trained, tmp_path / "out", *small) == 0
    assert len(written) == len(set(written)), "each once"
    assert "2 of " in capsys.readouterr().err
    whole, out = (tensors_of(tmp_path / name, optimizer=True) for name in ("whole", "out"))
    assert all(torch.equal(value, out[name]) for name, value in whole.items())
    assert {path.name for path in tmp_path.iterdir()} == {"whole", "out"}


def test_all_that_does_not_fit_is_listed_before_a_byte_is_written(trained, tmp_path, capsys):
    assert export(trained, tmp_path / "out") == 0
    common = tmp_path / "out" / "iter_0000002" / "common.pt"
    saved = torch.load(common, weights_only=False)
    saved["args"].add_bias_linear = False
    torch.save(saved, common)
    into = ["import", "--megatron", str(tmp_path / "out"), "--save", str(tmp_path / "ours")]
    assert main(into) == 3
    unused = "tensors that this run does not have: model.decoder.layers.0.mlp.linear_fc1.bias, model.decoder.layers."
    assert unused in capsys.readouterr().err
    saved["args"].ffn_hidden_size = 48
    torch.save(saved, common)
    capsys.readouterr()
    assert main(into) == 3
    message = capsys.readouterr().err
    assert "tensor model.decoder.layers.0.mlp.linear_fc1.weight: expected shape (96, 32)" in message
    assert "tensor optimizer.exp_avg.decoder.layers.0.mlp.linear_fc1.weight" in message
    assert not (tmp_path / "ours").exists()


def test_a_model_that_megatron_lacks_is_refused_by_its_settings(tmp_path, capsys):
    words = [
        *launch.TINY,
        "--geglu-tanh",
        "--embedding-multiplier",
        "2",
        "--save",
        "ck",
        "--train-iters",
        "1",
    ]
    launch.ok(launch.run_forked([*words, "--save-interval", "1"], cwd=tmp_path))
    assert export(tmp_path, tmp_path / "out") == 3
    message = capsys.readouterr().err
    assert "geglu_tanh True" in message
    assert "embedding_multiplier 2.0" in message
    assert not (tmp_path / "out").exists()
