"""`fully_shard`: what moves, in which order, what is held, what is refused, and how training goes on after errors."""

from __future__ import annotations

import copy
import functools
import time

import pytest
import torch
from torch import nn

from megatron.core.module import ModelError
from megatron.core.sharding_table import ShardPlace, sharding_of
from megatron.core.transport import collectives
from tests.harness.ranks import share_ranks
from tests.harness.sharded_training import (
    STRATEGIES,
    WIDTH,
    Block,
    Net,
    Ordered,
    assert_at_rest,
    assert_same_weights,
    calls,
    check_parity,
    persistent_bytes,
    seeded,
    sharded,
    square_loss,
    token_loss,
    train_sharded,
    train_whole,
    unit_sizes,
)

UNITS = 5  # of Net: embed, three blocks, norm+head


SGD = functools.partial(torch.optim.SGD, lr=0.1)


def net() -> nn.Module:
    return Net().double()


# What moves ---------------------------------------------------------------------------------------------


def counts_of_every_strategy_and_accumulation(ctx) -> None:
    """AG, RS and AR of a step: per microbatch where gradients are cut, once where they are whole or inside no_sync."""
    a_microbatch = (
        2 * UNITS - 2
    )  # zero3: none for the embedding's backward, none between head's forward and backward
    for microbatches in (1, 2, 3):
        for no_sync in (False, True):
            expected = {
                "no_shard": {"all_reduce": UNITS},
                "optim": {"all_gather": UNITS, "reduce_scatter": UNITS},
                "optim_grads": {
                    # after every backward that reduces: anybody may have updated the shards
                    "all_gather": UNITS * (1 if no_sync else microbatches),
                    "reduce_scatter": UNITS * (1 if no_sync else microbatches),
                },
                "optim_grads_params": {
                    "all_gather": a_microbatch * microbatches,
                    "reduce_scatter": UNITS * (1 if no_sync else microbatches),
                },
            }
            for strategy in STRATEGIES:
                if strategy in ("no_shard", "optim") and not no_sync:
                    continue
                found = check_parity(
                    ctx,
                    net,
                    token_loss,
                    ga=microbatches,
                    no_sync=no_sync,
                    data_parallel_sharding_strategy=strategy,
                )
                assert calls(found.traffic) == expected[strategy], (
                    strategy,
                    microbatches,
                    no_sync,
                    found.traffic,
                )
                full = 8 * sum(unit_sizes(found.model.engine))
                if strategy == "optim":
                    assert found.traffic["all_gather"][1] == full == found.traffic["reduce_scatter"][1]


def a_small_bound_moves_the_same_and_holds_one_unit(ctx) -> None:
    plain = train_sharded(ctx, net, token_loss)
    small = check_parity(ctx, net, token_loss, suggested_communication_unit_size=1)
    large = check_parity(ctx, net, token_loss, suggested_communication_unit_size=10**9)
    assert small.traffic == plain.traffic == large.traffic
    sizes = unit_sizes(plain.model.engine)
    largest = max(sizes)
    assert large.model.engine.memory_tracker.peak("gathered") > 8 * largest
    bound = 8 * 2 * sum(sizes) // len(sizes)
    assert 8 * largest < plain.model.engine.memory_tracker.peak("gathered") <= bound, "one ahead, and no more"
    held = small.model.engine.memory_tracker.peak("gathered")
    assert held == largest * 8, (held, largest)
    assert_same_weights(small.weights, plain.weights, 0.0)


# In which order -----------------------------------------------------------------------------------------


def an_order_other_than_that_of_registration(ctx) -> None:
    for strategy in STRATEGIES:
        check_parity(
            ctx,
            lambda: Ordered().double(),
            square_loss(WIDTH),
            ga=2,
            data_parallel_sharding_strategy=strategy,
            no_sync=strategy in ("no_shard", "optim"),
        )


def an_order_that_changes(ctx) -> None:
    orders = ([0, 1, 2, 3], [0, 1, 2, 3], [3, 1, 0, 2], [3, 1, 0, 2], [1, 3], [0, 1, 2, 3])

    def reordered(model, sample):
        inner = getattr(model, "module", model)
        inner.order = orders[sample // 1000]
        return square_loss(WIDTH)(model, sample)

    for strategy in STRATEGIES:
        check_parity(
            ctx,
            lambda: Ordered().double(),
            reordered,
            steps=len(orders),
            optimizer=SGD,
            data_parallel_sharding_strategy=strategy,
        )
    model = sharded(ctx, lambda: Ordered().double())
    for step, order in enumerate(orders):
        model.order = order
        square_loss(WIDTH)(model, step).backward()
        model.zero_grad()
    square_loss(WIDTH)(model, 0).backward()
    assert_at_rest(model)


# What is held -------------------------------------------------------------------------------------------


def persistent_bytes_are_those_of_the_formula(ctx) -> None:
    for strategy in STRATEGIES:
        for dtype, main in ((torch.float64, 0), (torch.bfloat16, 4)):
            model = sharded(
                ctx, lambda dtype=dtype: Net().to(dtype), data_parallel_sharding_strategy=strategy
            )
            numel = sum(unit_sizes(model.engine))
            predicted = persistent_bytes(
                numel,
                sharding_of(strategy, "no_shard"),
                ShardPlace(ctx.rank, ctx.world_size, 0, 1),
                weight_itemsize=dtype.itemsize,
                main_itemsize=main,
                grad_itemsize=main or dtype.itemsize,
            )
            cut = strategy.startswith("optim_grads")
            built = model.engine.memory_tracker.live("main_grads")
            assert built == (0 if cut else predicted["main_grads"]), (strategy, built)
            token_loss(model, 0).backward()
            assert_at_rest(model)
            held = {
                name: model.engine.memory_tracker.live(name)
                for name in ("weights", "main_weights", "main_grads")
            }
            assert held == {name: predicted[name] for name in held}, (strategy, dtype, held, predicted)
            padding = numel - sum(parameter.numel() for parameter in seeded(net).parameters())
            assert 0 <= padding < UNITS * 128 * ctx.world_size, padding
            assert sum(held.values()) == model.engine.memory_tracker.persistent_bytes


# Errors -------------------------------------------------------------------------------------------------


class Failing(Net):
    fails = None

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for index, block in enumerate(self.blocks):
            x = block(x)
            if self.fails == ("forward", index):
                raise RuntimeError("on purpose")
            if self.fails == ("backward", index):
                x.register_hook(_fail)
        return self.head(self.norm(x))


def _fail(grad: torch.Tensor) -> None:
    raise RuntimeError("on purpose")


def training_goes_on_after_an_exception(ctx) -> None:
    expected = train_whole(net, token_loss, ctx.world_size, steps=4)
    for strategy in STRATEGIES:
        model = sharded(ctx, lambda: Failing().double(), data_parallel_sharding_strategy=strategy)
        updates = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for step in range(4):
            updates.zero_grad()
            for fails in ((), (("forward", 1), ("backward", 1)), (("backward", 2), ("forward", 0)))[step % 3]:
                model.fails = fails
                with pytest.raises(RuntimeError, match="on purpose"):
                    token_loss(model, 5).backward()
                updates.zero_grad()
            model.fails = None
            token_loss(model, 1000 * step + ctx.rank).backward()
            updates.step()
        assert_same_weights(model.full_state_dict(), expected.weights)
        assert_at_rest(model)


def ranks_fail_at_different_places(ctx) -> None:
    """In backward: at different units, and where weights and gradients are whole one rank alone. Where weights are
    gathered, at one unit: a gather needs all ranks."""
    expected = train_whole(net, token_loss, ctx.world_size, steps=3)
    for strategy in ("no_shard", "optim_grads", "optim_grads_params"):
        model = sharded(ctx, lambda: Failing().double(), data_parallel_sharding_strategy=strategy)
        updates = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for step in range(3):
            updates.zero_grad()
            if strategy != "no_shard" or ctx.rank == 1:
                model.fails = ("backward", 1 if strategy == "optim_grads_params" else 1 + ctx.rank)
                with pytest.raises(RuntimeError, match="on purpose"):
                    token_loss(model, 5).backward()
            else:
                token_loss(model, 5).backward()
            updates.zero_grad()
            model.fails = None
            token_loss(model, 1000 * step + ctx.rank).backward()
            updates.step()
        assert_same_weights(model.full_state_dict(), expected.weights)
        assert_at_rest(model)


def writes_wait_for_readers(ctx) -> None:
    """Behind units that are called by themselves, and behind evaluations that end with an error: a rank that is late
    still reads the others' weights, which these write next."""

    def late(module, args) -> None:
        time.sleep(0.03 * ctx.rank)

    for reading in ("units", "units, with gradients", "an error"):
        model = sharded(ctx, lambda: Failing().double(), data_parallel_sharding_strategy="optim_grads_params")
        token_loss(model, 0).backward()
        model.zero_grad()
        before = {name: value.clone() for name, value in model.full_state_dict().items()}
        seen: dict[str, list[torch.Tensor]] = {}
        for name, block in model.blocks.named_children():
            block.register_forward_pre_hook(late, prepend=True)
            block.register_forward_pre_hook(functools.partial(note_weights, seen, f"blocks.{name}."))
        if reading == "an error":
            model.fails = ("forward", 2)
            with torch.no_grad(), pytest.raises(RuntimeError, match="on purpose"):
                token_loss(model, 0)
        else:
            x = torch.zeros(2, WIDTH, dtype=torch.float64)
            with torch.set_grad_enabled("gradients" in reading):
                for block in model.blocks:
                    x = block(x)
        with torch.no_grad():
            for shard in model.parameters():
                shard.add_(1.0)
        assert len(seen) == 3
        for prefix, values in seen.items():
            own = [value for name, value in before.items() if name.startswith(prefix)]
            assert all(torch.equal(a, b) for a, b in zip(values, own, strict=True)), (reading, prefix)
        collectives.barrier(ctx.ps.control_group)


def note_weights(seen, prefix, module, args) -> None:
    seen[prefix] = [parameter.detach().clone() for parameter in module.parameters()]


class InPlace(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x += 1
        return super().forward(x)


def units_that_change_their_inputs_in_place(ctx) -> None:
    """Nothing listens to gradients of inputs."""
    for strategy in STRATEGIES:
        check_parity(
            ctx,
            lambda: nn.Sequential(Block(), InPlace(), InPlace()).double(),
            square_loss(WIDTH),
            ga=2,
            data_parallel_sharding_strategy=strategy,
        )


def refusals(ctx) -> None:
    with pytest.raises(ModelError, match=r"no module of the model matches; its classes are .*Block"):
        sharded(ctx, net, units=[nn.LSTM])
    with pytest.raises(ModelError, match=r"no module.*matches"):
        sharded(ctx, net, units=["Blok"])
    with pytest.raises(ModelError, match=r"the model has no modules \['heads'\]"):
        sharded(ctx, net, units=[("embed", "heads")])
    model = sharded(ctx, net)
    with pytest.raises(ModelError, match="convert the module before fully_shard"):
        model.to(torch.float32)
    assert model.to(torch.float64) is model
    with pytest.raises(ModelError, match="load full_state_dict"):
        copy.deepcopy(model)
    with pytest.raises(ModelError, match=r"missing, unknown or of another shape: \['embed.weight'\]"):
        model.load_full_state_dict({n: p for n, p in model.full_state_dict().items() if n != "embed.weight"})
    for field, value in (
        ("fsdp_double_buffer", True),
        ("fsdp_memory_budget", 5),
        ("fsdp_reshard_policy", "backward"),
        ("fsdp_reshard_policy", "budget"),
    ):
        with pytest.raises(
            ModelError, match=rf"{field}={value!r}: a loop without a plan can have .*pretrain\(\)"
        ):
            sharded(ctx, net, **{field: value})


def a_second_backward_of_whole_gradients_is_refused(ctx) -> None:
    for strategy in ("no_shard", "optim"):
        model = sharded(ctx, net, data_parallel_sharding_strategy=strategy)
        token_loss(model, 0).backward()
        loss = token_loss(model, 1)
        with pytest.raises(
            ModelError, match=rf"{strategy}: gradients of an earlier backward are there.*no_sync"
        ):
            loss.backward()
        model.zero_grad(set_to_none=False)
        token_loss(model, 1).backward()


CHECKS_ON_TWO = (
    counts_of_every_strategy_and_accumulation,
    a_small_bound_moves_the_same_and_holds_one_unit,
    an_order_other_than_that_of_registration,
    an_order_that_changes,
    persistent_bytes_are_those_of_the_formula,
    training_goes_on_after_an_exception,
    ranks_fail_at_different_places,
    writes_wait_for_readers,
    units_that_change_their_inputs_in_place,
    refusals,
    a_second_backward_of_whole_gradients_is_refused,
)


@pytest.mark.grid
def test_order_and_errors_on_two_ranks():
    share_ranks(2, {check.__name__: check for check in CHECKS_ON_TWO})
