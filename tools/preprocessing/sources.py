"""Raw text on disk, cut into chunks of work that do not depend on how many workers share them."""

from __future__ import annotations

import dataclasses
import fnmatch
import glob
import os
from collections.abc import Iterator, Sequence
from pathlib import PurePath

from megatron.core import safe_files
from megatron.core.datasets.errors import DataError, data_errors
from tools.json_lines import json_object

CHUNK_BYTES = 8 << 20
CHUNK_FILES = 4096
BLOCK_BYTES = 1 << 20
LARGEST_DOCUMENT_BYTES = 2**31 - 1  # it is held in memory, and a sequence has no more tokens than that
FORMATS = ("auto", "jsonl", "text", "lines")
_FORMAT_OF_SUFFIX = {".jsonl": "jsonl", ".json": "jsonl", ".ndjson": "jsonl", ".txt": "text"}

Document = dict[str, list[bytes]]
"""Key to the sequences of one document, each UTF-8 text."""


@dataclasses.dataclass(frozen=True)
class TextChunk:
    """One piece of work.

    format: "jsonl" and "lines": the lines of `files[0]` that start in bytes [start, stop); "text": whole files.
    size: bytes, for progress.
    """

    format: str
    files: tuple[str, ...]
    start: int
    stop: int
    size: int


@dataclasses.dataclass(frozen=True)
class Source:
    """One input file and how to read it."""

    path: str
    format: str
    size: int
    modified_ns: int


def find_sources(
    inputs: Sequence[str], input_format: str, suffixes: Sequence[str], excludes: Sequence[str]
) -> list[Source]:
    """The files that `inputs` (files, glob patterns, folders) name, in the order given; a folder's and a
    pattern's files sorted by path.

    suffixes: which files of a folder are documents.  excludes: names (or patterns) of files and folders to leave out.
    Raises DataError for an input that names nothing, or whose format is not plain from its name.
    """
    sources: list[Source] = []
    for entry in inputs:
        kind = input_format
        if os.path.isdir(entry):
            if not suffixes:
                told = "say which of its files with --suffix, e.g. --suffix .py"
                raise DataError(f"--input {entry} is a folder: {told}")
            paths = _tree(entry, tuple(suffixes), tuple(excludes))
            kind = "text" if kind == "auto" else kind
        else:
            named = [entry] if os.path.exists(entry) else sorted(glob.glob(entry))
            paths = [path for path in named if not os.path.isdir(path)]
        if not paths:
            raise DataError(f"--input {entry}: no such file, and nothing matches it")
        sources += [_source(path, kind) for path in paths]
    return sources


def _source(path: str, kind: str) -> Source:
    unfit = data_errors(path, "--input ", "; text is read from files")
    with unfit, safe_files.open_regular(path, follow=True) as fd:
        status = os.fstat(fd)
    if kind == "auto":
        kind = _FORMAT_OF_SUFFIX.get(os.path.splitext(path)[1].lower(), kind)
    if kind == "auto":
        raise DataError(
            f"--input {path}: its name does not say what it holds: give "
            "--format jsonl (one JSON object a line), text (the file is one document) or lines (each line is one)"
        )
    if kind == "text" and status.st_size > LARGEST_DOCUMENT_BYTES:
        raise DataError(
            f"--input {path}: {status.st_size} bytes; one document has {LARGEST_DOCUMENT_BYTES} at most: cut it, or "
            "read its lines as documents (--format lines)"
        )
    return Source(path, kind, status.st_size, status.st_mtime_ns)


def plan_chunks(sources: Sequence[Source]) -> list[TextChunk]:
    """Cut sources into chunks of about CHUNK_BYTES; small text files share one."""
    chunks: list[TextChunk] = []
    group: list[Source] = []
    for source, following in zip(sources, [*sources[1:], None], strict=True):
        if source.format != "text":
            for start in range(0, source.size, CHUNK_BYTES):
                stop = min(start + CHUNK_BYTES, source.size)
                chunks.append(TextChunk(source.format, (source.path,), start, stop, stop - start))
            continue
        group.append(source)
        size = sum(member.size for member in group)
        is_last = following is None or following.format != "text"
        if is_last or size >= CHUNK_BYTES or len(group) >= CHUNK_FILES:
            chunks.append(TextChunk("text", tuple(member.path for member in group), 0, 0, size))
            group = []
    return chunks


def read_documents(chunk: TextChunk, keys: Sequence[str]) -> Iterator[Document]:
    """The documents of a chunk. Raises DataError naming file and line for what cannot be read."""
    if chunk.format == "text":
        for path in chunk.files:
            with data_errors(path):
                data = safe_files.read_bytes(path, max_bytes=LARGEST_DOCUMENT_BYTES, follow=True)
            yield {keys[0]: [data]}
        return
    for offset, line in _lines(chunk):
        if chunk.format == "lines":
            yield {keys[0]: [line.rstrip(b"\r\n")]}
        elif line.strip():  # a blank line is no document
            yield _json_document(chunk.files[0], offset, line, keys)


def _tree(folder: str, suffixes: tuple[str, ...], excludes: tuple[str, ...]) -> list[str]:
    def kept(names: list[str]) -> list[str]:
        return [name for name in names if not any(fnmatch.fnmatchcase(name, one) for one in excludes)]

    found = []
    for root, folders, files in os.walk(folder):
        folders[:] = kept(folders)
        found += [os.path.join(root, name) for name in kept(files) if name.endswith(suffixes)]
    # By parts, so that the order does not depend on how the separator sorts among other characters.
    return sorted((path for path in found if os.path.isfile(path)), key=lambda path: PurePath(path).parts)


def _lines(chunk: TextChunk) -> Iterator[tuple[int, bytes]]:
    """(offset, line) of the lines that start inside the chunk."""
    path = chunk.files[0]
    with data_errors(path), safe_files.opened(path, follow=True) as file:
        offset = max(0, chunk.start - 1)
        file.seek(offset)
        part = b"" if chunk.start else b"\n"
        while not part.endswith(b"\n") and (part := file.readline(BLOCK_BYTES)):
            offset += len(part)  # the line across the border belongs to the chunk before
        while offset < chunk.stop:
            line = file.readline(LARGEST_DOCUMENT_BYTES + 1)
            if not line:
                raise DataError(f"{path}: ended at byte {offset}, expected {chunk.stop}: did it change?")
            if len(line) > LARGEST_DOCUMENT_BYTES:
                told = f"longer than {LARGEST_DOCUMENT_BYTES} bytes: is this text of lines?"
                raise DataError(f"{_place(path, offset)}: {told}")
            yield offset, line
            offset += len(line)


def _json_document(path: str, offset: int, line: bytes, keys: Sequence[str]) -> Document:
    document: Document = {}
    try:
        row = json_object(line)
        for key in keys:
            if key not in row:
                raise DataError(f"no key {key!r}; it has {', '.join(map(repr, row)) or 'none'}")
            texts = row[key] if isinstance(row[key], list) else [row[key]]
            if not all(isinstance(text, str) for text in texts):
                raise DataError(f"key {key!r}: expected text, or a list of texts")
            # A lone surrogate, which JSON can spell and UTF-8 cannot, becomes a byte that is no UTF-8, and is counted.
            document[key] = [text.encode("utf-8", "surrogatepass") for text in texts]
    except ValueError as error:
        raise DataError(f"{_place(path, offset)}: {error}") from None
    return document


def _place(path: str, offset: int) -> str:
    """`file, line N`: lines are counted only when there is something to report."""
    count = 1
    with safe_files.opened(path, follow=True) as file:
        while offset > 0 and (block := file.read(min(offset, BLOCK_BYTES))):
            count += block.count(b"\n")
            offset -= len(block)
    return f"{path}, line {count}"
