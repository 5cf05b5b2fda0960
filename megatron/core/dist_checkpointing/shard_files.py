"""Which pieces of tensors a file of a checkpoint holds, and where in it (floor 0, pure)."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from megatron.core.dist_checkpointing.manifest import ChunkEntry, TensorEntry
from megatron.core.dist_checkpointing.safetensors_format import StoredTensor, build_header
from megatron.core.rectangles import Dims


class PieceFacts(NamedTuple):
    """What ranks tell each other of a piece: its tensor, safetensors' name of the dtype, and where it lies in it."""

    name: str
    dtype: str
    global_shape: Dims
    offset: Dims
    shape: Dims

    @property
    def stored(self) -> StoredTensor:
        """What it is in a file: under its name and rectangle, `w[0:2,0:3]`."""
        box = ",".join(f"{begin}:{begin + n}" for begin, n in zip(self.offset, self.shape, strict=True))
        return StoredTensor(f"{self.name}[{box}]", self.dtype, self.shape)


def shard_name(rank: int) -> str:
    """The file that a rank writes."""
    return f"shard_{rank:05d}.safetensors"


@dataclasses.dataclass(frozen=True)
class ShardFile:
    """Where everything lies in one rank's file: its pieces in file order, and where each begins."""

    header: bytes
    pieces: tuple[PieceFacts, ...]
    begins: tuple[int, ...]
    num_bytes: int


def lay_out(pieces: Iterable[PieceFacts]) -> ShardFile:
    """The same for everyone who knows the plan (pure)."""
    ordered = sorted(pieces, key=lambda one: one.stored.rank)
    header, places = build_header([one.stored for one in ordered])
    return ShardFile(header, tuple(ordered), tuple(places[:-1]), places[-1] if ordered else 0)


def describe_tensors(plans: Sequence[Sequence[PieceFacts]]) -> dict[str, TensorEntry]:
    """What the manifest says of tensors that are written by these plans, one a rank."""
    found: list[tuple[PieceFacts, ChunkEntry]] = []
    for rank, plan in enumerate(plans):
        layout, file = lay_out(plan), shard_name(rank)
        for one, begin in zip(layout.pieces, layout.begins, strict=True):
            found.append((one, ChunkEntry(one.offset, one.shape, file, one.stored.key, begin)))
    found.sort(key=lambda pair: pair[0])  # by name, then by place
    return {
        name: TensorEntry(dtype, shape, tuple(chunk for _, chunk in pairs))
        for (name, dtype, shape), pairs in itertools.groupby(found, lambda pair: pair[0][:3])
    }
