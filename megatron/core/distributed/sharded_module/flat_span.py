"""Which elements of a parameter a rank holds, who holds the rest, and tensors that know both."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from inspect import currentframe
from typing import Self

import torch
from torch import Tensor

from megatron.core.dist_checkpointing.state import LocalPiece, part_pieces
from megatron.core.module import ModelError
from megatron.core.param_meta import ParamMeta, region_parts
from megatron.core.transport import collectives
from megatron.core.transport.parallel_state import Group


@dataclasses.dataclass(frozen=True, eq=False)
class FlatSpan:
    """Elements [start, end) of a parameter's flattened local tensor.

    groups: the ranks that have the others, one group after the other. tensor_parallel: the last of them, where it holds
    other rectangles of the parameter. all_have_all: nobody has cut it.
    """

    meta: ParamMeta
    start: int
    end: int
    groups: tuple[Group, ...] = ()
    tensor_parallel: Group | None = None
    all_have_all: bool = False

    def __deepcopy__(self, memo: dict[int, object]) -> FlatSpan:
        return self  # copies of a tensor are of the same elements; groups are nobody's to copy

    def agrees(self, other: FlatSpan) -> bool:
        """Whether the same elements of tensors of one shape are meant."""
        return (other.start, other.end) == (self.start, self.end)

    def pieces(self, part: Tensor) -> list[LocalPiece]:
        """Their rectangles of the whole tensor, as views of `part`, 1-D."""
        return part_pieces("", self.meta, part, self.start, self.end)

    def part_of(self, whole: Tensor) -> Tensor:
        """1-D: this rank's elements of a tensor of the whole shape."""
        if not self.meta.regions:
            return whole.reshape(-1)[self.start : self.end]
        part = whole.new_empty(self.end - self.start)
        for piece in self.pieces(part):
            piece.tensor.copy_(whole[_box(piece.offset, piece.tensor)])
        return part

    def owned(self, part: Tensor) -> Tensor:
        """1-D: of this rank's elements those that no other tensor parallel rank counts."""
        if self.tensor_parallel is None:
            return part
        return torch.cat([part[:0], *(view.reshape(-1) for _, view in self._owned_parts(part))])

    def whole(self, part: Tensor) -> Tensor:
        """The whole tensor, on every rank. Communicates over the groups."""
        found = part.new_zeros(self.meta.global_shape)
        for offset, view in self._owned_parts(part):
            found[_box(offset, view)] = view
        as_bytes = found.view(-1).view(torch.uint8)  # zeros of others change no bit, nor a zero's sign
        for group in self.groups:
            collectives.all_reduce(as_bytes, group)
        return found

    def _owned_parts(self, part: Tensor) -> Iterator[tuple[Sequence[int], Tensor]]:
        rank = 0 if self.tensor_parallel is None else self.tensor_parallel.rank
        for region in self.meta.parts:
            if rank % region.copies == 0:
                yield from region_parts(region, self.meta.local_shape, part, self.start, self.end)


def _box(offset: Sequence[int], view: Tensor) -> tuple[slice, ...]:
    return tuple(slice(start, start + size) for start, size in zip(offset, view.shape, strict=True))


class TensorPart(Tensor):
    """What operations know of a `ShardedTensor`. local: this rank's part, 1-D. place: which elements of the whole
    tensor these are. dims: its shape, quicker to read; another one of as many elements for a view."""

    local: Tensor
    place: FlatSpan
    dims: tuple[int, ...]

    @staticmethod
    def __new__(cls, local: Tensor, place: FlatSpan, shape: Sequence[int] | None = None) -> Self:
        dims = place.meta.global_shape if shape is None else tuple(shape)
        new: Self = Tensor._make_wrapper_subclass(cls, dims, dtype=local.dtype, device=local.device)
        new.local, new.place, new.dims = local, place, dims
        return new

    def again(self, local: Tensor, shape: Sequence[int] | None = None) -> Self:
        """The same elements of another tensor, of this one's shape unless another is given."""
        return type(self)(local, self.place, self.dims if shape is None else shape)

    def full_tensor(self) -> Tensor:
        """The whole tensor, a copy on every rank. Communicates over the ranks that hold it: all of them call."""
        return self.place.whole(self.local).view(self.shape)

    def part_of(self, value: Tensor) -> Tensor:
        """1-D: of a tensor of this one's shape, sharded or whole, this rank's elements. Raises ModelError for parts of
        other elements."""
        if not isinstance(value, TensorPart):
            return self.place.part_of(value)
        if not self.place.agrees(value.place):
            ours, theirs = ((one.start, one.end) for one in (self.place, value.place))
            raise ModelError(
                f"{self.place.meta.name!r}: this rank has elements {theirs} of one tensor and {ours} of the other, "
                "which were sharded otherwise: use full_tensor() of one of them, or torch.distributed.checkpoint "
                "between them, which cuts anew"
            )
        return value.local

    def refusal(self, asked: str) -> ModelError:
        """asked: what this rank's part is not enough for."""
        place, who = self.place, _running_optimizer()
        return ModelError(
            f"{who}{asked} of {place.meta.name!r} {tuple(self.shape)}, of which this rank has elements "
            f"[{place.start}, {place.end}): that needs the whole tensor. What is elementwise works here, and "
            "sums and norms of all elements; full_tensor() is the whole one, model.unshard() makes attributes whole, "
            "full_state_dict() has all weights; optimizers of whole matrices train under "
            "data_parallel_sharding_strategy='no_shard', or use an elementwise one (AdamW, SGD, Lion)"
        )


def _running_optimizer() -> str:
    """Whose step an operation is part of, as the beginning of a message."""
    frame = currentframe()
    while frame is not None:
        if isinstance(owner := frame.f_locals.get("self"), torch.optim.Optimizer):
            return f"{type(owner).__name__}.step(): "
        frame = frame.f_back
    return ""
