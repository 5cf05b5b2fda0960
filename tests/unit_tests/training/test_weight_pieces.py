"""The model's weights as a checkpoint sees them, from every strategy's buffers: regions of the global tensors."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from megatron.core.distributed.custom_fsdp.data_parallel_config import DistributedDataParallelConfig
from megatron.core.distributed.custom_fsdp.flat_buffer import FlatBuffer
from megatron.core.param_meta import ParamMeta
from megatron.core.rectangles import Rectangle, fill_error
from megatron.core.sharding_table import STRATEGIES, ShardOver, ShardPlace, sharding_of
from megatron.training.engine import weight_pieces
from tests.harness.cut_models import MODEL, global_part, region_list

ROWS = {name: sharding_of(name) for name in STRATEGIES} | {
    "fully_hybrid": sharding_of("optim_grads_params", "optim")
}
PLACES = [ShardPlace(i, 2, o, 2) for i in range(2) for o in range(2)]
FROZEN = ("l0.qkv", "final")


def whole(name: str) -> torch.Tensor:
    return torch.randn(MODEL[name], generator=torch.Generator().manual_seed(sum(name.encode())))


def buffer_of(sharding, place, tp: int, tp_rank: int, *, zero: bool = False) -> FlatBuffer:
    meta = {name: ParamMeta(name, MODEL[name], regions=region_list(name, tp, tp_rank)) for name in MODEL}
    parameters = {}
    for name, fact in meta.items():
        local = torch.zeros(fact.local_shape)
        for region in () if zero else fact.parts:
            region.view(local).copy_(global_part(region, whole(name)))
        parameters[name] = nn.Parameter(local, requires_grad=name not in FROZEN)
    return FlatBuffer(
        parameters,
        meta,
        DistributedDataParallelConfig(),
        sharding=sharding,
        place=place,
        device=torch.device("cpu"),
        units={name: name.split(".")[0] for name in MODEL},
    )


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("row", ROWS)
def test_pieces_of_all_ranks_are_the_model_and_write_it(row, tp):
    sharding = ROWS[row]
    buffers = [buffer_of(sharding, place, tp, rank) for place in PLACES for rank in range(tp)]
    found = {name: torch.full(shape, float("nan")) for name, shape in MODEL.items()}
    boxes: dict[str, set[Rectangle]] = {name: set() for name in MODEL}
    for buffer in buffers:
        for piece in weight_pieces(buffer):
            name = piece.name.removeprefix("model.")
            assert piece.global_shape == MODEL[name]
            slot = tuple(slice(o, o + n) for o, n in zip(piece.offset, piece.tensor.shape, strict=True))
            found[name][slot] = piece.tensor
            boxes[name].add(Rectangle(piece.offset, tuple(piece.tensor.shape)))
    for name in MODEL:
        assert torch.equal(found[name], whole(name)), name
        assert (
            fill_error(MODEL[name], sorted(boxes[name], key=repr)) is None
        )  # replicas are the same rectangles
    for place in PLACES:
        for rank in range(tp):
            empty = buffer_of(sharding, place, tp, rank, zero=True)
            for piece in weight_pieces(empty):
                slot = tuple(slice(o, o + n) for o, n in zip(piece.offset, piece.tensor.shape, strict=True))
                piece.tensor.copy_(found[piece.name.removeprefix("model.")][slot])
            full = buffer_of(sharding, place, tp, rank)
            for name in MODEL:
                assert torch.equal(empty.weight_part(name), full.weight_part(name)), name


def test_names_are_in_the_order_asked_for():
    buffer = buffer_of(ROWS["optim_grads_params"], PLACES[0], 1, 0)
    assert buffer.sharding.weights is ShardOver.INNER
    names = [piece.name for piece in weight_pieces(buffer, ["l1.norm", "embedding"])]
    assert list(dict.fromkeys(names)) == ["model.l1.norm", "model.embedding"]
