"""A sharded module's whole state: what the plain module's `state_dict()` has, out and in."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from megatron.core.distributed.sharded_module.fully_shard import fully_shard
from megatron.core.module import ModelError
from megatron.core.transport.parallel_state import single_process
from tests.harness.ranks import share_ranks
from tests.harness.sharded_training import STRATEGIES, WIDTH, Net, assert_at_rest, seeded, sharded, unit_sizes

VOCAB = 24


class TiedWithBuffers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("transient", torch.zeros(2), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.embed(tokens)))


def whole_state_is_that_of_the_plain_module(ctx) -> None:
    """Into a plain module, strictly, and from a plain module's own state_dict()."""
    other = seeded(TiedWithBuffers, 5)
    other(torch.arange(VOCAB))  # running statistics that are not the initial ones
    for strategy in STRATEGIES:
        model = sharded(ctx, TiedWithBuffers, [("embed", "head")], data_parallel_sharding_strategy=strategy)
        model(torch.arange(VOCAB)).square().mean().backward()
        for parameter in model.parameters():
            parameter.data -= 0.1 * parameter.grad
        state = model.full_state_dict()
        plain = seeded(TiedWithBuffers, 1)
        plain.load_state_dict(state)
        assert list(state) == list(plain.state_dict())
        assert torch.equal(plain.norm.running_mean, model.norm.running_mean)
        model.load_full_state_dict(other.state_dict())
        for name, value in model.full_state_dict().items():
            assert torch.equal(value, other.state_dict()[name]), name
        assert torch.equal(model.norm.running_var, other.norm.running_var)
        one_name = {name: value for name, value in state.items() if name != "head.weight"}
        model.load_full_state_dict(one_name)
        assert torch.equal(model.full_state_dict()["head.weight"], state["embed.weight"])
        with pytest.raises(ModelError, match=r"'embed.weight' and 'head.weight' are one weight here"):
            model.load_full_state_dict({**state, "head.weight": state["embed.weight"] + 1})
        with pytest.raises(ModelError, match=r"of another shape: \['norm.running_mean'\]"):
            model.load_full_state_dict({n: v for n, v in state.items() if n != "norm.running_mean"})
        with pytest.raises(ModelError, match=r"of another shape: \['norm.running_var'\]"):
            model.load_full_state_dict({**state, "norm.running_var": torch.zeros(3)})
        with pytest.raises(ModelError, match=r"of another shape: \['more'\]"):
            model.load_full_state_dict({**state, "more": torch.zeros(3)})


def other_ranks_take_part_and_hold_nothing_afterwards(ctx) -> None:
    """Unit by unit: no more than one is whole at a time, and memory is given back."""
    model = sharded(ctx, Net)
    model.engine.memory_tracker.reset_peaks()
    state = model.full_state_dict()
    largest = 4 * max(unit_sizes(model.engine))
    assert model.engine.memory_tracker.peak("gathered") == largest
    assert_at_rest(model)
    plain = seeded(Net).state_dict()
    assert list(state) == list(plain)
    assert all(torch.equal(state[name], value) for name, value in plain.items())


CHECKS = (whole_state_is_that_of_the_plain_module, other_ranks_take_part_and_hold_nothing_afterwards)


def test_whole_state_on_two_ranks():
    share_ranks(2, {check.__name__: check for check in CHECKS})


class WithExtra(nn.Linear):
    """State that is no tensor."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.seen = 0

    def get_extra_state(self) -> dict[str, int]:
        return {"seen": self.seen}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.seen = state["seen"]


def test_copies_are_taken_and_extra_state_goes_along():
    module = fully_shard(WithExtra(), single_process())
    module.seen = 7
    state = module.full_state_dict()
    assert state["_extra_state"] == {"seen": 7}
    module.seen = 0
    with torch.no_grad():
        module.weight.zero_()
    assert state["weight"].any(), "a copy"
    module.load_full_state_dict(state)
    assert torch.equal(module.weight, state["weight"])
    assert module.seen == 7
    with pytest.raises(ModelError, match=r"missing, unknown or of another shape: \['bias'\]"):
        module.load_full_state_dict({name: value for name, value in state.items() if name != "bias"})
