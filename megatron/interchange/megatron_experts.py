"""Megatron-LM's names of experts, whose tensors are one here, with a dim of experts in front (floor 0, pure)

    sequential, in a rank's file             experts.local_experts.3.linear_fc1.weight, by number in a rank
    grouped, in a rank's file                experts.linear_fc1.weight3
    either, in torch_dist                    experts.experts.linear_fc1.weight, all in one
    the same with singleton_local_shards     experts.experts.3.linear_fc1.weight_w and weight_v: gate and up

The first spelling stands for all that are of one expert.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from megatron.core.dist_checkpointing.files import CheckpointError
from megatron.core.dist_checkpointing.source import ArrayTensor
from megatron.interchange.architecture import InterchangeError

_MODULE = re.compile(r"(.*\.mlp\.experts\.)(.*)")
_SEQUENTIAL = re.compile(r"(.*\.mlp\.experts\.)local_experts\.([0-9]{1,6})\.(.*)")
_GROUPED = re.compile(r"(linear_fc[12])\.(weight|bias)([0-9]{1,6})")
_BY_NUMBER = re.compile(r"experts\.([0-9]{1,6}\..*)")
HALVES = ("_w", "_v")  # of a gated projection's name
KEPT_IN_FP32 = ".router.expert_bias"  # whatever weights are


def of_one_expert(name: str) -> str:
    """A name in the first spelling, or ours of all experts; any other as it is. Raises InterchangeError for matrices of
    --moe-use-legacy-grouped-gemm."""
    match = _MODULE.fullmatch(name)
    if match is None:
        return name
    module, rest = match.groups()
    if rest in ("weight1", "weight2"):
        raise InterchangeError(
            f"{name!r:.200}: of --moe-use-legacy-grouped-gemm, whose matrices lie the other way round: save it in "
            "Megatron-LM without that flag"
        )
    if grouped := _GROUPED.fullmatch(rest):
        return f"{module}local_experts.{grouped[3]}.{grouped[1]}.{grouped[2]}"
    if numbered := _BY_NUMBER.fullmatch(rest):
        return f"{module}local_experts.{numbered[1]}"
    return module + rest.removeprefix("experts.")


def moved(name: str, first: int) -> str:
    """The name of an expert that is number `first` and more among all."""
    match = _SEQUENTIAL.fullmatch(name)
    return name if match is None else f"{match[1]}local_experts.{first + int(match[2])}.{match[3]}"


def is_of_one(name: str) -> bool:
    """Whether it is a tensor of one expert."""
    return _SEQUENTIAL.fullmatch(name) is not None


def in_torch_dist(name: str) -> str:
    """Their name there of a weight of ours, below a layer."""
    module = "mlp.experts."
    return f"{module}experts.{name.removeprefix(module)}" if name.startswith(module) else name


def experts_joined(tensors: Mapping[str, ArrayTensor], path: Path) -> dict[str, ArrayTensor]:
    """One tensor of all experts for those of one each. Raises CheckpointError where an expert is missing."""
    whole: dict[str, ArrayTensor] = {}
    parts: dict[str, dict[int, ArrayTensor]] = {}
    for name, tensor in tensors.items():
        if match := _SEQUENTIAL.fullmatch(name):
            parts.setdefault(match[1] + match[3], {})[int(match[2])] = tensor
        else:
            whole[name] = tensor
    for name, by_number in parts.items():
        each = [by_number[number] for number in sorted(by_number)]
        if sorted(by_number) != list(range(len(each))) or name in whole:
            raise CheckpointError(f"{path}: {name!r:.200}: experts {sorted(by_number)[:8]} of it are there")
        whole[name] = joined([_in_front(one) for one in each], name, path)
    return whole


def halves_joined(tensors: Mapping[str, ArrayTensor], path: Path) -> dict[str, ArrayTensor]:
    """One tensor for gate and up projections that are stored as two. Raises CheckpointError where one is missing."""
    whole = {name: tensor for name, tensor in tensors.items() if not name.endswith(HALVES)}
    for name in (name.removesuffix(HALVES[0]) for name in tensors if name.endswith(HALVES[0])):
        if name + HALVES[1] not in tensors or name in whole:
            raise CheckpointError(
                f"{path}: {name!r:.200}: its gate is there, and not its up projection alone"
            )
        whole[name] = joined([tensors[name + half] for half in HALVES], name, path)
    return whole


def joined(parts: Iterable[ArrayTensor], name: str, path: Path) -> ArrayTensor:
    """Tensors one below the other. Raises CheckpointError where they are not alike."""
    chunks, first, kinds = [], 0, set()
    for part in parts:
        kinds.add((part.dtype, part.shape[1:]))
        for chunk in part.chunks:
            offset = (first + chunk.offset[0], *chunk.offset[1:])
            chunks.append(dataclasses.replace(chunk, offset=offset))
        first += part.shape[0]
    if len(kinds) != 1:
        raise CheckpointError(f"{path}: {name!r:.200}: parts of {sorted(map(str, kinds))}")
    ((dtype, rest),) = kinds
    return ArrayTensor(dtype, (first, *rest), tuple(chunks))


def _in_front(tensor: ArrayTensor) -> ArrayTensor:
    """With a dim of one expert in front."""
    chunks = (
        dataclasses.replace(
            chunk,
            offset=(0, *chunk.offset),
            shape=(1, *chunk.shape),
            stored=(1, *chunk.stored),
            at=(0, *chunk.at),
        )
        for chunk in tensor.chunks
    )
    return ArrayTensor(tensor.dtype, (1, *tensor.shape), tuple(chunks))
