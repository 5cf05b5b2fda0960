"""Megatron's `GPTDatasetConfig` and its builder, over our data sets. Samples are dicts of NumPy arrays, of which
torch's DataLoader makes tensors."""

from __future__ import annotations

import dataclasses
import enum
import os
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron.compat.fields import check_fields
from megatron.core.datasets import gpt_samples, indexed_dataset_reader
from megatron.core.datasets.blend import Blend, parse_blend
from megatron.core.datasets.builder import Datasets, GPTDatasetSpec, build_train_valid_test_datasets
from megatron.core.datasets.errors import DataError
from megatron.core.datasets.gpt_samples import SampleFormat, pad_id
from megatron.core.datasets.indexed_dataset_writer import IndexedDatasetWriter
from megatron.core.tokenizers.tokenizer import NullTokenizer
from megatron.core.tokenizers.tokenizer_config import TokenizerConfig

Prefixes = tuple[Sequence[str], Sequence[float] | None] | None


@dataclasses.dataclass
class GPTDatasetConfig:
    """Megatron's fields. blend: (prefixes, weights or None), with `split`; blend_per_split: three of them."""

    random_seed: int
    sequence_length: int
    tokenizer: Any
    blend: Prefixes = None
    blend_per_split: Sequence[Prefixes] | None = None
    split: str | None = None
    path_to_cache: str | None = None
    reset_position_ids: bool = False
    reset_attention_mask: bool = False
    eod_mask_loss: bool = False
    create_attention_mask: bool = True
    mid_level_dataset_surplus: float = 0.005
    drop_last_partial_validation_sequence: bool = True
    add_extra_token_to_sequence: bool = True
    mock: bool = False
    full_validation: bool = False
    multiple_validation_sets: bool = False
    mmap_bin_files: bool = True  # without effect, as is what follows: files are read, by one thread
    num_dataset_builder_threads: int = 1
    allow_ambiguous_pad_tokens: bool = False

    def sample_format(self) -> SampleFormat:
        """Ours. Raises ValueError for what its flags do not take."""
        names = {one.name for one in dataclasses.fields(SampleFormat)}
        given = {"seq_length": self.sequence_length, "seed": self.random_seed, "split": self.split}
        asked = {name: one for name, one in given.items() if one is not None}
        check_fields(
            "GPTDatasetConfig", asked, called={"seq_length": "sequence_length", "seed": "random_seed"}
        )
        same = {name: value for name, value in vars(self).items() if name in names}
        eod, pad = self.tokenizer.eod, getattr(self.tokenizer, "pad", None)
        same |= {"vocab_size": self.tokenizer.vocab_size, "pad": pad_id(pad, frozenset({eod}))}
        return SampleFormat(eod=eod, extra_token=self.add_extra_token_to_sequence, **same)

    def spec(self, mock: bool) -> GPTDatasetSpec:
        """Ours. Raises DataError for what contradicts itself."""
        corpora: dict[str, Any] = {"mock": True}
        if not (mock or self.mock):
            per_split = tuple(map(_blend, self.blend_per_split or ())) or None
            corpora = {"blend": _blend(self.blend), "split": self.split, "blend_per_split": per_split}
        return GPTDatasetSpec(
            self.sample_format(),
            self.random_seed,
            **corpora,
            cache_path=self.path_to_cache,
            surplus=self.mid_level_dataset_surplus,
            full_validation=self.full_validation,
            multiple_validation_sets=self.multiple_validation_sets,
        )


def _blend(given: Prefixes) -> Blend | None:
    return given and Blend(tuple(given[0]), given[1] and tuple(map(float, given[1])))  # type: ignore[arg-type]


Split = enum.Enum("Split", ["train", "valid", "test"], start=0)


class CorpusOfPrefix(indexed_dataset_reader.IndexedDataset):
    """A corpus by Megatron's arguments. mmap and what is behind it is without effect: files are read."""

    def __init__(self, path_prefix: str, multimodal: bool = False, mmap: bool = True, **_: Any) -> None:
        if multimodal:
            raise DataError(f"IndexedDataset({path_prefix!r}, multimodal=True): not here")
        super().__init__(path_prefix)
        self.path_prefix = path_prefix

    def __getitem__(self, idx: Any) -> Any:
        """A sequence's tokens; of a slice of neighbours a list of them."""
        if not isinstance(idx, slice):
            return self.get(range(len(self))[idx])
        if idx.step not in (None, 1):
            raise ValueError(f"IndexedDataset[{idx}]: sequences one after the other")
        return [self.get(one) for one in range(len(self))[idx]]

    def get(self, idx: int, offset: int = 0, length: int | None = None) -> NDArray[Any]:
        """`length` of a sequence's tokens, from `offset` on; to its end by default."""
        return super().get(idx, offset, length)

    @property
    def sequence_lengths(self) -> NDArray[np.int32]:
        """Tokens in each sequence."""
        return self.lengths

    @property
    def document_indices(self) -> NDArray[np.int64]:
        """The first sequence of each document, and the end."""
        return self.index.boundaries

    @staticmethod
    def exists(path_prefix: str) -> bool:
        """Whether both files are there."""
        paths = indexed_dataset_reader.index_path(path_prefix), indexed_dataset_reader.data_path(path_prefix)
        return all(map(os.path.exists, paths))


class DatasetOfCorpus(gpt_samples.GPTDataset):
    """Samples of a corpus by Megatron's arguments. indexed_indices: consecutive sequences. num_samples: at least so
    many; None: one epoch. Raises ValueError for other indices, DataError."""

    def __init__(
        self,
        indexed_dataset: Any,
        dataset_path: str | None,
        indexed_indices: Sequence[int],
        num_samples: int | None,
        index_split: Any,
        config: GPTDatasetConfig,
    ) -> None:
        first, end = int(indexed_indices[0]), int(indexed_indices[-1]) + 1
        if list(indexed_indices) != list(range(first, end)):
            raise ValueError("GPTDataset(indexed_indices): consecutive sequences, as np.arange gives them")
        filed: dict[str, Any] = {"seed": config.random_seed, "cache_folder": config.path_to_cache}
        samples = range(first, end), index_split.name, num_samples, config.sample_format()
        super().__init__(indexed_dataset, *samples, **filed)


class MockSamples(DatasetOfCorpus):
    """Names mock data to `BlendedMegatronDatasetBuilder`."""


IndexedDataset, GPTDataset, MockGPTDataset = CorpusOfPrefix, DatasetOfCorpus, MockSamples  # Megatron's names


class IndexedDatasetBuilder:
    """Writes a corpus: bin_path PREFIX.bin, `finalize` PREFIX.idx."""

    def __init__(self, bin_path: str, dtype: Any = np.int32, multimodal: bool = False) -> None:
        self._prefix = bin_path.removesuffix(".bin")
        if multimodal or self._prefix == bin_path:
            raise ValueError(
                f"IndexedDatasetBuilder({bin_path!r}, multimodal={multimodal}): text, to NAME.bin"
            )
        self._writer = IndexedDatasetWriter(self._prefix, np.dtype(dtype))
        self._items: list[NDArray[Any]] = []

    def add_item(self, tensor: Any, mode: int = 0) -> None:
        """A sequence of the document that `end_document` ends. tensor: [n] integers."""
        self._items.append(np.asarray(tensor))

    def add_document(self, tensor: Any, lengths: Sequence[int], modes: Any = None) -> None:
        """tensor: [n] integers. lengths: of its sequences."""
        self._writer.add_document(np.asarray(tensor), list(map(int, lengths)))

    def end_document(self) -> None:
        """Of the items since the last one."""
        items, self._items = self._items, []
        self._writer.add_document(np.concatenate(items) if items else [], list(map(len, items)))

    def add_index(self, path_prefix: str) -> None:
        """All documents of another corpus."""
        self._writer.add_corpus(path_prefix)

    def finalize(self, idx_path: str) -> None:
        """Publish both files. Raises ValueError for another name, and for items without an `end_document`."""
        if idx_path != indexed_dataset_reader.index_path(self._prefix) or self._items:
            told = f"{self._prefix}.idx, after end_document(): {len(self._items)} items are in no document"
            raise ValueError(f"IndexedDatasetBuilder.finalize({idx_path!r}): expects {told}")
        self._writer.finish()


def get_blend_from_list(blend: Sequence[str] | None) -> tuple[list[str], list[float] | None] | None:
    """(prefixes, weights or None) of the words of --data-path. Raises DataError."""
    if blend is None:
        return None
    found = parse_blend(blend, "get_blend_from_list")
    return list(found.prefixes), None if found.weights is None else list(found.weights)


@dataclasses.dataclass
class BlendedMegatronDatasetBuilder:
    """cls: `GPTDataset` or `MockGPTDataset`. sizes: samples of train, valid, test; None: one epoch."""

    cls: type
    sizes: Any
    is_built_on_rank: Callable[[], bool]
    config: GPTDatasetConfig

    def build(self) -> Datasets:
        """Train, valid, test; None without data and on ranks that read none. Raises DataError."""
        if not self.is_built_on_rank():
            return Datasets(None, None, None)
        spec = self.config.spec(mock=issubclass(self.cls, MockGPTDataset))
        return build_train_valid_test_datasets(spec, self.sizes)


def compile_helpers() -> None:
    """Nothing is compiled: indices are built by NumPy."""


class _NullTokenizer(NullTokenizer):
    """Ids below vocab_size, and vocab_size itself, which ends a document."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__(TokenizerConfig(vocab_size=int(vocab_size)))
