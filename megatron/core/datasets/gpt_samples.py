"""Samples of one corpus and split, or of counting sequences instead (`--mock-data`): what a GPT is trained on."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron import names_of
from megatron.core.datasets import index_builders as index
from megatron.core.datasets.errors import DataError, require_memory
from megatron.core.datasets.gpt_dataset_config import MOCK_LONGEST_DOCUMENT
from megatron.core.datasets.held_arrays import Array, Arrays, layout_bytes
from megatron.core.datasets.index_cache import IndexCache
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
        end = total if length is None else min(offset + length, total)
        tokens = np.arange(offset + 1, end + 1, dtype=np.int64) % self.vocab_size
        if offset < end == total:
            tokens[-1] = self.eod
        return tokens

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
    cache_folder: where indices are kept, of which samples read pieces; None builds them in memory.
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
        self._require_memory_of_sample()
        self._arrays = self._indices(identity or {}, cache_folder)

    def __len__(self) -> int:
        return self.plan.num_samples

    def __getitem__(self, i: int) -> Sample:
        """Sample i: int64 [s] "tokens", "labels", "position_ids", float32 [s] "loss_mask".

        With `create_attention_mask` also bool [1, s, s] "attention_mask", True where attention is masked.
        """
        return {name: values[0] for name, values in make_samples(self.text(i)[None], self.format).items()}

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
            return {name: np.concatenate(list(blocks)) for name, blocks in self._build()}
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

    def _fault(self, arrays: Mapping[str, Array]) -> str | None:
        """What is wrong with arrays that were read from disk."""
        return index.index_fault(arrays, self.corpus.lengths, self.sequences, self.plan)

    def _build(self) -> Iterator[tuple[str, Iterable[NDArray[Any]]]]:
        """The arrays one after the other, so that no two that are large are in memory at a time."""
        self._require_memory_of_index()
        rng = np.random.RandomState(self._seed)
        documents = index.build_document_index(self.sequences, self.plan, rng)
        yield "document_index", [documents]
        yield "sample_index", index.build_sample_index(self.corpus.lengths, documents, self.plan)
        del documents
        yield "shuffle_index", [index.build_shuffle_index(self.plan, rng)]

    def _bounds(self, i: int) -> list[list[int]]:
        """Where sample i starts, and where it ends: position in the document order, offset in that document."""
        k = self._shuffled(i)
        if k >= len(self):
            raise self._impossible(i)
        return self._arrays["sample_index"][k : k + 2].tolist()

    def _shuffled(self, i: int) -> int:
        return int(self._arrays["shuffle_index"][i : i + 1][0])

    # ----------------------------------------------------------------------------------------------------------

    def _require_memory_of_sample(self) -> None:
        """Raises DataError for a length of samples that no memory holds."""
        length = self.format.sequence_length
        if self.plan.num_samples:
            masks = length * length if self.format.create_attention_mask else 0
            size = BYTES_PER_TOKEN * length + masks
            require_memory(
                size, f"{self.corpus.prefix}: split {self.split!r}: one sample of --seq-length {length}"
            )

    def _require_memory_of_index(self) -> None:
        """The same of numbers of samples, before their order is made."""
        samples, layouts = self.plan.num_samples, self._layouts()
        require_memory(
            max(
                layout_bytes(layouts[name]) for name in ("document_index", "shuffle_index") if name in layouts
            ),
            f"{self.corpus.prefix}: split {self.split!r}: making the index of {samples} samples (--train-samples, or "
            f"iterations x --global-batch-size) of --seq-length {self.format.sequence_length}, which go "
            f"{self.plan.num_epochs} times through the corpus,",
        )

    def _pieces(self, i: int) -> list[tuple[int, int, int]]:
        """(sequence, offset, tokens) of each non-empty stretch that sample i is made of."""
        if not 0 <= i < len(self):
            raise IndexError(f"sample {i} of {len(self)}")
        (first, offset), (last, last_offset) = self._bounds(i)
        if not 0 <= first <= last < len(self._arrays["document_index"]):
            raise self._impossible(i)
        pieces = []
        sequences = self._arrays["document_index"][first : last + 1].tolist()
        for sequence in sequences[:-1]:
            pieces.append((sequence, offset, int(self.corpus.lengths[sequence]) - offset))
            offset = 0
        pieces.append((sequences[-1], offset, last_offset + self.plan.extra_token - offset))
        return [piece for piece in pieces if piece[2] > 0]

    def _check_pieces(self, i: int, pieces: Sequence[tuple[int, int, int]]) -> None:
        """Raises DataError for what no index says."""
        lengths, room = self.corpus.lengths, self.format.sequence_length + self.plan.extra_token
        inside = all(s in self.sequences and at >= 0 and at + n <= lengths[s] for s, at, n in pieces)
        if not inside or sum(count for _, _, count in pieces) > room:
            raise self._impossible(i)

    def _impossible(self, i: int) -> DataError:
        """The files of an index are open for as long as a run lasts."""
        return DataError(
            f"{self.corpus.prefix}: split {self.split!r}: the index of sample {i} says what cannot be: its files "
            "changed while in use; the next start builds them again"
        )

    def text(self, i: int) -> NDArray[np.int64]:
        """Tokens of sample i, int64 [s + x], padded at the end."""
        length, vocab_size = self.format.sequence_length + self.plan.extra_token, self.format.vocab_size
        text = np.full(length, self.format.pad, dtype=np.int64)
        done = 0
        pieces = self._pieces(i)
        self._check_pieces(i, pieces)
        for sequence, offset, count in pieces:
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


def make_samples(texts: NDArray[np.int64], sample_format: SampleFormat) -> Sample:
    """Samples of int64 texts [n, s + x], which `text` of a dataset gives: labels, masks and positions, [n, ...]."""
    length, pad = sample_format.sequence_length, sample_format.pad
    if sample_format.extra_token:
        tokens, labels = texts[:, :length].copy(), texts[:, 1:].copy()
    else:
        tokens, labels = texts, np.roll(texts, -1, axis=1)
        labels[:, -1] = pad
    loss_mask = np.ones(tokens.shape, dtype=np.float32)
    positions, starts = np.arange(length, dtype=np.int64), np.zeros_like(tokens)
    if sample_format.looks_for_eod:
        is_eod = tokens == sample_format.eod
        if sample_format.eod_mask_loss:
            loss_mask[is_eod] = 0.0
        # Where the document of each position starts: one after the last end of document before it.
        ends = np.where(is_eod[:, :-1], positions[1:], 0)
        np.maximum.accumulate(ends, axis=1, out=starts[:, 1:])
    own_positions = (
        positions - starts if sample_format.reset_position_ids else np.tile(positions, (len(tokens), 1))
    )
    samples: Sample = {"tokens": tokens, "labels": labels, "position_ids": own_positions}
    if sample_format.create_attention_mask:
        masked = np.tile(positions[None, :] > positions[:, None], (len(tokens), 1, 1, 1))
        if sample_format.reset_attention_mask:
            masked |= positions < starts[:, None, :, None]
        samples["attention_mask"] = masked
    padding = labels == pad
    loss_mask[padding] = 0.0
    labels[padding] = 0
    tokens[tokens == pad] = 0
    samples["loss_mask"] = loss_mask
    return samples


def pad_id(pad: int | None, other_special_ids: frozenset[int]) -> int:
    """The padding id of samples: the tokenizer's, but -1 if it has none or uses it for something else too."""
    return NO_PAD if pad is None or pad in other_special_ids else pad


__getattr__ = names_of(__name__)  # Megatron's names
