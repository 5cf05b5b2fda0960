"""All ranks begin with rank 0's weights, buffers included; what has no memory yet is left alone."""

from __future__ import annotations

import torch
from torch import nn

from megatron.core.transport.collectives import broadcast_weights
from tests.harness.ranks import run_ranks


def test_every_rank_takes_rank_zeros_parameters_and_buffers():
    def take(ctx):
        torch.manual_seed(ctx.rank)
        model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
        model[1].running_mean.fill_(float(ctx.rank + 5))
        model[0].bias.requires_grad_(False)
        other = nn.Linear(2, 2, device="meta")
        weight = model[0].weight
        broadcast_weights([model, other], ctx.ps)
        assert other.weight.is_meta
        assert model[0].weight is weight
        assert weight.grad_fn is None
        return {name: value.tolist() for name, value in model.state_dict().items()}

    first, second = run_ranks(take, 2)
    torch.manual_seed(0)
    assert first == second
    assert first["0.weight"] == nn.Linear(3, 2).weight.tolist()
    assert first["1.running_mean"] == [5.0, 5.0]
