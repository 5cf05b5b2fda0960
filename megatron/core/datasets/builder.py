"""Datasets of a run: from corpora and settings to training, validation and test data.

Nothing here knows of ranks. With an index cache building is idempotent: let one rank of each file system
build first, then the others, which find the cache.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from megatron.core.datasets import blend as blends
from megatron.core.datasets.blend import SPLIT_NAMES, Blend
from megatron.core.datasets.blended_samples import BlendedDataset
from megatron.core.datasets.errors import DataError
from megatron.core.datasets.gpt_dataset_config import DataConfig, indices_folder
from megatron.core.datasets.gpt_samples import Corpus, GPTDataset, MockCorpus, SampleFormat
from megatron.core.datasets.indexed_dataset_reader import IndexedDataset
from megatron.core.datasets.mock_dataset import MockDataset

Dataset = GPTDataset | BlendedDataset
Sizes = tuple[int | None, int | None, int | None]
WHOLE = (0.0, 1.0)


@dataclasses.dataclass(frozen=True)
class GPTDatasetSpec:
    """All that decides which samples there are and in which order.

    blend with split: corpora shared by the three splits; or blend_per_split: each split's own corpora, used
    whole; or mock.  split None is 969,30,1.
    tokenizer_identity: `Tokenizer.identity()`, part of the cache's key.
    cache: keep indices on disk, in cache_path, by default `<prefix>/cache/GPTDataset_indices` beside each
    corpus (mock data: only where cache_path is given).
    surplus: extra share of samples asked of the members of a weighted blend.
    full_validation: the validation set is one epoch, whatever is requested.
    multiple_validation_sets: validation corpora stay separate; `Datasets.valid` is then a list.
    """

    sample_format: SampleFormat
    seed: int = 1234
    blend: Blend | None = None
    split: str | None = None
    blend_per_split: tuple[Blend | None, Blend | None, Blend | None] | None = None
    mock: bool = False
    tokenizer_identity: str = ""
    cache: bool = True
    cache_path: str | None = None
    surplus: float = 0.005
    full_validation: bool = False
    multiple_validation_sets: bool = False

    def __post_init__(self) -> None:
        if self.mock + (self.blend is not None) + (self.blend_per_split is not None) != 1:
            per_split = "--train-data-path/--valid-data-path/--test-data-path"
            raise DataError(f"give exactly one of --data-path, {per_split}, and --mock-data")
        if self.blend_per_split is not None and self.split is not None:
            per_split = "with --train-data-path and the like leave it out"
            raise DataError(f"--split divides the corpora of --data-path; {per_split}")


def spec_of(data: DataConfig, sample: Mapping[str, Any], **more: Any) -> GPTDatasetSpec:
    """What the flags of data describe. sample: further fields of `SampleFormat`. more: fields of the spec. Raises
    DataError."""
    resets = "reset_position_ids", "reset_attention_mask", "eod_mask_loss"
    return GPTDatasetSpec(
        SampleFormat(**{name: getattr(data, name) for name in resets}, **sample),
        **_corpora(data),
        cache_path=data.data_cache_path,
        surplus=data.mid_level_dataset_surplus,
        full_validation=data.full_validation,
        multiple_validation_sets=data.multiple_validation_sets,
        **more,
    )


def prefixes_of(data: DataConfig) -> list[str]:
    """All corpora of the flags, each once. Raises DataError."""
    named = _corpora(data)
    parts = named.get("blend_per_split", (named.get("blend"),))
    return [*dict.fromkeys(prefix for blend in parts if blend for prefix in blend.prefixes)]


def _corpora(data: DataConfig) -> dict[str, Any]:
    """Which of GPTDatasetSpec's three ways of naming corpora the flags use. Raises DataError."""
    if data.mock_data:
        return {"mock": True}
    if data.per_split_data_args_path is not None:
        return {"blend_per_split": blends.read_per_split_file(data.per_split_data_args_path)}
    per_split = (data.train_data_path, data.valid_data_path, data.test_data_path)
    if any(per_split):
        named = zip(SPLIT_NAMES, per_split, strict=True)
        made = (blends.parse_blend(words, f"--{name}-data-path") if words else None for name, words in named)
        return {"blend_per_split": tuple(made)}
    if data.data_args_path is not None:
        return {"blend": blends.read_blend_file(data.data_args_path), "split": data.split}
    if data.data_path is None:  # of a trainer whose flags were read without asking what its provider needs
        raise DataError(
            "no training data is named, and build_gpt_datasets reads what the flags name: give --data-path PREFIX "
            "(made by tools/preprocess_data.py), or --mock-data for a trial"
        )
    return {"blend": blends.parse_blend(data.data_path), "split": data.split}


class Datasets(NamedTuple):
    """None: no data for that split. valid is a list with `multiple_validation_sets`."""

    train: Dataset | None
    valid: Dataset | list[Dataset] | None
    test: Dataset | None


def build_train_valid_test_datasets(
    spec: GPTDatasetSpec, sizes: Sizes, *, allow_empty: bool = False, skip_empty: bool = False
) -> Datasets:
    """The datasets of a run.

    sizes: samples requested of train, valid, test; None for one epoch. Datasets may be longer.
    allow_empty: accept an epoch too short for one sample as a dataset of length 0.
    skip_empty: a split without sequences is None instead of an error.
    Raises DataError for damaged corpora, and for a split that was asked for and came out empty: Megatron
    would count its epochs for ever.
    """
    return _Builder(spec, allow_empty, skip_empty).build(sizes)


class _Builder:
    """Opens each corpus once and builds what `spec` describes."""

    def __init__(self, spec: GPTDatasetSpec, allow_empty: bool, skip_empty: bool) -> None:
        self.spec, self.allow_empty, self.skip_empty = spec, allow_empty, skip_empty
        self.corpus = functools.cache(self._open)
        self.split = blends.MOCK_SPLIT if spec.mock else spec.split or blends.DEFAULT_SPLIT
        self.matrix = blends.parse_split(self.split)
        if spec.blend_per_split:
            self.split, self.matrix = "per split", (WHOLE, WHOLE, WHOLE)

    def build(self, sizes: Sizes) -> Datasets:
        valid_size = None if self.spec.full_validation else sizes[1]
        train = self._split(0, sizes[0])
        valid: Dataset | list[Dataset] | None
        if self.spec.multiple_validation_sets:
            blend = self._blend_of(1)
            valid = None if blend is None else [self._member(one, 1, valid_size) for one in blend.prefixes]
        else:
            valid = self._split(1, valid_size)
        return Datasets(train, valid, self._split(2, sizes[2]))

    def _blend_of(self, which: int) -> Blend | None:
        """The corpora of a split, None where it has none."""
        if self.matrix[which] is None:
            return None
        if self.spec.blend_per_split is not None:
            return self.spec.blend_per_split[which]
        return Blend((MockCorpus.prefix,)) if self.spec.mock else self.spec.blend

    def _split(self, which: int, size: int | None) -> Dataset | None:
        blend = self._blend_of(which)
        if blend is None:
            return None
        if size == 0 or self.skip_empty:
            if not any(len(self._sequences(self.corpus(prefix), which)) for prefix in blend.prefixes):
                return None
        if len(blend.prefixes) == 1 and (blend.weights is None or self.spec.blend_per_split is not None):
            return self._member(blend.prefixes[0], which, size)
        if blend.weights is None:  # members give one epoch each; their lengths are the weights
            members = [self._member(prefix, which, None) for prefix in blend.prefixes]
            lengths = [len(member) for member in members]
            if not (total := sum(lengths)):
                return BlendedDataset(members, [], None)
            turns = None if size is None else min(size, total)
            return BlendedDataset(members, blends.normalize([float(n) for n in lengths]), turns)
        if size is None:
            raise DataError(
                f"split {SPLIT_NAMES[which]!r}: a weighted blend has no epoch of its own: give the number of samples, "
                "or leave the weights out, or keep the corpora apart (--multiple-validation-sets)"
            )
        # Members give their share of `size`, and a surplus, since turns are not spread exactly by share.
        shares = blends.normalize(blend.weights)
        taken = [math.ceil(size * share) for share in shares]
        asked = [math.ceil(turn * (1 + self.spec.surplus)) for turn in taken]
        members = [self._member(prefix, which, n) for prefix, n in zip(blend.prefixes, asked, strict=True)]
        return BlendedDataset(members, shares, sum(taken))

    def _member(self, prefix: str, which: int, size: int | None) -> GPTDataset:
        corpus, name, spec = self.corpus(prefix), SPLIT_NAMES[which], self.spec
        sequences = self._sequences(corpus, which)
        if not len(sequences):
            raise DataError(
                f"{prefix}: split {name!r} is empty: --split {self.split} gives it none of the {len(corpus)} "
                "sequences; use a larger corpus, a larger weight for it, or weight 0 for no such data"
            )
        identity: dict[str, object] = {
            "split": self.split,
            "split_matrix": [None if bounds is None else list(bounds) for bounds in self.matrix],
            "tokenizer": spec.tokenizer_identity,
        }
        kind, folder = (MockDataset, None) if spec.mock else (GPTDataset, indices_folder(prefix))
        folder = (folder if spec.cache_path is None else spec.cache_path) if spec.cache else None
        filed: dict[str, Any] = {"seed": spec.seed, "identity": identity, "cache_folder": folder}
        dataset = kind(corpus, sequences, name, size, spec.sample_format, **filed)
        if len(dataset) < 1 and not self.allow_empty:
            raise DataError(
                f"{prefix}: one epoch of split {name!r} has {dataset.plan.tokens} tokens, too few for one sample of "
                f"--seq-length {spec.sample_format.sequence_length}"
            )
        return dataset

    def _open(self, prefix: str) -> Corpus:
        if self.spec.mock:
            eod, vocab_size = self.spec.sample_format.eod, self.spec.sample_format.vocab_size
            if eod is None or vocab_size is None:
                raise DataError("--mock-data needs a tokenizer's vocabulary size and end-of-document id")
            return MockCorpus(eod, vocab_size)
        corpus = IndexedDataset(prefix)
        if (dtype := corpus.index.dtype).kind == "f":
            raise DataError(f"{prefix}.idx: dtype at byte 17: expected integer tokens, found {dtype}")
        return corpus

    def _sequences(self, corpus: Corpus, which: int) -> range:
        bounds = self.matrix[which]
        assert bounds is not None, f"split {SPLIT_NAMES[which]} has weight 0"
        return blends.sequence_range(bounds, len(corpus))
