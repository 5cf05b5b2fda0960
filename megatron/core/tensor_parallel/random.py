"""Stateless random numbers: every mask is a function of where and when it is drawn.

[Note: stateless dropout] A site's generator is reseeded at each call from a hash of (seed, iteration, global
microbatch, layer, site[, tp_rank]). Masks then do not depend on the order in which a schedule runs
microbatches, on whether a layer is recomputed, or on how often a step is replayed, and there is no random
state to save.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from megatron.core.module import ModelContext


def stable_seed(*parts: int | str) -> int:
    """A 63-bit seed from any integers and strings, the same on every machine and in every Python process."""
    text = "\x1f".join(f"{type(part).__name__}:{part}" for part in parts)
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


class DropoutSite:
    """One place of the model where numbers are dropped.

    context: the clock. layer: global layer number, -1 outside the layers. site: name within the layer.
    tp_rank: for a tensor that is sharded over tensor-parallel ranks, whose masks must differ; None where
    every rank holds all of it.
    """

    def __init__(self, context: ModelContext, layer: int, site: str, tp_rank: int | None = None) -> None:
        self.context = context
        self.place = (layer, site, -1 if tp_rank is None else tp_rank)

    def seed(self) -> int:
        """The seed of this site in the context's microbatch."""
        clock = self.context
        return stable_seed(clock.seed, clock.iteration, clock.microbatch, *self.place)


class _Dropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, probability: float, seed: int) -> Tensor:
        generator = torch.Generator(device=x.device).manual_seed(seed)
        keep = torch.empty(x.shape, dtype=torch.bool, device=x.device)
        keep.bernoulli_(1.0 - probability, generator=generator)
        ctx.save_for_backward(keep)
        ctx.scale = 0.0 if probability == 1.0 else 1.0 / (1.0 - probability)
        return (x * keep).mul_(ctx.scale)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (keep,) = ctx.saved_tensors
        return (grads[0] * keep).mul_(ctx.scale), None, None


def dropout(x: Tensor, probability: float, site: DropoutSite, training: bool) -> Tensor:
    """x with elements zeroed with `probability` and the rest scaled by 1 / (1 - probability)."""
    if not training or probability == 0.0:
        return x
    out: Tensor = _Dropout.apply(x, probability, site.seed())
    return out


@contextlib.contextmanager
def seeded_default_generator(device: torch.device, seed: int) -> Iterator[None]:
    """The default generator of `device` starts from `seed` inside, and is put back as it was afterwards.

    For kernels that draw by themselves and take no generator (dropout inside attention).
    """
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        generator = torch.cuda.default_generators[index]
    else:
        generator = torch.default_generator
    state = generator.get_state()
    generator.manual_seed(seed)
    try:
        yield
    finally:
        generator.set_state(state)


def __getattr__(name: str) -> Any:  # Megatron's names
    return importlib.import_module("megatron.compat.names").look_up(__name__, name)
