"""The ends of slices are updated as one tensor of whole vectors."""

from __future__ import annotations

import pytest
import torch

from megatron.core.optimizer.flat_update import VECTOR, FlatSlice, UnalignedTails, vector_of


def test_ends_are_gathered_filled_up_and_put_back():
    weights = torch.arange(300.0)
    views = [weights[5:10], weights[100:163], weights[290:]]
    squares = torch.arange(78.0)
    moments = [squares[:5], squares[5:68], squares[68:]]
    steps = torch.zeros(())
    pieces = [
        FlatSlice("decay", weight, {"m": moment}, steps, None, 0, 0)
        for weight, moment in zip(views, moments, strict=True)
    ]
    tails = UnalignedTails(pieces)
    whole, grads = tails.gather([torch.full((view.numel(),), 2.0) for view in views])
    assert whole.group == "decay"
    assert whole.num_steps is steps
    assert whole.main_weights.numel() == whole.moments["m"].numel() == grads.numel() == 2 * VECTOR
    assert whole.main_weights[:78].tolist() == torch.cat(views).tolist()
    assert not whole.main_weights[78:].any()
    assert grads.tolist() == [2.0] * 78 + [0.0] * 50
    assert whole.moments["m"][:78].tolist() == squares.tolist()
    whole.main_weights.add_(1000.0)
    whole.moments["m"].mul_(2)
    tails.scatter(whole)
    expected = torch.arange(300.0)
    for start, end in ((5, 10), (100, 163), (290, 300)):
        expected[start:end] += 1000.0
    assert torch.equal(weights, expected)
    assert torch.equal(squares, 2 * torch.arange(78.0))


def test_only_cpus_treat_ends_differently():
    assert vector_of(torch.device("cpu")) == VECTOR
    assert vector_of(torch.device("cuda")) == 1
    with pytest.raises(AssertionError, match="no tails of any group"):
        UnalignedTails([])
