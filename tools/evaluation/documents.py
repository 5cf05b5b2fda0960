"""Documents to evaluate a model on, and the windows that they are cut into."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from megatron.core import safe_files
from megatron.core.datasets.indexed_dataset_reader import IndexedDataset
from megatron.core.tokenizers.tokenizer import NullTokenizer, Tokenizer
from tools.json_lines import json_object, text_in

MAX_TEXT_BYTES = 1 << 32  # of a file that is one document


@dataclasses.dataclass(frozen=True)
class Document:
    """size: its characters, or tokens of a corpus. ids: makes its tokens. num_bytes: counts those of its text in UTF-8;
    None where they are not known. where: for messages."""

    size: int
    ids: Callable[[], Sequence[int]]
    num_bytes: Callable[[], int | None]
    where: str


class TextWindow(NamedTuple):
    """inputs, and of each the token that follows it."""

    inputs: Sequence[int]
    targets: Sequence[int]


def of_texts(files: Sequence[str], tokenizer: Tokenizer, first: Sequence[int] = ()) -> Iterator[Document]:
    """Of a .jsonl file a document a line, in its field "text"; of any other file one. first: ids before each, which
    no tokenizer has put there already. Raises ValueError."""

    def tokenized(where: str, text: str) -> list[int]:
        try:
            ids = tokenizer.tokenize(text)
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from error
        return ids if list(first) == ids[: len(first)] else [*first, *ids]

    for where, text in itertools.chain.from_iterable(map(_texts, files)):
        ids = functools.partial(tokenized, where, text)
        yield Document(len(text), ids, lambda text=text: len(text.encode()), where)  # type: ignore[misc]


def _texts(file: str) -> Iterator[tuple[str, str]]:
    try:
        if not file.endswith(".jsonl"):
            yield file, safe_files.read_text(file, max_bytes=MAX_TEXT_BYTES, follow=True)
            return
        with safe_files.opened(file, follow=True) as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    where = f"{file}:{number}"
                    try:
                        text = text_in(json_object(line), "text")
                    except ValueError as error:
                        raise ValueError(f"{where}: {error}") from None
                    yield where, text
    except OSError as error:
        raise ValueError(f"--text {file}: {error.strerror}") from error


def of_corpora(prefixes: Sequence[str], tokenizer: Tokenizer | None) -> Iterator[Document]:
    """Documents of tokenized corpora, by their index. Raises DataError."""
    for prefix in prefixes:
        with IndexedDataset(prefix) as corpus:
            first, starts = corpus.index.boundaries, corpus.index.starts
            for number in range(corpus.num_documents):
                begin, end = int(starts[first[number]]), int(starts[first[number + 1]])
                ids = functools.partial(_tokens, corpus, begin, end - begin)
                count = functools.partial(_bytes_of, ids, tokenizer)
                yield Document(end - begin, ids, count, f"{prefix}: document {number}")


def _tokens(corpus: IndexedDataset, begin: int, count: int) -> list[int]:
    ids: list[int] = corpus.read_tokens(begin, count).tolist()
    return ids


def _bytes_of(ids: Callable[[], list[int]], tokenizer: Tokenizer | None) -> int | None:
    """Of the text that these ids are exactly the tokens of, between a begin and an end of it."""
    if tokenizer is None or isinstance(tokenizer, NullTokenizer):
        return None
    own = ids()
    own = own[1:] if own[:1] == [tokenizer.bos] else own
    own = own[:-1] if own[-1:] == [tokenizer.eod] else own
    if not tokenizer.special_ids.isdisjoint(own) or max(own, default=0) >= tokenizer.vocab_size:
        return None
    text = tokenizer.detokenize(own)
    return len(text.encode()) if tokenizer.tokenize(text) in (own, [tokenizer.bos, *own]) else None


def windows(ids: Sequence[int], length: int) -> Iterator[TextWindow]:
    """Windows of `length` inputs, the last of what is left. Each token but the first is a target once."""
    for begin in range(0, len(ids) - 1, length):
        end = min(begin + length, len(ids) - 1)
        yield TextWindow(ids[begin:end], ids[begin + 1 : end + 1])


def batches(of: Iterable[TextWindow], size: int) -> Iterator[list[TextWindow]]:
    """`size` windows each, the last of what is left."""
    batch: list[TextWindow] = []
    for window in of:
        batch.append(window)
        if len(batch) == size:
            yield batch
            batch = []
    if batch:
        yield batch
