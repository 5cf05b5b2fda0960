"""Import, compare and export of Hugging Face folders, as a user calls them."""

import json
import shutil

import pytest
import safetensors.torch
import torch
import transformers

from megatron.training.run.arguments import parse_config
from tests.harness.hugging_face import TOYS, VOCAB, saved_toy
from tools.checkpoint import main
from tools.conversion.hugging_face import true_rows


def words(*parts):
    return [str(part) for part in parts]


def contents_of(folder):
    """Every tensor of a folder's files, as bits."""
    held = {}
    for path in folder.glob("*.safetensors"):
        for key, value in safetensors.torch.load_file(path).items():
            held[key] = value.view(torch.int16) if value.dtype == torch.bfloat16 else value
    return held


@pytest.mark.parametrize("name", TOYS)
def test_what_goes_in_comes_out(name, tmp_path):
    """Names, dtypes, shapes, bytes; and config.json in meaning."""
    theirs, ours, back = tmp_path / "theirs", tmp_path / "ours", tmp_path / "back"
    dtype = torch.bfloat16 if name in ("llama2", "gemma") else torch.float32
    before = saved_toy(name, theirs, dtype)
    assert main(words("import", "--hf", theirs, "--save", ours, "--max-shard-size", "9KB")) == 0
    assert len(list((ours / "iter_0000000").glob("*.safetensors"))) > 2
    assert main(words("compare", theirs, ours)) == 0
    assert main(words("export", "--load", ours, "--hf", back, "--max-shard-size", "20KB")) == 0
    assert main(words("compare", theirs, back)) == 0
    after = transformers.AutoModelForCausalLM.from_pretrained(back)
    assert type(after) is type(before)
    one, other = before.state_dict(), after.state_dict()
    assert one.keys() == other.keys()
    for key, value in one.items():
        assert value.dtype == other[key].dtype, key
        assert torch.equal(value, other[key]), key
    files = [contents_of(folder) for folder in (theirs, back)]
    assert files[0].keys() == files[1].keys()
    for key, value in files[0].items():
        assert value.dtype == files[1][key].dtype, key
        assert value.shape == files[1][key].shape, key
        assert value.numpy(force=True).tobytes() == files[1][key].numpy(force=True).tobytes(), key
    configs = before.config.to_dict(), after.config.to_dict()
    differing = {key for key in {**configs[0], **configs[1]} if configs[0].get(key) != configs[1].get(key)}
    # A window that all positions lie in is none.
    assert differing <= {"_name_or_path", "hidden_activation"} | (
        {"sliding_window"} if name == "mistral" else set()
    )
    written = {path.name for path in back.iterdir()}
    index = json.loads((back / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == {name for name in written if name.endswith(".safetensors")}
    assert not list(tmp_path.glob(".*"))


def test_compare_names_what_differs(tmp_path, capsys):
    saved_toy("qwen2", tmp_path / "a")
    model = saved_toy("qwen2", tmp_path / "b")
    with torch.no_grad():
        model.model.layers[1].self_attn.k_proj.bias[3] += 0.5
    model.save_pretrained(tmp_path / "b")
    assert main(words("compare", tmp_path / "a", tmp_path / "b")) == 1
    told = capsys.readouterr().out
    assert "model.decoder.layers.1.self_attention.linear_qkv.bias: largest difference 0.5" in told
    assert "1 tensor not the same" in told


def test_no_row_but_padding_is_left_out(tmp_path, capsys):
    theirs, ours, like, back = (tmp_path / name for name in ("theirs", "ours", "like", "back"))
    saved_toy("qwen2", theirs)
    assert main(words("import", "--hf", theirs, "--save", ours)) == 0
    like.mkdir()
    stated = json.loads((theirs / "config.json").read_text())
    (like / "config.json").write_text(json.dumps(stated | {"vocab_size": VOCAB - 1}))
    assert main(words("export", "--load", ours, "--hf", back, "--like", like)) == 3
    assert f"has vocab_size {VOCAB - 1}, this model {VOCAB} rows" in capsys.readouterr().err
    assert not back.exists()
    shape = "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --tokenizer-type NullTokenizer"
    run = f"{shape} --vocab-size 60 --micro-batch-size 2 --train-iters 3 --lr 1e-2 --mock-data"
    config = parse_config([*run.split(), "--make-vocab-size-divisible-by", "64"])
    assert true_rows(config, 64, {"vocab_size": VOCAB}, like) == VOCAB
    assert true_rows(config, 64, {}, None) == 64


def test_the_architecture_is_that_of_the_runs_config_json(tmp_path, capsys):
    """A Mistral is also a Llama; which of them it is only its config.json says, else it is told which was chosen."""
    theirs, ours = tmp_path / "theirs", tmp_path / "ours"
    saved_toy("mistral", theirs)
    assert main(words("import", "--hf", theirs, "--save", ours)) == 0
    for beside, model_type in ((True, "mistral"), (False, "llama")):
        if not beside:
            shutil.rmtree(ours / "hugging_face")
        back = tmp_path / model_type
        assert main(words("export", "--load", ours, "--hf", back)) == 0
        assert json.loads((back / "config.json").read_text())["model_type"] == model_type
    assert "model_type llama: the first that can express this model" in capsys.readouterr().err
