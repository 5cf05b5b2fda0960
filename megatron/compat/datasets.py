"""Megatron's `GPTDatasetConfig` and its builder, over our data sets. Samples are dicts of NumPy arrays, of which
torch's DataLoader makes tensors."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from megatron.core.datasets.blend import Blend
from megatron.core.datasets.builder import Datasets, GPTDatasetSpec, build_train_valid_test_datasets
from megatron.core.datasets.gpt_dataset import SampleFormat, pad_id
from megatron.core.datasets.mock_dataset import MockDataset as MockGPTDataset
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

    def spec(self, mock: bool) -> GPTDatasetSpec:
        """Ours. Raises DataError for what contradicts itself."""
        eod, pad = self.tokenizer.eod, getattr(self.tokenizer, "pad", None)
        fields = {one.name for one in dataclasses.fields(SampleFormat)}
        same = {name: value for name, value in vars(self).items() if name in fields}
        same |= {"vocab_size": self.tokenizer.vocab_size, "pad": pad_id(pad, frozenset({eod}))}
        sample = SampleFormat(eod=eod, **same)
        corpora: dict[str, Any] = {"mock": True}
        if not mock:
            per_split = tuple(map(_blend, self.blend_per_split or ())) or None
            corpora = {"blend": _blend(self.blend), "split": self.split, "blend_per_split": per_split}
        cache, surplus = self.path_to_cache, self.mid_level_dataset_surplus
        return GPTDatasetSpec(sample, self.random_seed, **corpora, cache_path=cache, surplus=surplus)


def _blend(given: Prefixes) -> Blend | None:
    return given and Blend(tuple(given[0]), given[1] and tuple(map(float, given[1])))  # type: ignore[arg-type]


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
