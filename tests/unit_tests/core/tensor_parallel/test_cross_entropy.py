"""Cross entropy against torch's, and that it works in the logits' memory."""

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

from megatron.core.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy


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
