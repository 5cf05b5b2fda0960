import hashlib
import json

import numpy as np
import pytest

from megatron.core.datasets.indexed_dataset_writer import IndexedDatasetWriter
from tests.harness.scripts import run_script


def run(*words):
    return run_script("tools/inspect_data.py", *words)


def run_json(*words):
    done = run(*words, "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture
def corpus(tmp_path):
    prefix = str(tmp_path / "c")
    with IndexedDatasetWriter(prefix, np.dtype("<u2")) as writer:
        for n in range(100):
            writer.add_document([n % 50 + 1] * 9 + [0])
    return prefix


def sha(values, dtype):
    return hashlib.sha256(np.array(values, dtype=dtype).tobytes()).hexdigest()


def test_digests_by_hand(corpus):
    """One sequence makes the first split, so its order is known without a shuffle."""
    result = run_json("--data-path", corpus, "--seq-length", 4, "--split", "1,50,49", "--samples", 9)
    train = result["splits"]["train"]
    assert train["len"] == (10 - 1) // 4 == len(train["samples"])
    order = np.arange(2, dtype=np.uint32)
    rng = np.random.RandomState(1234)
    rng.shuffle(np.zeros(1, dtype=np.int32))
    rng.shuffle(order)
    text = [1] * 9 + [0]
    for k, sample in zip(order, train["samples"], strict=True):
        start = 4 * int(k)
        assert sample == {
            "tokens": sha(text[start : start + 4], "<i8"),
            "labels": sha(text[start + 1 : start + 5], "<i8"),
            "loss_mask": sha([1.0] * 4, "<f4"),
            "position_ids": sha(range(4), "<i8"),
            "documents": [0],
        }


def test_shape_and_options(corpus):
    result = run_json("--data-path", corpus, "--seq-length", 16, "--split", "8,1,1", "--samples", 3)
    assert list(result) == ["splits"]
    assert list(result["splits"]) == ["train", "valid", "test"]
    assert result["splits"]["train"]["len"] == (800 - 1) // 16
    assert list(result["splits"]["train"]["samples"][0]) == [
        "tokens",
        "labels",
        "loss_mask",
        "position_ids",
        "documents",
    ]
    sized = run_json("--data-path", corpus, "--seq-length", 16, "--split", "8,1,1", "--sizes", "200,10,none")
    assert sized["splits"]["train"]["len"] == (5 * 800 - 1) // 16
    reset = run_json(
        "--data-path", corpus, "--seq-length", 16, "--split", "8,1,1", "--samples", 3, "--eod", 0,
        "--reset-position-ids", "--eod-mask-loss",
    )  # fmt: skip
    for a, b in zip(result["splits"]["train"]["samples"], reset["splits"]["train"]["samples"], strict=True):
        assert a["tokens"] == b["tokens"]
        assert a["position_ids"] != b["position_ids"]
        assert a["loss_mask"] != b["loss_mask"]
    assert run_json("--data-path", corpus, "--seq-length", 16, "--split", "1,0,0")["splits"].keys() == {
        "train"
    }


def test_blends_and_per_split_paths(corpus):
    blend = run_json(
        "--data-path", 0.3, corpus, 0.7, corpus, "--seq-length", 8, "--split", "1,0,0", "--sizes", "10,,"
    )
    assert blend["splits"]["train"]["len"] == 3 + 7
    both = run_json("--train-data-path", corpus, "--valid-data-path", corpus, corpus, "--seq-length", 8)
    assert {name: split["len"] for name, split in both["splits"].items()} == {"train": 124, "valid": 248}
    apart = run_json(
        "--valid-data-path",
        corpus,
        corpus,
        "--seq-length",
        8,
        "--multiple-validation-sets",
        "--full-validation",
    )
    assert apart["splits"].keys() == {"valid0", "valid1"}


def test_table(corpus):
    done = run("--data-path", corpus, "--seq-length", 16, "--split", "8,1,1", "--verify", "--eod", 0)
    assert done.returncode == 0, done.stderr
    assert "train: 49 samples" in done.stdout
    assert "eod tokens       100" in done.stdout


def test_verify(corpus):
    report = run_json("--data-path", corpus, "--verify", "--eod", 0, "--vocab-size", 51)
    assert report == {
        "corpora": [
            {
                "prefix": corpus,
                "dtype": "uint16",
                "documents": 100,
                "empty_documents": 0,
                "sequences": 100,
                "tokens": 1000,
                "shortest": 10,
                "longest": 10,
                "smallest_token": 0,
                "largest_token": 50,
                "eod_tokens": 100,
                "checksums": "good",
            }
        ]
    }
    high = run("--data-path", corpus, "--verify", "--vocab-size", 50)
    assert high.returncode == 4
    assert "token 490 at byte 980: expected 0 to 49, found 50" in high.stderr
    with open(corpus + ".idx", "r+b") as file:
        file.truncate(99)
    cut = run("--data-path", corpus, "--verify")
    assert cut.returncode == 4
    assert "c.idx: number of sequences at byte 18" in cut.stderr
    assert "Traceback" not in cut.stderr


def test_refusals(corpus):
    assert run("--data-path", corpus).returncode == 2
    assert run("--data-path", corpus, "--mock-data", "--seq-length", 4).returncode == 2
    assert run("--data-path", corpus, "--seq-length", 4, "--reset-position-ids").returncode == 2
    assert run("--data-path", corpus, "--seq-length", 4, "--sizes", "1,2").returncode == 2


def test_a_split_that_rounds_to_nothing_is_named_and_the_others_are_shown(corpus):
    words = ("--data-path", corpus, "--seq-length", 4, "--split")
    done = run(*words, "9990,1,9", "--json")
    assert done.returncode == 0, done.stderr
    splits = json.loads(done.stdout)["splits"]
    assert [(name, split["len"]) for name, split in splits.items()] == [
        ("train", 249),
        ("valid", 0),
        ("test", 0),
    ]
    assert splits["valid"]["samples"] == []
    assert "'valid' is empty: --split 9990,1,9" in done.stderr
    assert "'train'" not in done.stderr


def test_a_corpus_of_nothing_is_an_error(tmp_path):
    prefix = str(tmp_path / "none")
    with IndexedDatasetWriter(prefix, np.dtype("<u2")):
        pass
    done = run("--data-path", prefix, "--seq-length", 4)
    assert done.returncode == 4
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "words",
    ["--seed -1", f"--seed {10**22}", f"--sizes {10**20},1,1", f"--seq-length {10**20}", "--eod -3"],
)
def test_numbers_that_no_corpus_can_mean_are_wrong_arguments(words):
    flags = ["--data-path", "nowhere", "--seq-length", "8", *words.split()]
    done = run(*flags)
    assert done.returncode == 2
    assert "must be from" in done.stderr
