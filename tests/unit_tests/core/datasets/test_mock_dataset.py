"""Samples of mock data are those that its documents have as a corpus, whose order other tests hold."""

import numpy as np
import pytest

from megatron.core.datasets.gpt_samples import GPTDataset, MockCorpus, SampleFormat
from megatron.core.datasets.mock_dataset import MockDataset

CORPUS = MockCorpus(9, 10)
SEQUENCES = range(3, 40)


def dataset(kind, requested, length=700, split="train", *, cache_folder=None, seed=5, **fields):
    sample_format = SampleFormat(length, eod=9, vocab_size=10, **fields)
    return kind(CORPUS, SEQUENCES, split, requested, sample_format, seed=seed, cache_folder=cache_folder)


def same_samples(mock, corpus, places):
    assert (len(mock), mock.description()) == (len(corpus), corpus.description())
    for place in places:
        assert mock.documents(place) == corpus.documents(place), place
        for name, values in mock[place].items():
            assert np.array_equal(values, corpus[place][name]), (place, name)


@pytest.mark.parametrize("extra_token", [True, False])
@pytest.mark.parametrize("requested", [None, 0, 5, 150, 200])
def test_its_samples_are_a_corpus_of_these_documents(requested, extra_token):
    """Of one epoch, and of several with the last one in the order of the others, or apart."""
    sets = [dataset(kind, requested, extra_token=extra_token) for kind in (MockDataset, GPTDataset)]
    same_samples(*sets, range(len(sets[0])))


def test_a_last_sample_that_is_padded():
    fields = {"split": "valid", "drop_last_partial_validation_sequence": False, "length": 999}
    sets = [dataset(kind, None, **fields) for kind in (MockDataset, GPTDataset)]
    same_samples(*sets, range(len(sets[0])))


def kept(folder):
    (path,) = folder.glob("*-MockDataset-train-*.npy")
    return path


def test_as_much_of_the_order_is_kept_as_is_asked_for(tmp_path):
    corpus = dataset(GPTDataset, 7)
    for _built_or_read in range(2):
        mock = dataset(MockDataset, 7, cache_folder=str(tmp_path))
        assert np.load(kept(tmp_path)).shape == (7,)
        same_samples(mock, corpus, (0, 6, len(corpus) - 1))  # the last one makes the whole order
        assert np.load(kept(tmp_path)).shape == (7,)


@pytest.mark.parametrize("change", [lambda a: a[[0, 0, 2, 3]], lambda a: a + 10**6])
def test_an_order_on_disk_that_cannot_be_is_built_again(change, tmp_path, monkeypatch):
    with monkeypatch.context() as patched:
        right = MockDataset._order
        patched.setattr(MockDataset, "_order", lambda self: change(right(self)[:4]))
        dataset(MockDataset, 4, cache_folder=str(tmp_path))
    wrong = kept(tmp_path).read_bytes()
    same_samples(dataset(MockDataset, 4, cache_folder=str(tmp_path)), dataset(GPTDataset, 4), range(4))
    assert kept(tmp_path).read_bytes() != wrong
