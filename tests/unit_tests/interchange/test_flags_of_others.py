"""What a launch line takes from a model of others, told and refused before torch is imported."""

import json

import pytest

from megatron.core.dist_checkpointing.files import CheckpointError
from megatron.interchange.known import ARCHITECTURES
from megatron.training.run.arguments import ConfigurationError, launch_config, parse_config
from megatron.training.run.checkpointing import load_for_inference
from tests.harness.hugging_face import POSITIONS, VOCAB, saved_toy
from tests.unit_tests.interchange.published import PUBLISHED

RUN = (
    "--seq-length 32 --micro-batch-size 2 --train-iters 3 --lr 1e-2 --tokenizer-type NullTokenizer --vocab-size 60 "
    "--mock-data"
).split()


@pytest.fixture(scope="module")
def toys(tmp_path_factory):
    root = tmp_path_factory.mktemp("toys")
    for name in ("qwen3", "mistral", "gpt2"):
        saved_toy(name, root / name)
    return root


def refused(capsys, status, *words):
    with pytest.raises(SystemExit) as ended:
        launch_config([*RUN, *map(str, words)])
    assert ended.value.code == status
    return capsys.readouterr().err


def changed(toy, folder, **fields):
    """A copy with other fields of config.json."""
    folder.mkdir()
    for path in toy.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    (folder / "config.json").write_text(json.dumps(json.loads((toy / "config.json").read_text()) | fields))
    return folder


# --hf-config


def test_a_config_json_gives_the_models_flags(toys):
    for path in (toys / "qwen3", toys / "qwen3" / "config.json"):
        model = parse_config([*RUN, "--hf-config", str(path)]).model
        assert (model.num_layers, model.hidden_size, model.ffn_hidden_size) == (2, 32, 56)
        assert (model.kv_channels, model.num_query_groups, model.qk_layernorm) == (12, 2, True)
        assert (model.padded_vocab_size, model.max_position_embeddings) == (VOCAB, POSITIONS)
        assert (model.attention_dropout, model.hidden_dropout) == (0, 0)


def test_flags_win_and_what_they_contradict_is_named(toys):
    line = [*RUN, "--hf-config", str(toys / "qwen3"), "--num-layers", "3", "--rotary-base", "10000"]
    config = parse_config([*line, "--num-attention-heads", "4"])
    assert (config.model.num_layers, config.model.hidden_size) == (3, 32)
    told = [note for note in config.notes if note.startswith("--hf-config")]
    assert [note.split(" as in ")[0] for note in told] == ["--hf-config: num_layers is 3 as given, not 2"]
    assert config.origin["hidden_size"] == str(toys / "qwen3")
    with pytest.raises(ConfigurationError, match="--swiglu and --squared-relu"):
        parse_config([*line, "--squared-relu"])


def test_a_config_json_that_cannot_be_expressed_is_refused_by_field(toys, tmp_path, capsys):
    wrong = changed(toys / "qwen3", tmp_path / "wrong", hidden_act="relu", new_field=1)
    told = refused(capsys, 2, "--hf-config", wrong)
    assert "hidden_act" in told
    assert "new_field" in told
    assert "--hf-config" in told
    assert "none.json: missing" in refused(capsys, 2, "--hf-config", tmp_path / "none.json")
    assert "File name too long" in refused(capsys, 2, "--hf-config", "9" * 400)


# --load


def test_weights_alone_are_no_run_to_go_on_from(toys, capsys):
    told = refused(capsys, 3, "--load", toys / "qwen3", "--use-checkpoint-args")
    assert "start a new one from them with --finetune" in told
    told = refused(capsys, 2, "--load", toys / "qwen3", "--use-checkpoint-args", "--check-config")
    assert "--finetune" in told
    told = refused(
        capsys, 3, "--load", toys / "qwen3", "--use-checkpoint-args", "--finetune", "--ckpt-step", "5"
    )
    assert "leave --ckpt-step 5 out" in told


def test_shape_and_tokenizer_come_from_the_folder(toys, tmp_path, capsys):
    folder = changed(toys / "qwen3", tmp_path / "with a tokenizer")
    (folder / "tokenizer.json").write_text("{}")
    line = [word for word in RUN if word not in ("--tokenizer-type", "NullTokenizer", "--vocab-size", "60")]
    line += ["--load", str(folder), "--finetune", "--use-checkpoint-args"]
    config = parse_config([*line, "--hidden-dropout", "0.3", "--num-layers", "7"])
    assert config.tokenizer.tokenizer_type == "HuggingFaceTokenizer"
    assert config.tokenizer.tokenizer_model == str(folder)
    assert (config.model.num_layers, config.model.kv_channels, config.model.norm_epsilon) == (2, 12, 1e-6)
    assert (config.model.attention_dropout, config.model.hidden_dropout) == (0, 0.3), (
        "flags count where they may"
    )
    assert "--use-checkpoint-args: num_layers is 2 as in the checkpoint, not 7" in config.warnings
    with pytest.raises(SystemExit) as ended:
        launch_config([*line, "--check-config", "--json"])
    assert ended.value.code == 0
    report = json.loads(capsys.readouterr().out)
    assert report["config"]["padded_vocab_size"] == VOCAB
    assert report["origin"]["hidden_size"] == "checkpoint"


def test_positions_within_a_window_need_a_flag(toys, tmp_path, capsys):
    wide = changed(toys / "mistral", tmp_path / "wide", max_position_embeddings=64)
    line = ["--load", wide, "--finetune", "--use-checkpoint-args"]
    assert f"--max-position-embeddings {POSITIONS}" in refused(capsys, 3, *line)
    config = parse_config([*RUN, *map(str, line), "--max-position-embeddings", "32"])
    assert config.model.max_position_embeddings == 32


def test_text_is_made_within_a_window(toys, tmp_path):
    """Forwards alone know neither dropout nor, unless they are asked to, that a window ends before the positions."""
    wide = changed(toys / "mistral", tmp_path / "wide", max_position_embeddings=64)
    with pytest.raises(CheckpointError, match=f"--max-position-embeddings {POSITIONS}"):
        load_for_inference(str(wide))
    config, _ = load_for_inference(str(wide), max_position_embeddings=POSITIONS)
    assert config["max_position_embeddings"] == POSITIONS
    mixed = changed(toys / "gpt2", tmp_path / "mixed", resid_pdrop=0.1, embd_pdrop=0.2)
    assert load_for_inference(str(mixed))[0]["hidden_dropout"] == 0


def test_all_that_has_no_place_is_listed_at_once(toys, tmp_path, capsys):
    wrong = changed(toys / "qwen3", tmp_path / "wrong", num_hidden_layers=1, tie_word_embeddings=False)
    told = refused(capsys, 3, "--load", wrong, "--finetune", "--use-checkpoint-args")
    assert "theirs lm_head.weight: missing" in told
    assert "theirs model.layers.1.input_layernorm.weight: has no place in the other format" in told
    longer = changed(toys / "gpt2", tmp_path / "longer", n_positions=16)
    told = refused(capsys, 3, "--load", longer, "--finetune", "--use-checkpoint-args", "--seq-length", "16")
    assert "transformer.wpe.weight: shape (32, 32), expected (16, 32)" in told


def test_a_model_below_the_folder_is_named(toys, tmp_path, capsys):
    commit = "0123456789abcdef" * 2 + "01234567"
    (tmp_path / "snapshots").mkdir()
    (tmp_path / "snapshots" / commit).symlink_to(toys / "qwen3")
    told = refused(capsys, 3, "--load", tmp_path, "--finetune", "--use-checkpoint-args")
    assert f"give --load {tmp_path / 'snapshots' / commit}" in told


# --pretrained-checkpoint, --ckpt-convert-format


def test_a_pretrained_checkpoint_counts_while_load_has_none(toys, tmp_path, capsys):
    line = [*RUN, "--pretrained-checkpoint", str(toys / "qwen3"), "--use-checkpoint-args"]
    for load in ([], ["--load", str(tmp_path / "ck")]):
        config = parse_config([*line, *load])
        assert (config.checkpoint.load, config.checkpoint.finetune) == (str(toys / "qwen3"), True)
        assert any("--pretrained-checkpoint" in note for note in config.notes)
    (tmp_path / "ck" / "iter_0000004").mkdir(parents=True)
    (tmp_path / "ck" / "iter_0000004" / "manifest.json").write_text("{}")
    told = refused(capsys, 3, *line[len(RUN) :], "--load", tmp_path / "ck")
    assert "manifest.json" in told, "a damaged checkpoint is no reason to begin again"
    empty = tmp_path / "empty"
    told = refused(capsys, 3, "--pretrained-checkpoint", empty, "--hf-config", toys / "qwen3")
    assert "--pretrained-checkpoint needs one" in told


def test_a_conversion_needs_something_and_somewhere(toys, capsys):
    told = refused(capsys, 2, "--ckpt-convert-format", "torch_dist", "--hf-config", toys / "qwen3")
    assert "--ckpt-convert-format without --load" in told
    assert "--ckpt-convert-format and --ckpt-convert-save need each other" in told
    told = refused(capsys, 2, "--ckpt-convert-format", "torch", "--ckpt-convert-save", "x")
    assert "tools/checkpoint.py export --megatron" in told


def test_every_published_model_gives_a_launch_line(tmp_path):
    """At --max-position-embeddings within a window, where there is one."""
    seen = set()
    for name, stated in PUBLISHED.items():
        path = tmp_path / "config.json"
        path.write_text(json.dumps(stated))
        line = [*RUN, "--hf-config", str(path), "--max-position-embeddings", "1024"]
        config = parse_config(line)
        seen.add(stated["model_type"])
        assert config.model.padded_vocab_size == stated["vocab_size"], name
    assert seen == ARCHITECTURES.keys()
