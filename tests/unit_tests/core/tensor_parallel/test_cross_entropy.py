"""Cross entropy against torch's, and that it works in the logits' memory."""

import functools

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

from megatron.core.rectangles import even_share
from megatron.core.tensor_parallel.mappings import TensorParallel
from megatron.core.tensor_parallel.vocab_loss import vocab_parallel_cross_entropy
from tests.harness.ranks import RankContext, share_ranks


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_against_torch(dtype):
    torch.manual_seed(0)
    raw = (torch.randn(7, 3, 50) * 20).to(dtype)
    labels = torch.randint(50, (7, 3))
    weight = torch.randn(7, 3)
    ours = raw.clone().requires_grad_()
    loss = vocab_parallel_cross_entropy(ours * 1, labels)
    (loss * weight).sum().backward()
    theirs = raw.clone().requires_grad_()
    wide = theirs.double()
    expected = F.cross_entropy(wide.flatten(0, 1), labels.flatten(), reduction="none").view(7, 3)
    (expected * weight).sum().backward()
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-4, torch.bfloat16: 1e-4}[dtype]
    assert loss.dtype == torch.promote_types(dtype, torch.float32)
    assert (loss - expected).abs().max() < tolerance
    assert (ours.grad.double() - theirs.grad.double()).abs().max() < (
        0.02 if dtype == torch.bfloat16 else tolerance
    )


def test_unlikely_label_is_finite():
    logits = torch.tensor([[0.0, 500.0, -500.0]])
    assert vocab_parallel_cross_entropy(logits, torch.tensor([2])).item() == pytest.approx(1000.0)


def test_one_buffer():
    logits = torch.randn(4, 9, requires_grad=True)
    made = logits * 1
    address = made.data_ptr()
    seen = []
    made.register_hook(lambda grad: seen.append(grad.data_ptr()))
    vocab_parallel_cross_entropy(made, torch.zeros(4, dtype=torch.int64)).sum().backward()
    assert seen == [address]


def sharded(ctx: RankContext, dtype: torch.dtype, vocabulary: int):
    """Losses, this rank's columns of the gradient, and whether it worked in the logits' memory."""
    tp = TensorParallel(ctx.make_ps(tp=ctx.world_size).group("tp"))
    torch.manual_seed(0)
    raw = (torch.randn(7, 3, vocabulary) * 20).to(dtype)
    labels = torch.randint(vocabulary, (7, 3))
    mine = raw.chunk(ctx.world_size, -1)[ctx.rank].clone().requires_grad_()
    behind = even_share(vocabulary, ctx.world_size) - mine.shape[-1]
    logits = F.pad(mine * 1, (0, behind), value=1e4)  # of no id
    address, seen = logits.data_ptr(), []
    logits.register_hook(lambda grad: seen.append(grad.data_ptr()))
    loss = vocab_parallel_cross_entropy(logits, labels, tp, vocabulary)
    (loss * torch.randn(7, 3)).sum().backward()
    unlikely = torch.full((1, 2), 500.0 * (1 - 2 * (ctx.rank % 2)))
    last = torch.tensor([2 * ctx.world_size - 1])
    return loss.detach(), mine.grad, seen == [address], vocab_parallel_cross_entropy(unlikely, last, tp)


@pytest.mark.parametrize(("size", "vocabulary"), [(2, 48), (4, 48), (4, 45)])
def test_sharded_vocabulary_against_torch(size, vocabulary):
    """Of 45 ids over four ranks, the last has nine."""
    dtypes = (torch.float64, torch.float32, torch.bfloat16)
    of = functools.partial(sharded, vocabulary=vocabulary)
    found = share_ranks(size, {str(dtype): functools.partial(of, dtype=dtype) for dtype in dtypes})
    for dtype in dtypes:
        torch.manual_seed(0)
        raw = (torch.randn(7, 3, vocabulary) * 20).to(dtype).requires_grad_()
        labels = torch.randint(vocabulary, (7, 3))
        wide = raw.double()
        expected = F.cross_entropy(wide.flatten(0, 1), labels.flatten(), reduction="none").view(7, 3)
        (expected * torch.randn(7, 3)).sum().backward()
        ranks = found[str(dtype)]
        tolerance = {torch.float64: 1e-12, torch.float32: 1e-4, torch.bfloat16: 1e-4}[dtype]
        for loss, _, in_place, unlikely in ranks:
            assert loss.dtype == torch.promote_types(dtype, torch.float32)
            assert torch.equal(loss, ranks[0][0])
            assert (loss - expected).abs().max() < tolerance
            assert in_place == (dtype != torch.bfloat16)
            assert unlikely.item() == pytest.approx(1000.0, abs=2.0)
        grad = torch.cat([grad for _, grad, _, _ in ranks], -1)
        assert grad.dtype == dtype
        limit = 0.02 if dtype == torch.bfloat16 else tolerance
        assert (grad.double() - raw.grad.double()).abs().max() < limit
