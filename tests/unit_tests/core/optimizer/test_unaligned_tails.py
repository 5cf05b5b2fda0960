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
    pieces = [
        FlatSlice(None, "decay", 0, 0, *both)
        for both in zip(views, ({"m": one} for one in moments), strict=True)
    ]
    ends = UnalignedTails(pieces)
    assert ends.group == "decay"
    assert ends.parameter.numel() == 0
    got = ends.gather([torch.full((view.numel(),), 2.0) for view in views])
    assert ends.parameter.numel() == got["m"].numel() == 2 * VECTOR
    assert ends.parameter[:78].tolist() == torch.cat(views).tolist()
    assert not ends.parameter[78:].any()
    assert ends.parameter.grad.tolist() == [2.0] * 78 + [0.0] * 50
    assert got["m"][:78].tolist() == squares.tolist()
    with torch.no_grad():
        ends.parameter.add_(1000.0)
    ends.scatter({"m": got["m"] * 2})
    expected = torch.arange(300.0)
    for start, end in ((5, 10), (100, 163), (290, 300)):
        expected[start:end] += 1000.0
    assert torch.equal(weights, expected)
    assert torch.equal(squares, 2 * torch.arange(78.0))
    assert (ends.parameter.numel(), ends.parameter.grad) == (0, None)


def test_only_cpus_treat_ends_differently():
    assert vector_of(torch.device("cpu")) == VECTOR
    assert vector_of(torch.device("cuda")) == 1
    with pytest.raises(AssertionError, match="no tails of any group"):
        UnalignedTails([])
