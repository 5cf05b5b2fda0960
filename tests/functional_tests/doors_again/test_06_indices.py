"""Number 6: mock samples need no index at any number of tokens; a real corpus's is made and held once a host, in pieces
that all its ranks read, and a file that is cut under them is an error, no SIGBUS."""

import logging
import os
from collections import Counter
from multiprocessing import get_context

import numpy as np
import pytest

from megatron.core.datasets import held_arrays, mock_dataset
from megatron.core.datasets.blended_samples import BlendedDataset
from megatron.core.datasets.errors import DataError
from megatron.core.datasets.gpt_samples import GPTDataset, MockCorpus, SampleFormat
from megatron.core.datasets.held_arrays import HeldArray
from megatron.core.datasets.index_builders import plan_epochs
from megatron.core.datasets.indexed_dataset_reader import IndexedDataset
from megatron.core.datasets.indexed_dataset_writer import IndexedDatasetWriter
from megatron.core.datasets.mock_dataset import MockDataset, MockOrder
from megatron.training.config.launch_env import LaunchEnv
from megatron.training.config.problems import ConfigurationError
from megatron.training.run.arguments import parse_config
from tests.harness import launch

LINE = [*launch.TINY_DATA, "--mock-data"]
LLAMA_3 = (
    "--num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 --group-query-attention "
    "--num-query-groups 8 --seq-length 8192 --max-position-embeddings 8192 --position-embedding-type rope --swiglu "
    "--normalization RMSNorm --disable-bias-linear --untie-embeddings-and-output-weights --bf16 --micro-batch-size 1 "
    "--global-batch-size 128 --train-samples 1953125000 --lr 3e-4 --lr-decay-samples 1949218748 --lr-warmup-samples "
    "3906252 --tokenizer-type NullTokenizer --vocab-size 128256 --use-distributed-optimizer"
).split()


# --- mock data


def order(requested, length=30, *, seed=5, extra_token=True, documents=9):
    lengths = np.array([7, 1, 40, 3, 90, 11, 5, 64, 2, 8, 77], dtype=np.int32)
    sequences = range(1, 1 + documents)
    tokens = int(lengths[1 : 1 + documents].sum())
    plan = plan_epochs(tokens, length, requested, extra_token=extra_token)
    return plan, lengths, MockOrder(lengths, sequences, plan, seed)


@pytest.mark.parametrize("extra_token", [True, False])
@pytest.mark.parametrize("requested", [None, 3, 8, 16, 21, 300])
def test_samples_by_formula_are_the_tokens_of_each_epoch_once(requested, extra_token):
    plan, lengths, mock = order(requested, extra_token=extra_token)
    seen = Counter()
    for i in range(plan.num_samples):
        pieces = mock.pieces(i)
        assert sum(count for _, _, count in pieces) == plan.sequence_length + plan.extra_token
        for document, offset, count in pieces:
            assert 0 <= offset < offset + count <= lengths[document]
        left = plan.sequence_length  # the token behind is the next sample's first
        for document, offset, count in pieces:
            seen.update((document, offset + k) for k in range(min(left, count)))
            left -= min(left, count)
    whole = Counter({(d, k): plan.num_epochs for d in range(1, 10) for k in range(lengths[d])})
    missing = whole - seen
    assert not seen - whole
    assert missing.total() == plan.tokens - plan.num_samples * plan.sequence_length


def test_a_last_epoch_that_is_hardly_begun_comes_last():
    plan, _, mock = order(16)
    assert plan.last_epoch_apart
    places = [begin + shuffle(i) for begin, shuffle in mock._shuffles for i in range(shuffle._size)]
    assert sorted(places) == list(range(plan.num_samples))
    assert sorted(places[: plan.samples_before_last]) == list(range(plan.samples_before_last))


def test_neighbours_in_the_order_are_of_epochs_far_apart():
    plan, _, mock = order(20_000)
    samples_an_epoch = plan.num_samples / plan.num_epochs
    epochs = np.array([mock._shuffles[0][1](i) / samples_an_epoch for i in range(4000)])
    assert abs(np.corrcoef(epochs[:-1], epochs[1:])[0, 1]) < 0.06
    assert np.histogram(epochs, bins=10, range=(0, plan.num_epochs))[0].min() > 320
    firsts = [[mock._epoch(epoch)[0].tolist() for epoch in range(12)] for _ in range(2)]
    assert firsts[0] == firsts[1]
    assert len({tuple(one) for one in firsts[0]}) == 12, "each epoch has its documents in an order of its own"


def test_any_number_of_samples_is_read_from_at_once():
    tokens = 10**15
    corpus, sample_format = MockCorpus(9, 10), SampleFormat(8192, eod=9, vocab_size=10)
    mock, again, other = (
        MockDataset(corpus, range(33_333), "train", tokens // 8192, sample_format, seed=seed)
        for seed in (5, 5, 6)
    )
    assert mock.by_formula
    assert len(mock) >= tokens // 8192
    assert mock.description()["order"] == "formula"
    for i in (0, 1, len(mock) - 1):
        assert mock[i]["tokens"].tolist() == again[i]["tokens"].tolist()
        assert mock.documents(i) != other.documents(i)
    with pytest.raises(IndexError):
        mock[len(mock)]


def test_orders_of_today_stay():
    """Where one is made, the formula's is another one and is not used."""
    corpus, sample_format = MockCorpus(9, 10), SampleFormat(700, eod=9, vocab_size=10)
    mock = MockDataset(corpus, range(3, 40), "train", 150, sample_format, seed=5)
    real = GPTDataset(corpus, range(3, 40), "train", 150, sample_format, seed=5)
    assert not mock.by_formula
    assert "order" not in mock.description()
    assert [mock.documents(i) for i in range(150)] == [real.documents(i) for i in range(150)]
    assert [mock._formula.pieces(i) for i in range(150)] != [real._pieces(i) for i in range(150)]


@pytest.mark.grid
def test_a_run_of_a_trillion_samples_says_so_in_a_line_and_resumes_exactly(tmp_path):
    line = [*LINE, "--train-samples", str(10**12)]
    saving = [*line, "--save", "ck", "--load", "ck", "--save-interval", "1"]
    straight = launch.ok(launch.run_forked([*line, "--exit-interval", "2"], cwd=tmp_path))
    told = " > mock data, train: the order of 1,000,0"
    assert straight.output.count(told) == 1, straight.output
    assert (
        "computed by a formula of --seed, not kept, as its index would take more than 1 GiB"
        in straight.output
    )
    first = launch.ok(launch.run_forked([*saving, "--exit-interval", "1"], cwd=tmp_path))
    second = launch.ok(launch.run_forked([*saving, "--exit-interval", "2"], cwd=tmp_path))
    assert {**first.losses(), **second.losses()} == straight.losses()


def problems_of(line):
    env = LaunchEnv(rank=0, world_size=8, local_rank=0, local_world_size=8)
    try:
        parse_config([*line, "--check-config"], env=env)
    except ConfigurationError as error:
        return error.problems
    return []


@pytest.mark.parametrize("data", [["--mock-data"], ["--data-path", "web_text_document"]])
def test_a_llama_3_line_is_accepted(data):
    assert problems_of([*LLAMA_3, *data]) == []


def test_an_index_beyond_the_limit_says_what_it_takes_and_where():
    line = [*LLAMA_3, "--data-path", "c", "--train-samples", str(2**33)]
    (problem,) = problems_of(line)
    assert "their index takes 96 GiB on the disk of --data-cache-path, once a machine," in problem.message
    assert "rank" not in problem.message


# --- a corpus


@pytest.fixture
def prefix(tmp_path):
    rng = np.random.default_rng(0)
    with IndexedDatasetWriter(str(tmp_path / "c"), np.dtype(np.uint16)) as writer:
        for _ in range(60):
            writer.add_document(rng.integers(0, 120, size=rng.integers(2, 90)))
    return str(tmp_path / "c")


def dataset(prefix, folder, requested=3000):
    corpus = IndexedDataset(prefix)
    return GPTDataset(
        corpus, range(60), "train", requested, SampleFormat(16), seed=5, cache_folder=str(folder)
    )


def blend(prefix, folder):
    members = [dataset(prefix, folder, 3000), dataset(prefix, folder, 1500)]
    return BlendedDataset(members, [0.6, 0.4], 2000)


def files_of(dataset):
    """(device, inode) of each file that its arrays are read from; None of those in this process's memory."""
    found = []
    for one in (*dataset.members, dataset) if isinstance(dataset, BlendedDataset) else (dataset,):
        arrays = {"turns": one._turns} if isinstance(one, BlendedDataset) else one._arrays
        for array in arrays.values():
            status = os.fstat(array._fd) if isinstance(array, HeldArray) else None
            found.append(status and (status.st_dev, status.st_ino))
    return found


def _another_rank(build, path, told):
    """A process of the same machine, which makes nothing."""
    held_arrays.held_in_memory = None
    GPTDataset._build = None
    with held_arrays.shared() as sharing:
        sharing.adopt(path)
        mine = build()
    told.put((files_of(mine), [mine[i]["tokens"].tolist() for i in range(0, 1500, 50)]))


@pytest.mark.parametrize("kind", [dataset, blend])
@pytest.mark.parametrize("writable", [True, False])
def test_ranks_of_a_machine_read_the_same_files(prefix, tmp_path, monkeypatch, writable, kind):
    """Of the cache, and where none can be written of memory."""
    monkeypatch.setattr(held_arrays, "SMALL_BYTES", 0)
    folder = tmp_path / "cache"
    if not writable:
        folder.write_text("in the way")
        folder = folder / "cache"
    context = get_context("fork")
    told = context.SimpleQueue()
    with held_arrays.shared() as sharing:
        first = kind(prefix, folder)
        path = sharing.publish()
        other = context.Process(target=_another_rank, args=(lambda: kind(prefix, folder), path, told))
        other.start()
        files, tokens = told.get()
        other.join()
    assert files == files_of(first)
    assert None not in files
    assert len(set(files)) == len(files)
    assert tokens == [first[i]["tokens"].tolist() for i in range(0, 1500, 50)]
    small = dataset(prefix, tmp_path / "other")
    if kind is dataset:
        assert tokens == [small[i]["tokens"].tolist() for i in range(0, 1500, 50)]


def test_who_cannot_see_the_offered_files_makes_its_own(prefix, tmp_path):
    with held_arrays.shared() as sharing:
        sharing.adopt("/proc/1/fd/987654")
        sharing.adopt(str(tmp_path / "nothing"))
        sharing.offered = {"blend": {"turns": ["/proc/1/fd/987654", 0]}}
        assert len(dataset(prefix, tmp_path / "cache")) >= 3000
        assert held_arrays.offered("blend", {"turns": (np.dtype(np.int64), (3,))}) is None


@pytest.mark.parametrize("name", ["document", "sample", "shuffle"])
def test_a_file_that_is_cut_or_written_to_under_a_run_is_an_error(prefix, tmp_path, monkeypatch, name):
    monkeypatch.setattr(held_arrays, "SMALL_BYTES", 0)
    for content in (b"", None):
        folder = tmp_path / f"cache{content}"
        held = dataset(prefix, folder)
        (path,) = folder.glob(f"*-{name}_index.npy")
        with open(path, "r+b") as file:
            size = os.fstat(file.fileno()).st_size
            file.truncate(140)
            if content is None:
                file.seek(140)
                file.write(b"\xf7" * (size - 140))
        told = "cut while in use" if content is not None else "changed while in use|expected .* bytes, found"
        with pytest.raises(DataError, match=told):
            list(map(held.__getitem__, range(len(held))))


@pytest.mark.grid
def test_one_rank_of_a_machine_makes_an_index_that_cannot_be_kept(prefix, tmp_path, monkeypatch):
    monkeypatch.setattr(held_arrays, "SMALL_BYTES", 0)
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    (tmp_path / "file").write_text("in the way")
    data = ["--data-path", prefix, "--split", "1", "--data-cache-path", "file/cache"]
    line = [*launch.TINY_DATA, *data, "--train-iters", "2"]
    run = launch.ok(launch.run_forked(line, ranks=2, cwd=tmp_path))
    assert run.output.count("kept in memory") == 1, run.output
    kept = [*line[:-4], "--data-cache-path", "cache", *line[-2:]]
    assert launch.ok(launch.run_forked(kept, ranks=2, cwd=tmp_path)).losses() == run.losses()


def test_values_read_from_an_index_are_those_of_an_array(tmp_path):
    array = np.arange(40, dtype=np.int64).reshape(20, 2)
    held = held_arrays.held_in_memory("x", (array.dtype, array.shape), [array[:7], array[7:]])
    for rows in (slice(0, 0), slice(3, 9), slice(19, 20), slice(15, 99), slice(5, 2), slice(None)):
        assert np.array_equal(held[rows], array[rows])
    assert len(held) == 20


def test_mock_data_beyond_memory_needs_none(monkeypatch):
    monkeypatch.setattr(mock_dataset, "MOCK_INDEX_BYTES", 0)
    corpus, sample_format = MockCorpus(9, 10), SampleFormat(700, eod=9, vocab_size=10)
    mock = MockDataset(corpus, range(3, 40), "valid", 150, sample_format, seed=5)
    assert mock._arrays == {}
    assert {len(mock[i]["tokens"]) for i in range(len(mock))} == {700}
