"""Megatron-LM's own checkpoints of `--ckpt-format torch_dist` as sources of weights (floor 0).

Tensors have Megatron's names, which are ours but for three: Transformer Engine's layers keep a norm inside the linear
layer behind it, `torch_dist` may keep the layers of a model in one tensor with the layer as first dim, and experts have
several spellings (`megatron_experts`). Nothing is run: pickles are read by `inert_pickle`, values at their place in the
files.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

from megatron.core.dist_checkpointing.files import CheckpointError, named_errors, open_regular
from megatron.core.dist_checkpointing.safetensors_format import ITEM_BYTES
from megatron.core.dist_checkpointing.source import ArrayChunk, ArrayTensor
from megatron.core.rectangles import Dims, fill_error
from megatron.core.safe_files import read_bytes
from megatron.interchange.architecture import InterchangeError
from megatron.interchange.inert_pickle import MAX_BYTES, Inert, at, plain, read_pickle
from megatron.interchange.megatron_experts import experts_joined, halves_joined, of_one_expert
from megatron.interchange.megatron_state import LEFT_OUT, optimizer_sections
from megatron.interchange.torch_archive import DTYPES, Archive, is_dims

METADATA, COMMON = ".metadata", "common.pt"
_PART = re.compile(r"__[0-9]{1,6}_[0-9]{1,6}\.distcp")
LAYER = re.compile(r"(decoder\.layers\.)([0-9]{1,6})\.(.*)")
# Our names -> those of Transformer Engine's layers, below a layer.
FUSED = {
    "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
    "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
}
# Moments and main weights in the space of the model: Megatron's prefix -> ours.
_STATE = re.compile(r"(?:chained_\d\.)?optimizer\.state\.([a-z0-9_]{1,40})\.(.*)")
MAIN_WEIGHTS = ("fp32_param", "param")
_FLAT = re.compile(r"(chained_\d+\.)?optimizer\..*(dp_group_idx|gbuf_idx|bucket_idx)")
_HALVES = ("BF16", "F16")
Places = dict[tuple[str, Dims], Any]  # of a tensor's chunks, by its name and their offsets


@dataclasses.dataclass(frozen=True)
class MegatronSource:
    """Megatron's tensors under our names. args: its launch's settings, JSON values. state: what belongs
    to its optimizer's tensors, as sections of the `common` of a checkpoint of ours; empty where those are left."""

    directory: Path
    described_in: Path
    tensors: Mapping[str, ArrayTensor]
    args: Mapping[str, Any]
    iteration: int
    state: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    follows_links: ClassVar[bool] = False


def open_torch_dist(directory: Path, *, optimizer: bool = False) -> MegatronSource:
    """One checkpoint's directory (`iter_0000123`). optimizer: its moments and main weights too, where there are any.

    Raises CheckpointError for what is damaged or hostile, and InterchangeError for flat optimizer buckets, which cannot
    be read without the layout that wrote them.
    """
    path = directory / METADATA
    with named_errors(path):
        metadata = read_pickle(read_bytes(path, max_bytes=MAX_BYTES), path)
    tensors = _named_by_us(_torch_dist_tensors(directory, metadata, optimizer), path)
    common = directory / COMMON
    with open_regular(common) as fd:
        archive = Archive(fd, common)
        args, iteration = settings(archive)
        states = any(name.startswith("optimizer.") for name in tensors)
        state = optimizer_sections(archive, args, iteration, common) if states else {}
    return MegatronSource(directory, path, tensors, args, iteration, state)


def settings(archive: Archive) -> tuple[dict[str, Any], int]:
    """A launch's settings and the iteration that a checkpoint is of, {} and 0 where nothing is said of them."""
    args, iteration = at(archive.value, "args"), at(archive.value, "iteration")
    stated = plain(args.state) if isinstance(args, Inert) else {}
    return stated if isinstance(stated, dict) else {}, iteration if type(iteration) is int else 0


def _torch_dist_tensors(directory: Path, metadata: Any, optimizer: bool) -> dict[str, ArrayTensor]:
    path = directory / METADATA
    described, places = at(metadata, "state_dict_metadata"), at(metadata, "storage_data")
    if not isinstance(described, dict) or not isinstance(places, dict):
        raise CheckpointError(f"{path}: no description of a torch_dist checkpoint")
    where: Places = {}
    for index, place in places.items():
        tensor, offset = at(index, "fqn"), at(index, "offset")
        if isinstance(tensor, str) and is_dims(offset):  # of bytes there is no offset
            where[tensor, offset] = place
    wanted = {}
    for name, entry in described.items():
        if not isinstance(name, str) or at(entry, "chunks") is None:
            continue  # bytes: `_extra_state`, random generators
        if _FLAT.match(name) and optimizer:
            raise InterchangeError(
                f"{path}: {name!r:.200} is a flat bucket of a distributed optimizer: {LEFT_OUT}, or save it in "
                "Megatron-LM with --dist-ckpt-optim-fully-reshardable"
            )
        if optimizer or "optimizer." not in name:
            wanted[name] = entry
    with contextlib.ExitStack() as files:
        opened = functools.cache(lambda name: files.enter_context(open_regular(directory / name)))
        return {name: _stored(name, entry, where, opened, path) for name, entry in wanted.items()}


def _stored(name: str, entry: Any, where: Places, opened: Callable[[str], int], path: Path) -> ArrayTensor:
    """opened: descriptors of `.distcp` files by their names."""
    shape, listed, dtype = at(entry, "size"), at(entry, "chunks"), _dtype(at(entry, "properties"))
    if dtype is None or not is_dims(shape) or not isinstance(listed, list):
        raise CheckpointError(f"{path}: {name!r:.200}: dtype, shape or chunks are not read")
    chunks = []
    for chunk in listed:
        offset, size = at(chunk, "offsets"), at(chunk, "sizes")
        if not is_dims(offset) or not is_dims(size) or (place := where.get((name, offset))) is None:
            raise CheckpointError(f"{path}: {name!r:.200}: nothing is said of where one of its chunks lies")
        file, begin, length = (at(place, key) for key in ("relative_path", "offset", "length"))
        if not isinstance(file, str) or not _PART.fullmatch(file):
            shown = repr(file)[:200] if isinstance(file, str) else "what is no text"
            raise CheckpointError(f"{path}: {shown} is no plain name of a .distcp file")
        if type(begin) is not int or type(length) is not int:
            raise CheckpointError(f"{path}: nothing is said of which bytes of {file} are meant")
        archive = Archive(opened(file), path.parent / file, begin, length)
        tensor = archive.tensor(archive.value)
        if tensor is None or (tensor.dtype, tensor.shape) != (dtype, size):
            raise CheckpointError(
                f"{path.parent / file}: {name!r:.200} at {offset}: expected {dtype} of {size}"
            )
        chunks.append(ArrayChunk(offset, size, file, tensor.begin, size, (0,) * len(size)))
    if (problem := fill_error(shape, chunks)) is not None:
        raise CheckpointError(f"{path}: {name!r:.200}: {problem}")
    return ArrayTensor(dtype, shape, tuple(chunks))


def _dtype(properties: Any) -> str | None:
    """The first of what torch's TensorProperties are made of, or set to."""
    if not isinstance(properties, Inert):
        return None
    given = properties.args or properties.state
    kind = given[0] if isinstance(given, tuple) and given else None
    return DTYPES.get(getattr(kind, "path", ""))


def _named_by_us(stored: Mapping[str, ArrayTensor], path: Path) -> dict[str, ArrayTensor]:
    """Theirs under our names and prefixes, one tensor a layer."""
    named: dict[str, ArrayTensor] = {}
    routed = any(".mlp.router." in name for name in stored)  # whose norm may have both names
    for name, tensor in stored.items():
        state = _STATE.fullmatch(name)
        prefix, rest = (f"optimizer.{state_name(state[1])}.", state[2]) if state else ("model.", name)
        for ours, part in _layers(rest, tensor):
            if prefix + ours in named and not (routed and ".pre_mlp_layernorm." in ours):
                raise CheckpointError(f"{path}: {prefix + ours!r:.200} is there twice, by two names")
            named[prefix + ours] = part
    return without_same(experts_joined(halves_joined(named, path), path))


def state_name(theirs: str) -> str:
    """Our name of what an optimizer keeps of each parameter."""
    return "main_weight" if theirs in MAIN_WEIGHTS else theirs


def without_same(named: Mapping[str, ArrayTensor]) -> dict[str, ArrayTensor]:
    """Without the main weights of what is not in 16 bits, which are the weights themselves."""
    main = "optimizer.main_weight."
    return {
        name: tensor
        for name, tensor in named.items()
        if not name.startswith(main)
        or (model := named.get("model." + name.removeprefix(main))) is None
        or model.dtype in _HALVES
    }


def _layers(name: str, tensor: ArrayTensor) -> Iterator[tuple[str, ArrayTensor]]:
    """A tensor of one layer, or of each of all layers where it has those as its first dim."""
    begin = "decoder.layers."
    if not name.startswith(begin) or LAYER.fullmatch(name):
        yield unfused(name), tensor
        return
    item = ITEM_BYTES[tensor.dtype]
    for layer in range(tensor.shape[0]):
        chunks = []
        for chunk in tensor.chunks:
            at = layer - chunk.offset[0]
            if 0 <= at < chunk.shape[0]:
                rest, offset = chunk.shape[1:], chunk.offset[1:]
                first = chunk.begin + at * math.prod(rest) * item
                chunks.append(ArrayChunk(offset, rest, chunk.file, first, rest, (0,) * len(rest)))
        ours = f"{begin}{layer}.{name.removeprefix(begin)}"
        yield unfused(ours), ArrayTensor(tensor.dtype, tensor.shape[1:], tuple(chunks))


def unfused(name: str) -> str:
    """Our name of a tensor that may be one of Transformer Engine's layers, or of experts."""
    name = of_one_expert(name)
    if (match := LAYER.fullmatch(name)) is not None:
        for ours, theirs in FUSED.items():
            if match[3].startswith(theirs):
                return f"{match[1]}{match[2]}.{ours}{match[3].removeprefix(theirs)}"
    return name
