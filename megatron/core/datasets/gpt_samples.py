"""Samples of one corpus and split, or of counting sequences instead (`--mock-data`): what a GPT is trained on."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron import names_of
from megatron.core.datasets import index_builders as index
from megatron.core.datasets.errors import DataError, require_memory
from megatron.core.datasets.gpt_dataset_config import MOCK_LONGEST_DOCUMENT
from megatron.core.datasets.index_cache import Arrays, IndexCache
from megatron.core.datasets.indexed_dataset_reader import IndexedDataset

Sample = dict[str, NDArray[Any]]
NO_PAD = -1
MOCK_DOCUMENTS = 100_000
BYTES_PER_TOKEN = 8 + 8 + 8 + 4  # tokens, labels, positions, loss mask


class MockCorpus:
    """100000 documents 1, 2, ..., modulo the vocabulary, each ended by the end-of-document token.

    Lengths are drawn once and for all, so the samples are the same in every run.
    """

    prefix = "mock"

    def __init__(self, eod: int, vocab_size: int) -> None:
        self.eod, self.vocab_size = eod, vocab_size
        rng = np.random.default_rng(0)
        self.lengths = rng.integers(1, MOCK_LONGEST_DOCUMENT, size=MOCK_DOCUMENTS, dtype=np.int32)

    def __len__(self) -> int:
        return MOCK_DOCUMENTS

    def get(self, sequence: int, offset: int = 0, length: int | None = None) -> NDArray[np.int64]:
        """Tokens [offset, offset + length) of a document."""
        total = int(self.lengths[sequence])
        tokens = np.arange(1, total + 1, dtype=np.int64) % self.vocab_size
        tokens[-1] = self.eod
        return tokens[offset : total if length is None else offset + length]

    def fingerprint(self) -> dict[str, int | str]:
        """Identity of the content, as of a corpus on disk."""
        return {"mock": 1, "eod": self.eod, "vocab_size": self.vocab_size}


Corpus = IndexedDataset | MockCorpus


@dataclasses.dataclass(frozen=True)
class SampleFormat:
    """How tokens become a sample.

    sequence_length: tokens.  eod: end-of-document id.  pad: id of padding, -1 for none (`pad_id`).
    vocab_size: ids must be below it; None leaves them unchecked.
    reset_position_ids, reset_attention_mask: documents inside a sample do not see each other.
    eod_mask_loss: no loss where the input is an end of document.  create_attention_mask: add "attention_mask".
    extra_token: the label of the last token is the token after it; else labels are rolled and the last is padding.
    drop_last_partial_validation_sequence: False keeps the tail of the validation set as one padded sample.
    """

    sequence_length: int
    eod: int | None = None
    pad: int = NO_PAD
    vocab_size: int | None = None
    reset_position_ids: bool = False
    reset_attention_mask: bool = False
    eod_mask_loss: bool = False
    create_attention_mask: bool = False
    extra_token: bool = True
    drop_last_partial_validation_sequence: bool = True

    def __post_init__(self) -> None:
        if self.sequence_length < 1:
            raise DataError(f"--seq-length {self.sequence_length}: must be at least 1")
        if self.looks_for_eod and self.eod is None:
            flags = "--reset-position-ids, --reset-attention-mask and --eod-mask-loss"
            raise DataError(f"{flags} need the id of the end-of-document token")

    @property
    def looks_for_eod(self) -> bool:
        return self.reset_position_ids or self.reset_attention_mask or self.eod_mask_loss


class GPTDataset:
    """Samples of the `sequences` of one corpus, in Megatron's order (index_builders.py).

    split: "train", "valid" or "test".  requested: samples asked for, None for one epoch; `len` may be more.
    seed: of both shuffles.  identity: what else the order is filed under in the cache (split, tokenizer).
    cache_folder: where indices are kept; None builds them in memory.
    Raises DataError for a split without tokens, and, on reading, for a token outside the vocabulary.
    """

    def __init__(
        self,
        corpus: Corpus,
        sequences: range,
        split: str,
        requested: int | None,
        sample_format: SampleFormat,
        *,
        seed: int,
        identity: dict[str, object] | None = None,
        cache_folder: str | None = None,
    ) -> None:
        self.corpus, self.sequences, self.split, self.format = corpus, sequences, split, sample_format
        tokens = int(corpus.lengths[sequences.start : sequences.stop].sum(dtype=np.int64))
        if tokens == 0:
            raise DataError(
                f"{corpus.prefix}: split {split!r} holds no tokens (sequences {sequences.start} to {sequences.stop} of "
                f"{len(corpus)}): use a larger corpus, or give --split a larger weight for it, or 0 for no such data"
            )
        self.plan = index.plan_epochs(
            tokens,
            sample_format.sequence_length,
            requested,
            extra_token=sample_format.extra_token,
            drop_last_partial=split != "valid" or sample_format.drop_last_partial_validation_sequence,
        )
        self._seed, self._requested = seed, requested
        self._require_memory()
        self._arrays = self._indices(identity or {}, cache_folder)

    def __len__(self) -> int:
        return self.plan.num_samples

    def __getitem__(self, i: int) -> Sample:
        """Sample i: int64 [s] "tokens", "labels", "position_ids", float32 [s] "loss_mask".

        With `create_attention_mask` also bool [1, s, s] "attention_mask", True where attention is masked.
        """
        text = self._text(i)
        length = self.format.sequence_length
        if self.format.extra_token:
            tokens, labels = text[:length].copy(), text[1 : length + 1].copy()
        else:
            tokens, labels = text, np.roll(text, -1)
            labels[-1] = self.format.pad
        return make_sample(tokens, labels, self.format)

    def description(self) -> dict[str, object]:
        """What decides which tokens sample i has: two datasets with equal descriptions give the same samples."""
        return {
            "prefix": self.corpus.prefix,
            "corpus": dict(self.corpus.fingerprint()),
            "sequences": [self.sequences.start, self.sequences.stop],
            "sequence_length": self.format.sequence_length,
            "seed": self._seed,
            "epochs": self.plan.num_epochs,
            "last_epoch_apart": self.plan.last_epoch_apart,
        }

    def documents(self, i: int) -> list[int]:
        """The sequences of the corpus that sample i has tokens of, in the order of its tokens."""
        return [sequence for sequence, _, _ in self._pieces(i)]

    def _indices(self, identity: dict[str, object], folder: str | None) -> Arrays:
        if folder is None:
            return self._build()
        key = {
            "class": type(self).__name__,
            "path_prefix": self.corpus.prefix,
            "num_samples": self._requested,
            "index_split": self.split,
            "random_seed": self._seed,
            "sequence_length": self.format.sequence_length,
            "add_extra_token_to_sequence": self.format.extra_token,
            "drop_last_partial_validation_sequence": self.format.drop_last_partial_validation_sequence,
            "sequences": [self.sequences.start, self.sequences.stop],
            **identity,
        }
        cache = IndexCache(folder, key, self.corpus.fingerprint(), self._layouts(), self._fault)
        return cache.load_or_build(self._build)

    # Which indices there are and what they say: others of mock data -------------------------------------------

    def _layouts(self) -> dict[str, index.Layout]:
        return index.index_layouts(self.corpus.lengths, self.sequences, self.plan)

    def _index_bytes(self) -> int:
        return index.layout_bytes(self._layouts())

    def _fault(self, arrays: Arrays) -> str | None:
        """What is wrong with arrays that were read from disk."""
        return index.index_fault(arrays, self.corpus.lengths, self.sequences, self.plan)

    def _build(self) -> Arrays:
        rng = np.random.RandomState(self._seed)
        documents = index.build_document_index(self.sequences, self.plan, rng)
        return {
            "document_index": documents,
            "sample_index": index.build_sample_index(self.corpus.lengths, documents, self.plan),
            "shuffle_index": index.build_shuffle_index(self.plan, rng),
        }

    def _bounds(self, i: int) -> list[list[int]]:
        """Where sample i starts, and where it ends: position in the document order, offset in that document."""
        k = int(self._arrays["shuffle_index"][i])
        return self._arrays["sample_index"][k : k + 2].tolist()

    # ----------------------------------------------------------------------------------------------------------

    def _require_memory(self) -> None:
        """Raises DataError for numbers of samples, or lengths of them, that no memory holds."""
        samples, length = self.plan.num_samples, self.format.sequence_length
        split = f"{self.corpus.prefix}: split {self.split!r}"
        require_memory(
            self._index_bytes(),
            f"{split}: the index of {samples} samples (--train-samples, or iterations x --global-batch-size) of "
            f"--seq-length {length}, which go {self.plan.num_epochs} times through the corpus,",
        )
        if samples:
            masks = length * length if self.format.create_attention_mask else 0
            require_memory(BYTES_PER_TOKEN * length + masks, f"{split}: one sample of --seq-length {length}")

    def _pieces(self, i: int) -> list[tuple[int, int, int]]:
        """(sequence, offset, tokens) of each non-empty stretch that sample i is made of."""
        if not 0 <= i < len(self):
            raise IndexError(f"sample {i} of {len(self)}")
        (first, offset), (last, last_offset) = self._bounds(i)
        pieces = []
        for position in range(first, last + 1):
            sequence = int(self._arrays["document_index"][position])
            is_last = position == last
            end = last_offset + self.plan.extra_token if is_last else int(self.corpus.lengths[sequence])
            if end > offset:
                pieces.append((sequence, offset, end - offset))
            offset = 0
        return pieces

    def _text(self, i: int) -> NDArray[np.int64]:
        """Tokens of sample i, int64 [s + x], padded at the end."""
        length, vocab_size = self.format.sequence_length + self.plan.extra_token, self.format.vocab_size
        text = np.full(length, self.format.pad, dtype=np.int64)
        done = 0
        for sequence, offset, count in self._pieces(i):
            tokens = self.corpus.get(sequence, offset, count)
            if vocab_size is not None and not 0 <= int(tokens.min()) <= int(tokens.max()) < vocab_size:
                at = int(np.argmax((tokens < 0) | (tokens >= vocab_size)))
                raise DataError(
                    f"{self.corpus.prefix}.bin: token {offset + at} of sequence {sequence}: expected an id below the "
                    f"vocabulary size {vocab_size}, found {int(tokens[at])}; "
                    "was the corpus made with another tokenizer?"
                )
            text[done : done + count] = tokens
            done += count
        return text


class MockDataset(GPTDataset):
    """Samples of mock data, in the order that they would have as a corpus.

    A split has millions, of which a run reads some: where one starts is computed when it is read, and as much of their
    order is kept, on disk too, as was asked for. A read beyond that makes the whole order.
    """

    def _indices(self, identity: dict[str, object], folder: str | None) -> Arrays:
        documents = index.build_document_index(self.sequences, self.plan, np.random.RandomState(self._seed))
        self._ends = np.cumsum(self.corpus.lengths[documents], dtype=np.int64)
        return {**super()._indices(identity, folder), "document_index": documents}

    def _layouts(self) -> dict[str, index.Layout]:
        whole = self.plan.num_samples
        kept = whole if self._requested is None else min(self._requested, whole)
        return {"shuffle_index": (index.shuffle_index_dtype(self.plan), (kept,))}

    def _index_bytes(self) -> int:
        ends = 8 * self.plan.num_epochs * len(self.sequences)
        return ends + index.layout_bytes(super()._layouts())

    def _fault(self, arrays: Arrays) -> str | None:
        return index.shuffle_fault(arrays["shuffle_index"], self.plan.num_samples)

    def _build(self) -> Arrays:
        dtype, (kept,) = self._layouts()["shuffle_index"]
        return {"shuffle_index": self._order()[:kept].copy() if kept else np.empty(0, dtype)}

    def _order(self) -> NDArray[Any]:
        rng = np.random.RandomState(self._seed)
        index.build_document_index(self.sequences, self.plan, rng)  # draws first
        return index.build_shuffle_index(self.plan, rng)

    def _bounds(self, i: int) -> list[list[int]]:
        if i >= len(self._arrays["shuffle_index"]):
            self._arrays["shuffle_index"] = self._order()
        k = int(self._arrays["shuffle_index"][i])
        starts = self.plan.starts(k, k + 2)
        positions = np.searchsorted(self._ends, starts, side="right" if self.plan.extra_token else "left")
        befores = np.where(positions > 0, self._ends[positions - 1], 0)
        return np.stack([positions, starts - befores], axis=1).tolist()


def make_sample(tokens: NDArray[np.int64], labels: NDArray[np.int64], sample_format: SampleFormat) -> Sample:
    """Add masks and positions to int64 [s] tokens and labels; both are changed in place where they are padding."""
    loss_mask = np.ones(len(tokens), dtype=np.float32)
    starts = positions = np.arange(len(tokens), dtype=np.int64)
    if sample_format.looks_for_eod:
        is_eod = tokens == sample_format.eod
        if sample_format.eod_mask_loss:
            loss_mask[is_eod] = 0.0
        # Where the document of each position starts: one after the last end of document before it.
        starts = np.zeros(len(tokens), dtype=np.int64)
        np.maximum.accumulate(np.where(is_eod[:-1], positions[1:], 0), out=starts[1:])
    own_positions = positions - starts if sample_format.reset_position_ids else positions
    sample: Sample = {"tokens": tokens, "labels": labels, "position_ids": own_positions}
    if sample_format.create_attention_mask:
        masked = positions[None, :] > positions[:, None]
        if sample_format.reset_attention_mask:
            masked |= positions[None, :] < starts[:, None]
        sample["attention_mask"] = masked[None]
    padding = labels == sample_format.pad
    loss_mask[padding] = 0.0
    labels[padding] = 0
    tokens[tokens == sample_format.pad] = 0
    sample["loss_mask"] = loss_mask
    return sample


def pad_id(pad: int | None, other_special_ids: frozenset[int]) -> int:
    """The padding id of samples: the tokenizer's, but -1 if it has none or uses it for something else too."""
    return NO_PAD if pad is None or pad in other_special_ids else pad


__getattr__ = names_of(__name__)  # Megatron's names
