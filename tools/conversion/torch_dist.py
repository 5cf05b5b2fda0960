"""A checkpoint of ours as one of Megatron-LM's `--ckpt-format torch_dist`.

The layers of a model are in one tensor with the layer as first dim, norms under the names of the linear layers behind
them: so any homogeneous specification of Megatron-LM asks for them. Values are written in pieces of a bounded size,
each an archive of torch.save, whose length follows from its shape.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import io
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import save as save_archive  # here into memory alone
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.storage import WriteResult

from megatron.core.config_base import arg_info
from megatron.core.dist_checkpointing.catalog import TRACKER_NAME, Found, directory_name
from megatron.core.dist_checkpointing.pieces import TORCH_DTYPES
from megatron.core.rectangles import Dims, Rectangle
from megatron.core.safe_files import publish_text, published, sync_directory
from megatron.core.transformer.layer_table import expert_layers, layer_table
from megatron.core.transformer.model_config import TransformerConfig
from megatron.interchange.architecture import InterchangeError
from megatron.interchange.megatron_args import as_theirs
from megatron.interchange.megatron_experts import KEPT_IN_FP32, in_torch_dist
from megatron.interchange.megatron_folder import COMMON, FUSED, LAYER
from megatron.interchange.megatron_state import LEFT_OUT, SCHEDULE
from megatron.training.config.config import FIELDS, Config
from megatron.training.config.saved_config import MODEL_PREFIX, OPTIMIZER_PREFIX
from tools.conversion.contents import config_in
from tools.conversion.exporting import MAIN, exported, refuse_existing, stored_name
from tools.conversion.progress import Say
from tools.conversion.source_reader import SourceReader
from tools.conversion.stream import OutputFile, bands, in_files, num_bytes_of, write_files
from tools.conversion.values import DTYPES, converted

PIECE_BYTES = 64 << 20
_BACKEND = {"sharded_backend": "torch_dist", "sharded_backend_version": 1,
            "common_backend": "torch", "common_backend_version": 1}  # fmt: skip
_ARGS = ("model", "tokenizer", "optimizer", "training")  # groups of flags that are args of theirs
_SIZES = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size",
          "expert_model_parallel_size", "data_parallel_size", "world_size")  # fmt: skip
# Modules of a layer that keep scales of fp8: each is asked for them, where there are none too.
_WITH_SCALES = ("self_attention.core_attention", "self_attention.linear_proj", "self_attention.linear_qkv")
_FC = ("linear_fc1", "linear_fc2")


class Piece(NamedTuple):
    """A rectangle of one of their tensors (`key`), and our tensor whose rectangle `box` it is. source: "" for an object
    of no values."""

    key: str
    offset: Dims
    shape: Dims
    source: str
    box: Rectangle
    dtype: str


class Extent(NamedTuple):
    """Where an archive lies in a file."""

    file: str
    begin: int
    length: int


def export_folder(
    found: Found, folder: Path, *, optimizer: bool, dtype: str | None, max_shard_bytes: int, say: Say
) -> Path:
    """Write a checkpoint as a folder of Megatron-LM's, which must not be there yet. optimizer: with its states, where
    there are any.

    dtype: of weights, a key of DTYPES, float32 from main weights where there are any; as stored if not given. Raises
    CheckpointError, before anything is written where it cannot be expressed or has no space.
    """
    refuse_existing(folder)
    config = config_in(found)
    optimizer = optimizer and any(name.startswith(OPTIMIZER_PREFIX) for name in found.tensors)
    if optimizer and dtype is not None:
        raise InterchangeError(f"--dtype {dtype} is for weights alone: add --no-load-optim")
    _refuse_unknown(found, config, optimizer)
    pieces = list(_pieces(found, config.model, optimizer, dtype))
    common = _common(found, config, optimizer, {piece.dtype for piece in pieces if piece.source})
    parts = in_files(pieces, lambda piece: num_bytes_of(piece.shape, piece.dtype), max_shard_bytes)
    name = directory_name(found.iteration)
    with exported(found, folder, dtype, optimizer, max_shard_bytes) as (temporary, reader):
        directory = temporary / name
        places: list[Extent] = []
        files = []
        for number, part in enumerate(parts):
            file = f"__0_{number}.distcp"
            begins = list(itertools.accumulate(map(archive_bytes, part), initial=0))
            places += (Extent(file, begin, end - begin) for begin, end in itertools.pairwise(begins))
            files.append(OutputFile(file, begins[-1], functools.partial(_archives, part, reader)))
        write_files(directory, files, say, hashed=False)
        _write_metadata(directory, pieces, places)
        with published(directory / COMMON) as made:
            made.write(_archive(common))
        publish_text(directory / "metadata.json", json.dumps(_BACKEND))
        sync_directory(directory)
        publish_text(temporary / TRACKER_NAME, str(found.iteration))
    return folder / name


def _archive(value: Any) -> memoryview:
    buffer = io.BytesIO()
    save_archive(value, buffer)
    return buffer.getbuffer()


def _archives(pieces: Sequence[Piece], reader: SourceReader) -> Iterator[memoryview]:
    """The bytes of a file; Megatron-LM keeps an object in a list."""
    for piece in pieces:
        if not piece.source:
            yield _archive([None])
            continue
        bits = converted(
            reader.read(piece.source, piece.box), reader.source.tensors[piece.source].dtype, piece.dtype
        )
        values = torch.from_numpy(np.ascontiguousarray(bits)).view(TORCH_DTYPES[piece.dtype])
        yield _archive(values.view(piece.shape))


def archive_bytes(piece: Piece) -> int:
    """How long a piece's archive is, which its values do not change."""
    return _length(piece.shape, piece.dtype) if piece.source else len(_archive([None]))


@functools.cache
def _length(shape: Dims, dtype: str) -> int:
    return len(_archive(torch.empty(shape, dtype=TORCH_DTYPES[dtype])))


def _refuse_unknown(found: Found, config: Config, optimizer: bool) -> None:
    """Raises InterchangeError for all that Megatron-LM's checkpoints cannot say."""
    problems = [
        f"{field.name} {getattr(config.model, field.name)!r} is no setting of its models"
        for field in dataclasses.fields(config.model)
        if (info := arg_info(field)) is not None
        and info.ours
        and info.weights
        and getattr(config.model, field.name) not in (None, field.default)
    ]
    prefixes = (MODEL_PREFIX, OPTIMIZER_PREFIX)
    problems += [f"{name} has no place" for name in found.tensors if not name.startswith(prefixes)]
    if optimizer and config.optimizer.decoupled_lr is not None:
        problems.append(f"the groups of --decoupled-lr are not written: {LEFT_OUT.replace('load', 'export')}")
    if problems:
        raise InterchangeError(f"{found.described_in}: no checkpoint of Megatron-LM: {'; '.join(problems)}")


def _pieces(found: Found, model: TransformerConfig, optimizer: bool, dtype: str | None) -> Iterator[Piece]:
    """In the order of our names."""
    for name in found.tensors:
        if name.startswith(MODEL_PREFIX):
            ours = name.removeprefix(MODEL_PREFIX)
            yield from _cut(found, model, "", ours, stored_name(found, ours, dtype), dtype)
        elif optimizer:
            kind, _, ours = name.removeprefix(OPTIMIZER_PREFIX).partition(".")
            theirs = "fp32_param" if name.startswith(MAIN) else kind
            yield from _cut(found, model, f"optimizer.state.{theirs}.", ours, name, None)
    for key in _scales(model):
        yield Piece(key, (), (0,), "", Rectangle((), ()), "U8")


def _scales(model: TransformerConfig) -> Iterator[str]:
    """Keys of the scales of fp8, by layer, and of experts by layer and expert."""
    one_tensor, layers = _layers_in_one_tensor(model), model.num_layers
    for number, kind in enumerate(layer_table(model)):
        layer, where = ("", (number, layers)) if one_tensor else (f"{number}.", (0, 1))
        modules = [*_WITH_SCALES, *(f"mlp.{name}" for name in _FC if kind.experts is None)]
        if kind.experts is not None and kind.experts.shared_width:
            modules += [f"mlp.shared_experts.{name}" for name in _FC]
        for module in modules:
            yield f"decoder.layers.{layer}{module}._extra_state/shard_{where[0]}_{where[1]}"
        experts = kind.experts.num_experts if kind.experts else 0
        for expert in range(experts):
            parts = (f"{number}.{expert}", f"{layers}.{experts}")
            parts = parts if one_tensor else (f"{expert}", f"{experts}")
            for name in _FC:
                yield f"decoder.layers.{layer}mlp.experts.experts.{name}._extra_state/shard_{parts[0]}_{parts[1]}"


def _cut(
    found: Found, model: TransformerConfig, prefix: str, name: str, source: str, dtype: str | None
) -> Iterator[Piece]:
    """A tensor, in pieces of some rows so that none is larger than PIECE_BYTES unless a row is."""
    shape = found.tensors[source].shape
    kept = DTYPES[dtype] if dtype and not name.endswith(KEPT_IN_FP32) else found.tensors[source].dtype
    for layer, key in _named_by_them(name, model):
        for box in bands(shape, kept, PIECE_BYTES):
            yield Piece(prefix + key, layer + box.offset, (1,) * len(layer) + box.shape, source, box, kept)


def _named_by_them(name: str, model: TransformerConfig) -> list[tuple[Dims, str]]:
    """Their name of a weight of ours, and the layer that it is of, where that is its first index. A norm before experts
    has two: local layers ask for one, Transformer Engine's for the other."""
    match = LAYER.fullmatch(name)
    if match is None:
        return [((), name)]
    number, names = int(match[2]), [in_torch_dist(match[3])]
    for ours, theirs in FUSED.items():
        if match[3].startswith(ours):
            kept = names if ours.startswith("pre_mlp") and number in expert_layers(model) else []
            names = [*kept, theirs + match[3].removeprefix(ours)]
    if _layers_in_one_tensor(model):
        return [((number,), match[1] + rest) for rest in names]
    return [((), f"{match[1]}{number}.{rest}") for rest in names]


def _layers_in_one_tensor(model: TransformerConfig) -> bool:
    """Whether layers are alike."""
    return len(set(layer_table(model))) == 1


def _write_metadata(directory: Path, pieces: Sequence[Piece], places: Sequence[Extent]) -> None:
    """`.metadata`, as torch writes it."""
    described: dict[str, Any] = {}
    results = []
    for piece, place in zip(pieces, places, strict=True):
        stored = _StorageInfo(*place)
        if not piece.source:
            described[piece.key] = BytesStorageMetadata()
            results.append(WriteResult(MetadataIndex(piece.key), place.length, stored))
            continue
        if piece.key not in described:
            properties = TensorProperties(dtype=TORCH_DTYPES[piece.dtype])
            described[piece.key] = TensorStorageMetadata(properties, torch.Size(piece.shape), [])
        tensor = described[piece.key]
        offset = torch.Size(piece.offset)
        index = MetadataIndex(piece.key, offset, len(tensor.chunks))
        tensor.chunks.append(ChunkStorageMetadata(offset, torch.Size(piece.shape)))
        ends = (first + count for first, count in zip(piece.offset, piece.shape, strict=True))
        tensor.size = torch.Size(map(max, ends, tensor.size))
        results.append(WriteResult(index, place.length, stored))
    FileSystemWriter(directory).finish(Metadata(described), [results])


def _common(found: Found, config: Config, optimizer: bool, dtypes: set[str]) -> dict[str, Any]:
    """What is not sharded: args as Megatron-LM's --use-checkpoint-args reads them, counters, state of an optimizer."""
    state = found.manifest.common.get("train_state", {})
    names = {
        name
        for name, (group, field) in FIELDS.items()
        if group in _ARGS and (info := arg_info(field)) is not None and not info.ours
    }
    args = {name: as_theirs(name, value) for name, value in config.flat().items() if name in names}
    args |= {
        "add_position_embedding": True,
        "bf16": "BF16" in dtypes,
        "fp16": "F16" in dtypes,
        "no_save_rng": True,
        "no_save_optim": not optimizer,
        "use_distributed_optimizer": False,
        "consumed_train_samples": found.manifest.consumed_train_samples,
        **{name: state.get(name, 0) for name in ("consumed_valid_samples", "skipped_train_samples")},
        **dict.fromkeys(_SIZES, 1),
    }
    common = {"args": argparse.Namespace(**args), "checkpoint_version": 3.0, "iteration": found.iteration}
    common["num_floating_point_operations_so_far"] = state.get("num_floating_point_operations_so_far", 0.0)
    return common | (_state_of_optimizer(found, config) if optimizer else {})


def _state_of_optimizer(found: Found, config: Config) -> dict[str, Any]:
    """What belongs to its tensors: `megatron_state.optimizer_sections` the other way round."""
    common: Mapping[str, Any] = found.manifest.common
    schedule, steps = common["scheduler"]["schedule"], common["optimizer"]["num_steps"]
    inner: dict[str, Any] = {
        "state": {"common_step": torch.tensor(float(steps))},
        "param_groups": [_param_group(config, schedule, decays, steps) for decays in (1.0, 0.0)],
    }
    if any(name.startswith(MAIN) for name in found.tensors):
        inner = {"optimizer": inner}
        scaler = common["scaler"]
        if "clean_steps" in scaler:
            inner["grad_scaler"] = {
                "scale": torch.tensor([scaler["scale"]]),
                "growth_tracker": scaler["clean_steps"],
                "hysteresis_tracker": scaler["budget"],
            }
    told = {theirs: schedule[ours] for ours, theirs in SCHEDULE.items()}
    return {
        "optimizer": inner,
        "opt_param_scheduler": {**told, "num_steps": common["scheduler"]["samples"]},
    }


def _param_group(config: Config, schedule: Mapping[str, Any], decays: float, steps: int) -> dict[str, Any]:
    """Settings of a group of parameters, as torch's optimizers and the fused ones keep them; `lr` and `weight_decay`
    are set by the schedule before they are used."""
    flags = config.optimizer
    group = {
        "wd_mult": decays, "lr_mult": 1.0, "is_expert_parallel": False, "is_decoupled_lr": False,
        "default_config": True, "lr": schedule["max_lr"], "max_lr": schedule["max_lr"], "min_lr": schedule["min_lr"],
        "weight_decay": decays * schedule["end_weight_decay"], "foreach": None, "maximize": False,
        "differentiable": False, "fused": None,
    }  # fmt: skip
    if flags.optimizer == "sgd":
        return {**group, "momentum": flags.sgd_momentum, "dampening": 0, "nesterov": False}
    return {
        **group, "betas": (flags.adam_beta1, flags.adam_beta2), "eps": flags.adam_eps, "amsgrad": False,
        "capturable": False, "decoupled_weight_decay": True, "bias_correction": True, "step": steps,
    }  # fmt: skip
