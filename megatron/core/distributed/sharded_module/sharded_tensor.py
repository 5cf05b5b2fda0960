"""A tensor of which this rank holds a part, and which answers as the whole one: a sharded parameter, its gradient, what
an optimizer keeps of it.

Shape, dims and number of elements are the whole tensor's. What is elementwise works on this rank's part and gives such
a tensor again; sums, norms and extremes of all elements are those over all ranks, who therefore all have to ask; what
needs more of the tensor than that is refused (`sharded_ops.py`). torch's optimizers, clipping, loss scaling and
`torch.distributed.checkpoint` know nothing of it and work. What differs from a plain tensor: `.data` may be set to a
whole tensor, of which the rank takes its part, and pickling is refused.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import _foreach_supported_types as _foreach_of_optimizers
from torch.utils._foreach_utils import _foreach_supported_types as _foreach_of_clipping

from megatron.core.distributed.sharded_module import sharded_ops
from megatron.core.distributed.sharded_module.flat_span import TensorPart
from megatron.core.module import ModelError


class ShardedTensor(TensorPart):
    """A `TensorPart` on which operations work."""

    def to_local(self) -> Tensor:
        """This rank's part, 1-D; its memory."""
        return self.local

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

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        return sharded_ops.run(func, args, kwargs or {})

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
