"""What moves between tensor parallel ranks, and when: the layers' backward hides its communication behind W."""

import dataclasses

import pytest
import torch

from megatron.core.tensor_parallel.mappings import (
    ALONE,
    SequenceShard,
    TensorParallel,
    gather_sequence,
    gather_vocabulary,
    sequence_slice,
    start_sum,
    sum_ranks,
)
from megatron.core.tensor_parallel.parallel_layers import column_linear, row_linear
from megatron.core.transport import collectives
from tests.harness.ranks import RankContext, share_ranks


def test_alone_nothing_moves():
    x = torch.randn(5, 2, requires_grad=True)
    assert TensorParallel(None, sequence_parallel=True) == ALONE
    assert not ALONE.sequence_parallel
    assert (ALONE.size, ALONE.rank, ALONE.shard_rank, ALONE.sequence_rank) == (1, 0, None, None)
    assert gather_sequence(x, ALONE) is x
    assert sequence_slice(x, ALONE) is x
    assert gather_vocabulary(x, ALONE) is x
    assert sum_ranks(x, ALONE) is x


def moves(ctx: RankContext):
    ps = ctx.make_ps(tp=ctx.world_size)
    tp = TensorParallel.of(ps, sequence_parallel=True)
    assert tp.group is ps.group("tp")
    assert (tp.size, tp.rank) == (ctx.world_size, ctx.rank)
    plain = TensorParallel.of(ps, sequence_parallel=False)
    assert (plain.shard_rank, plain.sequence_rank, tp.sequence_rank) == (ctx.rank, None, ctx.rank)
    whole = torch.arange(24.0, dtype=torch.float64).view(4, 2, 3)
    shard = sequence_slice(whole, tp)
    assert shard.shape == (4 // ctx.world_size, 2, 3)
    assert torch.equal(gather_sequence(shard, tp), whole)
    assert gather_sequence(whole, plain) is whole
    operand = SequenceShard(shard.transpose(1, 2).contiguous().transpose(1, 2), tp)
    operand.start()
    assert torch.equal(operand.whole(), whole)
    assert operand.whole() is operand.whole()
    assert torch.equal(sum_ranks(whole * (ctx.rank + 1), plain), whole * 3)
    assert torch.equal(sum_ranks(whole * (ctx.rank + 1), tp), shard * 3)
    total, pending = start_sum(whole.clone(), tp)
    pending.wait()
    assert torch.equal(total, shard * 2)
    with pytest.raises(ValueError, match=r"a sequence of 5 tokens .*--tensor-model-parallel-size"):
        sequence_slice(torch.zeros(5, 2), tp)
    logits = torch.full((2, 3, 4), float(ctx.rank), requires_grad=True)
    gathered = gather_vocabulary(logits, tp)
    assert torch.equal(gathered, torch.tensor([0.0] * 4 + [1.0] * 4).expand(2, 3, 8))
    (gathered * torch.arange(8.0)).sum().backward()
    assert torch.equal(logits.grad, (torch.arange(4.0) + 4 * ctx.rank).expand(2, 3, 4))
    assert torch.equal(gather_vocabulary(logits, tp, 7), gathered[..., :7])
    return True


class LoggingSink:
    def __init__(self, log, deferring, keeps_gathered=False):
        self.log, self.deferring, self.keeps_gathered = log, deferring, keeps_gathered

    def put(self, key, x, dy):
        self.log.append(f"put {key}")

    def done(self, key, microbatch): ...


def order(ctx: RankContext):
    """What a layer's backward begins and waits for, in order."""
    log = []
    wait = collectives.Pending.wait

    def logged_wait(pending):
        if pending.work is not None:
            log.append(f"wait {pending.op}")
        wait(pending)

    collectives.Pending.wait = logged_wait
    group = ctx.make_ps(tp=2).group("tp")
    group = dataclasses.replace(group, observer=lambda op, purpose, ranks: log.append(op))
    weight, bias = torch.ones(6, 4, requires_grad=True), torch.ones(6, requires_grad=True)
    found = {}
    for sp in (False, True):
        for deferring in (False, True):
            for linear in (column_linear, row_linear):
                x = torch.ones(4, 2, 4, requires_grad=True)
                sink = LoggingSink(log, deferring)
                tp = TensorParallel(group, sp)
                out = linear(x, weight, bias, sink=sink, key="w", bias_key="b", tp=tp)
                kept = {t.data_ptr() for t in out.grad_fn.saved_tensors}
                assert kept == {x.data_ptr(), weight.data_ptr()}, "this rank's part of x, nothing gathered"
                log.clear()
                out.sum().backward()
                found[linear.__name__, sp, deferring] = list(log)
    return found


def test_over_two_ranks():
    found = share_ranks(2, {"moves": moves, "order": order})
    assert found["moves"] == [True, True]
    puts = ["put w", "put b"]
    reduced = ["all_reduce", *puts, "wait all_reduce"]
    # gloo's reduce_scatter is an all-to-all and a sum; the name is that of the collective asked for
    scattered = ["reduce_scatter", *puts, "wait reduce_scatter"]
    gathered = ["all_gather", "wait all_gather", *puts]
    for log in found["order"]:
        assert log == {
            ("column_linear", False, False): reduced,
            ("column_linear", False, True): reduced,
            ("column_linear", True, False): ["all_gather", *scattered],
            ("column_linear", True, True): scattered,  # gathered in W
            ("row_linear", False, False): puts,
            ("row_linear", False, True): puts,
            ("row_linear", True, False): gathered,
            ("row_linear", True, True): gathered,
        }
