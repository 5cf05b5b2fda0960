"""Shards and manifest of a checkpoint, and DCP's storage interface over them: no pickle, SHA-256 of every file.

Why not DCP's own storage: it unpickles on load, finds no flipped bit, and loses the checkpoint when killed
while overwriting one (docs/checkpoints.md). The reader also serves the stock entry point
(`torch.distributed.checkpoint.load(state, storage_reader=SafeStorageReader(directory))`).
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from megatron.core.dist_checkpointing import manifest as stated
from megatron.core.dist_checkpointing.files import open_regular, read_into, write_file
from megatron.core.dist_checkpointing.manifest import ChunkEntry, FileEntry, Manifest, TensorEntry
from megatron.core.dist_checkpointing.planning import TORCH_DTYPES, PieceFacts, chunk_metadata
from megatron.core.dist_checkpointing.safetensors_format import build_header


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


def _memory(flat: Tensor) -> memoryview:
    """The bytes of a 1-D host tensor, shared with it."""
    array: Any = flat.view(torch.uint8).numpy()
    return memoryview(array)


def write_shard(path: Path, layout: ShardFile, resolve: Callable[[PieceFacts], Tensor]) -> FileEntry | None:
    """Write one rank's file, durably, one tensor in host memory at a time. No tensors, no file: None."""
    if not layout.pieces:
        return None

    def parts() -> Iterator[bytes | memoryview]:
        yield layout.header
        for piece in layout.pieces:
            flat = resolve(piece).detach().contiguous().cpu().reshape(-1)  # sync: to be written
            yield _memory(flat) if flat.numel() else b""

    num_bytes, digest = write_file(path, parts())
    assert num_bytes == layout.num_bytes, f"{path}: {num_bytes} bytes, planned {layout.num_bytes}"
    return FileEntry(num_bytes, digest)


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


class SafeStorageReader(StorageReader):
    """Reads the parts that a plan asks for. Digests were checked before, by `load.verify`."""

    def __init__(self, directory: str | os.PathLike[str], manifest: Manifest | None = None) -> None:
        self.directory = Path(directory)
        self._manifest = manifest

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        if checkpoint_id is not None:
            self.directory, self._manifest = Path(checkpoint_id), None

    def read_metadata(self, *args: Any, **kwargs: Any) -> dcp.Metadata:
        """DCP's metadata, from JSON instead of its pickle."""
        manifest = self._manifest = self._manifest or stated.read_manifest(self.directory)[0]
        state: dict[str, Any] = {}
        where: dict[dcp.MetadataIndex, tuple[ChunkEntry, torch.dtype]] = {}
        for name, entry in manifest.tensors.items():
            dtype = TORCH_DTYPES[entry.dtype]
            chunks = [chunk_metadata(chunk.offset, chunk.shape) for chunk in entry.chunks]
            properties = dcp.TensorProperties(dtype=dtype)
            state[name] = dcp.TensorStorageMetadata(properties, torch.Size(entry.shape), chunks)
            for chunk, place in zip(entry.chunks, chunks, strict=True):
                where[dcp.MetadataIndex(name, place.offsets)] = (chunk, dtype)
        return dcp.Metadata(state_dict_metadata=state, storage_data=where)

    def set_up_storage_reader(self, metadata: dcp.Metadata, *args: Any, **kwargs: Any) -> None:
        self._where: dict[dcp.MetadataIndex, tuple[ChunkEntry, torch.dtype]] = metadata.storage_data

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        placed = [(*self._where[item.storage_index], item) for item in plan.items]
        placed.sort(key=lambda one: (one[0].file, one[0].begin))
        for name, parts in itertools.groupby(placed, lambda one: one[0].file):
            path = self.directory / name
            with open_regular(path) as fd:
                for chunk, dtype, item in parts:
                    source = _read_part(fd, path, chunk, dtype, item)
                    target = planner.resolve_tensor(item).detach()
                    assert target.shape == source.shape, f"{item}: {target.shape}, {source.shape}"
                    target.copy_(source)
                    planner.commit_tensor(item, target)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return (Path(checkpoint_id) / stated.MANIFEST_NAME).is_file()


def _read_part(fd: int, path: Path, chunk: ChunkEntry, dtype: torch.dtype, item: ReadItem) -> Tensor:
    """The rectangle of a chunk that an item asks for. Only the rows it spans (dim 0) are read."""
    offsets, lengths = tuple(item.storage_offsets), tuple(item.lengths)
    part = torch.empty((*lengths[:1], *chunk.shape[1:]), dtype=dtype)
    if part.numel():
        row_bytes = math.prod(chunk.shape[1:]) * dtype.itemsize
        begin = chunk.begin + (offsets[0] * row_bytes if offsets else 0)
        read_into(fd, path, begin, _memory(part.view(-1)))
    for dim in range(1, part.dim()):
        part = part.narrow(dim, offsets[dim], lengths[dim])
    return part
