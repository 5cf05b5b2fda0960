"""DCP's storage interface over our checkpoints, for its stock entry point: no pickle.

torch.distributed.checkpoint.load(state, storage_reader=SafeStorageReader(directory))
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from megatron.core.dist_checkpointing.manifest import MANIFEST_NAME, ChunkEntry, read_manifest
from megatron.core.dist_checkpointing.pieces import TORCH_DTYPES
from megatron.core.dist_checkpointing.shard_files import PieceFacts
from megatron.core.dist_checkpointing.storage import Read, fill
from megatron.core.rectangles import Dims, Rectangle


def chunk_metadata(offset: Dims, shape: Dims) -> dcp.ChunkStorageMetadata:
    return dcp.ChunkStorageMetadata(offsets=torch.Size(offset), sizes=torch.Size(shape))


def write_item(piece: PieceFacts) -> WriteItem:
    """What DCP is told of a piece."""
    chunk = chunk_metadata(piece.offset, piece.shape)
    properties = dcp.TensorProperties(dtype=TORCH_DTYPES[piece.dtype])
    data = TensorWriteData(chunk, properties, torch.Size(piece.global_shape))
    return WriteItem(dcp.MetadataIndex(piece.name, chunk.offsets), WriteItemType.SHARD, tensor_data=data)


class SafeStorageReader(StorageReader):
    """Reads the parts that a plan asks for; digests are for `loading.verify`."""

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self.directory = Path(directory)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        if checkpoint_id is not None:
            self.directory = Path(checkpoint_id)

    def read_metadata(self, *args: Any, **kwargs: Any) -> dcp.Metadata:
        """DCP's metadata, from JSON instead of its pickle."""
        state: dict[str, Any] = {}
        where: dict[dcp.MetadataIndex, tuple[ChunkEntry, str]] = {}
        for name, entry in read_manifest(self.directory)[0].tensors.items():
            chunks = [chunk_metadata(chunk.offset, chunk.shape) for chunk in entry.chunks]
            properties = dcp.TensorProperties(dtype=TORCH_DTYPES[entry.dtype])
            state[name] = dcp.TensorStorageMetadata(properties, torch.Size(entry.shape), chunks)
            for chunk, place in zip(entry.chunks, chunks, strict=True):
                where[dcp.MetadataIndex(name, place.offsets)] = (chunk, entry.dtype)
        return dcp.Metadata(state_dict_metadata=state, storage_data=where)

    def set_up_storage_reader(self, metadata: dcp.Metadata, *args: Any, **kwargs: Any) -> None:
        self._where: dict[dcp.MetadataIndex, tuple[ChunkEntry, str]] = metadata.storage_data

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        targets = [(item, planner.resolve_tensor(item).detach()) for item in plan.items]
        boxes = (Rectangle(tuple(item.storage_offsets), tuple(item.lengths)) for item in plan.items)
        fill(
            self.directory,
            [
                Read(*self._where[item.storage_index], box, target)
                for (item, target), box in zip(targets, boxes, strict=True)
            ],
        )
        for item, target in targets:
            planner.commit_tensor(item, target)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return (Path(checkpoint_id) / MANIFEST_NAME).is_file()
