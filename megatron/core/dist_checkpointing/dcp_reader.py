"""DCP's storage interface over our checkpoints: no pickle.

Why not DCP's own storage: it unpickles on load, finds no flipped bit, and loses the checkpoint when killed
while overwriting one (docs/checkpoints.md). The reader also serves the stock entry point
(`torch.distributed.checkpoint.load(state, storage_reader=SafeStorageReader(directory))`).
"""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from megatron.core.dist_checkpointing import manifest as stated
from megatron.core.dist_checkpointing.files import open_regular
from megatron.core.dist_checkpointing.pieces import TORCH_DTYPES
from megatron.core.dist_checkpointing.planning import chunk_metadata
from megatron.core.dist_checkpointing.source import SourceTensor, StoredChunk
from megatron.core.dist_checkpointing.storage import ChunkReader
from megatron.core.rectangles import Rectangle


class SafeStorageReader(StorageReader):
    """Reads the parts that a plan asks for. Digests were checked before, by `load.verify`."""

    def __init__(
        self,
        directory: str | os.PathLike[str],
        tensors: Mapping[str, SourceTensor] | None = None,
        *,
        follow: bool = False,
    ) -> None:
        self.directory, self._tensors, self._follow = Path(directory), tensors, follow

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        if checkpoint_id is not None:
            self.directory, self._tensors = Path(checkpoint_id), None

    def read_metadata(self, *args: Any, **kwargs: Any) -> dcp.Metadata:
        """DCP's metadata, from JSON instead of its pickle."""
        if self._tensors is None:
            self._tensors = stated.read_manifest(self.directory)[0].tensors
        state: dict[str, Any] = {}
        where: dict[dcp.MetadataIndex, tuple[StoredChunk, torch.dtype]] = {}
        for name, entry in self._tensors.items():
            dtype = TORCH_DTYPES[entry.dtype]
            chunks = [chunk_metadata(chunk.offset, chunk.shape) for chunk in entry.chunks]
            properties = dcp.TensorProperties(dtype=dtype)
            state[name] = dcp.TensorStorageMetadata(properties, torch.Size(entry.shape), chunks)
            for chunk, place in zip(entry.chunks, chunks, strict=True):
                where[dcp.MetadataIndex(name, place.offsets)] = (chunk, dtype)
        return dcp.Metadata(state_dict_metadata=state, storage_data=where)

    def set_up_storage_reader(self, metadata: dcp.Metadata, *args: Any, **kwargs: Any) -> None:
        self._where: dict[dcp.MetadataIndex, tuple[StoredChunk, torch.dtype]] = metadata.storage_data

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        placed = [(*self._where[item.storage_index], item) for item in plan.items]
        placed.sort(key=lambda one: (one[0].file, one[0].begin))
        for name, parts in itertools.groupby(placed, lambda one: one[0].file):
            path = self.directory / name
            with open_regular(path, follow=self._follow) if name else contextlib.nullcontext() as fd:
                reader = None if fd is None else ChunkReader(fd, path)
                for chunk, dtype, item in parts:
                    target = planner.resolve_tensor(item).detach()
                    if reader is None:
                        target.zero_()
                    else:
                        box = Rectangle(tuple(item.storage_offsets), tuple(item.lengths))
                        source = reader.read(chunk, dtype, box)
                        assert target.shape == source.shape, f"{item}: {target.shape}, {source.shape}"
                        target.copy_(source)
                    planner.commit_tensor(item, target)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return (Path(checkpoint_id) / stated.MANIFEST_NAME).is_file()
