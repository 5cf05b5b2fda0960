"""`fully_shard` over models with parameters that are unused, frozen, shared or odd, and with structured inputs."""

from __future__ import annotations

import dataclasses
import functools

import pytest
import torch
from torch import nn

from tests.harness.ranks import share_ranks
from tests.harness.sharded_training import (
    STRATEGIES,
    WIDTH,
    Block,
    Net,
    Ordered,
    Tied,
    calls,
    check_parity,
    square_loss,
    token_loss,
    vectors,
)

SGD = functools.partial(torch.optim.SGD, lr=0.1)


def net() -> nn.Module:
    return Net().double()


# Unused -------------------------------------------------------------------------------------------------


class Branches(nn.Module):
    """Two outputs of which one is never used, a module that never runs, a parameter that only some ranks use."""

    def __init__(self) -> None:
        super().__init__()
        self.first = TwoOutputs()
        self.never = Block()
        self.second = Sometimes()

    def forward(self, x: torch.Tensor, extra: bool) -> torch.Tensor:
        used, _ = self.first(x)
        return self.second(used, extra)


class TwoOutputs(Block):
    def __init__(self) -> None:
        super().__init__()
        self.side = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return super().forward(x), self.side(x)


class Sometimes(Block):
    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, extra: bool) -> torch.Tensor:
        y = super().forward(x)
        return self.extra(y) if extra else y


def unused_outputs_modules_and_parameters_on_one_rank(ctx) -> None:
    for strategy in STRATEGIES:
        for microbatches in (1, 2):
            check_parity(
                ctx,
                lambda: Branches().double(),
                lambda model, sample: model(vectors(sample, WIDTH), sample % 2 == 0).square().mean(),
                ga=microbatches,
                optimizer=SGD,  # a plain Adam would skip what has no gradient at all
                units=[TwoOutputs, Sometimes, Block],
                data_parallel_sharding_strategy=strategy,
            )


def whole_units_unused_on_one_rank_where_weights_and_gradients_are_whole(ctx) -> None:
    def loss(model, sample):
        inner = getattr(model, "module", model)
        inner.order = [0, 2] if sample % 2 else [0, 1, 2, 3]
        return square_loss(WIDTH)(model, sample)

    for strategy in ("no_shard", "optim"):
        check_parity(
            ctx, lambda: Ordered().double(), loss, optimizer=SGD, data_parallel_sharding_strategy=strategy
        )


# Frozen and shared --------------------------------------------------------------------------------------


def frozen(which: str) -> nn.Module:
    model = Net().double()
    for name, parameter in model.named_parameters():
        within = name.endswith(".bias") or name.endswith("up.weight")
        keep = {
            "within": not within,
            "units": not name.startswith(("embed", "blocks.1")),
            "last": not name.startswith(("norm", "head")),
            "all but one": name == "blocks.1.down.weight",
        }[which]
        parameter.requires_grad_(keep)
    return model


def frozen_parameters(ctx) -> None:
    for which in ("within", "units", "last", "all but one"):
        for strategy in STRATEGIES:
            for microbatches in (2,):
                found = check_parity(
                    ctx,
                    functools.partial(frozen, which),
                    token_loss,
                    ga=microbatches,
                    data_parallel_sharding_strategy=strategy,
                )
        trained = [name for name, p in frozen(which).named_parameters() if p.requires_grad]
        assert [name for name, p in found.model.named_parameters() if p.requires_grad] == trained
        if which == "all but one":
            assert calls(found.traffic)["reduce_scatter"] == 2, found.traffic  # one unit, two microbatches


def shared_parameters_are_one_unit(ctx) -> None:
    """Named together, or found to share."""
    for units in ([Block], ["Block", ("embed", "head")]):
        _tied_parity(ctx, units)


def _tied_parity(ctx, units: list) -> None:
    for strategy in STRATEGIES:
        found = check_parity(
            ctx,
            lambda: Tied().double(),
            token_loss,
            units=units,
            ga=2,
            data_parallel_sharding_strategy=strategy,
        )
    names = [unit.name for unit in found.model.engine.units]
    together = "embed+norm+head" if units == [Block] else "embed+head"
    assert together in names, names
    gathers = 1 + 2 + 2 + 2 * (units != [Block])  # tied: once; blocks twice; the norm by itself twice
    assert calls(found.traffic)["all_gather"] == 2 * gathers, found.traffic


class SharedLayer(nn.Module):
    """One linear layer in two blocks, of a width that two ranks do not divide."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(7, 7), nn.Linear(7, 7)
        self.c = nn.Linear(7, 7)
        self.c.weight = self.a.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.c(self.b(self.a(x).tanh()).tanh())


def shared_parameters_of_uneven_shape(ctx) -> None:
    for units in ([SharedLayer], [("a", "c"), "b"]):
        check_parity(
            ctx, lambda: SharedLayer().double(), square_loss(7), units=[u for u in units if u != "b"]
        )


# Of unusual shape ---------------------------------------------------------------------------------------


class Odd(nn.Module):
    """A scalar, a transposed and an empty parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.turned = nn.Parameter(torch.randn(WIDTH, 9).t())
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.block = Block()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.block(x * self.scale) @ self.turned.t() + self.empty.sum()


def scalar_empty_and_noncontiguous_parameters(ctx) -> None:
    for strategy in STRATEGIES:
        check_parity(
            ctx, lambda: Odd().double(), square_loss(WIDTH), data_parallel_sharding_strategy=strategy
        )


@dataclasses.dataclass
class Batch:
    x: torch.Tensor
    nested: dict[str, list[torch.Tensor]]
    label: str


class Structured(nn.Module):
    """A dataclass in, a dict of tuples out; keyword arguments, None and strings between units."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = _Opening(), _Closing()

    def forward(self, batch: Batch) -> torch.Tensor:
        out = self.first(batch, scale=2.0, nothing=None)
        return self.second(**out)


class _Opening(Block):
    def forward(self, batch: Batch, *, scale: float, nothing: None) -> dict[str, object]:
        x = super().forward(batch.x * scale + batch.nested["more"][0])
        return {"pair": (x, x.detach()), "label": batch.label, "count": x.shape[0]}


class _Closing(Block):
    def forward(self, *, pair: tuple[torch.Tensor, torch.Tensor], label: str, count: int) -> torch.Tensor:
        assert label == "kept", label
        return super().forward(pair[0] + pair[1] / count)


def nested_and_keyword_inputs_and_outputs(ctx) -> None:
    def loss(model, sample):
        x = vectors(sample, WIDTH)
        return model(Batch(x, {"more": [x.cos()]}, "kept")).square().mean()

    for strategy in STRATEGIES:
        found = check_parity(
            ctx,
            lambda: Structured().double(),
            loss,
            units=[_Opening, _Closing],
            data_parallel_sharding_strategy=strategy,
        )
    assert calls(found.traffic) == {"all_gather": 3, "reduce_scatter": 2}, found.traffic


CHECKS_ON_TWO = (
    unused_outputs_modules_and_parameters_on_one_rank,
    whole_units_unused_on_one_rank_where_weights_and_gradients_are_whole,
    frozen_parameters,
    shared_parameters_are_one_unit,
    shared_parameters_of_uneven_shape,
    scalar_empty_and_noncontiguous_parameters,
    nested_and_keyword_inputs_and_outputs,
)


@pytest.mark.grid
def test_modules_on_two_ranks():
    share_ranks(2, {check.__name__: check for check in CHECKS_ON_TWO})
