"""Ours against the plain-PyTorch reference in fp64: loss and every gradient to 1e-10, ten AdamW steps to 1e-9."""

import pytest
import torch

from tests.harness.tiny_models import SEQ, VARIANTS, backward_microbatch, reference_of, tiny_batch, tiny_model


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return ((a - b).norm() / b.norm().clamp_min(1e-30)).item()


@pytest.mark.parametrize("variant", VARIANTS)
def test_loss_and_gradients(variant):
    model = tiny_model(**VARIANTS[variant])
    reference = reference_of(model)
    batch = tiny_batch()
    loss = backward_microbatch(model, batch)
    expected = reference(batch[0], batch[1]).mean()
    expected.backward()
    assert abs(loss.item() - expected.item()) < 1e-10
    grads = model.summed_grads()
    assert set(grads) == {name for name, _ in reference.named_parameters()}
    for name, parameter in reference.named_parameters():
        assert (grads[name] - parameter.grad).abs().max() < 1e-10, name
        if not name.endswith("k_layernorm.bias"):
            assert relative(grads[name], parameter.grad) < 1e-9 or parameter.grad.abs().max() < 1e-14, name
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("variant", VARIANTS)
def test_ten_adamw_steps(variant):
    model = tiny_model(**VARIANTS[variant])
    reference = reference_of(model)
    ours = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-6, weight_decay=0.1)
    theirs = torch.optim.AdamW(reference.parameters(), lr=1e-2, eps=1e-6, weight_decay=0.1)
    for step in range(10):
        batch = tiny_batch(seed=step)
        loss = backward_microbatch(model, batch)
        for name, grad in model.summed_grads().items():
            model.get_parameter(name).grad = grad.clone()
        ours.step()
        ours.zero_grad()
        for buffer in model.context.grads.main_grads.values():
            buffer.zero_()
        expected = reference(batch[0], batch[1]).mean()
        expected.backward()
        theirs.step()
        theirs.zero_grad()
        assert abs(loss.item() - expected.item()) < 1e-9, step
    for name, parameter in reference.named_parameters():
        assert (model.get_parameter(name) - parameter).abs().max() < 1e-9, name


def test_mask_of_the_batch():
    """Documents separated by a mask: True = masked, [b, 1, s, s]."""
    for backend in ("auto", "unfused"):
        model = tiny_model(attention_backend=backend)
        reference = reference_of(model)
        batch = tiny_batch(batch=2)
        cut = torch.tensor([5, 9])
        rows, columns = torch.meshgrid(torch.arange(SEQ), torch.arange(SEQ), indexing="ij")
        crosses = (rows[None] >= cut[:, None, None]) & (columns[None] < cut[:, None, None])
        mask = (crosses | (columns > rows)[None])[:, None]
        loss = backward_microbatch(model, batch, mask=mask)
        expected = reference(batch[0], batch[1], mask).mean()
        expected.backward()
        assert abs(loss.item() - expected.item()) < 1e-10
        for name, parameter in reference.named_parameters():
            assert (model.summed_grads()[name] - parameter.grad).abs().max() < 1e-10, name
