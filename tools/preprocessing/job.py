"""Tokenize chunks in parallel, go on where a killed run stopped, and put the parts together.

Each chunk becomes a part, a small corpus of its own, in `<output prefix>.parts/`; its `.done` file, written last, says
that it is complete. Parts are appended in the order of the chunks, so the result does not depend on the number of
workers or on interruptions. `job.json` records all that the parts depend on; when it differs, they are made anew.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import multiprocessing
import operator
import os
import re
import shutil
import signal
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron.core import safe_files
from megatron.core.datasets.checksums import check_corpus, checksums_path, require_checksums
from megatron.core.datasets.errors import DataError
from megatron.core.datasets.indexed_dataset_reader import IndexedDataset, data_path, index_path, token_dtype
from megatron.core.datasets.indexed_dataset_writer import IndexedDatasetWriter
from megatron.core.tokenizers.tokenizer import ByteTokenizer, Tokenizer, TokenizerError
from tools.preprocessing.sources import Source, TextChunk, plan_chunks, read_documents

FORMAT_VERSION = 2
BATCH_DOCUMENTS = 1024
BATCH_BYTES = 1 << 20
MAX_RECORD_BYTES = 1 << 28  # of job.json, which names every source
_OF_A_JOB = re.compile(r"\.?(job\.json|\d{8,}[.-]).*")


@dataclasses.dataclass(frozen=True)
class Statistics:
    """What went through.

    empty_documents, tokens: over all keys.  not_utf8: texts whose invalid bytes were replaced by U+FFFD.
    """

    documents: int = 0
    empty_documents: int = 0
    tokens: int = 0
    bytes: int = 0
    not_utf8: int = 0

    def __add__(self, other: Statistics) -> Statistics:
        return Statistics(*map(operator.add, dataclasses.astuple(self), dataclasses.astuple(other)))


@dataclasses.dataclass(frozen=True)
class Job:
    """One run of preprocessing.

    build_tokenizer: called once in each worker.  keys: of the JSON objects; a corpus is made of each.
    """

    sources: tuple[Source, ...]
    output_prefix: str
    build_tokenizer: Callable[[], Tokenizer]
    keys: tuple[str, ...] = ("text",)
    append_eod: bool = False
    workers: int = 1

    def corpus_prefix(self, key: str) -> str:
        return f"{self.output_prefix}_{key}_document"

    @property
    def parts(self) -> str:
        return f"{self.output_prefix}.parts"

    def part_prefix(self, index: int, key: str) -> str:
        return os.path.join(self.parts, f"{index:08d}-{self.keys.index(key)}")

    def done_path(self, index: int) -> str:
        return os.path.join(self.parts, f"{index:08d}.done")


ProgressOf = Callable[[Statistics, int], None]


def run_job(job: Job, progress: ProgressOf = lambda done, total_bytes: None) -> Statistics:
    """Make the corpora; `progress(so far, bytes in all)` is called after each chunk.

    Raises DataError for input that cannot be read, and for an output prefix that another run is writing.
    """
    chunks = plan_chunks(job.sources)
    total = sum(chunk.size for chunk in chunks)
    tokenizer = job.build_tokenizer()
    os.makedirs(os.path.dirname(job.output_prefix) or ".", exist_ok=True)
    with _parts_folder(job, tokenizer):
        finished = [_finished_part(job, index) for index in range(len(chunks))]
        done = sum((part for part in finished if part is not None), Statistics())
        progress(done, total)
        todo = [(index, chunk) for index, chunk in enumerate(chunks) if finished[index] is None]
        for part in _parts(job, tokenizer, todo):
            done += part
            progress(done, total)
        for key in job.keys:
            with IndexedDatasetWriter(job.corpus_prefix(key), token_dtype(tokenizer.vocab_size)) as writer:
                for index in range(len(chunks)):
                    writer.add_corpus(job.part_prefix(index, key))
        shutil.rmtree(job.parts)
    return done


@contextlib.contextmanager
def _parts_folder(job: Job, tokenizer: Tokenizer) -> Iterator[None]:
    """The folder of parts, ours alone, with nothing in it that was made from something else."""
    lock = f"{job.output_prefix}.lock"
    description = {
        "version": FORMAT_VERSION,
        "sources": [dataclasses.astuple(source) for source in job.sources],
        "keys": job.keys,
        "append_eod": job.append_eod,
        "tokenizer": tokenizer.identity(),
    }
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(safe_files.locked(lock, patience_s=0))
        except BlockingIOError:
            raise DataError(f"--output-prefix {job.output_prefix}: another run is writing there") from None
        _tidy(job, json.dumps(description))
        yield
        os.unlink(lock)


def _tidy(job: Job, description: str) -> None:
    """Leave only what an interrupted run of this very job has finished. Raises OSError where others keep files."""
    os.makedirs(job.parts, exist_ok=True)
    if os.path.islink(job.parts):
        told = "is a symbolic link, not the folder of an interrupted run"
        raise safe_files.UnsafeFileError(job.parts, told)
    names = sorted(os.listdir(job.parts))
    if foreign := [name for name in names if not _OF_A_JOB.fullmatch(name)]:
        told = f"holds {foreign[0]}, which is of no interrupted run: parts are kept, and removed, there"
        raise safe_files.UnsafeFileError(job.parts, told)
    path, known = os.path.join(job.parts, "job.json"), None
    with contextlib.suppress(OSError, ValueError):
        known = safe_files.read_text(path, max_bytes=MAX_RECORD_BYTES)
    for name in names:
        if name.endswith(".tmp") or known != description:
            os.unlink(os.path.join(job.parts, name))
    for key, path_of in itertools.product(job.keys, (data_path, index_path, checksums_path)):
        safe_files.remove_leftovers(path_of(job.corpus_prefix(key)))
    if known != description:
        safe_files.publish_text(path, description)


def _parts(job: Job, tokenizer: Tokenizer, todo: Sequence[tuple[int, TextChunk]]) -> Iterator[Statistics]:
    """Statistics of each part, as it is finished, in any order."""
    if job.workers == 1 or len(todo) <= 1:
        for index, chunk in todo:
            yield _make_part(job, tokenizer, index, chunk)
        return
    context = multiprocessing.get_context("fork")
    with context.Pool(min(job.workers, len(todo)), initializer=_start_worker, initargs=(job,)) as pool:
        yield from pool.imap_unordered(_work, todo)


_worker: dict[str, Any] = {}  # a pool gives its processes no other place to keep the tokenizer in


def _start_worker(job: Job) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent reports the interruption and ends its workers
    _worker["job"], _worker["tokenizer"] = job, job.build_tokenizer()


def _work(item: tuple[int, TextChunk]) -> Statistics:
    return _make_part(_worker["job"], _worker["tokenizer"], *item)


def _make_part(job: Job, tokenizer: Tokenizer, index: int, chunk: TextChunk) -> Statistics:
    """Tokenize one chunk into a small corpus for each key."""
    dtype, statistics, writers = token_dtype(tokenizer.vocab_size), Statistics(bytes=chunk.size), {}
    with contextlib.ExitStack() as stack:
        for key in job.keys:
            writer = IndexedDatasetWriter(job.part_prefix(index, key), dtype)
            writers[key] = stack.enter_context(writer)
        for batch in _batches(chunk, job.keys):
            statistics += Statistics(documents=len(batch))
            for key, writer in writers.items():
                try:
                    statistics += _write_batch(job, tokenizer, writer, [document[key] for document in batch])
                except TokenizerError as error:
                    bounds = f"bytes {chunk.start} to {chunk.stop}"
                    place = bounds if chunk.stop else f"{len(chunk.files)} files"
                    raise DataError(f"{chunk.files[0]}, {place}, key {key!r}: {error}") from error
    safe_files.publish_text(job.done_path(index), json.dumps(dataclasses.asdict(statistics)))
    return statistics


def _batches(chunk: TextChunk, keys: Sequence[str]) -> Iterator[list[dict[str, list[bytes]]]]:
    """Documents in groups large enough for a tokenizer's batch call, and small enough for memory."""
    batch, size = [], 0
    for document in read_documents(chunk, keys):
        batch.append(document)
        size += sum(len(text) for texts in document.values() for text in texts)
        if len(batch) >= BATCH_DOCUMENTS or size >= BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _write_batch(
    job: Job, tokenizer: Tokenizer, writer: IndexedDatasetWriter, documents: Sequence[Sequence[bytes]]
) -> Statistics:
    """Append documents, each a list of sequences; empty sequences are left out, a document without any stays as one."""
    ids, not_utf8 = _tokenize(tokenizer, [text for texts in documents for text in texts])
    left, tokens, empty = iter(ids), 0, 0
    for texts in documents:
        sequences = [array for array in itertools.islice(left, len(texts)) if len(array)]
        if not sequences:
            empty += 1
            writer.add_document(np.zeros(0, dtype=writer.dtype))
            continue
        if job.append_eod:
            dtype = np.int64 if sequences[-1].itemsize > 4 else np.int32
            sequences[-1] = np.concatenate([sequences[-1], [tokenizer.eod]], dtype=dtype, casting="unsafe")
        lengths = [len(array) for array in sequences]
        writer.add_document(sequences[0] if len(sequences) == 1 else np.concatenate(sequences), lengths)
        tokens += sum(lengths)
    return Statistics(empty_documents=empty, tokens=tokens, not_utf8=not_utf8)


def _tokenize(tokenizer: Tokenizer, texts: Sequence[bytes]) -> tuple[list[NDArray[Any]], int]:
    """Ids of texts, and how many of them were not UTF-8. Bytes are taken as they are where they are the vocabulary."""
    if isinstance(tokenizer, ByteTokenizer):
        return [tokenizer.tokenize_bytes(text) for text in texts], 0
    decoded, not_utf8 = [], 0
    for text in texts:
        try:
            decoded.append(text.decode())
        except UnicodeDecodeError:
            decoded.append(text.decode(errors="replace"))
            not_utf8 += 1
    return tokenizer.tokenize_batch(decoded), not_utf8


def _finished_part(job: Job, index: int) -> Statistics | None:
    """What an earlier run recorded of a part, None if it is not there or not whole."""
    try:
        record = safe_files.read_json(job.done_path(index), max_bytes=1 << 16)
        statistics = Statistics(**record)
        if any(type(number) is not int or number < 0 for number in record.values()):
            return None
        for key in job.keys:
            prefix = job.part_prefix(index, key)
            check_corpus(prefix, require_checksums(prefix))
            IndexedDataset(prefix).close()
    except (OSError, ValueError, TypeError):
        return None
    return statistics
