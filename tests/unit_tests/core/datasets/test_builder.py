import os

import numpy as np
import pytest

from megatron.core.datasets.blend import (
    Blend,
    parse_blend,
    parse_split,
    read_blend_file,
    read_per_split_file,
    sequence_range,
)
from megatron.core.datasets.builder import GPTDatasetSpec, build_train_valid_test_datasets
from megatron.core.datasets.errors import DataError
from megatron.core.datasets.gpt_dataset_config import requested_sizes
from megatron.core.datasets.gpt_samples import MockCorpus, SampleFormat, pad_id
from megatron.core.datasets.indexed_dataset_writer import IndexedDatasetWriter

FORMAT = SampleFormat(8, eod=0)


@pytest.fixture
def corpus(tmp_path):
    prefix = str(tmp_path / "c")
    with IndexedDatasetWriter(prefix, np.dtype("<u2")) as writer:
        for n in range(40):
            writer.add_document([n + 1] * 11 + [0])
    return prefix


def build(corpus, sizes=(None, None, None), fmt=FORMAT, **fields):
    blend = fields.pop("blend", Blend((corpus,)))
    return build_train_valid_test_datasets(GPTDatasetSpec(fmt, blend=blend, **fields), sizes)


def test_split_that_rounds_to_nothing_is_refused(corpus):
    with pytest.raises(DataError, match="split 'test' is empty: --split 969,30,1 gives it none of the 40"):
        build(corpus, cache=False)
    # Nothing asked of it: nothing wrong.
    assert build(corpus, (10, 5, 0), cache=False).test is None


def test_cache_default_place_and_reuse(corpus, caplog):
    caplog.set_level("INFO", "megatron.core.datasets.index_cache")
    first = build(corpus, split="8,1,1")
    folder = os.path.join(corpus, "cache", "GPTDataset_indices")
    assert len([name for name in os.listdir(folder) if name.endswith(".npy")]) == 9
    built = caplog.text.count("building index")
    again = build(corpus, split="8,1,1")
    assert built == 3 == caplog.text.count("building index")
    for i in range(9):
        assert first.train[i]["tokens"].tolist() == again.train[i]["tokens"].tolist()
    build(corpus, split="8,1,1", seed=9)
    build(corpus, split="8,1,1", tokenizer_identity="other")
    assert caplog.text.count("building index") == 9


def test_cache_follows_the_corpus(corpus):
    before = build(corpus, split="1,0,0")
    with IndexedDatasetWriter(corpus, np.dtype("<u2")) as writer:
        for n in range(60):
            writer.add_document([n + 1] * 7)
    after = build(corpus, split="1,0,0")
    assert len(before.train) == (40 * 12 - 1) // 8
    assert len(after.train) == (60 * 7 - 1) // 8
    after.train[len(after.train) - 1]


def test_token_beyond_the_vocabulary(corpus):
    dataset = build(corpus, split="1,0,0", cache=False, fmt=SampleFormat(8, vocab_size=40)).train
    with pytest.raises(DataError, match=r"c\.bin: token \d+ of sequence 39: .*size 40, found 40"):
        [dataset[i] for i in range(len(dataset))]


def test_exactly_one_source():
    for fields in ({}, {"mock": True, "blend": Blend(("a",))}):
        with pytest.raises(DataError, match="exactly one"):
            GPTDatasetSpec(FORMAT, **fields)


def test_weighted_blend_needs_a_size(corpus):
    with pytest.raises(DataError, match="weighted blend"):
        build(corpus, blend=Blend((corpus,), (1.0,)), split="1,0,0", cache=False)


def test_full_validation_is_one_epoch(corpus):
    sets = build(corpus, (10, 1000, 10), split="8,1,1", cache=False, full_validation=True)
    assert len(sets.valid) == (4 * 12 - 1) // 8


def test_mock_data():
    spec = GPTDatasetSpec(SampleFormat(1024, eod=99, vocab_size=100), mock=True)
    sets = build_train_valid_test_datasets(spec, (1000, 100, 10))
    lengths = np.random.default_rng(0).integers(1, 4096, size=100000, dtype=np.int32)
    assert len(sets.train) == (int(lengths[: round(100000 / 3)].sum()) - 1) // 1024
    corpus = MockCorpus(99, 100)
    assert (corpus.lengths == lengths).all()
    n = int(lengths[5])
    assert corpus.get(5).tolist() == [v % 100 for v in range(1, n)] + [99]
    assert corpus.get(5, 3, 4).tolist() == corpus.get(5).tolist()[3:7]
    assert sets.train[0]["tokens"].shape == (1024,)


def test_split_text():
    assert parse_split("969,30,1")[0] == (0.0, 0.969)
    assert parse_split("'1'") == ((0.0, 1.0), None, None)
    assert sequence_range((0.25, 0.5), 10) == range(2, 5)  # 2.5 to even
    for bad in ("", "0,0,0", "1,2,3,4", "-1,2,3", "1e-1,2,3", "1.2.3,1,1"):
        with pytest.raises(DataError, match="--split"):
            parse_split(bad)


def test_words_of_data_path():
    assert parse_blend(["a"]) == Blend(("a",))
    assert parse_blend(["a", "b"]) == Blend(("a", "b"))
    assert parse_blend(["0.3", "a"]) == Blend(("a",), (0.3,))
    assert parse_blend(["3", "a", "1e-1", "b"]) == Blend(("a", "b"), (3.0, 0.1))
    assert parse_blend(["1", "a", "b"]) == Blend(("1", "a", "b"))
    for bad in (["1", "a", "b", "c"], ["0", "a"], ["-1", "a"], ["nan", "a"], ["inf", "a"], []):
        with pytest.raises(DataError, match="--data-path"):
            parse_blend(bad)


def test_files_of_words(tmp_path):
    words, splits = tmp_path / "words", tmp_path / "splits.json"
    words.write_text("0.3 a\n0.7 b\n")
    assert read_blend_file(str(words)) == Blend(("a", "b"), (0.3, 0.7))
    splits.write_text('{"train": ["1", "a"], "valid": ["b"]}')
    assert read_per_split_file(str(splits)) == (Blend(("a",), (1.0,)), Blend(("b",)), None)
    splits.write_text('{"trian": []}')
    with pytest.raises(DataError, match="train, valid, test"):
        read_per_split_file(str(splits))
    with pytest.raises(DataError, match="missing"):
        read_blend_file(str(tmp_path / "missing"))


def test_requested_sizes():
    common = {"eval_iters": 3, "global_batch_size": 8}
    assert requested_sizes(train_samples=None, train_iters=100, eval_interval=30, **common) == (800, 96, 24)
    assert requested_sizes(train_samples=70, train_iters=9, eval_interval=None, **common) == (70, 24, 24)


def test_pad_id():
    assert pad_id(None, frozenset({1})) == -1
    assert pad_id(1, frozenset({1})) == -1
    assert pad_id(2, frozenset({1})) == 2


def test_float_corpus_is_refused(tmp_path):
    prefix = str(tmp_path / "f")
    with IndexedDatasetWriter(prefix, np.dtype("<u2")) as writer:
        writer.add_document([1, 2])
    with open(prefix + ".idx", "r+b") as file:
        file.seek(17)
        file.write(b"\x07")
    os.truncate(prefix + ".bin", 8)
    with pytest.raises(DataError, match="expected integer tokens"):
        build(prefix, split="1,0,0", cache=False)
