"""What `state_dict()` of a sharded module and of its optimizer holds: this rank's pieces of tensors, and their places.

`torch.distributed.checkpoint` asks them for rectangles of the whole tensor (its `_Checkpointable` protocol), so that it
saves whole tensors and reads them into any other number of ranks, or into a plain module. What is computed from a piece
elementwise is a piece again; a sum, a row or any other tensor would be the rank's own and is refused.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from megatron.core.dist_checkpointing.state import LocalPiece, part_pieces
from megatron.core.module import ModelError
from megatron.core.param_meta import ParamMeta

# What of a piece is said of the whole tensor, which has no memory.
_OF_THE_WHOLE = frozenset(
    {
        *(Tensor.size, Tensor.dim, Tensor.numel, Tensor.data_ptr),
        *(vars(torch._C.TensorBase)[name].__get__ for name in ("shape", "ndim")),
    }
)


@dataclasses.dataclass(frozen=True)
class FlatSpan:
    """Elements [start, end) of a parameter's flattened local tensor. refusal: why torch.distributed.checkpoint cannot
    save what an optimizer keeps for them; empty where it can."""

    meta: ParamMeta
    start: int
    end: int
    refusal: str = ""

    def pieces(self, local: Tensor) -> list[LocalPiece]:
        """Their rectangles, in `local`, 1-D. Raises ModelError where there is a refusal."""
        if self.refusal:
            raise ModelError(self.refusal)
        return part_pieces("", self.meta, local, self.start, self.end)


class StatePiece(Tensor):
    """A rank's 1-D part of a tensor; size and shape are the whole tensor's."""

    local: Tensor
    place: FlatSpan

    @staticmethod
    def __new__(cls, local: Tensor, place: FlatSpan) -> StatePiece:
        shape = tuple(local.shape) if place.refusal else place.meta.global_shape
        piece: StatePiece = Tensor._make_wrapper_subclass(cls, shape, dtype=local.dtype, device=local.device)
        piece.local, piece.place = local, place
        return piece

    def to_local(self) -> Tensor:
        """This rank's part, 1-D."""
        return self.local

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func in _OF_THE_WHOLE:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        found: list[StatePiece] = []

        def local(piece: StatePiece) -> Tensor:
            found.append(piece)
            return piece.local

        plain, options = tree_map_only(StatePiece, local, (args, dict(kwargs or {})))
        first = found[0]
        if func is Tensor.new_empty and tuple(args[1]) == tuple(first.size()):  # as async_save makes copies
            return StatePiece(first.local.new_empty(first.local.shape, **options), first.place)
        for other in (*plain, *options.values()):
            if isinstance(other, Tensor) and other.dim() and other.shape != first.local.shape:
                raise first._partial(f"{func.__name__} of a tensor of shape {tuple(other.shape)} and")
        if func is Tensor.__getitem__:  # of the whole tensor nobody has the rows
            raise first._partial("an index of")
        result = func(*plain, **options)
        if not isinstance(result, Tensor):
            return result
        if result.shape != first.local.shape:
            raise first._partial(f"{func.__name__} of")
        return StatePiece(result, first.place)

    def _partial(self, asked: str) -> ModelError:
        return ModelError(
            f"{asked} this rank's part of {self.place.meta.name!r}, {self.local.numel()} elements: state_dict() of a "
            "sharded module is for torch.distributed.checkpoint; full_state_dict() has the whole weights, to_local() "
            "this rank's part"
        )

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise ModelError(
            f"{func}: a piece of a sharded module's state is asked for memory of the whole tensor, which no rank has: "
            "use to_local(), or full_state_dict() of the module"
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise ModelError(
            f"{self.place.meta.name!r} is pickled (torch.save), and this rank holds a part of it only: all ranks call "
            "torch.distributed.checkpoint.save(), which any number of ranks can load, or full_state_dict(), which has "
            "the whole weights; to_local() of a piece is the rank's own part"
        )

    # torch.distributed.checkpoint ------------------------------------------------------------------------

    def __create_write_items__(self, fqn: str, object: Any) -> list[Any]:
        from megatron.core.dist_checkpointing.planning import PieceFacts  # slow to import

        pieces = self.place.pieces(self.local)
        return [PieceFacts.of(piece)._replace(name=fqn).write_item() for piece in pieces]

    def __create_chunk_list__(self) -> list[Any]:
        """Where a load is about to write: a rank that holds nothing of this notes it as the others do."""
        from megatron.core.dist_checkpointing.planning import chunk_metadata  # slow to import

        if not self.local.numel():
            self.local.zero_()
        return [chunk_metadata(piece.offset, piece.tensor.shape) for piece in self.place.pieces(self.local)]

    def __get_tensor_shard__(self, index: Any) -> Tensor:
        offset = tuple(index.offset)
        return next(piece.tensor for piece in self.place.pieces(self.local) if piece.offset == offset)


def taken(value: Any, place: FlatSpan) -> Any:
    """What is loaded into a place: a piece of just this place, or of a whole tensor this rank's part. Raises ModelError
    for a piece of another place."""
    if isinstance(value, StatePiece):
        if (value.place.start, value.place.end) != (place.start, place.end):
            raise ModelError(
                f"{place.meta.name!r}: elements [{value.place.start}, {value.place.end}) are loaded where this rank "
                f"has [{place.start}, {place.end}): of other ranks' pieces use torch.distributed.checkpoint.load(), "
                "which cuts them anew, or load_full_state_dict() of whole weights"
            )
        return value.local
    if isinstance(value, Tensor) and tuple(value.shape) == place.meta.local_shape:
        return value.reshape(-1)[place.start : place.end]
    return value


def as_pieces(value: Any, place: FlatSpan, optimizer: str) -> Any:
    """What an optimizer keeps of a shard: single numbers stay, what has the shard's shape is cut as it is, and the rest
    is refused where torch.distributed.checkpoint is to save it."""

    def piece(tensor: Tensor) -> Tensor:
        if isinstance(tensor, StatePiece) or tensor.dim() == 0:
            return tensor
        if tuple(tensor.shape) == (place.end - place.start,):
            return StatePiece(tensor, place)
        refusal = (
            f"torch.distributed.checkpoint: {optimizer} keeps a tensor of shape {tuple(tensor.shape)} for "
            f"{place.meta.name!r}, of which this rank has {place.end - place.start} elements: not cut like the weight, "
            "it cannot be cut anew for other ranks; save full_state_dict() of the module, and begin with a new "
            "optimizer"
        )
        return StatePiece(tensor, dataclasses.replace(place, refusal=refusal))

    return tree_map_only(Tensor, piece, value)


def own_parts(kept: Any, place: FlatSpan) -> Any:
    """This rank's parts of the pieces in what an optimizer kept of a shard."""
    return tree_map_only(StatePiece, lambda piece: taken(piece, place), kept)


def repacked(
    optimizer: torch.optim.Optimizer,
    packed: dict[str, Any],
    places: Mapping[int, FlatSpan],
    change: Callable[[Any, FlatSpan], Any],
) -> dict[str, Any]:
    """What `Optimizer.state_dict()` gives, or `load_state_dict()` is given, with change(kept, place) of what is kept of
    each shard. places: by id of a shard. Keys of a packed state are what its groups list in the place of parameters."""

    def listed(state: Mapping[str, Any]) -> list[Any]:
        return [one for group in state["param_groups"] for one in group["params"]]

    pairs = zip(listed(packed), listed(vars(optimizer)), strict=False)  # torch says where numbers differ
    place_of = {key: places[id(shard)] for key, shard in pairs if id(shard) in places}
    kept = packed["state"].items()
    state = {key: change(one, place_of[key]) if key in place_of else one for key, one in kept}
    return {**packed, "state": state}
