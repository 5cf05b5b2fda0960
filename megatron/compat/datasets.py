"""Megatron's data sets of a GPT: `GPTDatasetConfig`, `MockGPTDataset`, `BlendedMegatronDatasetBuilder`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from megatron.core.datasets.blend import Blend, parse_blend
from megatron.core.datasets.builder import Dataset as Samples
from megatron.core.datasets.builder import GPTDatasetSpec, build_train_valid_test_datasets
from megatron.core.datasets.gpt_dataset import SampleFormat, pad_id

__all__ = [
    "BlendedMegatronDatasetBuilder",
    "GPTDataset",
    "GPTDatasetConfig",
    "MockGPTDataset",
    "compile_helpers",
    "get_blend_from_list",
]
Prefixes = tuple[Sequence[str], Sequence[float] | None] | None


@dataclasses.dataclass
class GPTDatasetConfig:
    """Megatron's fields. blend: (prefixes, weights or None) with `split`; blend_per_split: three of them."""

    random_seed: int = 1234
    sequence_length: int = 1024
    blend: Prefixes = None
    blend_per_split: Sequence[Prefixes] | None = None
    split: str | None = None
    path_to_cache: str | None = None
    tokenizer: Any = None
    reset_position_ids: bool = False
    reset_attention_mask: bool = False
    eod_mask_loss: bool = False
    create_attention_mask: bool = True
    drop_last_partial_validation_sequence: bool = True
    add_extra_token_to_sequence: bool = True
    mid_level_dataset_surplus: float = 0.005
    num_dataset_builder_threads: int = 1
    mmap_bin_files: bool = True
    multiple_validation_sets: bool = False
    full_validation: bool = False

    def spec(self, mock: bool) -> GPTDatasetSpec:
        """Ours. Raises DataError for what contradicts itself, ValueError without a tokenizer."""
        if self.tokenizer is None:
            raise ValueError(
                "GPTDatasetConfig(tokenizer=...): give one with vocab_size and eod, such as NullTokenizer"
            )
        eod = int(self.tokenizer.eod)
        pad = getattr(self.tokenizer, "pad", None)
        sample = SampleFormat(
            self.sequence_length,
            eod=eod,
            pad=pad_id(pad, frozenset({eod})),
            vocab_size=int(self.tokenizer.vocab_size),
            reset_position_ids=self.reset_position_ids,
            reset_attention_mask=self.reset_attention_mask,
            eod_mask_loss=self.eod_mask_loss,
            create_attention_mask=self.create_attention_mask,
            extra_token=self.add_extra_token_to_sequence,
            drop_last_partial_validation_sequence=self.drop_last_partial_validation_sequence,
        )
        per_split = None
        if self.blend_per_split is not None and any(self.blend_per_split):
            train, valid, test = map(_blend, self.blend_per_split)
            per_split = (train, valid, test)
        return GPTDatasetSpec(
            sample,
            seed=self.random_seed,
            blend=None if mock else _blend(self.blend),
            split=None if mock or per_split is not None else self.split,
            blend_per_split=None if mock else per_split,
            mock=mock,
            cache_path=self.path_to_cache,
            surplus=self.mid_level_dataset_surplus,
            full_validation=self.full_validation,
            multiple_validation_sets=self.multiple_validation_sets,
        )


def _blend(given: Prefixes) -> Blend | None:
    if given is None or not given[0]:
        return None
    prefixes, weights = given
    return Blend(tuple(prefixes), None if weights is None else tuple(map(float, weights)))


class GPTDataset(Dataset[dict[str, Tensor]]):
    """Samples as torch tensors: tokens, labels, position_ids int64 [s], loss_mask fp32 [s], attention_mask bool
    [1, s, s] where it is asked for."""

    mock = False

    def __init__(self, samples: Samples) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {name: torch.from_numpy(array) for name, array in self.samples[index].items()}


class MockGPTDataset(GPTDataset):
    """The same of counting sequences, without a corpus."""

    mock = True


class BlendedMegatronDatasetBuilder:
    """cls: `GPTDataset` or `MockGPTDataset`. sizes: samples of train, valid, test; None: one epoch.
    is_built_on_rank: whether this rank reads data."""

    def __init__(
        self,
        cls: type[GPTDataset],
        sizes: Sequence[int | None],
        is_built_on_rank: Callable[[], bool],
        config: GPTDatasetConfig,
    ) -> None:
        self._cls, self._is_built_on_rank, self._config = cls, is_built_on_rank, config
        train, valid, test = sizes
        self._sizes = (train, valid, test)

    def build(self) -> list[Any]:
        """[train, valid, test]; None for a split without data, and on ranks that read none. Raises DataError."""
        if not self._is_built_on_rank():
            return [None, None, None]
        made = build_train_valid_test_datasets(self._config.spec(self._cls.mock), self._sizes)
        return [
            [self._cls(inner) for inner in one]
            if isinstance(one, list)
            else None
            if one is None
            else self._cls(one)
            for one in made
        ]


def get_blend_from_list(blend: Sequence[str] | None) -> Prefixes:
    """Words of `--data-path` as (prefixes, weights or None)."""
    if blend is None:
        return None
    parsed = parse_blend(blend)
    return list(parsed.prefixes), None if parsed.weights is None else list(parsed.weights)


def compile_helpers() -> None:
    """Nothing is compiled: indices are built by NumPy."""
