"""Megatron-LM's checkpoints of `--ckpt-format torch`, a file a rank, as sources of weights (floor 0)."""

from __future__ import annotations

import dataclasses
import itertools
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from megatron.core.dist_checkpointing.files import CheckpointError, open_regular
from megatron.core.dist_checkpointing.source import ArrayTensor
from megatron.interchange.architecture import InterchangeError
from megatron.interchange.inert_pickle import at
from megatron.interchange.megatron_experts import (
    KEPT_IN_FP32,
    experts_joined,
    is_of_one,
    moved,
    of_one_expert,
)
from megatron.interchange.megatron_folder import (
    LAYER,
    MegatronSource,
    settings,
    state_name,
    unfused,
    without_same,
)
from megatron.interchange.megatron_state import LEFT_OUT, inner_optimizers, optimizer_sections
from megatron.interchange.torch_archive import Archive

_RANK = re.compile(r"mp_rank_([0-9]{2,4})(?:_([0-9]{3}))?(?:_([0-9]{3}))?")
_FILE, _FLAT = "model_optim_rng.pt", "distrib_optim.pt"
_CHUNK = re.compile(r"model[0-9]{1,3}")
_COPIES = ("output_layer.weight", "word_embeddings_for_head.weight")  # of tied word embeddings
# Which dim tensor parallel ranks have cut, by what a name ends with; not cut: norms and output biases.
_CUT_ROWS = ("word_embeddings.weight", "output_layer.weight", "linear_qkv.weight", "linear_qkv.bias")
_CUT_COLUMNS = ("linear_proj.weight", "linear_fc2.weight")
_FC1 = ("linear_fc1.weight", "linear_fc1.bias")


Key = tuple[str, str]  # "model." or the like, and the name of a weight as its stage has it


class _Shard(NamedTuple):
    """One `mp_rank_*` folder's file. chunks: of each model chunk, whole local tensors."""

    chunks: list[dict[Key, ArrayTensor]]
    args: dict[str, Any]
    iteration: int
    state: dict[str, Any]


def open_torch(directory: Path, *, optimizer: bool = False) -> MegatronSource:
    """One checkpoint's directory of `--ckpt-format torch`: any tensor and pipeline parallel sizes, virtual pipelines.

    optimizer: its moments and main weights too, where there are any. Raises CheckpointError for what is damaged,
    InterchangeError for experts cut over ranks of which file names say nothing, and for states that are flat in the
    layout of the run that wrote them.
    """
    grid: dict[tuple[int, int, int], _Shard] = {}
    for entry in sorted(os.listdir(directory)):
        if (match := _RANK.fullmatch(entry)) is not None:
            if optimizer and (directory / entry / _FLAT).exists():
                raise InterchangeError(
                    f"{directory / entry / _FLAT}: flat buckets of a distributed optimizer: {LEFT_OUT}"
                )
            shard = _shard(directory, f"{entry}/{_FILE}", optimizer)
            tp, second, third = (int(number or 0) for number in match.groups())
            if match[3] is None and _expert_ranks(shard.args) > 1:  # one number behind tp's: args tell whose
                second, third = third, second
            grid[tp, second, third] = shard
    if not grid:
        raise CheckpointError(f"{directory}: no folder mp_rank_TT, mp_rank_TT_PPP or mp_rank_TT_PPP_EEE")
    num_tp, num_pp, num_ep = (max(place[axis] for place in grid) + 1 for axis in range(3))
    first = next(iter(grid.values()))
    cut = _experts_cut(first.args, num_tp, num_ep, directory)
    if len({len(shard.chunks) for shard in grid.values()}) != 1:
        raise CheckpointError(f"{directory}: not the same number of models in each rank's file")
    stages = [
        _Stage(
            {tp: shard.chunks[chunk] for (tp, at, _), shard in grid.items() if at == pp},
            {(tp % cut, ep): shard.chunks[chunk] for (tp, at, ep), shard in grid.items() if at == pp},
        )
        for chunk in range(len(first.chunks))
        for pp in range(num_pp)
    ]
    if any((len(one.dense), len(one.experts)) != (num_tp, cut * num_ep) for one in stages):
        raise CheckpointError(
            f"{directory}: {len(grid)} folders mp_rank_*, expected those of {num_tp} tensor x {num_pp} pipeline x "
            f"{num_ep} expert parallel ranks: it is not whole"
        )
    tensors = without_same(experts_joined(_whole(stages, first.args, directory), directory))
    return MegatronSource(directory, directory, tensors, first.args, first.iteration, first.state)


def _expert_ranks(args: Mapping[str, Any]) -> int:
    return args.get("expert_model_parallel_size") or 1


def _experts_cut(args: Mapping[str, Any], num_tp: int, num_ep: int, directory: Path) -> int:
    """Over how many ranks each expert is. Raises CheckpointError, and InterchangeError where file names do not tell its
    parts."""
    cut, stated = args.get("expert_tensor_parallel_size") or num_tp, _expert_ranks(args)
    if num_ep != stated or (args.get("num_experts") or 0) % num_ep:
        raise CheckpointError(f"{directory}: files of {num_ep} expert parallel ranks, its args say {stated}")
    if not args.get("num_experts"):
        return num_tp
    if num_tp % cut:
        raise InterchangeError(
            f"{directory}: experts are cut over {cut} tensor parallel ranks, dense layers over {num_tp}: such "
            "files are not read; save with --ckpt-format torch_dist"
        )
    return cut


class _Stage(NamedTuple):
    """What ranks hold of a model chunk: dense layers by tensor parallel rank; experts by theirs, and by the expert
    parallel one."""

    dense: Mapping[int, Mapping[Key, ArrayTensor]]
    experts: Mapping[tuple[int, int], Mapping[Key, ArrayTensor]]

    def parts(self, num_experts: int) -> dict[Key, list[ArrayTensor]]:
        """Of each tensor, in the order of the ranks that it is cut over; experts numbered through."""
        held: dict[Key, list[ArrayTensor]] = {}
        num_ep = max(ep for _, ep in self.experts) + 1
        by_rank = [(0, False, one) for _, one in sorted(self.dense.items())]
        by_rank += [(ep * num_experts // num_ep, True, one) for (_, ep), one in sorted(self.experts.items())]
        for first, of_experts, tensors in by_rank:
            for (prefix, theirs), tensor in tensors.items():
                if is_of_one(name := of_one_expert(theirs)) == of_experts:
                    held.setdefault((prefix, moved(name, first)), []).append(tensor)
        return held


def _whole(stages: Sequence[_Stage], args: Mapping[str, Any], directory: Path) -> dict[str, ArrayTensor]:
    """Our tensors, out of stages in the order of the model; layers are counted from 0 in each. A tied embedding is in
    the first stage, and as an output layer in the last."""
    tensors: dict[str, ArrayTensor] = {}
    tied = args.get("untie_embeddings_and_output_weights") is False
    layers = 0
    for stage in stages:
        here, cut = 0, len({part for part, _ in stage.experts})
        for (prefix, name), parts in stage.parts(args.get("num_experts") or 0).items():
            if len(parts) != (cut if is_of_one(name) else len(stage.dense)):
                raise CheckpointError(
                    f"{directory}: tensor parallel ranks' files have tensors of different names"
                )
            ours = name
            if (match := LAYER.fullmatch(name)) is not None:
                here = max(here, int(match[2]) + 1)
                ours = f"{match[1]}{layers + int(match[2])}.{match[3]}"
            key = prefix + unfused(ours)
            if key not in tensors and not (tied and name in _COPIES):
                tensors[key] = _joined(unfused(ours), parts, args, directory)
        layers += here
    return tensors


def _shard(directory: Path, file: str, optimizer: bool) -> _Shard:
    path = directory / file
    with open_regular(path) as fd:
        archive = Archive(fd, path)
        value = archive.value if isinstance(archive.value, dict) else {}
        numbered = sorted((key for key in value if _CHUNK.fullmatch(str(key))), key=lambda key: int(key[5:]))
        models = [value[key] for key in (["model"] if "model" in value else numbered)]
        if not all(isinstance(model, dict) for model in models):
            raise CheckpointError(f"{path}: a model that is no dict")

        def held(prefix: str, named: Mapping[Any, Any]) -> dict[Key, ArrayTensor]:
            return {
                (prefix, str(name)): ArrayTensor.whole(tensor, file)
                for name, stored in named.items()
                if (tensor := archive.tensor(stored)) is not None and not str(name).endswith("_extra_state")
            }

        chunks = [held("model.", model) for model in models]
        args, iteration = settings(archive)
        state = {}
        if optimizer and "optimizer" in value:
            for what, number, name, stored in _states(value, chunks, path):
                chunks[number] |= held(f"optimizer.{state_name(what)}.", {name: stored})
            state = optimizer_sections(archive, args, iteration, path)
        return _Shard(chunks, args, iteration, state)


def _states(
    value: Mapping[str, Any], chunks: Sequence[Mapping[Key, ArrayTensor]], path: Path
) -> Iterator[tuple[str, int, str, Any]]:
    """What an optimizer keeps: what it is, of which model chunk, of which weight, the tensor.

    It numbers parameters: group after group, in each in the order of the model. Groups are told by whether they decay,
    which biases and one-dimensional weights do not; experts on ranks of their own have another optimizer.
    """
    chained = inner_optimizers(value, path)
    for of_experts, (saved, inner) in enumerate(chained):
        held = [
            (number, name, array)
            for number, chunk in enumerate(chunks)
            for (_, name), array in chunk.items()
            if not name.endswith(KEPT_IN_FP32)  # no parameter
            and (len(chained) == 1 or is_of_one(of_one_expert(name)) == of_experts)
        ]
        states, main = at(inner, "state"), at(saved, "fp32_from_fp16_params") or ()
        for number_of_group, group in enumerate(inner["param_groups"]):
            ids, decays = at(group, "params"), at(group, "wd_mult") != 0.0
            weights = [
                (number, name)
                for number, name, array in held
                if (len(array.shape) > 1 and not name.endswith(".bias")) == decays
            ]
            if not isinstance(states, dict) or not isinstance(ids, list) or len(ids) != len(weights):
                raise InterchangeError(
                    f"{path}: group {number_of_group} of its optimizer is not the weights that do "
                    f"{'' if decays else 'not '}decay, so nothing says which state is whose: {LEFT_OUT}"
                )
            of_group = main[number_of_group] if number_of_group < len(main) else ()
            copies = of_group if isinstance(of_group, list) else ()
            for id_, copy, (number, name) in itertools.zip_longest(ids, copies[: len(ids)], weights):
                state = states.get(id_) if type(id_) is int else None
                for what, tensor in state.items() if isinstance(state, dict) else ():
                    if what != "step":
                        yield str(what), number, name, tensor
                yield "fp32_param", number, name, copy


def _joined(name: str, parts: Sequence[ArrayTensor], args: Mapping[str, Any], directory: Path) -> ArrayTensor:
    """One of our tensors, out of what tensor parallel ranks hold of it."""
    if len({part.shape for part in parts}) != 1:
        raise CheckpointError(f"{directory}: {name!r:.200}: tensor parallel ranks have shapes that differ")
    if len(parts) == 1 or not name.endswith((*_FC1, *_CUT_ROWS, *_CUT_COLUMNS)):
        return parts[0]
    if name.endswith(_FC1) and (args.get("swiglu") or args.get("gated_linear_unit")):
        # Each rank has its rows of the gate, then its rows of up; ours has all of the gate, then all of up.
        parts = [_half(part, half) for half in range(2) for part in parts]
    dim = 1 if name.endswith(_CUT_COLUMNS) else 0
    chunks, first = [], 0
    for part in parts:
        offset = tuple(first if axis == dim else 0 for axis in range(len(part.shape)))
        chunks.append(dataclasses.replace(part.chunks[0], offset=offset))
        first += part.shape[dim]
    shape = tuple(first if axis == dim else size for axis, size in enumerate(parts[0].shape))
    return ArrayTensor(parts[0].dtype, shape, tuple(chunks))


def _half(part: ArrayTensor, half: int) -> ArrayTensor:
    """The first half of the rows of a tensor that is whole, or the second."""
    rows, *rest = part.shape
    shape, begin = (rows // 2, *rest), (rows // 2 * half, *(0 for _ in rest))
    return ArrayTensor(part.dtype, shape, (dataclasses.replace(part.chunks[0], shape=shape, at=begin),))
