"""Every changed byte of a corpus is seen, by `inspect_data --verify` and by `--verify-data`, and said where it is."""

import importlib.util
import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from megatron.core.datasets import checksums
from megatron.core.datasets.errors import DataError
from megatron.core.datasets.indexed_dataset_reader import IndexedDataset
from megatron.core.datasets.indexed_dataset_writer import IndexedDatasetWriter
from tests.harness import launch
from tools.corpus_report import verify_corpus

ROOT = Path(__file__).resolve().parents[3]
pytestmark = pytest.mark.timeout(60)


def write(folder, name="corpus", documents=40, seed=0):
    dice = np.random.default_rng(seed)
    with IndexedDatasetWriter(str(folder / name), np.dtype("<u2")) as writer:
        for _ in range(documents):
            writer.add_document(dice.integers(0, 127, dice.integers(5, 60)))
    return folder / name


def file(prefix, ending):
    return prefix.with_name(prefix.name + ending)


@pytest.fixture
def inspect(capsys):
    """Runs tools/inspect_data.py here; (status, stdout, stderr)."""
    spec = importlib.util.spec_from_file_location("inspect_tool", ROOT / "tools" / "inspect_data.py")
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)

    def run(*words):
        status = tool.main([str(word) for word in words])
        return status, *capsys.readouterr()

    return run


@pytest.fixture
def corpus(tmp_path, monkeypatch):
    monkeypatch.setattr(checksums, "BLOCK_BYTES", 100)
    return write(tmp_path)


def refused(prefix):
    with pytest.raises(DataError) as error:
        verify_corpus(str(prefix))
    return str(error.value)


def test_each_of_400_changed_bytes_is_seen(corpus):
    dice = np.random.default_rng(1)
    sizes = [file(corpus, ending).stat().st_size for ending in (".bin", ".idx")]
    verify_corpus(str(corpus))
    for place in dice.choice(sum(sizes), 400, replace=False):
        ending, place = (".bin", place) if place < sizes[0] else (".idx", place - sizes[0])
        content = bytearray(file(corpus, ending).read_bytes())
        right = content[place]
        content[place] ^= int(dice.integers(1, 256))
        file(corpus, ending).write_bytes(content)
        assert f"corpus{ending}" in refused(corpus)
        content[place] = right
        file(corpus, ending).write_bytes(content)
    verify_corpus(str(corpus))


def test_each_changed_byte_of_the_checksums_is_seen(corpus):
    path = file(corpus, ".sha256.json")
    right = path.read_bytes()
    for place in np.random.default_rng(2).choice(len(right), min(len(right), 300), replace=False):
        path.write_bytes(right[:place] + bytes([right[place] ^ 1]) + right[place + 1 :])
        assert "corpus.sha256.json" in refused(corpus)
    path.write_bytes(right + b" ")
    assert "corpus.sha256.json itself is damaged" in refused(corpus)


@pytest.mark.parametrize(
    "content",
    [b"", b"{}", b"[]", b"1", b"null", b"[" * 100_000, b"\xff", b'{"version": 2}', b'{"version": 1}']
    + [
        b'{"version": 1, "block_bytes": %s}' % word
        for word in (b"0", b"-1", b"1e400", b'"x"', b"true", b"1" * 5000)
    ]
    + [
        b'{"version": 1, "block_bytes": 9, "bin": %s}' % word
        for word in (b"[]", b"{}", b'{"bytes": -1, "sha256": []}')
    ],
)
def test_checksums_that_are_none_are_a_message(tmp_path, content):
    prefix = write(tmp_path)
    file(prefix, ".sha256.json").write_bytes(content)
    assert "corpus.sha256.json" in refused(prefix)


def test_the_range_of_the_damage_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(checksums, "BLOCK_BYTES", 100)
    prefix = write(tmp_path)
    path = file(prefix, ".bin")
    content = bytearray(path.read_bytes())
    for place in (101, 250, 299, 555, len(content) - 1):
        content[place] ^= 1
    path.write_bytes(content)
    tail = len(content) // 100 * 100
    told = f"bytes 100 to 299, bytes 500 to 599, bytes {tail} to {len(content) - 1}"
    assert f"corpus.bin: not what was written (SHA-256): {told};" in refused(prefix)


def test_swapped_cut_and_longer_files_are_seen(tmp_path):
    one, other = write(tmp_path, "one"), write(tmp_path, "other", seed=1)
    kept = {path: path.read_bytes() for path in tmp_path.iterdir()}
    for ending in (".bin", ".idx", ".sha256.json"):
        shutil.copy(file(other, ending), file(one, ending))
        assert "one." in refused(one)
        file(one, ending).write_bytes(kept[file(one, ending)])
    for ending in (".bin", ".idx"):
        for content in (kept[file(one, ending)][:-2], kept[file(one, ending)] + b"\0\0", b""):
            file(one, ending).write_bytes(content)
            assert f"one{ending}" in refused(one)
        file(one, ending).write_bytes(kept[file(one, ending)])
    verify_corpus(str(one))


def test_ranks_that_share_the_blocks_see_all_of_them(tmp_path, monkeypatch):
    monkeypatch.setattr(checksums, "BLOCK_BYTES", 100)
    prefix = write(tmp_path)
    path, known = file(prefix, ".bin"), checksums.read_checksums(str(prefix))
    content = bytearray(path.read_bytes())
    for place in range(50, len(content), 100):
        content[place] ^= 1
        path.write_bytes(content)
        finders = []
        for part in range(3):
            try:
                checksums.check_corpus(str(prefix), known, part=part, parts=3, threads=2)
            except DataError:
                finders.append(part)
        assert finders == [place // 100 % 3]
        content[place] ^= 1


def test_the_writer_hashes_what_it_writes_without_reading_it_again(tmp_path, monkeypatch):
    """However the data comes: in documents, in parts, in blocks of any length."""
    monkeypatch.setattr(checksums, "BLOCK_BYTES", 64)
    part = write(tmp_path, "part")
    written = file(part, ".sha256.json").read_bytes()
    file(part, ".sha256.json").unlink()
    checksums.write_checksums(str(part), threads=2)
    assert file(part, ".sha256.json").read_bytes() == written
    with IndexedDatasetWriter(str(tmp_path / "whole"), np.dtype("<u2")) as writer:
        writer.add_corpus(str(part))
        writer.add_document([1, 2, 3])
        writer.add_document([])
        writer.add_corpus(str(part))
    assert verify_corpus(str(tmp_path / "whole"))["checksums"] == "good"


def test_a_corpus_made_anew_has_its_own_checksums(tmp_path):
    prefix = write(tmp_path)
    write(tmp_path, seed=3)
    assert verify_corpus(str(prefix))["checksums"] == "good"
    with IndexedDatasetWriter(str(tmp_path / "empty"), np.dtype("<i4")):
        pass
    assert verify_corpus(str(tmp_path / "empty"))["checksums"] == "good"


def test_inspect_data_verifies_and_says_so(tmp_path, inspect):
    prefix = write(tmp_path)
    status, said, _ = inspect("--data-path", prefix, "--verify")
    assert (status, "checksums        good" in said) == (0, True)
    path = file(prefix, ".bin")
    path.write_bytes(bytes([path.read_bytes()[0] ^ 1]) + path.read_bytes()[1:])
    status, _, said = inspect("--data-path", prefix, "--verify")
    assert status == 4
    assert f"{path}: not what was written (SHA-256): bytes 0 to {path.stat().st_size - 1}" in said
    file(prefix, ".sha256.json").unlink()
    status, said, _ = inspect("--data-path", prefix, "--verify")
    assert (status, f"(--write-checksums {prefix})" in said) == (0, True)


def test_checksums_of_a_corpus_without_them(tmp_path, inspect):
    """Of Megatron's, or of one that was written earlier; what is there already is not written over."""
    prefixes = [write(tmp_path, "one"), write(tmp_path, "other", seed=1)]
    for prefix in prefixes:
        file(prefix, ".sha256.json").unlink()
        assert len(IndexedDataset(str(prefix))) == 40
    assert inspect("--write-checksums", *prefixes)[0] == 0
    for prefix in prefixes:
        assert verify_corpus(str(prefix))["checksums"] == "good"
    status, _, said = inspect("--write-checksums", prefixes[0])
    assert (status, "is there already" in said) == (4, True)
    (tmp_path / "one.idx").write_bytes(b"")
    assert inspect("--write-checksums", prefixes[0])[0] == 4
    for words in (
        ("--write-checksums", prefixes[0], "--verify"),
        ("--write-checksums", prefixes[0], "--mock-data"),
    ):
        with pytest.raises(SystemExit, match="2"):
            inspect(*words)


def flags(*more):
    return [*launch.TINY_DATA, "--train-iters", "1", "--split", "100,0,0", "--verify-data", *more]


@pytest.mark.grid
def test_a_run_verifies_its_corpora_before_it_trains(tmp_path):
    """Blends, two ranks of a machine: the damage is told by all ranks, and nothing is trained."""
    for seed, name in enumerate(("a", "b")):
        write(tmp_path, name, seed=seed)
    words = flags("--data-path", "0.5", "a", "0.5", "b")
    done = launch.ok(launch.run_forked(words, ranks=2, cwd=tmp_path))
    assert "the checksums of 2 corpora are right" in done.output
    content = bytearray((tmp_path / "b.bin").read_bytes())
    content[9] ^= 1
    (tmp_path / "b.bin").write_bytes(content)
    launch.ok(launch.run_forked([word for word in words if word != "--verify-data"], cwd=tmp_path))
    run = launch.ended(launch.run_forked(words, ranks=2, cwd=tmp_path), 4)
    assert f"b.bin: not what was written (SHA-256): bytes 0 to {len(content) - 1}" in run.output
    assert "iteration        1/" not in run.output
    assert "Traceback" not in run.output


def test_a_run_without_checksums_or_corpora_says_what_to_do(tmp_path):
    prefix = write(tmp_path)
    file(prefix, ".sha256.json").unlink()
    run = launch.ended(launch.run_forked(flags("--data-path", "corpus"), cwd=tmp_path), 4)
    assert "tools/inspect_data.py --write-checksums corpus" in run.output
    mock = [*launch.TINY, "--train-iters", "1", "--verify-data"]
    assert "--verify-data" in launch.ended(launch.run_forked(mock, cwd=tmp_path), 2).output


def test_preprocessing_writes_them_for_any_number_of_workers(tmp_path):
    spec = importlib.util.spec_from_file_location("preprocess_tool", ROOT / "tools" / "preprocess_data.py")
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    for name in ("a", "b", "c"):
        (tmp_path / f"{name}.txt").write_text(name * 300)
    found = set()
    for workers in (1, 2):
        words = ["--input", str(tmp_path / "*.txt"), "--output-prefix", str(tmp_path / f"o{workers}")]
        words += ["--tokenizer-type", "ByteTokenizer", "--workers", str(workers), "--format", "lines"]
        assert tool.main(words) == 0
        prefix = tmp_path / f"o{workers}_text_document"
        assert verify_corpus(str(prefix))["checksums"] == "good"
        found.add(file(prefix, ".sha256.json").read_text())
    assert len(found) == 1
    assert json.loads(found.pop())["bin"]["bytes"] == 1800
    assert sorted(path.name.partition(".")[2] for path in tmp_path.glob("o1*")) == [
        "bin",
        "idx",
        "sha256.json",
    ]
    assert os.stat(prefix.with_name(prefix.name + ".bin")).st_mode & 0o111 == 0
