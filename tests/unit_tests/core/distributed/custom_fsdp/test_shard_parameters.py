"""A rank's shards as parameters: names, gradients beside them, and every way in which they may have changed."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn

from megatron.core.distributed.custom_fsdp.data_parallel_config import DistributedDataParallelConfig
from megatron.core.distributed.custom_fsdp.flat_buffer import FlatBuffer
from megatron.core.distributed.sharded_module import shard_parameters
from megatron.core.distributed.sharded_module.shard_parameters import ShardParameters
from megatron.core.module import ModelError
from megatron.core.param_meta import infer_param_meta
from megatron.core.sharding_table import ShardPlace, sharding_of


def sharded(rank: int = 0, ranks: int = 2) -> tuple[FlatBuffer, ShardParameters]:
    """One rank's part of two layers: "0.weight", "0.bias" in bf16, "1.weight" frozen, "1.bias" of one element."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(16, 16, dtype=torch.bfloat16), nn.Linear(16, 1))
    module[1].weight.requires_grad_(False)
    parameters = dict(module.named_parameters())
    buffer = FlatBuffer(
        parameters,
        infer_param_meta(module),
        DistributedDataParallelConfig(data_parallel_sharding_strategy="optim_grads_params"),
        sharding=sharding_of("optim_grads_params"),
        place=ShardPlace(rank, ranks),
        device=torch.device("cpu"),
        units=dict.fromkeys(parameters, "all"),
    )
    return buffer, ShardParameters(buffer)


def test_names_and_shapes():
    for rank in range(2):
        buffer, shards = sharded(rank)
        assert shards.names == ("0.weight", "0.bias", "1.bias")
        assert list(shards.registered) == [*shards.names, "1.weight"], "frozen ones too"
        assert [shard.requires_grad for shard in shards.registered.values()] == [True, True, True, False]
        for shard, name in zip(shards.current(), shards.names, strict=True):
            assert tuple(shard.shape) == buffer.param_meta[name].global_shape, "as the whole one"
            assert isinstance(shard, nn.Parameter)
            assert shard.dtype == torch.float32, "main weights"
            assert shard.to_local().data_ptr() == buffer.main_weight_part(name).data_ptr()
    sizes = [[shard.to_local().numel() for shard in sharded(rank)[1].current()] for rank in range(2)]
    assert [sum(pair) for pair in zip(*sizes, strict=True)] == [256, 16, 1]
    assert 0 in sizes[0] + sizes[1], "some are empty"


def test_gradients_beside_them_are_those_at_rest():
    buffer, shards = sharded()
    for memory in buffer.buckets:
        if memory.main_grads is not None:
            memory.main_grads.fill_(3.0)
    for name, shard, grad in shards:
        assert shard is shards.registered[name]
        assert grad.shape == shard.to_local().shape
        assert bool((grad == 3.0).all())


def change_in_place(shards: ShardParameters) -> None:
    with torch.no_grad():
        shards.current()[0].add_(1.0)


def change_an_empty_one(shards: ShardParameters) -> None:
    """Other ranks change their part of it: this one has to answer alike."""
    with torch.no_grad():
        next(shard for shard in shards.current() if not shard.to_local().numel()).add_(1.0)


def put_new_data(shards: ShardParameters) -> None:
    first = shards.current()[0]
    first.data = first.data + 1.0


def step_unheard_by_autograd(shards: ShardParameters) -> None:
    """Fused optimizers write weights without a word."""
    updates = torch.optim.SGD(shards.current()[:1], lr=0.0, fused=True)
    shards.current()[0].grad = torch.ones_like(shards.current()[0])
    updates.step()


@pytest.mark.parametrize(
    "change", [change_in_place, change_an_empty_one, put_new_data, step_unheard_by_autograd]
)
def test_changes_are_told_once(change):
    for rank in range(2):
        _, shards = sharded(rank)
        if change is change_an_empty_one and all(shard.to_local().numel() for shard in shards.current()):
            continue
        assert not shards.take_changes(), "made is not changed"
        change(shards)
        assert shards.take_changes(), change.__name__
        assert not shards.take_changes(), change.__name__


def test_an_optimizer_of_other_parameters_changes_nothing():
    _, shards = sharded()
    other = nn.Parameter(torch.ones(2))
    other.grad = torch.ones(2)
    torch.optim.SGD([other], lr=0.1).step()
    assert not shards.may_have_changed
    assert not shards.take_changes()


def test_after_a_backward_anybody_may_have_written():
    _, shards = sharded()
    shards.current()[0].data.add_(1.0)
    assert not shards.take_changes(), "a write to .data is told by nothing"
    shards.may_have_changed = True
    assert shards.take_changes()
    assert not shards.take_changes()


def test_values_with_memory_of_their_own_come_to_where_the_engine_reads_them():
    buffer, shards = sharded()
    first = shards.current()[0]
    first.data = torch.full_like(first, 5.0)
    assert shards.take_changes()
    assert bool((buffer.main_weight_part("0.weight") == 5.0).all())
    assert first.to_local().data_ptr() == buffer.main_weight_part("0.weight").data_ptr()


def test_parameters_that_others_have_registered_are_taken():
    """`load_state_dict(assign=True)` puts new parameters into the module's dict."""
    buffer, shards = sharded()
    for value, given in (
        (7.0, torch.full_like(shards.registered["0.weight"], 7.0)),
        (8.0, torch.full((16, 16), 8.0)),
    ):
        shards.register("0.weight", nn.Parameter(given))
        assert shards.current()[0] is shards.registered["0.weight"]
        assert shards.take_changes()
        assert bool((buffer.main_weight_part("0.weight") == value).all()), "of a whole one this rank's part"


def test_another_shape_or_type_is_refused():
    for data, told in ((torch.zeros(3), r"\(3,\) of"), (torch.zeros(16, 16).half(), "of torch.float16")):
        _, shards = sharded()
        with pytest.raises(ModelError, match=rf"'0.weight' would have shape .*{told}.*keeps both"):
            shards.current()[0].data = data
        shards.register("0.weight", nn.Parameter(data[:, :9] if data.dim() > 1 else data))
        with pytest.raises(ModelError, match=r"parameter '0.weight' has shape .* now.*load_full_state_dict"):
            shards.take_changes()


def test_optimizers_hold_no_shards():
    buffer, shards = sharded()
    gone = weakref.ref(shards)
    assert shards in shard_parameters._LIVE
    del shards, buffer
    gc.collect()
    assert gone() is None
