"""Rows D1 and D2 of the fault matrix: a bad corpus is an error naming file, field, byte, expected and found."""

import os
import struct
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron.core.datasets.errors import DataError
from megatron.core.datasets.indexed_dataset_reader import IndexedDataset, read_index, token_dtype
from megatron.core.datasets.indexed_dataset_writer import IndexedDatasetWriter

DOCUMENTS = [[[1, 2, 3]], [], [[4], [5, 6]], [[7, 8]]]
BIN = struct.pack("<8H", *range(1, 9))


def write(prefix, documents):
    with IndexedDatasetWriter(prefix, np.dtype("<u2")) as writer:
        for document in documents:
            writer.add_document([t for s in document for t in s], [len(s) for s in document])


@pytest.fixture
def corpus(tmp_path):
    prefix = str(tmp_path / "corpus")
    write(prefix, DOCUMENTS)
    return prefix


def test_bytes_on_disk(corpus):
    """The layout, byte for byte, written down by hand."""
    idx = bytes.fromhex("4D4D4944494458 0000") + struct.pack("<QBQQ", 1, 8, 4, 5)
    idx += (
        struct.pack("<4i", 3, 1, 2, 2) + struct.pack("<4q", 0, 6, 8, 12) + struct.pack("<5q", 0, 1, 1, 3, 4)
    )
    with open(corpus + ".idx", "rb") as file:
        assert file.read() == idx
    assert len(idx) == 34 + 12 * 4 + 8 * 5
    with open(corpus + ".bin", "rb") as file:
        assert file.read() == BIN


def test_read_back(corpus):
    with IndexedDataset(corpus) as dataset:
        assert len(dataset) == 4
        assert dataset.num_documents == 4
        assert dataset.num_tokens == 8
        assert [dataset.get(i).tolist() for i in range(4)] == [[1, 2, 3], [4], [5, 6], [7, 8]]
        assert dataset.get(0, 1).tolist() == [2, 3]
        assert dataset.get(0, 1, 1).tolist() == [2]
        assert dataset.get(0, 3).tolist() == []


@pytest.mark.parametrize("dtype", ["u1", "i1", "<i2", "<i4", "<i8", "<u2"])
def test_dtypes(tmp_path, dtype):
    prefix = str(tmp_path / "c")
    with IndexedDatasetWriter(prefix, np.dtype(dtype)) as writer:
        writer.add_document([0, 100, 127])
    with IndexedDataset(prefix) as dataset:
        assert dataset.index.dtype == np.dtype(dtype)
        assert dataset.get(0).tolist() == [0, 100, 127]


def test_dtype_by_vocabulary():
    assert token_dtype(65499) == np.dtype("<u2")
    assert token_dtype(65500) == np.dtype("<i4")


def test_empty_corpus_and_merge(tmp_path, corpus):
    none, merged, whole = (str(tmp_path / name) for name in ("none", "merged", "whole"))
    write(none, [])
    assert len(IndexedDataset(none)) == 0
    with IndexedDatasetWriter(merged, np.dtype("<u2")) as writer:
        for part in (corpus, none, corpus):
            writer.add_corpus(part)
    write(whole, DOCUMENTS * 2)
    for ending in (".bin", ".idx"):
        assert (tmp_path / f"merged{ending}").read_bytes() == (tmp_path / f"whole{ending}").read_bytes()


def test_nothing_appears_when_writing_fails(tmp_path):
    with (
        pytest.raises(DataError, match="70000 does not fit uint16"),
        IndexedDatasetWriter(str(tmp_path / "c"), np.dtype("<u2")) as writer,
    ):
        writer.add_document([1, 70000])
    assert os.listdir(tmp_path) == []


FIELDS = [
    (0, b"XX", "magic at byte 0"),
    (9, struct.pack("<Q", 2), "version at byte 9: expected 1, found 2"),
    (17, b"\x00", "dtype code at byte 17"),
    (17, b"\x09", "dtype code at byte 17: expected one of .*, found 9"),
    (18, struct.pack("<Q", 2**63), f"number of sequences at byte 18: .*found {2**63}"),
    (18, struct.pack("<Q", 0), "size: expected 74 bytes"),
    (26, struct.pack("<Q", 0), "number of document boundaries at byte 26: expected at least 1, found 0"),
    (26, struct.pack("<Q", 2**63), f"number of document boundaries at byte 26: .*found {2**63}"),
    (34 + 4, struct.pack("<i", -1), "length of sequence 1 at byte 38: expected at least 0, found -1"),
    (34, struct.pack("<i", 4), "byte offset of sequence 1 at byte 58: expected 8 .*found 6"),
    (34 + 12, struct.pack("<i", 99), "corpus.bin: size: expected 210 bytes .*found 16"),
    (34 + 16, struct.pack("<q", 2), "byte offset of sequence 0 at byte 50: expected 0 .*found 2"),
    (34 + 16 + 8, struct.pack("<q", 7), "byte offset of sequence 1 at byte 58: expected 6 .*found 7"),
    (34 + 16 + 24, struct.pack("<q", 2**62), "byte offset of sequence 3 at byte 74: expected 12"),
    (34 + 48, struct.pack("<q", 1), "document boundary 0 at byte 82: expected 0, found 1"),
    (34 + 48 + 24, struct.pack("<q", 0), "document boundary 3 at byte 106: expected at least 1, found 0"),
    (34 + 48 + 32, struct.pack("<q", 5), "document boundary 4 at byte 114: expected 4, .*found 5"),
]


def patch(path, offset, data):
    with open(path, "r+b") as file:
        file.seek(offset)
        file.write(data)


@pytest.mark.parametrize(("offset", "data", "message"), FIELDS)
def test_bad_field(corpus, offset, data, message):
    patch(corpus + ".idx", offset, data)
    with pytest.raises(DataError, match=message) as error:
        IndexedDataset(corpus)
    assert corpus in str(error.value)


def test_every_truncation_is_refused(corpus):
    with open(corpus + ".idx", "rb") as file:
        whole = file.read()
    for size in range(len(whole)):
        with open(corpus + ".idx", "wb") as file:
            file.write(whole[:size])
        with pytest.raises(DataError, match=r"corpus\.idx: .*expected .*found"):
            IndexedDataset(corpus)


@settings(
    max_examples=150,
    derandomize=True,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(st.data())
def test_any_corruption_is_refused_or_harmless(corpus, data):
    """Random bytes anywhere end in DataError, or in a corpus whose sequences can all be read."""
    with open(corpus + ".idx", "rb") as file:
        changed = bytearray(file.read())
    for _ in range(data.draw(st.integers(1, 3))):
        changed[data.draw(st.integers(0, len(changed) - 1))] = data.draw(st.integers(0, 255))
    path = corpus + "-changed"
    for ending, content in ((".idx", changed), (".bin", BIN)):
        with open(path + ending, "wb") as file:
            file.write(content)
    try:
        dataset = IndexedDataset(path)
    except DataError as refusal:
        message = str(refusal)
    else:
        message = path
        for i in range(len(dataset)):
            dataset.get(i)
    assert path in message


def test_validation_of_a_million_sequences(tmp_path):
    n = 10**6
    path = str(tmp_path / "big.idx")
    boundaries = np.arange(n + 1, dtype="<i8")
    boundaries[-1] = n + 7
    with open(path, "wb") as file:
        file.write(b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 1, n, n + 1))
        file.write(np.ones(n, dtype="<i4").tobytes() + np.arange(n, dtype="<i8").tobytes())
        file.write(boundaries.tobytes())
    with pytest.raises(DataError, match=f"document boundary {n} at byte {34 + 12 * n + 8 * n}"):
        read_index(path)


@pytest.mark.parametrize("change", [-1, 1])
def test_bin_of_another_size(corpus, change):
    os.truncate(corpus + ".bin", 16 + change)
    with pytest.raises(DataError, match=rf"corpus\.bin: size: expected 16 bytes .*found {16 + change}"):
        IndexedDataset(corpus)


def test_bin_that_shrinks_while_open(corpus):
    """In a process of its own: a signal would end it, an exception is printed."""
    code = (
        "import os, sys\n"
        "from megatron.core.datasets.indexed_dataset_reader import IndexedDataset\n"
        "d = IndexedDataset(sys.argv[1])\n"
        "os.truncate(sys.argv[1] + '.bin', 4)\n"
        "try:\n    d.get(3)\n"
        "except ValueError as e:\n    print(type(e).__name__, e)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, corpus], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "DataError" in done.stdout
    assert "corpus.bin: read at byte 12: expected 4 bytes, found 0; the file shrank" in done.stdout


def test_missing_files(tmp_path, corpus):
    with pytest.raises(DataError, match=r"nothing\.idx: no such file"):
        IndexedDataset(str(tmp_path / "nothing"))
    with pytest.raises(DataError, match="without its ending"):
        IndexedDataset(corpus + ".bin")
    with pytest.raises(DataError, match="object stores"):
        IndexedDataset("s3://bucket/corpus")


def test_multimodal_corpus_is_named(corpus):
    with open(corpus + ".idx", "ab") as file:
        file.write(b"\0" * 4)
    with pytest.raises(DataError, match="multimodal"):
        IndexedDataset(corpus)


def test_fingerprint_sees_content(corpus):
    before = IndexedDataset(corpus).fingerprint()
    assert before == IndexedDataset(corpus).fingerprint()
    patch(corpus + ".bin", 0, b"\x09")
    assert IndexedDataset(corpus).fingerprint() != before
