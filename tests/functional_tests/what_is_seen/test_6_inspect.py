"""Issue I, line 6: the text of samples, a checkpoint's summary, and a tokenizer for generate.py, on a real run."""

import dataclasses
import json
import shutil
import sys

import numpy as np
import pytest

from megatron.core.datasets.indexed_dataset_writer import IndexedDatasetWriter
from megatron.core.dist_checkpointing.saving import save
from megatron.core.dist_checkpointing.state import LocalPiece
from megatron.core.models.gpt.gpt import GPTModel
from megatron.core.tokenizers.build import build_tokenizer
from megatron.core.tokenizers.tokenizer import ByteTokenizer
from megatron.training.config.config import Config
from tests.harness import launch
from tests.harness.tiny_models import tiny_config
from tools import checkpoint, generate, inspect_data
from tools.reports.run_record import layout, read_run

TEXTS = [f"def number_{n}():\n    return {n}  # \x1b[31mred\x07\n" * 4 for n in range(40)]
RUN = [
    *"--num-layers 4 --hidden-size 32 --num-attention-heads 2 --seq-length 32 --max-position-embeddings 32".split(),
    *"--micro-batch-size 2 --global-batch-size 4 --train-iters 6 --lr 1e-2 --log-interval 2 --eval-iters 1".split(),
    *"--pipeline-model-parallel-size 2 --zero-bubble-v-schedule --swiglu --seed 77".split(),
    *"--data-path corpus --split 80,20,0 --num-workers 0 --save ck --save-interval 3".split(),
]


def write_corpus(folder, tokenizer):
    with IndexedDatasetWriter(str(folder / "corpus"), np.dtype("<u2")) as writer:
        for text in TEXTS:
            writer.add_document([*tokenizer.tokenize(text), tokenizer.eod])


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Of two pipeline ranks: the folder of its run, with `corpus` and `ck`."""
    folder = tmp_path_factory.mktemp("trained")
    write_corpus(folder, ByteTokenizer())
    words = [*RUN, "--tokenizer-type", "ByteTokenizer"]
    launch.ok(launch.run_forked(words, ranks=2, cwd=folder))
    return folder


@pytest.fixture
def here(trained, monkeypatch):
    """In the run's folder: its paths are relative."""
    monkeypatch.chdir(trained)
    return trained


def told_by(tool, capsys, *words, status=0):
    assert tool.main([*map(str, words)]) == status
    return capsys.readouterr()


def test_the_samples_of_a_run_are_shown_as_text(here, capsys):
    out = told_by(inspect_data, capsys, "--load", "ck", "--samples", 2).out
    assert out.startswith("corpus, split 80,20,0, sequences of 32 tokens, seed 77\ntrain: ")
    assert (
        out.count("32 tokens, 32 with a loss; of document") == 4
    )  # two of train, two of valid; none of test
    assert "\ntest:" not in out
    assert "    | def nu" in out
    assert "\x1b" not in out
    assert "\\x1b[31mred\\x07" in out  # what a terminal would obey


def test_texts_are_the_tokens_that_the_run_trains_on(here, capsys):
    told = json.loads(told_by(inspect_data, capsys, "--load", "ck", "--samples", 99, "--json").out)["splits"]
    same = "--data-path corpus --split 80,20,0 --seq-length 32 --seed 77 --sizes 24,4,4 --samples 99 --json"
    apart = json.loads(told_by(inspect_data, capsys, *same.split()).out)["splits"]
    for split, rows in apart.items():
        known = told[split]["samples"]
        assert [{name: row[name] for name in rows["samples"][0]} for row in known] == rows["samples"]
    tokenizer = ByteTokenizer()
    for row in (row for split in told.values() for row in split["samples"]):
        pieces = row["text"]
        assert len(tokenizer.tokenize("".join(pieces))) + len(pieces) - 1 == 32
        assert "".join(pieces) in "".join(TEXTS) or len(row["documents"]) > 1
        assert len(pieces) >= len(row["documents"])


def test_flags_name_a_tokenizer_as_well(here, capsys):
    words = "--data-path corpus --split 1 --seq-length 200 --samples 1 --tokenizer-type ByteTokenizer".split()
    out = told_by(inspect_data, capsys, *words, "--text", 80).out
    shown = [line for line in out.splitlines() if line.startswith("    | ")]
    assert "number_" in out
    assert shown
    assert "    ... and " in out
    masked = told_by(
        inspect_data, capsys, *words, "--eod-mask-loss"
    ).out  # the tokenizer's own end of document
    assert "-- end of document --" in masked
    assert "200 tokens, 199 with a loss; of documents " in masked


@pytest.mark.parametrize(
    ("words", "status", "message"),
    [
        ("--load nowhere", 3, "no checkpoint in nowhere"),
        ("--load ck --ckpt-step 5", 3, "--ckpt-step 5 is not in ck"),
        (
            "--load ck --tokenizer-type HuggingFaceTokenizer --tokenizer-model gone",
            2,
            "--tokenizer-model gone",
        ),
        ("--data-path corpus --seq-length 8 --tokenizer-model m", 2, "need --tokenizer-type"),
    ],
)
def test_what_cannot_be_shown_says_why(here, capsys, words, status, message):
    assert message in told_by(inspect_data, capsys, *words.split(), status=status).err


def test_data_that_the_run_named_from_its_own_folder(here, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    told = told_by(inspect_data, capsys, "--load", here / "ck", status=4).err
    assert "has named its data from the folder that it was started in" in told
    assert (
        "train: " in told_by(inspect_data, capsys, "--load", here / "ck", "--data-path", here / "corpus").out
    )


def test_a_checkpoint_opens_with_what_it_is_of(here, capsys):
    head = told_by(checkpoint, capsys, "inspect", "ck").out.splitlines()[:9]
    lines = launch.metrics_lines(here / "ck")
    losses = {line["iteration"]: line["lm loss"] for line in lines if "lm loss" in line}
    rows = dict(line.strip().split("  ", 1) for line in head[1:])
    rows = {name: value.strip() for name, value in rows.items()}
    assert head[0] == "ck/iter_0000006: iteration 6, 24 samples"
    assert rows["model"].startswith("GPT, 4 layers, hidden 32, swiglu MLP ")
    assert rows["model"].endswith("vocabulary 384")
    assert rows["tokenizer"] == "ByteTokenizer"
    assert rows["tokens seen"] == "768: 24 samples of 32, iteration 6 of 6"
    assert rows["last loss"].startswith(f"{losses[6]:.4f} at iteration 6, validation ")
    assert rows["layout"] == "2 ranks: PP 2, zbv"
    assert rows["layout"].removeprefix("2 ranks: ") == layout(read_run("ck/metrics.jsonl").starts[-1])
    assert rows["written by"].startswith("megatron-zero ")
    earlier = told_by(checkpoint, capsys, "inspect", "ck", "--ckpt-step", 3).out.splitlines()
    assert earlier[5].endswith(f"{losses[3]:.4f} at iteration 3")


def test_parameters_are_those_of_the_model(here, capsys):
    facts = json.loads(told_by(checkpoint, capsys, "inspect", "ck", "--json").out)
    sizes = [np.prod(one["shape"]) for name, one in facts["tensors"].items() if name.startswith("model.")]
    assert facts["summary"]["parameters"] == sum(sizes)
    assert facts["summary"]["tokens"] == 768
    out = told_by(checkpoint, capsys, "inspect", "ck").out
    assert f"{sum(sizes):,} in F32" in out
    assert "model.decoder.layers.0-3.mlp.linear_fc1.weight" in out  # layers that are alike in one line


def test_a_checkpoint_without_its_metrics_says_so(here, tmp_path, capsys):
    shutil.copytree("ck", tmp_path / "ck")
    (tmp_path / "ck" / "metrics.jsonl").unlink()
    out = told_by(checkpoint, capsys, "inspect", tmp_path / "ck").out
    assert f"last loss    not known: {tmp_path / 'ck' / 'metrics.jsonl'}: No such file" in out


@pytest.fixture
def _moved_tokenizer(tmp_path, monkeypatch):
    """In a folder with `corpus` and `ck` of a run whose tokenizer.json has become moved.json."""
    tokenizers = pytest.importorskip("tokenizers", reason="dev extra")
    bpe = tokenizers.Tokenizer(tokenizers.models.BPE())
    bpe.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    special = {"special_tokens": ["<|endoftext|>"], "show_progress": False}
    bpe.train_from_iterator(TEXTS, tokenizers.trainers.BpeTrainer(initial_alphabet=alphabet, **special))
    bpe.save(str(tmp_path / "moved.json"))
    monkeypatch.chdir(tmp_path)
    write_corpus(tmp_path, build_tokenizer("HuggingFaceTokenizer", tokenizer_model="moved.json"))
    model = dataclasses.replace(tiny_config(max_position_embeddings=64), padded_vocab_size=512)
    named = {"tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": "tokenizer.json"}
    data = {"data_path": ("corpus",), "split": "1", "train_iters": 5, "eval_iters": 0, "global_batch_size": 1}
    config = Config.from_flat({**dataclasses.asdict(model), **named, **data, "seq_length": 64})
    weights = GPTModel(model, padded_vocab_size=512, seed=5).named_parameters()
    pieces = [LocalPiece(f"model.{n}", tuple(p.shape), (0,) * p.dim(), p.detach()) for n, p in weights]
    save(tmp_path / "ck", 5, pieces, {"config": config.flat(), "consumed_train_samples": 5}, {})


@pytest.mark.usefixtures("_moved_tokenizer")
def test_generate_takes_a_tokenizer_whose_file_has_moved(monkeypatch, capsys):
    words = "generate.py --load ck --prompt def --max-new-tokens 3 --greedy --device cpu".split()
    monkeypatch.setattr(sys, "argv", words)
    with pytest.raises(SystemExit, match="2"):
        generate.main()
    assert "--tokenizer-model tokenizer.json: no such file" in capsys.readouterr().err
    monkeypatch.setattr(sys, "argv", [*words, "--tokenizer-model", "moved.json"])
    generate.main()
    assert capsys.readouterr().out.startswith("def")
    shown = told_by(inspect_data, capsys, "--load", "ck", "--tokenizer-model", "moved.json").out
    assert "def number_" in shown
