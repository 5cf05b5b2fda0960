"""Stateless random numbers: every mask and every initial weight is a function of where and when it is drawn.

[Note: stateless dropout] A site's generator is reseeded at each call from a hash of (seed, iteration, global
microbatch, layer, site[, tp_rank]). Masks then do not depend on the order in which a schedule runs microbatches, on
whether a layer is recomputed, or on how often a step is replayed, and there is no random state to save.

[Note: initial weights] A parameter's values depend on the seed and its global name only. Rows are drawn in blocks of
`ROW_BLOCK`, each from a CPU generator keyed by (seed, name, block), always in fp32 and always a full block, so that a
longer (padded) table starts with the same rows. Each expert of a parameter is a matrix of its own, keyed by its number,
too. fp64 parameters hold the same fp32 numbers, bf16 and fp16 parameters
the rounded ones. Any device and any degree of parallelism therefore start from the same model.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from megatron import names_of
from megatron.core.device import default_generator, new_generator
from megatron.core.module import ModelContext
from megatron.core.param_meta import InitKind, ParamMeta
from megatron.core.tensor_parallel.functions import Kept, apply

ROW_BLOCK = 128


def stable_seed(*parts: int | str) -> int:
    """A 63-bit seed from any integers and strings, the same on every machine and in every Python process."""
    text = "\x1f".join(f"{type(part).__name__}:{part}" for part in parts)
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


@dataclasses.dataclass(frozen=True)
class DropoutSite:
    """One place of the model where numbers are dropped.

    context: the clock. layer: global layer number, -1 outside the layers. site: name within the layer.
    tp_rank: for a tensor that is sharded over tensor-parallel ranks, whose masks must differ; None where
    every rank holds all of it.
    """

    context: ModelContext
    layer: int
    site: str
    tp_rank: int | None = None

    def seed(self) -> int:
        """The seed of this site in the context's microbatch."""
        clock, rank = self.context, -1 if self.tp_rank is None else self.tp_rank
        return stable_seed(clock.seed, clock.iteration, clock.microbatch, self.layer, self.site, rank)


def drop(x: Tensor, probability: float, site: DropoutSite) -> tuple[Tensor, Tensor | None]:
    """(x with elements dropped, bool: which are left); without a probability x itself and None. As `dropout`."""
    if probability == 0.0:
        return x, None
    generator = new_generator(x.device, site.seed())
    keep = torch.empty(x.shape, dtype=torch.bool, device=x.device)
    keep.bernoulli_(1.0 - probability, generator=generator)
    return drop_others(x, keep, probability), keep


def drop_others(x: Tensor, keep: Tensor | None, probability: float) -> Tensor:
    """x where `keep` (None: everywhere), scaled by 1 / (1 - probability), else 0: `drop` again, and its backward."""
    if keep is None:
        return x
    return (x * keep).mul_(0.0 if probability == 1.0 else 1.0 / (1.0 - probability))


class _Dropout(NamedTuple):
    """A `GradFunction` of x."""

    probability: float
    site: DropoutSite

    def forward(self, x: Tensor) -> tuple[Tensor, Kept]:
        y, keep = drop(x, *self)
        return y, (keep,)

    def backward(self, kept: Kept, dy: Tensor) -> tuple[Tensor]:
        (keep,) = kept
        return (drop_others(dy, keep, self.probability),)


def dropout(x: Tensor, probability: float, site: DropoutSite, training: bool) -> Tensor:
    """x [...] with elements zeroed with `probability`, the rest scaled by 1 / (1 - probability) (arXiv 1207.0580)."""
    if not training or probability == 0.0:
        return x
    return apply(_Dropout(probability, site), x)


@contextlib.contextmanager
def seeded_default_generator(device: torch.device, seed: int) -> Iterator[None]:
    """The default generator of `device` starts from `seed` inside, and is put back as it was afterwards.

    For kernels that draw by themselves and take no generator (dropout inside attention).
    """
    generator = default_generator(device)
    state = generator.get_state()
    generator.manual_seed(seed)
    try:
        yield
    finally:
        generator.set_state(state)


def fill(tensor: Tensor, meta: ParamMeta, seed: int) -> None:
    """Fills `tensor` [local_shape], this rank's part of a parameter (`ParamMeta.regions`), with initial values."""
    assert tuple(tensor.shape) == meta.local_shape, f"{meta.name}: {(*tensor.shape,)} != {meta.local_shape}"
    tensor.detach()[len(tensor) - meta.padding :].zero_()
    if meta.expert:
        of_one = dataclasses.replace(meta, global_shape=meta.global_shape[1:])
        for part in meta.parts:
            for number, matrix in enumerate(part.view(tensor), part.offset[0]):
                fill_rectangle(matrix, of_one, seed, *part.offset[1:], expert=number)
        return
    for part in meta.parts:
        row_start, col_start = (*part.offset, 0, 0)[:2]
        assert not any(part.offset[2:]), f"{meta.name}: cut along a dim after the second: {part}"
        fill_rectangle(part.view(tensor), meta, seed, row_start, col_start * math.prod(meta.global_shape[2:]))


@torch.no_grad()
def fill_rectangle(
    tensor: Tensor,
    meta: ParamMeta,
    seed: int,
    row_start: int = 0,
    col_start: int = 0,
    *,
    expert: int | None = None,
) -> None:
    """Fills `tensor`, the rectangle of a parameter that begins at (row_start, col_start), with initial values.

    tensor: [rows, columns], or of the parameter's own number of dims when it holds whole rows; any float
    dtype and device. A 1-D tensor is one column. expert: whose matrix it is, of those that `meta` has.
    """
    if meta.init is not InitKind.NORMAL:
        tensor.fill_(1.0 if meta.init is InitKind.ONES else 0.0)
        return
    row_end, col_end = row_start + tensor.shape[0], col_start + math.prod(tensor.shape[1:])
    keys = (seed, meta.name) if expert is None else (seed, meta.name, expert)
    all_rows, all_columns = meta.global_shape[0], math.prod(meta.global_shape[1:])
    assert row_end <= all_rows, f"{meta.name}: rows {row_start} to {row_end} of {meta.global_shape}"
    assert col_end <= all_columns, f"{meta.name}: columns {col_start} to {col_end} of {all_columns}"
    for block in range(row_start // ROW_BLOCK, -(-row_end // ROW_BLOCK)):
        generator = torch.Generator(device="cpu").manual_seed(stable_seed(*keys, block))
        values = torch.empty(ROW_BLOCK, all_columns, dtype=torch.float32)
        values.normal_(0.0, meta.init_std, generator=generator)
        start = block * ROW_BLOCK
        first, end = max(row_start, start), min(row_end, start + ROW_BLOCK)
        part = tensor[first - row_start : end - row_start]
        part.copy_(values[first - start : end - start, col_start:col_end].reshape(part.shape))


__getattr__ = names_of(__name__)  # Megatron's names
