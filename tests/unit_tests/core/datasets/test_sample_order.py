"""Our datasets against the prose, implemented a second time naively, on hundreds of random corpora."""

import importlib.util
import random
from pathlib import Path

import numpy as np
import pytest

from megatron.core.datasets.blend import Blend
from megatron.core.datasets.builder import GPTDatasetSpec, build_train_valid_test_datasets
from megatron.core.datasets.errors import DataError
from megatron.core.datasets.gpt_samples import SampleFormat
from megatron.core.datasets.indexed_dataset_writer import IndexedDatasetWriter

_spec = importlib.util.spec_from_file_location(
    "naive_sample_order", Path(__file__).with_name("naive_sample_order.py")
)
naive = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(naive)

CORPORA_PER_SEED = 25
SPLITS = [
    "969,30,1",
    "1,1,1",
    "8,1,1",
    "100,0,0",
    "1,0,1",
    "80,20",
    "'7, 2, 1'",
    "949/50/1",
    "0.6,0.3,0.1",
    "0,1,1",
]
EOD = 7


def write_corpus(rng, prefix):
    with IndexedDatasetWriter(prefix, np.dtype(rng.choice(["<u2", "<i4", "<i8"]))) as writer:
        for _ in range(rng.choice([3, 10, 40, 90])):
            lengths = [
                rng.choice([0, 1, 2, 5, 30, rng.randrange(1, 60)]) for _ in range(rng.choice([1, 1, 1, 2]))
            ]
            writer.add_document([rng.randrange(20) for _ in range(sum(lengths))], lengths)
    return prefix


def random_format(rng):
    return SampleFormat(
        sequence_length=rng.choice([1, 2, 5, 8, 17]),
        eod=EOD,
        pad=rng.choice([-1, 5]),
        reset_position_ids=rng.random() < 0.5,
        reset_attention_mask=rng.random() < 0.5,
        eod_mask_loss=rng.random() < 0.5,
        create_attention_mask=rng.random() < 0.5,
        extra_token=rng.random() < 0.75,
        drop_last_partial_validation_sequence=rng.random() < 0.75,
    )


def expected_items(prefix, bounds, which, fmt, requested, seed):
    """All samples of one corpus and split by the prose."""
    sequences = naive.read_corpus(prefix)
    x = int(fmt.extra_token)
    keep = which == 1 and not fmt.drop_last_partial_validation_sequence
    ids = list(range(*bounds))
    samples = naive.gpt_order(sequences, ids, fmt.sequence_length, x, requested, seed, keep)
    return [
        naive.gpt_item(
            sequences,
            places,
            fmt.sequence_length,
            x,
            fmt.pad,
            fmt.eod,
            fmt.reset_position_ids,
            fmt.reset_attention_mask,
            fmt.eod_mask_loss,
        )
        for places in samples
    ]


def assert_same(dataset, expected, rng):
    assert len(dataset) == len(expected)
    shown = range(len(expected)) if len(expected) < 12 else sorted(rng.sample(range(len(expected)), 12))
    for i in shown:
        tokens, labels, mask, positions, attention, documents = expected[i]
        item = dataset[i]
        assert item["tokens"].dtype == item["labels"].dtype == item["position_ids"].dtype == np.int64
        assert item["loss_mask"].dtype == np.float32
        assert item["tokens"].tolist() == tokens
        assert item["labels"].tolist() == labels
        assert item["loss_mask"].tolist() == mask
        assert item["position_ids"].tolist() == positions
        if "attention_mask" in item:
            assert item["attention_mask"][0].tolist() == attention
        assert dataset.documents(i) == documents


def has_tokens(prefix, bounds):
    return any(len(s) for s in naive.read_corpus(prefix)[bounds[0] : bounds[1]])


@pytest.mark.parametrize("seed", range(8))
def test_single_corpora(tmp_path, seed):
    rng = random.Random(seed)
    apart = compared = 0
    for number in range(CORPORA_PER_SEED):
        prefix = write_corpus(rng, str(tmp_path / f"c{number}"))
        fmt, split = random_format(rng), rng.choice(SPLITS)
        ranges = naive.split_ranges(split, len(naive.read_corpus(prefix)))
        sizes = tuple(rng.choice([None, 1, 7, 40, rng.randrange(1, 300)]) for _ in range(3))
        spec = GPTDatasetSpec(fmt, seed=rng.randrange(5000), blend=Blend((prefix,)), split=split, cache=False)
        if not all(bounds is None or has_tokens(prefix, bounds) for bounds in ranges):
            with pytest.raises(DataError, match="--split"):
                build_train_valid_test_datasets(spec, sizes, allow_empty=True)
            continue
        datasets = build_train_valid_test_datasets(spec, sizes, allow_empty=True)
        for which, (dataset, bounds) in enumerate(zip(datasets, ranges, strict=True)):
            assert (dataset is None) == (bounds is None)
            if dataset is not None:
                apart += dataset.plan.last_epoch_apart
                compared += 1
                assert_same(dataset, expected_items(prefix, bounds, which, fmt, sizes[which], spec.seed), rng)
    assert compared >= 20
    assert apart >= 1


@pytest.mark.parametrize("kind", ["weighted", "unweighted", "exhaustive", "per_split", "validation_sets"])
def test_blends(tmp_path, kind):
    rng = random.Random(kind)
    prefixes = [write_corpus(rng, str(tmp_path / f"c{n}")) for n in range(6)]
    prefixes = [p for p in prefixes if has_tokens(p, (0, len(naive.read_corpus(p))))]
    for _ in range(12):
        members = rng.sample(prefixes, rng.randrange(1 if kind == "weighted" else 2, len(prefixes) + 1))
        fmt = random_format(rng)
        size = None if kind in ("exhaustive", "validation_sets") else rng.randrange(1, 200)
        weights = [rng.choice([0.1, 0.3, 1.0, 5.0, rng.random() + 0.01]) for _ in members]
        seed = rng.randrange(5000)
        whole = {p: (0, len(naive.read_corpus(p))) for p in members}
        blend = Blend(tuple(members), tuple(weights) if kind == "weighted" else None)
        # The whole corpus as training data, by split or by being named for training only.
        if kind == "per_split":
            spec = GPTDatasetSpec(fmt, seed=seed, blend_per_split=(blend, None, None), cache=False)
        elif kind == "validation_sets":
            spec = GPTDatasetSpec(
                fmt,
                seed=seed,
                blend_per_split=(None, blend, None),
                cache=False,
                multiple_validation_sets=True,
            )
        else:
            spec = GPTDatasetSpec(fmt, seed=seed, blend=blend, split="1,0,0", cache=False)
        try:
            datasets = build_train_valid_test_datasets(spec, (size, size, size), allow_empty=True)
        except DataError as refusal:
            short = str(refusal)
        else:
            short = ""
        if short:
            assert "--mid-level-dataset-surplus" in short
            assert kind != "exhaustive"
            continue
        if kind == "validation_sets":
            assert datasets.train is None
            for dataset, prefix in zip(datasets.valid, members, strict=True):
                assert_same(dataset, expected_items(prefix, whole[prefix], 1, fmt, None, seed), rng)
            continue
        if kind == "weighted":
            asked, total = naive.weighted_requests(weights, size)
            items = [
                expected_items(p, whole[p], 0, fmt, n, seed) for p, n in zip(members, asked, strict=True)
            ]
            turns = naive.blend_order(naive.normalized(weights), total)
        else:
            items = [expected_items(p, whole[p], 0, fmt, None, seed) for p in members]
            lengths = [len(member) for member in items]
            if size is None:
                turns = naive.exhaustive_order(lengths)
            else:
                turns = naive.blend_order(naive.normalized(lengths), min(size, sum(lengths)))
        assert datasets.valid is None
        assert datasets.test is None
        assert_same(datasets.train, [items[member][sample] for member, sample in turns], rng)
