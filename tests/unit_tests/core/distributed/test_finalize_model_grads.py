"""Parts of gradients on other ranks: partial regions over tp, tied embeddings over the ends of the pipeline."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from megatron.core.device import Device
from megatron.core.distributed.custom_fsdp.data_parallel_config import DistributedDataParallelConfig
from megatron.core.distributed.custom_fsdp.flat_buffer import FlatBuffer
from megatron.core.distributed.custom_fsdp.shared_sums import MAX_PACKED, PartialSums, _cut
from megatron.core.distributed.data_parallel import DistributedDataParallel
from megatron.core.memory_tracker import MemoryTracker
from megatron.core.param_meta import LOOKUP, ParamMeta, Region
from megatron.core.sharding_table import STRATEGIES, ShardOver, ShardPlace, sharding_of
from megatron.core.transport import collectives
from megatron.core.transport.parallel_state import single_process
from tests.harness.cut_models import shard_place
from tests.harness.ranks import RanksError, run_ranks, share_ranks
from tests.harness.units_of_size import units_of_size

CONFIG = DistributedDataParallelConfig()


class Weights(nn.Module):
    """Parameters by name and shape; names may have dots."""

    def __init__(self, shapes: dict[str, tuple[int, ...]], dtype=torch.float64) -> None:
        super().__init__()
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.zeros(shape, dtype=dtype)))


def alone(parameters, meta, config) -> FlatBuffer:
    """A whole buffer."""
    return FlatBuffer(
        parameters,
        meta,
        config,
        sharding=STRATEGIES["no_shard"],
        place=ShardPlace(),
        device=torch.device("cpu"),
    )


def values(name: str, shape: tuple[int, ...], rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * rank + sum(name.encode()))
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def contribute(ddp: DistributedDataParallel, key: str, value: torch.Tensor | float) -> None:
    """As a sink does: announce, write, report."""
    assert ddp.reductions.grad_begins(key), f"{key} was written to before"
    ddp.buffer.main_grad(key).copy_(torch.as_tensor(value))
    ddp.reductions.grad_ready(key, 0)


def tp_meta(tp: int, tp_rank: int, copies: int) -> dict[str, ParamMeta]:
    """norm: whole, everywhere, partial. qkv: own query rows, then key rows that `copies` ranks hold. head: replicated,
    not partial. column: only rows of its own."""
    kv = tp_rank // copies
    heads = tp // copies
    q = Region((0, 0), (2 * tp_rank, 0), (2, 3))
    k = Region((2, 0), (2 * tp + kv, 0), (1, 3), copies=copies, partial=copies > 1)
    norm = Region((0,), (0,), (5,), copies=tp, partial=True)
    return {
        "norm": ParamMeta("norm", (5,), regions=(norm,)),
        "qkv": ParamMeta("qkv", (2 * tp + heads, 3), regions=(q, k)),
        "head": ParamMeta("head", (2, 2), regions=(Region((0, 0), (0, 0), (2, 2), copies=tp),)),
        "column": ParamMeta("column", (tp, 3), regions=(Region((0, 0), (tp_rank, 0), (1, 3)),)),
    }


SHAPES = {"norm": (5,), "qkv": (3, 3), "head": (2, 2), "column": (1, 3)}


def run_tp(ctx, tp, copies, dtype=torch.float64):
    ps = ctx.make_ps(tp=tp, dp=ctx.world_size // tp)
    model = Weights(SHAPES, dtype)
    ddp = DistributedDataParallel(model, ps, CONFIG, tp_meta(tp, ps.tp_rank, copies))
    results = []
    for _ in range(2):
        ddp.begin_step(1)
        for name, shape in SHAPES.items():
            contribute(ddp, name, values(name, shape, ctx.rank))
        ddp.finish()
        results.append({name: ddp.buffer.main_grad(name).clone() for name in SHAPES})
    assert all(torch.equal(results[0][name], results[1][name]) for name in SHAPES)
    return results[0]


@pytest.mark.parametrize(("tp", "copies", "dp"), [(2, 2, 1), (4, 2, 1), (4, 4, 1), (2, 2, 2)])
def test_only_the_copies_of_a_partial_region_are_added(tp, copies, dp):
    by_rank = run_ranks(run_tp, tp * dp, tp, copies)
    own = [{n: values(n, s, rank) for n, s in SHAPES.items()} for rank in range(tp * dp)]
    for rank, grads in enumerate(by_rank):
        tp_rank = rank % tp

        def total(name, tp_ranks, dp=dp, tp=tp):
            return sum(own[d * tp + t][name] for d in range(dp) for t in tp_ranks)

        block = range(tp_rank // copies * copies, tp_rank // copies * copies + copies)
        torch.testing.assert_close(grads["norm"], total("norm", range(tp)), rtol=1e-13, atol=1e-13)
        torch.testing.assert_close(grads["qkv"][2:], total("qkv", block)[2:], rtol=1e-13, atol=1e-13)
        torch.testing.assert_close(grads["qkv"][:2], total("qkv", [tp_rank])[:2], rtol=1e-13, atol=1e-13)
        for name in ("head", "column"):
            torch.testing.assert_close(grads[name], total(name, [tp_rank]), rtol=1e-13, atol=1e-13)
        first = by_rank[tp_rank // copies * copies]
        assert torch.equal(grads["qkv"][2:], first["qkv"][2:])  # the copies never drift apart
        assert torch.equal(grads["norm"], by_rank[0]["norm"])


def test_all_partial_regions_travel_in_one_collective_and_none_where_there_are_none(monkeypatch):
    calls = []
    real = collectives.sum_gradients

    def watch(bucket, group):
        calls.append((group.purpose, bucket.numel(), bucket.dtype))
        return real(bucket, group)

    monkeypatch.setattr(collectives, "sum_gradients", watch)

    def body(ctx):
        run_tp(ctx, 4, 2)
        return list(calls)

    # 5 of norm, 2 blocks of 3 key elements: 11, padded to a multiple of 4 ranks; two steps
    assert run_ranks(body, 4) == [[("tp", 12, torch.float64)] * 2] * 4

    def nothing(ctx):
        return [c for c in (run_ddp_without_parts(ctx), calls)[1] if c[0] == "tp"]

    assert run_ranks(nothing, 2) == [[], []]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pieces_of_a_bounded_buffer_have_the_bits_of_one_collective(monkeypatch, dtype):
    """Rows and long rows are cut, in tensors of one to three dims; nothing else is touched."""
    shapes = {"norm": (7,), "qkv": (6, 5), "deep": (2, 3, 4), "one": (1, 1)}
    sizes = []
    real = collectives.sum_gradients
    monkeypatch.setattr(
        collectives, "sum_gradients", lambda b, g, **k: (sizes.append(b.numel()), real(b, g, **k))[1]
    )

    def body(ctx):
        ps = ctx.make_ps(tp=4)
        half = ps.tp_rank // 2
        kv = Region((2, 1), (2 + 4 * half, 1), (4, 3), copies=2, partial=True)  # not contiguous
        deep = Region((0, 0, 1), (0, 3 * half, 1), (2, 3, 2), copies=2, partial=True)
        meta = {
            "norm": ParamMeta("norm", (7,), regions=(Region((0,), (0,), (7,), copies=4, partial=True),)),
            "qkv": ParamMeta("qkv", (10, 5), regions=(kv, Region((0, 0), (0, 0), (2, 5)))),
            "deep": ParamMeta("deep", (2, 6, 4), regions=(deep, Region((1, 2, 3), (1, 2, 3), (1, 1, 1)))),
            "one": ParamMeta(
                "one", (1, 1), regions=(Region((0, 0), (0, 0), (1, 1), copies=4, partial=True),)
            ),
        }
        parameters = {name: nn.Parameter(torch.zeros(shape, dtype=dtype)) for name, shape in shapes.items()}
        config = DistributedDataParallelConfig(grad_reduce_in_bf16=True)
        results = []
        for limit in (MAX_PACKED, 4, 5, 8, 12, 23):
            sizes.clear()
            buffer = alone(parameters, meta, config)
            assert buffer.main_grad("qkv").dtype == dtype
            for name, shape in shapes.items():
                buffer.main_grad(name).copy_(values(name, shape, ctx.rank))
            tracker = MemoryTracker()
            PartialSums(buffer, ps.tp_group, max_packed=limit, tracker=tracker).add()
            itemsize = buffer.main_grad("qkv").element_size()
            assert tracker.peak("packed") == max(sizes) * itemsize, (limit, tracker.lines())
            assert tracker.transient_bytes == 0
            assert tracker.peak("exchange") == max(sizes) * itemsize * 3 // 4, (
                "four ranks: in rank order, what the other three send beside the buffer"
            )
            results.append(({n: buffer.main_grad(n).clone() for n in shapes}, limit, list(sizes)))
        untouched = values("qkv", shapes["qkv"], ctx.rank).to(dtype)
        assert torch.equal(results[0][0]["qkv"][:, [0, 4]], untouched[:, [0, 4]])
        assert not torch.equal(results[0][0]["qkv"][2:, 1:4], untouched[2:, 1:4])
        return results

    total = 7 + 2 * 12 + 2 * 12 + 1
    for (whole, _, once), *pieces in run_ranks(body, 4):
        assert once == [total]
        for grads, limit, each in pieces:
            assert all(torch.equal(grads[name], whole[name]) for name in shapes), limit
            assert max(each) <= -(-limit // 4) * 4
            assert len(each) >= total / limit


def places(piece: torch.Tensor) -> tuple[tuple[int, int], tuple[int, ...]]:
    """Of a view of rows of 8192: offset and shape."""
    return divmod(piece.storage_offset(), 8192), tuple(piece.shape)


def test_replicated_rows_of_a_large_model_need_no_more_than_the_limit():
    """16 ranks, 8 groups of keys and values, hidden 8192, 80 layers: 5 GiB at once."""
    rows = torch.empty(256, 8192, device="meta")
    limit = MAX_PACKED // 8
    pieces = list(_cut(rows, limit))
    assert [piece.numel() * 8 for piece in pieces] == [MAX_PACKED]
    pieces = list(_cut(rows, 3 * 8192 - 1))
    assert [places(piece)[0] for piece in pieces] == [(row, 0) for row in range(0, 256, 2)]
    pieces = list(_cut(rows, 5000))
    assert [places(piece) for piece in pieces[:3]] == [
        ((0, 0), (1, 5000)),
        ((0, 5000), (1, 3192)),
        ((1, 0), (1, 5000)),
    ]
    assert sum(piece.numel() for piece in pieces) == rows.numel()


def run_ddp_without_parts(ctx):
    ps = ctx.make_ps(tp=2)
    meta = {"w": ParamMeta("w", (4, 3), regions=(Region((0, 0), (2 * ps.tp_rank, 0), (2, 3)),))}
    ddp = DistributedDataParallel(Weights({"w": (2, 3)}), ps, CONFIG, meta)
    ddp.begin_step(1)
    ddp.finish()


def test_bf16_parts_are_added_in_fp32_and_rounded_once():
    config = DistributedDataParallelConfig(grad_reduce_in_bf16=True)

    def body(ctx):
        ps = ctx.make_ps(tp=4)
        meta = {
            "norm": ParamMeta("norm", (64,), regions=(Region((0,), (0,), (64,), copies=4, partial=True),))
        }
        ddp = DistributedDataParallel(Weights({"norm": (64,)}, torch.bfloat16), ps, config, meta)
        ddp.begin_step(1)
        contribute(ddp, "norm", values("norm", (64,), ctx.rank))
        ddp.finish()
        return ddp.buffer.main_grad("norm").clone()

    parts = [values("norm", (64,), rank).bfloat16().float() for rank in range(4)]
    expected = (((parts[0] + parts[1]) + parts[2]) + parts[3]).bfloat16()
    for grad in run_ranks(body, 4):
        assert torch.equal(grad, expected)


def one_process_uses(shape, dtype, config) -> torch.Tensor:
    """What a process that holds both uses makes of them."""
    meta = {"tied": ParamMeta("tied", shape, uses=("tied", "tied" + LOOKUP))}
    ddp = DistributedDataParallel(
        Weights({"tied": shape}, dtype), single_process(Device("cpu")), config, meta
    )
    ddp.begin_step(1)
    contribute(ddp, "tied", values("output", shape, 0))
    contribute(ddp, "tied" + LOOKUP, values("lookup", shape, 0))
    ddp.finish()
    return ddp.buffer.main_grad("tied").clone()


@pytest.mark.parametrize("shape", [(4, 6), (3, 5)])  # an even and an odd number of elements
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tied_embeddings_get_the_bits_of_one_process(shape, dtype):
    configs = [DistributedDataParallelConfig(grad_reduce_in_bf16=reduced) for reduced in (False, True)]

    def check(config):
        def body(ctx):
            ps = ctx.make_ps(pp=3)
            names = (["tied"], ["own"], ["own2", "tied"])[ps.pp_rank]
            meta = {name: ParamMeta(name, shape, shared=name == "tied") for name in names}
            model = Weights(dict.fromkeys(names, shape), dtype)
            ddp = DistributedDataParallel(model, ps, config, meta, stages=[ps.pp_rank])
            ddp.begin_step(1)
            for name in names:
                use = {"tied": "lookup" if ps.pp_rank == 0 else "output"}.get(name, name)
                contribute(ddp, name, values(use, shape, 0))
            ddp.finish()
            return {name: ddp.buffer.main_grad(name).clone() for name in names}

        return body

    results = share_ranks(3, {str(i): check(config) for i, config in enumerate(configs)})
    for index, config in enumerate(configs):
        first, middle, last = results[str(index)]
        expected = one_process_uses(shape, dtype, config)
        assert torch.equal(first["tied"], expected)
        assert torch.equal(last["tied"], expected)
        assert torch.equal(middle["own"], values("own", shape, 0).to(expected.dtype))
        assert torch.equal(last["own2"], values("own2", shape, 0).to(expected.dtype))


def test_shared_and_partial_after_the_sum_over_data_parallel_ranks():
    """tp 2 x pp 2 x dp 2, averaging in the collective: every part once, every sample once."""
    config = DistributedDataParallelConfig(ddp_average_in_collective=True)

    def body(ctx):
        ps = ctx.make_ps(tp=2, pp=2, dp=2)
        table = Region((0, 0), (2 * ps.tp_rank, 0), (2, 3))
        norm = Region((0,), (0,), (3,), copies=2, partial=True)
        meta = {
            "tied": ParamMeta("tied", (4, 3), regions=(table,), shared=True),
            f"norm{ps.pp_rank}": ParamMeta(f"norm{ps.pp_rank}", (3,), regions=(norm,)),
        }
        model = Weights({"tied": (2, 3), f"norm{ps.pp_rank}": (3,)})
        ddp = DistributedDataParallel(model, ps, config, meta, stages=[ps.pp_rank])
        ddp.begin_step(1)
        for name in ddp.buffer.names:
            contribute(ddp, name, 10.0**ctx.rank / ddp.buffer.grads_divided_by)  # as sinks scale them
        assert ddp.buffer.grads_divided_by == 2
        ddp.finish()
        coordinates = (ps.tp_rank, ps.pp_rank, ps.dp_rank)
        return coordinates, {name: ddp.buffer.main_grad(name).unique().tolist() for name in ddp.buffer.names}

    by_rank = run_ranks(body, 8)
    where = [coordinates for coordinates, _ in by_rank]
    for (tp, pp, _), grads in by_rank:
        tied = sum(10.0**r for r, (t, _, _) in enumerate(where) if t == tp) / 2
        norm = sum(10.0**r for r, (_, p, _) in enumerate(where) if p == pp) / 2
        assert grads == {"tied": [tied], f"norm{pp}": [norm]}


def test_ranks_that_mean_different_parts_are_found_when_built():
    def parts(ctx):
        ps = ctx.make_ps(tp=2)
        region = Region((0,), (0,), (5,), copies=2, partial=True)
        meta = {"norm": ParamMeta("norm", (5,), regions=(region,) if ps.tp_rank == 0 else ())}
        DistributedDataParallel(Weights({"norm": (5,)}), ps, CONFIG, meta)

    with pytest.raises(RanksError, match=r"partial regions: .* on rank [01]"):
        run_ranks(parts, 2)

    def uses(ctx):
        ps = ctx.make_ps(pp=2)
        meta = {"tied": ParamMeta("tied", (5,), shared=ps.pp_rank == 0)}
        DistributedDataParallel(Weights({"tied": (5,)}), ps, CONFIG, meta)

    with pytest.raises(RanksError, match=r"shared parameters: .* on rank [01]"):
        run_ranks(uses, 2)

    def alone(ctx):
        meta = {"tied": ParamMeta("tied", (5,), shared=True)}
        DistributedDataParallel(Weights({"tied": (5,)}), ctx.ps, CONFIG, meta)

    with pytest.raises(RanksError, match=r"group 'embedding' has one rank"):
        run_ranks(alone, 1)


ROWS = {name: (sharding_of(name), 1) for name in STRATEGIES} | {
    "hybrid": (sharding_of("optim_grads_params"), 2),
    "fully_hybrid": (sharding_of("optim_grads_params", "optim"), 2),
}


@pytest.mark.grid
@pytest.mark.parametrize(("tp", "copies", "dp"), [(2, 2, 2), (4, 2, 2), (2, 2, 4)])
def test_every_strategy_adds_what_its_ranks_hold_of_partial_regions(tp, copies, dp):
    """After the sum over data parallel ranks each has a part of it; all parts together are the whole, to the bit."""

    def body(ctx):
        own = {
            n: values(n, s, ctx.rank % tp) for n, s in SHAPES.items()
        }  # as data parallel ranks have summed it
        found, calls = {}, {}
        for row, (sharding, instances) in ROWS.items():
            ps = ctx.make_ps(tp=tp, dp=dp, instances=instances)
            place = shard_place(ps)
            for limit in (MAX_PACKED, 8):
                parameters = {n: nn.Parameter(torch.zeros(s, dtype=torch.float64)) for n, s in SHAPES.items()}
                buffer = FlatBuffer(
                    parameters,
                    tp_meta(tp, ps.tp_rank, copies),
                    DistributedDataParallelConfig(),
                    sharding=sharding,
                    place=place,
                    device=torch.device("cpu"),
                    units=units_of_size({name: p.numel() for name, p in parameters.items()}, 6),
                )
                for name in SHAPES:
                    start, end = buffer.part(name, sharding.optimizer)
                    buffer.main_grad_part(name).copy_(own[name].view(-1)[start:end])
                PartialSums(buffer, ps.tp_group, max_packed=limit).add()
                held = {
                    name: (buffer.part(name, sharding.optimizer), buffer.main_grad_part(name).clone())
                    for name in SHAPES
                }
                found[row, limit] = held
            calls[row] = (ps.tp_rank, place.index(ShardOver.FULL))
        return found, calls

    by_rank = run_ranks(body, tp * dp)
    whole = {}
    for found, calls in by_rank:
        for name, ((start, end), grad) in found["no_shard", MAX_PACKED].items():
            assert (start, end) == (0, grad.numel())
            other = whole.setdefault((calls["no_shard"][0], name), grad)
            assert torch.equal(other, grad)
    for found, calls in by_rank:
        for (row, _), held in found.items():
            for name, ((start, end), grad) in held.items():
                assert torch.equal(grad, whole[calls[row][0], name][start:end]), (row, name)
    own = [values("norm", (5,), rank) for rank in range(tp)]
    torch.testing.assert_close(whole[0, "norm"], sum(own), rtol=1e-14, atol=1e-14)


def test_shared_gradients_that_are_cut_are_added_where_the_optimizer_has_them():
    """pp 2 x dp 4, instances of 2: stages have other parameters beside the tied one, and cut it alike all the same."""
    rows = {
        "optim_grads": ("optim_grads", "no_shard"),
        "HSDP": ("optim_grads_params", "no_shard"),
        "HFSDP": ("optim_grads_params", "optim"),
    }

    def body(ctx):
        ps = ctx.make_ps(pp=2, dp=4, instances=2)
        shapes = ({"positions": (7, 3), "tied": (5, 4)}, {"tied": (5, 4), "norm": (9,)})[ps.pp_rank]
        meta = {name: ParamMeta(name, shape, shared=name == "tied") for name, shape in shapes.items()}
        found = {}
        for row, (strategy, outer) in rows.items():
            config = DistributedDataParallelConfig(
                data_parallel_sharding_strategy=strategy, outer_dp_sharding_strategy=outer
            )
            ddp = DistributedDataParallel(Weights(shapes), ps, config, meta, stages=[ps.pp_rank])
            for microbatches in (1, 2):  # the second step overwrites what the first one left
                ddp.begin_step(microbatches)
                for name, shape in shapes.items():
                    contribute(ddp, name, values(name, shape, ctx.rank))
                ddp.finish()
            buffer = ddp.buffer
            part = buffer.part("tied", buffer.sharding.optimizer)
            found[row] = part, buffer.main_grad_part("tied").clone(), ps.dp_rank
        return found

    by_rank = run_ranks(body, 8)
    expected = sum(values("tied", (5, 4), rank) for rank in range(8)).flatten()
    for row in rows:
        parts = [ranks[row] for ranks in by_rank]
        assert {dp_rank: part for part, _, dp_rank in parts[:4]} == {d: part for part, _, d in parts[4:]}
        for (start, end), grad, _ in parts:
            torch.testing.assert_close(grad, expected[start:end], rtol=1e-13, atol=1e-13)
        assert sum(end - start for (start, end), _, _ in parts) >= 20, "all of it is somewhere"
