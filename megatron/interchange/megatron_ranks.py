"""Megatron-LM's checkpoints of `--ckpt-format torch`, a file a rank, as sources of weights (floor 0)."""

from __future__ import annotations

import dataclasses
import math
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from megatron.core.dist_checkpointing.files import CheckpointError, open_regular
from megatron.core.dist_checkpointing.source import ArrayChunk
from megatron.core.rectangles import Rectangle
from megatron.interchange.hf_folder import MappedTensor
from megatron.interchange.inert_pickle import Inert, plain
from megatron.interchange.megatron_folder import LAYER, MegatronSource, unfused
from megatron.interchange.torch_archive import Archive

_RANK = re.compile(r"mp_rank_([0-9]{2,4})(?:_([0-9]{3}))?")
# Which dim tensor parallel ranks have cut, by what a name ends with; not cut: norms and output biases.
_CUT_ROWS = ("word_embeddings.weight", "output_layer.weight", "linear_qkv.weight", "linear_qkv.bias")
_CUT_COLUMNS = ("linear_proj.weight", "linear_fc2.weight")
_FC1 = ("linear_fc1.weight", "linear_fc1.bias")


class _Shard(NamedTuple):
    """One `mp_rank_*` folder's file."""

    tp: int
    pp: int
    file: str
    chunks: list[dict[str, ArrayChunk]]  # of each model chunk: a whole local tensor by its name
    dtypes: dict[str, str]


def open_torch(directory: Path, *, optimizer: bool = False) -> MegatronSource:
    """One checkpoint's directory of `--ckpt-format torch`: any tensor and pipeline parallel sizes, virtual pipelines.

    Weights alone: optimizer states there are flat, in the layout of the run that wrote them. Raises CheckpointError.
    """
    shards: list[_Shard] = []
    args: dict[str, Any] = {}
    iteration: Any = 0
    for entry in sorted(os.listdir(directory)):
        if (match := _RANK.fullmatch(entry)) is not None:
            file = f"{entry}/model_optim_rng.pt"
            with open_regular(directory / file) as fd:
                archive = Archive(fd, directory / file)
                shards.append(_shard(int(match[1]), int(match[2] or 0), file, archive))
            if len(shards) == 1:
                stated = archive.value.get("args")
                args = plain(stated.state) if isinstance(stated, Inert) else {}
                iteration = archive.value.get("iteration")
    path = directory
    if not shards:
        raise CheckpointError(f"{directory}: no folder mp_rank_*")
    sizes = tuple(max(getattr(shard, axis) for shard in shards) + 1 for axis in ("tp", "pp"))
    grid = {(shard.tp, shard.pp): shard for shard in shards}
    if len(grid) != math.prod(sizes) or len(shards) != len(grid):
        raise CheckpointError(
            f"{directory}: {len(shards)} folders mp_rank_*, expected {sizes[0]} x {sizes[1]}"
        )
    tensors: dict[str, MappedTensor] = {}
    first = 0
    num_chunks = len(shards[0].chunks)
    for chunk in range(num_chunks):
        for pp in range(sizes[1]):
            stage = [grid[tp, pp] for tp in range(sizes[0])]
            layers = 0
            for name in stage[0].chunks[chunk]:
                parts = [shard.chunks[chunk].get(name) for shard in stage]
                match = LAYER.fullmatch(name)
                ours = name
                if match is not None:
                    layers = max(layers, int(match[2]) + 1)
                    ours = f"{match[1]}{first + int(match[2])}.{match[3]}"
                if any(part is None for part in parts):
                    raise CheckpointError(
                        f"{directory}: {name!r:.200} is not in every tensor parallel rank's file"
                    )
                joined = _joined(unfused(ours), stage[0].dtypes[name], [one for one in parts if one], args)
                key = "model." + unfused(ours)
                if key not in tensors:  # a tied embedding is in the first stage and in the last
                    tensors[key] = joined
            first += layers
    return MegatronSource(directory, path, tensors, args, iteration if type(iteration) is int else 0)


def _shard(tp: int, pp: int, file: str, archive: Archive) -> _Shard:
    value = archive.value if isinstance(archive.value, dict) else {}
    names = (
        ["model"]
        if "model" in value
        else sorted(
            (key for key in value if re.fullmatch(r"model[0-9]{1,3}", str(key))), key=lambda key: int(key[5:])
        )
    )
    chunks, dtypes = [], {}
    for key in names:
        held = {}
        for name, one in value[key].items() if isinstance(value[key], dict) else ():
            tensor = archive.tensor(one)
            if tensor is not None and not str(name).endswith("_extra_state"):
                zeros = (0,) * len(tensor.shape)
                held[str(name)] = ArrayChunk(zeros, tensor.shape, file, tensor.begin, tensor.shape, zeros)
                dtypes[str(name)] = tensor.dtype
        chunks.append(held)
    return _Shard(tp, pp, file, chunks, dtypes)


def _joined(name: str, dtype: str, parts: Sequence[ArrayChunk], args: Mapping[str, Any]) -> MappedTensor:
    """One of our tensors, out of what tensor parallel ranks hold of it."""
    gated = bool(args.get("swiglu") or args.get("gated_linear_unit"))
    if len(parts) == 1:
        return MappedTensor(dtype, parts[0].shape, tuple(parts))
    if name.endswith(_FC1):
        return _halves(dtype, parts) if gated else _stacked(dtype, parts, 0)
    if name.endswith(_CUT_ROWS):
        return _stacked(dtype, parts, 0)
    if name.endswith(_CUT_COLUMNS):
        return _stacked(dtype, parts, 1)
    return MappedTensor(dtype, parts[0].shape, (parts[0],))


def _stacked(dtype: str, parts: Sequence[ArrayChunk], dim: int) -> MappedTensor:
    chunks, first = [], 0
    for part in parts:
        offset = tuple(first if at == dim else 0 for at in range(len(part.shape)))
        chunks.append(dataclasses.replace(part, offset=offset))
        first += part.shape[dim]
    shape = tuple(first if at == dim else size for at, size in enumerate(parts[0].shape))
    return MappedTensor(dtype, shape, tuple(chunks))


def _halves(dtype: str, parts: Sequence[ArrayChunk]) -> MappedTensor:
    """Each rank has its rows of the gate, then its rows of up; ours has all of the gate, then all of up."""
    rows = parts[0].shape[0] // 2
    rest, total = parts[0].shape[1:], rows * len(parts)
    chunks = []
    for half in range(2):
        for rank, part in enumerate(parts):
            zeros = (0,) * len(rest)
            box = Rectangle((half * total + rank * rows, *zeros), (rows, *rest))
            at = (half * rows, *zeros)
            chunks.append(dataclasses.replace(part, offset=box.offset, shape=box.shape, at=at))
    return MappedTensor(dtype, (2 * total, *rest), tuple(chunks))
