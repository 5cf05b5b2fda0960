"""The engine in a loop without a plan: steps of known length, what they move and hold, what it refuses."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn

from megatron.core.distributed.custom_fsdp.all_gather_pipeline import UnitState
from megatron.core.distributed.custom_fsdp.data_parallel_config import DistributedDataParallelConfig
from megatron.core.distributed.sharded_module.sharded_engine import FullyShardedDataParallel
from megatron.core.module import ModelError
from megatron.core.sharding_table import ShardOver
from tests.harness.ranks import share_ranks
from tests.harness.sharded_training import STRATEGIES, Block, Net, moved_by, seeded, token_loss, unit_sizes


def engine(ctx, model: nn.Module | None = None, **config) -> FullyShardedDataParallel:
    config = {"data_parallel_sharding_strategy": "optim_grads_params", **config}
    model = model if model is not None else seeded(lambda: Net().double())
    return FullyShardedDataParallel(
        model, ctx.ps, DistributedDataParallelConfig(**config), fsdp_unit_modules=[Block]
    )


def microbatches(ddp: FullyShardedDataParallel, ctx, count: int) -> None:
    for index in range(count):
        token_loss(ddp, index * ctx.world_size + ctx.rank).backward()
        ddp.microbatch_done(0, index)


def descend(ddp: FullyShardedDataParallel) -> None:
    """A plain step, by hand."""
    for name in ddp.buffer.names:
        ddp.buffer.main_weight_part(name).sub_(ddp.buffer.main_grad_part(name), alpha=0.01)
    ddp.buffer.copy_main_to_weights()
    ddp.weights_changed()


def gradients_are_sums_over_ranks_and_microbatches(ctx) -> None:
    reference = seeded(lambda: Net().double())
    for sample in range(2 * ctx.world_size):
        token_loss(reference, sample).backward()
    expected = {name: parameter.grad for name, parameter in reference.named_parameters()}
    for strategy in STRATEGIES:
        ddp = engine(ctx, data_parallel_sharding_strategy=strategy)
        for _ in range(2):  # the second with what is recorded
            ddp.begin_step(2)
            microbatches(ddp, ctx, 2)
            assert ddp.is_stepping
            ddp.finish()
            assert not ddp.is_stepping
            for name, whole in expected.items():
                low, high = ddp.buffer.part(name, ddp.sharding.optimizer)
                found = ddp.buffer.main_grad_part(name)
                torch.testing.assert_close(found, whole.flatten()[low:high], rtol=0, atol=1e-12)
        assert ddp.memory_tracker.transient_bytes == 0


def valid_steps_that_no_plan_knows(ctx) -> None:
    """Layers dropped, an evaluation between forward and backward, weights read inside a step: no check ends the
    run, and the gradients are right."""

    class Dropped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.drop = Net().double(), False

        def forward(self, batch):
            x = self.net.embed(batch)
            for block in list(self.net.blocks)[self.drop :]:
                x = block(x)
            return self.net.head(self.net.norm(x))

    model = seeded(Dropped)
    ddp = engine(ctx, model)
    for step in range(4):
        ddp.begin_step(2)
        for index in range(2):
            model.drop = step == 1 and index == 0
            token_loss(ddp, index).backward()
            ddp.microbatch_done(0, index)
        ddp.finish()
        descend(ddp)

    reference = seeded(lambda: Net().double())
    for sample in range(2 * ctx.world_size):
        token_loss(reference, sample).backward()
    for between in ("evaluate", "read"):
        ddp = engine(ctx)
        for _ in range(3):
            ddp.begin_step(2)
            for index in range(2):
                loss = token_loss(ddp, index * ctx.world_size + ctx.rank)
                if between == "evaluate":
                    with torch.no_grad():
                        token_loss(ddp, 7)
                else:
                    with ddp.gathered(range(len(ddp.units))):
                        pass
                loss.backward()
                ddp.microbatch_done(0, index)
            ddp.finish()
            for name, whole in reference.named_parameters():
                low, high = ddp.buffer.part(name, ddp.sharding.optimizer)
                found = ddp.buffer.main_grad_part(name)
                torch.testing.assert_close(found, whole.grad.flatten()[low:high], rtol=0, atol=1e-12)


def gathers_of_units_that_did_not_run_end_with_the_step(ctx) -> None:
    """The optimizer writes the parts that they send."""

    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = Block().double(), Block().double()

        def forward(self, x):
            return self.used(x)

    for strategy in ("optim", "no_shard"):
        ddp = engine(ctx, seeded(Half), data_parallel_sharding_strategy=strategy, overlap_param_gather=True)
        for _ in range(2):
            descend(ddp)
            ddp.begin_step(1)
            ddp(torch.ones(2, 16, dtype=torch.float64)).sum().backward()
            ddp.microbatch_done(0, 0)
            under_way = ddp.gathers.state(1) is UnitState.GATHERING
            assert under_way is (strategy == "optim"), "the unused block's"
            ddp.finish()
            assert ddp.gathers.state(1) is UnitState.UNSHARDED


def sizes_of_buckets_have_no_effect(ctx) -> None:
    """A unit is a bucket in every row."""
    for strategy in STRATEGIES:
        plain = engine(ctx, data_parallel_sharding_strategy=strategy)
        for sizes in ({"ddp_bucket_size": 10**6}, {"ddp_num_buckets": 2}, {"ddp_bucket_size": 7}):
            ddp = engine(ctx, data_parallel_sharding_strategy=strategy, **sizes)
            assert [bucket.name for bucket in ddp.buffer.buckets] == [
                one.name for one in plain.buffer.buckets
            ]
            ddp.begin_step(1)
            microbatches(ddp, ctx, 1)
            ddp.finish()


def reading_whole_weights_outside_of_the_model(ctx) -> None:
    ddp = engine(ctx)
    reference = dict(seeded(lambda: Net().double()).named_parameters())
    with ddp.gathered(range(len(ddp.units))):
        for name, weight in reference.items():
            assert torch.equal(ddp.buffer.weight(name), weight), name
    assert ddp.memory_tracker.live("gathered") == 0
    with ddp.gathered([1]):
        assert ddp.memory_tracker.live("gathered", "blocks.0") == ddp.memory_tracker.live("gathered") > 0
    ddp.driver.unshard()
    token_loss(ddp, 0)  # what the model uses is its own
    ddp.driver.reshard()
    ddp.weights_changed()
    assert ddp.memory_tracker.live("gathered") == 0


def steps_without_reduction_tell_what_is_not_finite(ctx) -> None:
    ddp = engine(ctx)
    ddp.begin_step(1, reduce_gradients=False)
    (token_loss(ddp, 0) * float("inf")).backward()
    ddp.microbatch_done(0, 0)
    assert "blocks.0.up.weight" in ddp.nonfinite_keys()
    assert "reduce_scatter" not in moved_by(ddp)
    assert ddp.memory_tracker.transient_bytes == 0
    ddp.begin_step(1)
    microbatches(ddp, ctx, 1)
    ddp.finish()
    assert ddp.nonfinite_keys() == {}


def frozen_units_hold_no_more_than_the_bound(ctx) -> None:
    """No gradient tells that backward is through a frozen unit: its input's does, before the unit behind it comes."""
    model = seeded(lambda: Net().double())
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.startswith(("blocks.0", "embed")))
    ddp = engine(ctx, model, suggested_communication_unit_size=1)
    for _ in range(3):
        ddp.begin_step(1)
        microbatches(ddp, ctx, 1)
        ddp.finish()
        descend(ddp)
    assert ddp.memory_tracker.peak("gathered") == 8 * max(unit_sizes(ddp))


def an_engine_that_nobody_holds_is_freed(ctx) -> None:
    for strategy in STRATEGIES:
        ddp = engine(ctx, data_parallel_sharding_strategy=strategy)
        ddp.begin_step(1)
        microbatches(ddp, ctx, 1)
        ddp.finish()
        gone = weakref.ref(ddp)
        del ddp
        gc.collect()
        assert gone() is None, strategy


def refusals(ctx) -> None:
    halves = [nn.Sequential(), nn.Sequential()]
    for index, half in enumerate(halves):
        half.add_module(f"l{index}", nn.Linear(2, 2))
    config = DistributedDataParallelConfig(data_parallel_sharding_strategy="optim_grads")
    with pytest.raises(
        ModelError, match=r"sharding-strategy optim_grads: a rank with 2 model chunks .*use optim"
    ):
        FullyShardedDataParallel(halves, ctx.ps, config, fsdp_unit_modules=[nn.Linear])
    ddp = engine(ctx)
    with pytest.raises(AssertionError, match=r"finish\(\) outside of a step"):
        ddp.finish()
    with pytest.raises(AssertionError, match="outside of a step"):
        ddp.microbatch_done(0, 0)


def a_world_of_one(ctx) -> None:
    """Everything is whole: nothing moves, nothing is transient."""
    for strategy in STRATEGIES:
        ddp = engine(ctx, data_parallel_sharding_strategy=strategy)
        assert set(vars(ddp.sharding).values()) == {ShardOver.NONE}
        ddp.begin_step(2)
        microbatches(ddp, ctx, 2)
        ddp.finish()
        descend(ddp)
        assert (moved_by(ddp), ddp.memory_tracker.peak_transient_bytes) == ({}, 0)


CHECKS = (
    gradients_are_sums_over_ranks_and_microbatches,
    sizes_of_buckets_have_no_effect,
    valid_steps_that_no_plan_knows,
    gathers_of_units_that_did_not_run_end_with_the_step,
    reading_whole_weights_outside_of_the_model,
    steps_without_reduction_tell_what_is_not_finite,
    frozen_units_hold_no_more_than_the_bound,
    an_engine_that_nobody_holds_is_freed,
    refusals,
)


def test_engine_on_two_ranks():
    share_ranks(2, {check.__name__: check for check in CHECKS}, timeout=110)


def test_engine_on_one_rank():
    share_ranks(1, {"one": a_world_of_one})
