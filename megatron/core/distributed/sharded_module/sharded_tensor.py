"""A tensor of which this rank holds a part, and which answers as the whole one: a sharded parameter, its gradient, what
an optimizer keeps of it.

Shape, dims and number of elements are the whole tensor's. What is elementwise works on this rank's part and gives such
a tensor again; sums, norms and extremes of all elements are those over all ranks, who therefore all have to ask; what
needs more of the tensor than that is refused (`sharded_ops.py`). torch's optimizers, clipping, loss scaling and
`torch.distributed.checkpoint` know nothing of it and work. What differs from a plain tensor: `.data` may be set to a
whole tensor, of which the rank takes its part, and pickling is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from inspect import currentframe
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import _foreach_supported_types as _foreach_of_optimizers
from torch.utils._foreach_utils import _foreach_supported_types as _foreach_of_clipping

from megatron.core.distributed.sharded_module import sharded_ops
from megatron.core.distributed.sharded_module.flat_span import FlatSpan, TensorPart
from megatron.core.module import ModelError


class ShardedTensor(TensorPart):
    """place: what of the whole tensor this rank holds. shape: another one of as many elements (a view's)."""

    @staticmethod
    def __new__(cls, local: Tensor, place: FlatSpan, shape: Sequence[int] | None = None) -> ShardedTensor:
        dims = place.meta.global_shape if shape is None else tuple(shape)
        new: ShardedTensor = Tensor._make_wrapper_subclass(cls, dims, dtype=local.dtype, device=local.device)
        new.local, new.place, new.dims = local, place, dims
        return new

    def again(self, local: Tensor, shape: Sequence[int] | None = None) -> ShardedTensor:
        return ShardedTensor(local, self.place, self.dims if shape is None else shape)

    def to_local(self) -> Tensor:
        """This rank's part, 1-D; its memory."""
        return self.local

    def full_tensor(self) -> Tensor:
        """The whole tensor, a copy on every rank. Communicates over the ranks that hold it: all of them call."""
        return self.place.whole(self.local).view(self.shape)

    def numpy(self, *, force: bool = False) -> Any:
        """Raises ModelError: arrays and lists are of whole tensors."""
        raise self.refusal("numpy()")

    def tolist(self) -> Any:
        """Raises ModelError."""
        raise self.refusal("tolist()")

    @property
    def data(self) -> ShardedTensor:
        """The same memory, without autograd and with a version of its own."""
        return self.again(self.local)

    @data.setter
    def data(self, value: Tensor) -> None:
        """Of a whole tensor this rank takes its part. Raises ModelError for another shape or type."""
        if (tuple(value.shape), value.dtype) != (tuple(self.shape), self.dtype):
            raise ModelError(
                f"{self.place.meta.name!r} would have shape {tuple(value.shape)} of {value.dtype}, and has "
                f"{tuple(self.shape)} of {self.dtype}: a sharded parameter keeps both; write values of them"
            )
        self.local = self.part_of(value).clone()

    def part_of(self, value: Tensor) -> Tensor:
        """1-D: of a tensor of this one's shape, sharded or whole, this rank's elements. Raises ModelError for parts of
        other elements."""
        if not isinstance(value, ShardedTensor):
            return self.place.part_of(value)
        if not self.place.agrees(value.place):
            ours, theirs = ((one.start, one.end) for one in (self.place, value.place))
            raise ModelError(
                f"{self.place.meta.name!r}: this rank has elements {theirs} of one tensor and {ours} of the other, "
                "which were sharded otherwise: use full_tensor() of one of them, or torch.distributed.checkpoint "
                "between them, which cuts anew"
            )
        return value.local

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        return sharded_ops.run(func, args, kwargs or {})

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

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        place = self.place
        return (
            f"ShardedTensor({place.meta.name!r}, shape={tuple(self.shape)}, elements [{place.start}, {place.end}): "
            f"{self.local!r})"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        copied: Tensor = self.again(self.local.clone())
        if isinstance(self, nn.Parameter):
            copied = nn.Parameter(copied, self.requires_grad)
        memo[id(self)] = copied
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise ModelError(
            f"{self.place.meta.name!r} is pickled (torch.save), and this rank holds a part of it only: all ranks call "
            "torch.distributed.checkpoint.save(), which any number of ranks can load, or full_state_dict(), which has "
            "the whole weights; to_local() is the rank's own part"
        )

    # torch.distributed.checkpoint asks for rectangles of the whole tensor -------------------------------------

    def __create_write_items__(self, fqn: str, object: Any) -> list[Any]:
        from megatron.core.dist_checkpointing.dcp_reader import write_item  # slow to import
        from megatron.core.dist_checkpointing.pieces import facts_of

        pieces = self.place.pieces(self.local)
        return [write_item(facts_of(piece)._replace(name=fqn)) for piece in pieces]

    def __create_chunk_list__(self) -> list[Any]:
        """Where a load is about to write: a rank that holds nothing of this notes it as the others do."""
        from megatron.core.dist_checkpointing.dcp_reader import chunk_metadata  # slow to import

        if not self.local.numel():
            self.local.zero_()
        return [chunk_metadata(piece.offset, piece.tensor.shape) for piece in self.place.pieces(self.local)]

    def __get_tensor_shard__(self, index: Any) -> Tensor:
        offset = tuple(index.offset)
        return next(piece.tensor for piece in self.place.pieces(self.local) if piece.offset == offset)


def _running_optimizer() -> str:
    """Whose step an operation is part of, as the beginning of a message."""
    frame = currentframe()
    while frame is not None:
        if isinstance(owner := frame.f_locals.get("self"), torch.optim.Optimizer):
            return f"{type(owner).__name__}.step(): "
        frame = frame.f_back
    return ""


# As torch adds its DTensor: where nothing is said, lists of these go through foreach kernels as plain tensors do, and
# clipping sends one message and not one a parameter.
for _types in (_foreach_of_optimizers, _foreach_of_clipping):
    _types.append(ShardedTensor)  # type: ignore[arg-type]


def local_part(tensor: Tensor) -> Tensor:
    """1-D: what this rank holds of a parameter, sharded or not; its memory."""
    return tensor.local if isinstance(tensor, ShardedTensor) else tensor.detach().reshape(-1)


def local_grad(parameter: Tensor) -> Tensor:
    """1-D: what this rank holds of its gradient; empty where it has none. A whole one, as some loops and autograd set
    it, is cut."""
    grad = parameter.grad
    if grad is None:
        return parameter.new_empty(0) if not isinstance(parameter, ShardedTensor) else parameter.local[:0]
    return parameter.part_of(grad) if isinstance(parameter, ShardedTensor) else grad.reshape(-1)
