"""What a config means without the trainer, and what of it would have no effect."""

from __future__ import annotations

import dataclasses

import pytest

from megatron.core.distributed.custom_fsdp.data_parallel_config import DistributedDataParallelConfig
from megatron.core.distributed.sharded_module.fully_shard import (
    OF_SHARDED_GRADIENTS,
    SHARDED_GRADIENTS,
    resolve_standalone,
)
from megatron.core.module import ModelError

CHANGED = {
    "fsdp_reshard_policy": "step",
    "suggested_communication_unit_size": 9,
    "fsdp_debug": True,
    "megatron_fsdp_grad_comm_dtype": "bf16",
}


def resolved(instances: int = 1, **fields: object) -> DistributedDataParallelConfig:
    return resolve_standalone(DistributedDataParallelConfig(**fields), instances=instances)


def test_without_a_config_everything_is_cut():
    found = resolve_standalone(None, instances=2)
    assert found.data_parallel_sharding_strategy == "optim_grads_params"
    assert found.num_distributed_optimizer_instances == 2


def test_fields_of_cut_gradients_are_known_with_their_defaults():
    assert CHANGED.keys() == OF_SHARDED_GRADIENTS.keys()
    plain = DistributedDataParallelConfig()
    assert {name: getattr(plain, name) for name in OF_SHARDED_GRADIENTS} == OF_SHARDED_GRADIENTS


@pytest.mark.parametrize("field", CHANGED)
def test_what_acts_on_cut_gradients_only_is_refused_elsewhere(field):
    for strategy in ("no_shard", "optim"):
        with pytest.raises(ModelError, match=rf"{field}: no effect with .*'{strategy}'.*leave it out"):
            resolved(data_parallel_sharding_strategy=strategy, **{field: CHANGED[field]})
    for strategy in SHARDED_GRADIENTS:
        found = resolved(data_parallel_sharding_strategy=strategy, **{field: CHANGED[field]})
        assert getattr(found, field) == CHANGED[field]


def test_all_of_them_are_named_at_once():
    with pytest.raises(ModelError, match=r"fsdp_reshard_policy, suggested_.*leave them out"):
        resolved(data_parallel_sharding_strategy="optim", **CHANGED)


def test_the_distributed_optimizer_needs_a_strategy():
    with pytest.raises(ModelError, match=r"use_distributed_optimizer: .*'no_shard'"):
        resolved(use_distributed_optimizer=True)
    assert resolved(use_distributed_optimizer=True, data_parallel_sharding_strategy="optim")


def test_instances_are_those_of_the_ranks():
    with pytest.raises(
        ModelError, match=r"num_distributed_optimizer_instances=2: the ranks given have 1 instance; .*\(2, "
    ):
        resolved(data_parallel_sharding_strategy="optim", num_distributed_optimizer_instances=2)
    with pytest.raises(ModelError, match=r"=3: the ranks given have 2 instances;"):
        resolved(2, data_parallel_sharding_strategy="optim", num_distributed_optimizer_instances=3)
    for told in (1, 2):
        found = resolved(2, data_parallel_sharding_strategy="optim", num_distributed_optimizer_instances=told)
        assert found.num_distributed_optimizer_instances == 2


@pytest.mark.parametrize(
    "outer", [{"outer_dp_sharding_strategy": "optim"}, {"enable_full_sharding_in_hsdp": True}]
)
def test_the_optimizer_is_cut_over_instances_only_where_all_is_cut(outer):
    for strategy in ("no_shard", "optim", "optim_grads"):
        with pytest.raises(ModelError, match=rf"outer_dp_sharding_strategy='optim' with .*'{strategy}'"):
            resolved(2, data_parallel_sharding_strategy=strategy, **outer)
    found = resolved(2, data_parallel_sharding_strategy="optim_grads_params", **outer)
    assert found.outer_dp_sharding_strategy == "optim"


def test_nothing_else_is_changed():
    given = DistributedDataParallelConfig(
        data_parallel_sharding_strategy="optim_grads", overlap_grad_reduce=True
    )
    assert resolve_standalone(given, instances=1) == dataclasses.replace(given)
