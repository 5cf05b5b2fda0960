"""The tensor parallel ranks as the layers of one model see them, and what is moved between those ranks.

A tensor is *whole* (the same on every tensor parallel rank), *sharded* (`[s/tp, b, h]`: sequence parallel, arXiv
2205.05198, keeps the residual stream so) or *partial* (`{+tp}`: the sum over the ranks is what is meant).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from megatron import names_of
from megatron.core.tensor_parallel.functions import Kept, apply
from megatron.core.transport.collectives import Pending, all_gather, all_reduce, reduce_scatter
from megatron.core.transport.parallel_state import Group, ParallelState


@dataclasses.dataclass(frozen=True)
class TensorParallel:
    """The ranks that share every layer of a model.

    group: None or of one rank for a model that no other rank shares. sequence_parallel: between the linear layers
    the residual stream is split along the sequence; without others to split it with, it is not.
    """

    group: Group | None = None
    sequence_parallel: bool = False

    def __post_init__(self) -> None:
        if self.size == 1:
            object.__setattr__(self, "sequence_parallel", False)

    @classmethod
    def of(cls, ps: ParallelState, sequence_parallel: bool) -> TensorParallel:
        """This rank's tensor parallel group."""
        return cls(ps.group("tp"), sequence_parallel)

    @functools.cached_property
    def size(self) -> int:
        return 1 if self.group is None else self.group.size

    @property
    def rank(self) -> int:
        return 0 if self.group is None else self.group.rank

    @property
    def shard_rank(self) -> int | None:
        """`tp_rank` of a dropout site on a tensor that is always sharded (attention heads)."""
        return self.rank if self.size > 1 else None

    @property
    def sequence_rank(self) -> int | None:
        """`tp_rank` of a dropout site on the residual stream, which is sharded under sequence parallel only."""
        return self.rank if self.sequence_parallel else None

    @property
    def peers(self) -> Group:
        """The group, where there is one to talk to."""
        assert self.group is not None, "a single tensor parallel rank has no peers"
        return self.group


ALONE = TensorParallel()  # one rank holds every layer whole


class SequenceShard:
    """An `Operand`: this rank's part [s/tp, ...] of a tensor, gathered along the sequence when it is wanted whole."""

    def __init__(self, shard: Tensor, tp: TensorParallel) -> None:
        self.shard = shard.detach()  # what waits for W keeps nothing of the graph
        self.tp = tp
        self._gather: tuple[Tensor, Pending] | None = None

    def start(self) -> None:
        """Begin to gather; communicates over tp. A second call does nothing."""
        if self._gather is None:
            self._gather = _start_gather(self.shard, self.tp, async_op=True)

    def whole(self) -> Tensor:
        """[s, ...]; gathers now unless `start` was called."""
        self.start()
        assert self._gather is not None
        whole, pending = self._gather
        pending.wait()
        return whole


def _start_gather(shard: Tensor, tp: TensorParallel, *, async_op: bool) -> tuple[Tensor, Pending]:
    whole = shard.new_empty(shard.shape[0] * tp.size, *shard.shape[1:])
    return whole, all_gather(whole, shard.contiguous(), tp.peers, async_op=async_op)


def gather_sequence(shard: Tensor, tp: TensorParallel) -> Tensor:
    """[s/tp, ...] -> [s, ...] under sequence parallel; else the tensor itself. Communicates over tp."""
    return _start_gather(shard, tp, async_op=False)[0] if tp.sequence_parallel else shard


def _part_of_sequence(length: int, tp: TensorParallel) -> int:
    if length % tp.size:
        raise ValueError(
            f"a sequence of {length} tokens cannot be split over {tp.size} tensor parallel ranks: with "
            f"--sequence-parallel its length must be a multiple of --tensor-model-parallel-size"
        )
    return length // tp.size


def sequence_slice(whole: Tensor, tp: TensorParallel) -> Tensor:
    """This rank's part [s/tp, ...] of a whole tensor [s, ...] under sequence parallel; else the tensor itself."""
    if not tp.sequence_parallel:
        return whole
    part = _part_of_sequence(whole.shape[0], tp)
    return whole.narrow(0, tp.rank * part, part)


def start_sum(partial: Tensor, tp: TensorParallel) -> tuple[Tensor, Pending | None]:
    """Begin to add [s, ...] over tp: the sum, in place, or under sequence parallel this rank's part of it [s/tp, ...].

    The result holds once the pending collective (None without peers) has been waited for. `partial` is consumed.
    """
    if tp.size == 1:
        return partial, None
    partial = partial.contiguous()
    if not tp.sequence_parallel:
        return partial, all_reduce(partial, tp.peers, async_op=True)
    shard = partial.new_empty(_part_of_sequence(partial.shape[0], tp), *partial.shape[1:])
    return shard, reduce_scatter(shard, partial, tp.peers, async_op=True)


def sum_ranks(partial: Tensor, tp: TensorParallel) -> Tensor:
    """`start_sum`, waited for: [s, ...] -> [s, ...] or [s/tp, ...]. Communicates over tp."""
    total, pending = start_sum(partial, tp)
    if pending is not None:
        pending.wait()
    return total


# --- the same by autograd, along any dim: what goes one way has its gradient go the other

Move = Callable[[Tensor, int, TensorParallel], Tensor]


def as_it_is(x: Tensor, dim: int, tp: TensorParallel) -> Tensor:
    """Nothing is moved."""
    return x


def gathered(x: Tensor, dim: int, tp: TensorParallel) -> Tensor:
    """[..., n/tp, ...] -> [..., n, ...]. Communicates over tp."""
    parts, _ = _start_gather(x.unsqueeze(0), tp, async_op=False)
    return parts.movedim(0, dim).flatten(dim, dim + 1)


def own_part(x: Tensor, dim: int, tp: TensorParallel) -> Tensor:
    """[..., n, ...] -> [..., n/tp, ...]."""
    if x.shape[dim] % tp.size:
        raise ValueError(f"{list(x.shape)}: dim {dim} does not divide over {tp.size} tensor parallel ranks")
    return x.chunk(tp.size, dim)[tp.rank].contiguous()


def summed(x: Tensor, dim: int, tp: TensorParallel) -> Tensor:
    """The sum over tp, over which it communicates."""
    return sum_ranks(x.clone(), TensorParallel(tp.group))


def own_part_of_sum(x: Tensor, dim: int, tp: TensorParallel) -> Tensor:
    """{+tp}[..., n, ...] -> [..., n/tp, ...]. Communicates over tp."""
    moved = x.movedim(dim, 0).clone(memory_format=torch.contiguous_format)
    return sum_ranks(moved, TensorParallel(tp.group, sequence_parallel=True)).movedim(0, dim)


class _Moved(NamedTuple):
    """A `GradFunction` of x."""

    there: Move
    back: Move
    dim: int
    tp: TensorParallel

    def forward(self, x: Tensor) -> tuple[Tensor, Kept]:
        return self.there(x, self.dim, self.tp), ()

    def backward(self, kept: Kept, dy: Tensor) -> tuple[Tensor]:
        return (self.back(dy, self.dim, self.tp),)


def moved(x: Tensor, tp: TensorParallel, there: Move, back: Move, dim: int) -> Tensor:
    """x as `there` makes it, and its gradient as `back` does. Communicates over tp; every rank calls alike."""
    if tp.size > 1:
        x = apply(_Moved(there, back, dim % x.dim(), tp), x)
    return x


def gather_vocabulary(logits: Tensor, tp: TensorParallel, vocab_size: int | None = None) -> Tensor:
    """[..., v/tp] -> [..., v]. vocab_size: v, without what the last rank has behind it (`vocabulary_part`).

    Communicates over tp; every rank must make the same use of the result.
    """
    return logits if tp.size == 1 else moved(logits, tp, gathered, own_part, -1)[..., :vocab_size]


__getattr__ = names_of(__name__)  # Megatron's names
