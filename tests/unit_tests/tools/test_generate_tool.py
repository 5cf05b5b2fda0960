"""tools/generate.py: the trained model, its tokenizer, and errors with their exit status."""

import dataclasses
import importlib.util
import sys
from pathlib import Path

import pytest
import torch

from megatron.core.dist_checkpointing.saving import save
from megatron.core.dist_checkpointing.state import LocalPiece
from megatron.core.models.gpt.generate import generate
from megatron.core.models.gpt.gpt import GPTModel
from megatron.core.tokenizers.tokenizer import ByteTokenizer
from megatron.training.config.config import Config
from tests.harness.tiny_models import tiny_config

TOOL = Path(__file__).resolve().parents[3] / "tools" / "generate.py"


@pytest.fixture
def tool():
    spec = importlib.util.spec_from_file_location("generate_tool", TOOL)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def trained(tmp_path):
    """A checkpoint as training leaves it, and its model."""
    model_config = dataclasses.replace(
        tiny_config(position_embedding_type="rope", swiglu=True, max_position_embeddings=64),
        padded_vocab_size=384,
    )
    flat = Config.from_flat(
        {**dataclasses.asdict(model_config), "tokenizer_type": "ByteTokenizer", "bf16": True}
    ).flat()
    model = GPTModel(model_config, padded_vocab_size=384, seed=5, params_dtype=torch.bfloat16)
    pieces = [
        LocalPiece(f"model.{name}", tuple(p.shape), (0,) * p.dim(), p.detach())
        for name, p in model.named_parameters()
    ]
    save(tmp_path, 7, pieces, {"config": flat, "consumed_train_samples": 0}, {})
    return tmp_path, model


def run(tool, monkeypatch, *words):
    monkeypatch.setattr(sys, "argv", ["generate.py", "--device", "cpu", *map(str, words)])
    tool.main()


def test_prints_what_the_trained_model_says(tool, trained, monkeypatch, capsys):
    directory, model = trained
    run(tool, monkeypatch, "--load", directory, "--prompt", "def f(", "--max-new-tokens", 12, "--greedy")
    tokenizer = ByteTokenizer()
    prompt = tokenizer.tokenize("def f(")
    (made,) = generate(model, [prompt], 12, vocab_size=tokenizer.vocab_size, eod=tokenizer.eod)
    expected = tokenizer.detokenize(prompt + made.ids)
    assert capsys.readouterr().out == expected + "\n"


def test_seed_decides_what_is_drawn(tool, trained, monkeypatch, capsys):
    outputs = []
    for seed in (1, 1, 2):
        run(tool, monkeypatch, "--load", trained[0], "--prompt", "x", "--max-new-tokens", 20, "--seed", seed)
        outputs.append(capsys.readouterr().out)
    assert outputs[0] == outputs[1] != outputs[2]


def test_loaded_weights_are_the_saved_ones(tool, trained):
    directory, model = trained
    loaded, config = tool.load_model(str(directory), None, "cpu")
    assert config.params_dtype == "bfloat16"
    for name, weight in model.named_parameters():
        assert torch.equal(loaded.get_parameter(name), weight), name


@pytest.mark.parametrize(
    ("words", "status", "message"),
    [
        (("--load", "/nowhere", "--prompt", "x"), 3, "no checkpoint in /nowhere"),
        (("--load", "/nowhere", "--prompt", "x", "--top-p", "2"), 2, "--top-p 2.0"),
        (("--load", "/nowhere", "--prompt", "x", "--top-p", "nan"), 2, "--top-p nan"),
        (("--load", "/nowhere", "--prompt", "x", "--temperature", "nan"), 2, "--temperature nan"),
        (("--load", "/nowhere", "--prompt", "x", "--temperature", "inf"), 2, "--temperature inf"),
        (("--load", "/nowhere", "--prompt", "x", "--device", "bogus"), 2, "--device bogus: cannot be used"),
        (("--load", "/nowhere", "--prompt", "x", "--device", "meta"), 2, "--device meta: holds no values"),
    ],
)
def test_errors_name_the_flag_or_folder(tool, monkeypatch, capsys, words, status, message):
    with pytest.raises(SystemExit) as left:
        run(tool, monkeypatch, *words)
    assert left.value.code == status
    assert message in capsys.readouterr().err


def test_empty_prompt(tool, trained, monkeypatch, capsys):
    with pytest.raises(SystemExit) as left:
        run(tool, monkeypatch, "--load", trained[0], "--prompt", "")
    assert left.value.code == 2
    assert "--prompt holds no token" in capsys.readouterr().err


@pytest.mark.parametrize("tokens", [-1, 10**13])
def test_numbers_of_new_tokens_that_cannot_be(tool, trained, monkeypatch, capsys, tokens):
    with pytest.raises(SystemExit, match="2"):
        run(tool, monkeypatch, "--load", trained[0], "--prompt", "a", "--max-new-tokens", tokens)
    assert f"--max-new-tokens {tokens}: " in capsys.readouterr().err


def test_a_tokenizer_with_more_ids_than_the_model(tool, trained, monkeypatch, capsys):
    monkeypatch.setattr(ByteTokenizer, "vocab_size", 385)
    with pytest.raises(SystemExit, match="2"):
        run(tool, monkeypatch, "--load", trained[0], "--prompt", "a", "--max-new-tokens", 1)
    assert "the tokenizer has 385 ids, the model 384" in capsys.readouterr().err
