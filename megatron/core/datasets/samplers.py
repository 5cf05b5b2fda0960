"""In which order each data-parallel rank reads a dataset, and the loader that does it.

The order is a pure function of `consumed_samples`, the number of samples that all ranks have trained on,
which a checkpoint stores. Loader processes may be ahead of the training; nothing they do moves the position.
"""

from __future__ import annotations

import dataclasses
import itertools
import signal
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from megatron.core.datasets.blended_samples import BlendedDataset
from megatron.core.datasets.errors import DataError
from megatron.core.datasets.gpt_samples import GPTDataset, make_samples

Batch = dict[str, Tensor]
TOKENS_AT_ONCE = 4096


@dataclasses.dataclass(frozen=True)
class _Sampler:
    """This rank's samples of each step: micro_batch_size on each of dp_size ranks, consumed_samples behind them."""

    num_samples: int
    _: dataclasses.KW_ONLY
    consumed_samples: int
    micro_batch_size: int
    dp_rank: int
    dp_size: int

    def __post_init__(self) -> None:
        assert 0 <= self.dp_rank < self.dp_size, f"dp_rank {self.dp_rank} of {self.dp_size}"

    @property
    def step_samples(self) -> int:
        return self.micro_batch_size * self.dp_size


class SequentialSampler(_Sampler):
    """`single`: samples consumed_samples, consumed_samples + 1, ...; an incomplete last step is dropped.

    Of each micro_batch_size * dp_size consecutive samples, dp_rank r reads [r * micro_batch_size, (r+1) * ...).
    """

    def __len__(self) -> int:
        return max(0, self.num_samples - self.consumed_samples) // self.step_samples

    def __iter__(self) -> Iterator[list[int]]:
        for step in range(len(self)):
            first = self.consumed_samples + step * self.step_samples + self.dp_rank * self.micro_batch_size
            yield list(range(first, first + self.micro_batch_size))


@dataclasses.dataclass(frozen=True)
class CyclicSampler(_Sampler):
    """`cyclic`: reshuffled every epoch by a torch generator seeded with the epoch's number; never ends.

    data_sharding: each rank draws from its own consecutive share of the samples; else all ranks draw from
    all, strided by rank. Samples beyond the last full step of an epoch are left out of it.
    """

    data_sharding: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_samples < self.step_samples:
            raise DataError(
                f"--dataloader-type cyclic: {self.num_samples} samples are fewer than one step of {self.step_samples} "
                "(--micro-batch-size times data-parallel ranks): use more data or a smaller micro-batch"
            )

    def __iter__(self) -> Iterator[list[int]]:
        in_epoch = self.num_samples // self.step_samples * self.step_samples
        epoch, position = divmod(self.consumed_samples, in_epoch)
        if position % self.step_samples:
            raise DataError(
                f"--dataloader-type cyclic: {self.consumed_samples} consumed samples are no whole number of steps of "
                f"{self.step_samples}: resume with the data-parallel size and micro-batch of the saved run"
            )
        first = position // self.dp_size
        while True:
            order = self.epoch_order(epoch)
            for begin in range(first, len(order), self.micro_batch_size):
                yield order[begin : begin + self.micro_batch_size]
            epoch, first = epoch + 1, 0

    def epoch_order(self, epoch: int) -> list[int]:
        """This rank's samples of one epoch."""
        generator = torch.Generator()
        generator.manual_seed(epoch)
        per_rank = self.num_samples // self.step_samples * self.micro_batch_size
        if self.data_sharding:
            order = torch.randperm(per_rank, generator=generator) + self.dp_rank * per_rank
        else:
            whole = self.num_samples // self.micro_batch_size * self.micro_batch_size
            # Ranks beyond the remainder would get a sample more: cut to what all of them have.
            order = torch.randperm(whole, generator=generator)[self.dp_rank :: self.dp_size][:per_rank]
        return order.tolist()


class _RowLoader:
    """Batches of our own datasets, made in this process: of as many rows at once as have `TOKENS_AT_ONCE`, because the
    calls are what a short row costs."""

    def __init__(self, dataset: GPTDataset | BlendedDataset, sampler: Any, pin_memory: bool) -> None:
        self._dataset, self._sampler, self._pin_memory = dataset, sampler, pin_memory
        tokens = dataset.format.sequence_length * sampler.micro_batch_size
        self._at_once = max(1, TOKENS_AT_ONCE // tokens)

    def __len__(self) -> int:
        return len(self._sampler)

    def __iter__(self) -> Iterator[Batch]:
        places = iter(self._sampler)
        while batches := list(itertools.islice(places, self._at_once)):
            try:
                made = self._made(batches)
            except DataError:  # to be raised where the batch that it is about is asked for
                for batch in batches:
                    yield from self._made([batch])
            else:
                yield from made

    def _made(self, batches: list[list[int]]) -> list[Batch]:
        texts = np.stack([self._dataset.text(i) for batch in batches for i in batch])
        rows = make_samples(texts, self._dataset.format)
        by_name = {
            name: (one.pin_memory() if self._pin_memory else one).split(self._sampler.micro_batch_size)
            for name, one in zip(rows, map(torch.from_numpy, rows.values()), strict=True)
        }
        return [dict(zip(by_name, parts, strict=True)) for parts in zip(*by_name.values(), strict=True)]


def build_data_loader(
    dataset: Any,
    *,
    dataloader_type: str = "single",
    data_sharding: bool = True,
    num_workers: int = 0,
    pin_memory: bool = False,
    **place: int,
) -> Iterable[Any] | None:
    """An iterable of this rank's microbatches: dicts of [b, ...] tensors, from position `consumed_samples` on.

    dataset: a `GPTDataset`, a `BlendedDataset`, or a user's own with len() and [i]; None gives None.
    dataloader_type: "single", "cyclic", or "external", where `dataset` is the user's own iterable of batches and is
    returned as it is. place: consumed_samples, micro_batch_size, dp_rank, dp_size.
    num_workers: forked loader processes; 0 loads in this one.  pin_memory: batches in page-locked memory, for
    GPUs. `single` ends with the dataset's last full step; `cyclic` never ends.
    """
    if dataset is None or dataloader_type == "external":
        return dataset
    assert dataloader_type in ("single", "cyclic"), f"dataloader_type {dataloader_type!r}"
    sampler: _Sampler = SequentialSampler(len(dataset), **place)
    if dataloader_type == "cyclic":
        sampler = CyclicSampler(len(dataset), **place, data_sharding=data_sharding)
    if isinstance(dataset, GPTDataset | BlendedDataset) and not num_workers:
        return _RowLoader(dataset, sampler, pin_memory)
    return DataLoader(
        dataset,
        batch_sampler=sampler,  # type: ignore[arg-type]
        num_workers=num_workers,
        pin_memory=pin_memory,
        multiprocessing_context="fork" if num_workers else None,
        worker_init_fn=_start_worker if num_workers else None,
    )


def _start_worker(worker: int) -> None:
    """Signals sent to a whole job reach loaders too: the first is for the training process, which saves and then
    stops its loaders. A second SIGTERM ends a loader; multiprocessing, which stops loaders left over at exit that
    way and then waits for them, would wait for ever for one that ignores all.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda number, frame: signal.signal(number, signal.SIG_DFL))
