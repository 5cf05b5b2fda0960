"""Links, pipes, devices and forged arrays where caches, parts, tokenizers and reports are looked for.

Nothing of them is followed, waited for, read without end or believed; what can be built again is built again.
"""

import hashlib
import importlib.util
import json
import logging
import os
import stat
import struct
from pathlib import Path

import numpy as np
import pytest

from megatron.core.datasets.errors import DataError
from megatron.core.datasets.gpt_samples import GPTDataset, SampleFormat
from megatron.core.datasets.indexed_dataset_reader import IndexedDataset
from megatron.core.datasets.indexed_dataset_writer import IndexedDatasetWriter
from megatron.core.pipeline_parallel.plan.measuring.timeline_files import read_timeline
from megatron.core.tokenizers.build import build_tokenizer
from megatron.core.tokenizers.tokenizer import ByteTokenizer, TokenizerError
from tests.harness import launch
from tools.preprocessing import job, sources

ROOT = Path(__file__).resolve().parents[3]
pytestmark = pytest.mark.timeout(30)


def load_tool(name):
    spec = importlib.util.spec_from_file_location(f"{name}_tool", ROOT / "tools" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def plant(path, kind, victim):
    """Something at `path` that is no file of ours; `victim` must stay as it is."""
    if not victim.exists():
        victim.write_text("theirs")
    if path.exists():
        path.unlink()
    match kind:
        case "link":
            path.symlink_to(victim)
        case "dangling":
            path.symlink_to(victim.with_name("nowhere"))
        case "pipe":
            os.mkfifo(path)
        case "zeros":
            path.symlink_to("/dev/zero")
        case "huge":
            with open(path, "wb") as file:
                file.truncate(1 << 42)


KINDS = ("link", "dangling", "pipe", "zeros", "huge")


# The index cache -----------------------------------------------------------------------------------------


@pytest.fixture
def corpus(tmp_path):
    dice = np.random.default_rng(0)
    with IndexedDatasetWriter(str(tmp_path / "corpus"), np.dtype("<u2")) as writer:
        for _ in range(30):
            writer.add_document(dice.integers(0, 99, dice.integers(0, 20)))
    return tmp_path / "corpus"


def dataset(corpus, cache=None, *, length=8, extra_token=True):
    sample_format = SampleFormat(length, extra_token=extra_token)
    folder = None if cache is None else str(cache)
    opened = IndexedDataset(str(corpus))
    return GPTDataset(opened, range(3, 28), "train", 70, sample_format, seed=5, cache_folder=folder)


def samples(data):
    return [data[i]["tokens"].tolist() for i in range(len(data))]


def cached(cache, name):
    (path,) = cache.glob(f"*-{name}")
    return path


FILES = ("description.txt", "document_index.npy", "sample_index.npy", "shuffle_index.npy")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", FILES)
def test_what_is_planted_in_the_cache_is_built_over_and_its_target_kept(corpus, tmp_path, kind, name):
    expected = samples(dataset(corpus, tmp_path / "cache"))
    plant(cached(tmp_path / "cache", name), kind, tmp_path / "victim")
    assert samples(dataset(corpus, tmp_path / "cache")) == expected
    assert (tmp_path / "victim").read_text() == "theirs"
    assert not (tmp_path / "nowhere").exists()
    path = cached(tmp_path / "cache", name)
    assert stat.S_ISREG(path.lstat().st_mode)
    assert path.stat().st_size < 10_000


@pytest.mark.parametrize("kind", ["link", "dangling", "pipe", "zeros"])
def test_a_planted_lock_is_neither_followed_nor_waited_for(corpus, tmp_path, kind, caplog):
    expected = samples(dataset(corpus, tmp_path / "cache"))
    plant(cached(tmp_path / "cache", "train.lock"), kind, tmp_path / "victim")
    cached(tmp_path / "cache", "description.txt").unlink()
    with caplog.at_level(logging.WARNING):
        assert samples(dataset(corpus, tmp_path / "cache")) == expected
    assert "train.lock" in caplog.text
    assert "cannot be written" in caplog.text
    assert (tmp_path / "victim").read_text() == "theirs"
    assert not (tmp_path / "nowhere").exists()


def test_a_cache_folder_may_be_a_link_of_the_users(corpus, tmp_path):
    (tmp_path / "scratch").mkdir()
    (tmp_path / "cache").symlink_to(tmp_path / "scratch")
    dataset(corpus, tmp_path / "cache")
    assert len(list((tmp_path / "scratch").iterdir())) == 5


def npy(array, header=None):
    """A file of this array, or of one that its header claims."""
    text = header or f"{{'descr': {array.dtype.str!r}, 'fortran_order': False, 'shape': {array.shape}, }}"
    text = text.ljust(117) + "\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text.encode() + array.tobytes()


def forge(cache, name, content):
    """Put bytes in the place of an array, under a digest that fits."""
    cached(cache, f"{name}.npy").write_bytes(content)
    path = cached(cache, "description.txt")
    description = json.loads(path.read_text())
    description["files"][name] = hashlib.sha256(content).hexdigest()
    path.write_text(json.dumps(description, indent=4) + "\n")


def changed(place, value):
    def change(array):
        array[place] = value
        return npy(array)

    return change


FORGERIES = {
    "document below the split": ("document_index", changed(0, 2)),
    "document beyond the split": ("document_index", changed(-1, 28)),
    "document beyond the corpus": ("document_index", changed(0, 2**31 - 1)),
    "negative document": ("document_index", changed(0, -1)),
    "document twice": ("document_index", lambda a: changed(0, a[1] if a[1] != a[0] else a[2])(a)),
    "documents too few": ("document_index", lambda a: npy(a[:-1])),
    "documents of another type": ("document_index", lambda a: npy(a.astype(np.int64))),
    "documents that are floats": ("document_index", lambda a: npy(a.astype(np.float32))),
    "no shape": ("document_index", lambda a: npy(a.reshape(()) if a.ndim == 0 else a[:1].reshape(()))),
    "absurd shape": (
        "document_index",
        lambda a: npy(a, "{'descr': '<i4', 'fortran_order': False, 'shape': (1099511627776,), }"),
    ),
    "nested header": ("document_index", lambda a: npy(a, "-" * 100_00 + "1")),
    "objects": ("document_index", lambda a: npy(a, "{'descr': '|O', 'fortran_order': False, 'shape': (4,), }")),
    "position beyond the documents": ("sample_index", changed((1, 0), 2**31 - 1)),
    "negative position": ("sample_index", changed((1, 0), -1)),
    "positions that fall": ("sample_index", changed((5, 0), 0)),
    "negative offset": ("sample_index", changed((1, 1), -1)),
    "offset beyond its document": ("sample_index", changed((1, 1), 10**6)),
    "offset on a document's end": (
        "sample_index",
        lambda a: npy(np.array([[0, 0], *[[k, 20] for k in range(len(a) - 1)]], a.dtype)),
    ),
    "samples of another length": ("sample_index", lambda a: npy(np.sort(np.roll(a, 1, axis=0), axis=0))),
    "all samples at the start": ("sample_index", lambda a: npy(np.zeros_like(a))),
    "other columns": ("sample_index", lambda a: npy(a.reshape(2, -1))),
    "columns first": (
        "sample_index",
        lambda a: npy(a, f"{{'descr': '<i4', 'fortran_order': True, 'shape': {a.shape}, }}"),
    ),
    "sample beyond the last": ("shuffle_index", changed(0, 2**32 - 1)),
    "sample twice": ("shuffle_index", lambda a: changed(0, a[1])(a)),
    "samples twice, of the same sum": (
        "shuffle_index",
        lambda a: npy(np.where((a == 0) | (a == 2), 1, a).astype(a.dtype)),
    ),
    "bytes behind the array": ("shuffle_index", lambda a: npy(a) + b"\0"),
    "not numpy's": ("shuffle_index", lambda a: b"\x93NUMPX" + npy(a)[6:]),
    "version 9": ("shuffle_index", lambda a: b"\x93NUMPY\x09" + npy(a)[7:]),
    "cut header": ("shuffle_index", lambda a: npy(a)[:9]),
    "empty": ("shuffle_index", lambda a: b""),
}  # fmt: skip


@pytest.mark.parametrize("extra_token", [True, False])
@pytest.mark.parametrize("name", FORGERIES)
def test_arrays_with_right_digests_and_wrong_content_are_built_again(
    corpus, tmp_path, caplog, name, extra_token
):
    cache = tmp_path / "cache"
    expected = samples(dataset(corpus, cache, extra_token=extra_token))
    array, content = FORGERIES[name]
    forge(cache, array, content(np.load(cached(cache, f"{array}.npy")).copy()))
    with caplog.at_level(logging.INFO):
        assert samples(dataset(corpus, cache, extra_token=extra_token)) == expected
    assert "building index" in caplog.text
    assert "not there yet" not in caplog.text
    caplog.clear()
    with caplog.at_level(logging.INFO):
        assert samples(dataset(corpus, cache, extra_token=extra_token)) == expected
    assert not caplog.text


DESCRIPTIONS = {
    "a name that leads elsewhere": lambda d: {**d, "files": {**d["files"], "../victim": "0"}},
    "a name missing": lambda d: {**d, "files": {}},
    "files in a list": lambda d: {**d, "files": list(d["files"])},
    "no digests": lambda d: {**d, "files": {name: [] for name in d["files"]}},
    "a list": lambda d: [d],
    "nested": lambda d: None,
}


@pytest.mark.parametrize("name", DESCRIPTIONS)
def test_a_forged_description_is_built_again(corpus, tmp_path, name):
    cache = tmp_path / "cache"
    expected = samples(dataset(corpus, cache))
    path = cached(cache, "description.txt")
    content = DESCRIPTIONS[name](json.loads(path.read_text()))
    path.write_text("[" * 100_000 if content is None else json.dumps(content))
    assert samples(dataset(corpus, cache)) == expected
    assert json.loads(path.read_text())["files"].keys() == {"document_index", "sample_index", "shuffle_index"}


@pytest.mark.parametrize("length", [1, 3, 8, 1000])
@pytest.mark.parametrize("extra_token", [True, False])
def test_a_cache_as_it_was_written_before_is_used_as_it_is(corpus, tmp_path, caplog, length, extra_token):
    """By NumPy's own writer, with whatever padding its version gives the header."""
    cache = tmp_path / "cache"
    expected = samples(dataset(corpus, cache, length=length, extra_token=extra_token))
    for name in ("document_index", "sample_index", "shuffle_index"):
        path = cached(cache, f"{name}.npy")
        array = np.load(path)
        np.save(path, array, allow_pickle=False)
        content = path.read_bytes()
        forge(cache, name, content[:8] + struct.pack("<H", 182) + content[10:127] + b" " * 64 + content[127:])
    with caplog.at_level(logging.INFO):
        assert samples(dataset(corpus, cache, length=length, extra_token=extra_token)) == expected
    assert not caplog.text


def test_leftovers_of_killed_builders_are_removed(corpus, tmp_path):
    cache = tmp_path / "cache"
    dataset(corpus, cache)
    names = {path.name for path in cache.iterdir()}
    array, description = (cached(cache, name) for name in ("sample_index.npy", "description.txt"))
    for leftover in (
        f"{array.name}.4242.tmp",
        f".{array.name}.0123456789abcdef.tmp",
        f".{description.name}.ff.tmp",
    ):
        (cache / leftover).write_text("half")
    (cache / "theirs.tmp").write_text("of somebody else")
    description.unlink()
    dataset(corpus, cache)
    assert {path.name for path in cache.iterdir()} == names | {"theirs.tmp"}


def test_files_of_the_cache_are_private_until_they_are_complete(corpus, tmp_path, monkeypatch):
    seen = []
    replace = os.replace

    def watching(source, target):
        seen.append((Path(source).name, Path(target).name))
        assert [path for path in Path(target).parent.glob(".*.tmp") if path.name != Path(source).name] == []
        return replace(source, target)

    monkeypatch.setattr(os, "replace", watching)
    modes = []
    fchmod = os.fchmod
    monkeypatch.setattr(
        os, "fchmod", lambda fd, mode: (modes.append(os.fstat(fd).st_mode & 0o777), fchmod(fd, mode))
    )
    dataset(corpus, tmp_path / "cache")
    assert len(seen) == 4
    assert not any(str(os.getpid()) in source for source, _ in seen)
    assert modes == [0o600] * 4


def test_a_run_goes_on_over_a_forged_cache(corpus, tmp_path):
    flags = [*launch.TINY_DATA, "--data-path", str(corpus), "--split", "1,0,0", "--train-iters", "2"]
    flags += ["--data-cache-path", "cache"]
    first = launch.ok(launch.run_forked(flags, cwd=tmp_path))
    cache = tmp_path / "cache"
    right = np.load(cached(cache, "shuffle_index.npy"))
    forge(cache, "shuffle_index", npy(right * 0 + 2**31))
    again = launch.ok(launch.run_forked(flags, cwd=tmp_path))
    assert again.losses() == first.losses()
    assert np.load(cached(cache, "shuffle_index.npy")).tolist() == right.tolist()


# Preprocessing -------------------------------------------------------------------------------------------


@pytest.fixture
def preprocess(tmp_path, capsys):
    """Runs tools/preprocess_data.py here; (status, what it said)."""
    tool = load_tool("preprocess_data")
    (tmp_path / "in.txt").write_text("text")

    def run(*words, source=tmp_path / "in.txt", prefix=tmp_path / "o", tokenizer="ByteTokenizer"):
        argv = ["--input", source, "--output-prefix", prefix, "--tokenizer-type", tokenizer, *words]
        status = tool.main([str(word) for word in argv])
        return status, capsys.readouterr().err

    return run


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("in2.txt", "huge"),
        *((f"in2.{end}", kind) for end in ("txt", "jsonl") for kind in ("dangling", "pipe", "zeros")),
    ],
)
def test_input_that_is_no_text_file_is_a_message(preprocess, tmp_path, kind, name):
    plant(tmp_path / name, kind, tmp_path / "victim")
    status, said = preprocess(source=tmp_path / name)
    assert status == 4
    assert f"--input {tmp_path / name}" in said


def test_a_line_without_end_is_a_message(preprocess, tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "LARGEST_DOCUMENT_BYTES", 1000)
    (tmp_path / "in2.jsonl").write_text('{"text": "a"}\n' + "0" * 5000)
    status, said = preprocess(source=tmp_path / "in2.jsonl")
    assert (status, "in2.jsonl, line 2: longer than 1000 bytes" in said) == (4, True)


@pytest.mark.parametrize("kind", ["link", "dangling", "pipe", "zeros"])
def test_a_planted_lock_of_preprocessing(preprocess, tmp_path, kind):
    plant(tmp_path / "o.lock", kind, tmp_path / "victim")
    status, said = preprocess()
    assert status == 2
    assert f"--output-prefix {tmp_path / 'o.lock'}: is a " in said
    assert (tmp_path / "victim").read_text() == "theirs"
    assert not (tmp_path / "nowhere").exists()


def test_a_planted_folder_of_parts_is_not_emptied(preprocess, tmp_path):
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "job.json").write_text("theirs")
    (tmp_path / "o.parts").symlink_to(tmp_path / "home")
    assert preprocess()[0] == 2
    (tmp_path / "o.parts").unlink()
    (tmp_path / "o.parts").mkdir()
    (tmp_path / "o.parts" / "thesis.tex").write_text("theirs")
    status, said = preprocess()
    assert (status, "holds thesis.tex" in said) == (2, True)
    assert (tmp_path / "home" / "job.json").read_text() == "theirs"
    assert (tmp_path / "o.parts" / "thesis.tex").read_text() == "theirs"


@pytest.mark.parametrize("kind", KINDS)
def test_output_names_are_replaced_and_their_targets_kept(preprocess, tmp_path, kind):
    for ending in (".bin", ".idx", ".sha256.json"):
        plant(tmp_path / f"o_text_document{ending}", kind, tmp_path / "victim")
    assert preprocess() == (0, "")
    assert (tmp_path / "victim").read_text() == "theirs"
    assert IndexedDataset(str(tmp_path / "o_text_document")).get(0).tolist() == list(b"text")


def interrupted(tmp_path, monkeypatch):
    """What a run leaves that was interrupted before it put its parts together; (job, expected bytes)."""
    (tmp_path / "in.txt").write_text("text")
    (tmp_path / "in2.txt").write_text("more")
    inputs = [str(tmp_path / "in.txt"), str(tmp_path / "in2.txt")]
    monkeypatch.setattr(sources, "CHUNK_FILES", 1)
    work = job.Job(tuple(sources.find_sources(inputs, "text", [], [])), str(tmp_path / "o"), ByteTokenizer)

    def interrupt(path):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(job.shutil, "rmtree", interrupt)
        with pytest.raises(KeyboardInterrupt):
            job.run_job(work)
    return work, (tmp_path / "o_text_document.bin").read_bytes()


PARTS = {
    "job.json": ["pipe", "zeros", "link", "huge"],
    "00000000.done": ["pipe", "zeros", "link", "huge"],
    "00000001-0.bin": ["pipe", "zeros", "huge"],
    "00000001-0.idx": ["pipe", "zeros", "huge"],
    "00000001-0.sha256.json": ["pipe", "zeros", "link", "huge"],
}


@pytest.mark.parametrize(("name", "kind"), [(name, kind) for name, kinds in PARTS.items() for kind in kinds])
def test_planted_parts_are_made_again(tmp_path, monkeypatch, name, kind):
    work, expected = interrupted(tmp_path, monkeypatch)
    plant(tmp_path / "o.parts" / name, kind, tmp_path / "victim")
    assert job.run_job(work).documents == 2
    assert (tmp_path / "o_text_document.bin").read_bytes() == expected
    assert (tmp_path / "victim").read_text() == "theirs"
    assert not (tmp_path / "o.parts").exists()


def test_a_part_whose_bytes_changed_is_made_again(tmp_path, monkeypatch):
    work, expected = interrupted(tmp_path, monkeypatch)
    part = tmp_path / "o.parts" / "00000001-0.bin"
    part.write_bytes(b"\1" + part.read_bytes()[1:])
    (tmp_path / "o.parts" / "00000000.done").write_text('{"documents": "2", "tokens": -1}')
    job.run_job(work)
    assert (tmp_path / "o_text_document.bin").read_bytes() == expected


def test_leftovers_of_killed_preprocessing_are_removed(tmp_path, monkeypatch):
    work, _ = interrupted(tmp_path, monkeypatch)
    (tmp_path / ".o_text_document.bin.0123456789abcdef.tmp").write_bytes(b"half")
    (tmp_path / "o.parts" / ".00000001-0.bin.0123456789abcdef.tmp").write_bytes(b"half")
    job.run_job(work)
    assert not list(tmp_path.glob(".*"))


# Corpora, tokenizers, timelines ----------------------------------------------------------------------------


@pytest.mark.parametrize("ending", [".bin", ".idx"])
@pytest.mark.parametrize("kind", ["pipe", "zeros", "huge"])
def test_a_corpus_that_is_no_file(corpus, tmp_path, ending, kind):
    plant(corpus.with_name(f"corpus{ending}"), kind, tmp_path / "victim")
    with pytest.raises(DataError, match=rf"corpus\{ending}"):
        IndexedDataset(str(corpus))


def test_a_corpus_may_be_behind_links(corpus, tmp_path):
    for ending in (".bin", ".idx"):
        (tmp_path / f"alias{ending}").symlink_to(f"corpus{ending}")
    assert len(IndexedDataset(str(tmp_path / "alias"))) == len(IndexedDataset(str(corpus)))


@pytest.mark.parametrize("kind", ["dangling", "pipe", "zeros", "huge", "nested", "binary"])
@pytest.mark.parametrize(
    "tokenizer", ["GPT2BPETokenizer", "HuggingFaceTokenizer", "TikTokenizer", "Llama2Tokenizer"]
)
def test_tokenizer_files_that_are_none(tmp_path, tokenizer, kind):
    path = tmp_path / "file"
    if kind in KINDS:
        plant(path, kind, tmp_path / "victim")
    else:
        path.write_bytes(b"[" * 100_000 if kind == "nested" else bytes(range(256)) * 9)
    files = {"tokenizer_model": str(path)}
    if tokenizer == "GPT2BPETokenizer":
        files = {"vocab_file": str(path), "merge_file": str(path)}
    with pytest.raises(TokenizerError, match="file"):
        build_tokenizer(tokenizer, **files)


def test_a_planted_timeline_is_not_read(tmp_path):
    os.mkfifo(tmp_path / "rank-00000.jsonl")
    with pytest.raises(OSError, match="is a pipe"):
        read_timeline(tmp_path)


def test_a_timeline_is_not_written_through_a_planted_link(corpus, tmp_path):
    (tmp_path / "victim").write_text("theirs")
    (tmp_path / "times").mkdir()
    (tmp_path / "times" / "rank-00000.jsonl").symlink_to(tmp_path / "victim")
    flags = [*launch.TINY, "--train-iters", "1", "--log-pipeline-timeline", "times"]
    launch.ok(launch.run_forked(flags, cwd=tmp_path))
    assert (tmp_path / "victim").read_text() == "theirs"
    assert read_timeline(tmp_path / "times")[0].iteration == 1
