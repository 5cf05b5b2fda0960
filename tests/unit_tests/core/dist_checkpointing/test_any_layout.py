"""Checkpoints written under one tensor x pipeline parallel layout load under any other, bit for bit.

The pieces are those of a real flat buffer and optimizer (bf16 weights, fp32 main weights, moments) over a model that
is cut by hand: rows, columns, two bands, replicated rows, tied embeddings on two stages, uneven and empty stages.
"""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from megatron.core.device import Device
from megatron.core.dist_checkpointing.loading import find, load_pieces
from megatron.core.dist_checkpointing.saving import save
from megatron.core.dist_checkpointing.state import LocalPiece, pieces_of
from megatron.core.optimizer.mixed_precision import build_optimizer
from megatron.core.optimizer.optimization_config import OptimizerConfig
from megatron.core.transport.parallel_state import single_process
from tests.harness.cut_models import MODEL, cut_buffer, cut_stages, global_part
from tests.harness.ranks import run_ranks


@dataclasses.dataclass(frozen=True)
class Layout:
    """sizes: parameters a stage. placement: the stages of each pipeline rank. tied: the last stage holds the embedding
    too."""

    tp: int = 1
    pp: int = 1
    dp: int = 1
    sizes: tuple[int, ...] = (11,)
    placement: tuple[tuple[int, ...], ...] = ((0,),)
    tied: bool = False

    @property
    def world(self) -> int:
        return self.tp * self.pp * self.dp


LAYOUTS = {
    "dp4": Layout(dp=4),
    "tp4": Layout(tp=4),
    "tp2 dp2": Layout(tp=2, dp=2),
    "tp2 pp2 tied": Layout(tp=2, pp=2, sizes=(4, 7), placement=((0,), (1,)), tied=True),
    "pp4 uneven tied": Layout(pp=4, sizes=(2, 7, 0, 2), placement=((0,), (1,), (2,), (3,)), tied=True),
    "pp2 interleaved dp2": Layout(pp=2, dp=2, sizes=(1, 3, 5, 2), placement=((0, 2), (1, 3)), tied=True),
    "tp2": Layout(tp=2),
    "pp2": Layout(pp=2, sizes=(8, 3), placement=((0,), (1,))),
    "one": Layout(),
}
FOUR = [name for name, layout in LAYOUTS.items() if layout.world == 4]


def pieces(ps, layout: Layout) -> list[LocalPiece]:
    """Everything a rank would save, all zero."""
    stages = cut_stages(layout.sizes)
    buffer = cut_buffer(
        ps,
        {stage: stages[stage] for stage in layout.placement[ps.pp_rank]},
        tied_on=len(stages) - 1 if layout.tied else None,
        dtype=torch.bfloat16,
    )
    optimizer = build_optimizer(OptimizerConfig(), buffer, ps)
    weights = [
        piece
        for name in buffer.names
        for piece in pieces_of("model", buffer.param_meta[name], buffer.weight(name))
    ]
    return weights + optimizer.pieces()


def value(piece: LocalPiece) -> torch.Tensor:
    """What belongs there: a function of tensor and place alone."""
    generator = torch.Generator().manual_seed(sum(piece.name.encode()))
    whole = torch.randn(piece.global_shape, generator=generator).to(piece.tensor.dtype)
    for dim, (start, size) in enumerate(zip(piece.offset, piece.tensor.shape, strict=True)):
        whole = whole.narrow(dim, start, size)
    return whole


def write(root, ps, layout: Layout) -> None:
    mine = pieces(ps, layout)
    for piece in mine:
        piece.tensor.copy_(value(piece))
    save(root, 7, mine, {}, {}, ps)


def read(root, ps, layout: Layout) -> int:
    mine = pieces(ps, layout)
    found = find(root, ps).found
    assert found is not None
    load_pieces(found, mine, ps)
    for piece in mine:
        assert torch.equal(piece.tensor, value(piece)), (piece.name, piece.offset)
    return len(mine)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Every layout's checkpoint, and what each rank's loads of each layout under each other one said."""
    root = tmp_path_factory.mktemp("layouts")

    def body(ctx):
        states = {name: ctx.make_ps(tp=x.tp, pp=x.pp, dp=x.dp) for name, x in LAYOUTS.items() if name in FOUR}
        for name, ps in states.items():
            write(root / name, ps, LAYOUTS[name])
        return {
            (source, target): read(root / source, ps, LAYOUTS[target])
            for source in FOUR
            for target, ps in states.items()
        }

    return root, run_ranks(body, 4)


@pytest.mark.grid
def test_four_ranks_load_what_four_ranks_saved_under_any_layout(saved):
    _, by_rank = saved
    for loaded in by_rank:
        assert len(loaded) == len(FOUR) ** 2 == 36
    assert [by_rank[rank]["dp4", "pp4 uneven tied"] for rank in range(4)] == [8, 28, 0, 12]


@pytest.mark.grid
@pytest.mark.parametrize("source", FOUR)
def test_other_numbers_of_ranks_load_it_too(saved, source):
    root, _ = saved

    def body(ctx):
        for target in ("tp2", "pp2"):
            x = LAYOUTS[target]
            read(root / source, ctx.make_ps(tp=x.tp, pp=x.pp, dp=x.dp), x)
        return True

    assert run_ranks(body, 2) == [True, True]
    assert read(root / source, single_process(Device("cpu")), LAYOUTS["one"]) == 4 * len(MODEL)


@pytest.mark.parametrize("source", FOUR)
def test_every_element_is_written_once_however_many_ranks_hold_it(saved, source):
    root, _ = saved
    manifest = find(root / source, None).found.manifest
    kinds = ("model", "optimizer.main_weight", "optimizer.exp_avg", "optimizer.exp_avg_sq")
    assert set(manifest.tensors) == {f"{kind}.{name}" for kind in kinds for name in MODEL}
    for name, entry in manifest.tensors.items():
        assert sum(math.prod(chunk.shape) for chunk in entry.chunks) == math.prod(entry.shape), name
    # the writing is shared out: no rank that holds something stays idle, where others hold it too
    assert len(manifest.files) == (3 if source == "pp4 uneven tied" else 4)


@pytest.mark.grid
@pytest.mark.parametrize("source", ["one", "tp2"])
def test_four_ranks_load_what_fewer_saved(tmp_path, source):
    x = LAYOUTS[source]
    if x.world == 1:
        write(tmp_path, single_process(Device("cpu")), x)
    else:
        run_ranks(lambda ctx: write(tmp_path, ctx.make_ps(tp=x.tp), x), x.world)

    def body(ctx):
        return [read(tmp_path, ctx.make_ps(tp=t.tp, pp=t.pp, dp=t.dp), t) for t in map(LAYOUTS.get, FOUR)]

    assert all(counts[0] == 4 * len(MODEL) for counts in run_ranks(body, 4))


def test_pieces_are_views_of_the_local_tensor_and_refuse_another_shape():
    buffer = cut_buffer(single_process(Device("cpu")), {0: ["l0.qkv"]})
    meta = buffer.param_meta["l0.qkv"]
    (piece,) = pieces_of("model", meta, buffer.weight("l0.qkv"))
    assert (piece.name, piece.global_shape, piece.offset) == ("model.l0.qkv", (12, 6), (0, 0))
    piece.tensor.fill_(3.0)
    assert buffer.weight("l0.qkv").eq(3).all()
    with pytest.raises(AssertionError, match=r"l0.qkv: shape \(6, 12\) here, by its ParamMeta \(12, 6\)"):
        pieces_of("model", meta, torch.zeros(6, 12))


def test_bands_of_one_tensor_are_two_pieces_of_it():
    def body(ctx):
        ps = ctx.make_ps(tp=2)
        buffer = cut_buffer(ps, {0: ["l0.fc1"]})
        meta = buffer.param_meta["l0.fc1"]
        whole = torch.arange(96.0).view(16, 6)
        for region in meta.parts:
            region.view(buffer.weight("l0.fc1")).copy_(global_part(region, whole))
        return [
            (p.offset, p.tensor[:, 0].tolist()) for p in pieces_of("model", meta, buffer.weight("l0.fc1"))
        ]

    first = [((0, 0), [0.0, 6.0, 12.0, 18.0]), ((8, 0), [48.0, 54.0, 60.0, 66.0])]
    second = [((4, 0), [24.0, 30.0, 36.0, 42.0]), ((12, 0), [72.0, 78.0, 84.0, 90.0])]
    assert run_ranks(body, 2) == [first, second]
