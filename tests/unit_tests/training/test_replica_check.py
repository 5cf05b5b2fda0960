"""Replicas that differ by a bit are found on every rank alike, with the ranks and the parameter."""

import dataclasses

import pytest
import torch
from torch import nn

from megatron.core.distributed.custom_fsdp.data_parallel_config import DistributedDataParallelConfig
from megatron.core.distributed.data_parallel import DistributedDataParallel
from megatron.core.distributed.sharded_module.sharded_engine import FullyShardedDataParallel
from megatron.training.guard.exit_status import ExitStatus, status_of
from megatron.training.guard.weight_check import (
    ReplicaMismatchError,
    all_alike,
    check_replicas,
    first_difference,
    tensor_digest,
)
from megatron.training.run.training import RAISED_ALIKE, STATUS_TABLE
from tests.harness.ranks import run_ranks


@dataclasses.dataclass
class EngineLike:
    """What the check reads of an engine."""

    model: DistributedDataParallel


def model_of_seed(seed=1):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 10), nn.Linear(10, 4, bias=False))


def test_bits_decide():
    one = torch.tensor([1.0, 0.0])
    assert tensor_digest(one) == tensor_digest(one.clone())
    assert tensor_digest(one) != tensor_digest(torch.tensor([1.0, -0.0]))  # equal as numbers
    zeros = torch.zeros(2, 3, dtype=torch.bfloat16)
    assert tensor_digest(zeros.t()) == tensor_digest(torch.zeros(6, dtype=torch.bfloat16))
    assert tensor_digest(torch.tensor(2.0)) == tensor_digest(torch.tensor([2.0]))


def test_only_ranks_of_one_place_are_compared():
    assert all_alike([[0, 0, 0, "a"], [0, 0, 0, "a"], [1, 0, 0, "b"], [1, 0, 0, "b"]])
    assert not all_alike([[0, 0, 0, "a"], [0, 0, 0, "b"], [1, 0, 0, "a"]])


def test_the_fewer_ranks_and_the_first_parameter_are_named():
    everyone = [[0, 0, 0, d] for d in ("a", "a", "b", "a")]
    digests = [{"u": "1", "v": "2", "w": "3"} for _ in range(4)]
    digests[2] = {"u": "1", "v": "x", "w": "y"}
    found = first_difference(everyone, digests)
    assert found == "ranks [2] and [0, 1, 3] hold different bits of v"


def checked(engine, ctx):
    """What the check says."""
    try:
        check_replicas(engine, ctx.ps, 7)
    except ReplicaMismatchError as error:
        return str(error)
    return None


def whole(ctx, strategy):
    torch.set_num_threads(1)
    config = DistributedDataParallelConfig(data_parallel_sharding_strategy=strategy)
    engine = EngineLike(DistributedDataParallel(model_of_seed(), ctx.ps, config))
    before = checked(engine, ctx)
    if ctx.rank == 1:
        weight = engine.model.buffer.weight("1.weight").view(-1)
        weight[3:4].view(torch.int32).bitwise_xor_(1)
    return before, checked(engine, ctx)


@pytest.mark.parametrize("strategy", ["no_shard", "optim"])
def test_a_flipped_bit_of_whole_weights_is_found(strategy):
    for before, after in run_ranks(whole, 3, strategy):
        assert before is None
        assert after.startswith(
            "iteration 7: ranks [1] and [0, 2] hold different bits of 1.weight. These replicas started alike"
        )


def sharded(ctx):
    torch.set_num_threads(1)
    ps = ctx.make_ps(dp=4, instances=2)
    config = DistributedDataParallelConfig(
        use_custom_fsdp=True,
        data_parallel_sharding_strategy="optim_grads_params",
        num_distributed_optimizer_instances=2,
    )
    model = FullyShardedDataParallel(model_of_seed(), ps, config, fsdp_unit_modules=("Linear",))
    engine = EngineLike(model)
    ctx = dataclasses.make_dataclass("Context", ["ps"])(ps)
    before = checked(engine, ctx)
    if ps.rank == 3:
        engine.model.buffer.buckets[0].weights[:1].view(torch.int32).bitwise_xor_(1)
    return before, checked(engine, ctx)


def test_a_flipped_bit_of_a_shard_is_found_among_instances():
    for before, after in run_ranks(sharded, 4):
        assert before is None
        assert "ranks [3] and [1] hold different bits of the shard of unit" in after


def test_it_ends_the_run_as_a_machine_that_is_not_to_be_trusted():
    assert status_of(ReplicaMismatchError("x"), STATUS_TABLE) is ExitStatus.RERUN_INVALID
    assert issubclass(ReplicaMismatchError, RAISED_ALIKE)  # one rank of a machine says it
