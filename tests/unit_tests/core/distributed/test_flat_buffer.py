"""One flat buffer: parameters are views, values survive, accumulators of tied uses combine once."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from megatron.core.distributed.bucket_memory import grad_comm_dtype, main_grad_dtype, main_weight_dtype, own_storage
from megatron.core.distributed.distributed_data_parallel_config import DistributedDataParallelConfig
from megatron.core.distributed.flat_buffer import FlatBuffer
from megatron.core.distributed.sharding import STRATEGIES, ShardPlace
from megatron.core.param_meta import LOOKUP, ParamMeta, infer_param_meta

CPU = torch.device("cpu")


def plain(dtype=torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(7, 5), nn.LayerNorm(5), nn.Linear(5, 3)).to(dtype)


def buffer_of(
    module, config=None, meta=None, sharding=STRATEGIES["no_shard"], place=ShardPlace(0, 2), **more
) -> FlatBuffer:
    config = config or DistributedDataParallelConfig()
    parameters = dict(module.named_parameters())
    meta = meta or infer_param_meta(module)
    return FlatBuffer(parameters, meta, config, sharding=sharding, place=place, device=CPU, **more)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_parameters_become_views_and_keep_their_values_and_identity(dtype):
    module = plain(dtype)
    before = {name: p.detach().clone() for name, p in module.named_parameters()}
    objects = {name: id(p) for name, p in module.named_parameters()}
    buffer = buffer_of(module)
    (arena,) = buffer.arenas
    for name, p in module.named_parameters():
        assert torch.equal(p, before[name])
        assert id(p) == objects[name]
        assert isinstance(p, nn.Parameter)
        assert p.untyped_storage().data_ptr() == arena.weights.untyped_storage().data_ptr()
        assert torch.equal(buffer.main_weight(name), before[name].to(buffer.main_weight(name).dtype))
    assert buffer.names == tuple(before)
    assert arena.layout.numel % 256 == 0
    out = module(torch.ones(2, 7, dtype=dtype))
    buffer.weight("2.weight").zero_()
    assert torch.equal(module(torch.ones(2, 7, dtype=dtype)), module[2].bias.expand(2, 3))
    assert not torch.equal(out, module[2].bias.expand(2, 3))


def test_main_weights_exist_only_for_16_bit_weights():
    for dtype in (torch.float32, torch.float64):
        buffer = buffer_of(plain(dtype))
        assert buffer.main_weight("0.weight").data_ptr() == buffer.weight("0.weight").data_ptr()
        assert not buffer.has_own_main_weight("0.weight")
        assert buffer.persistent_bytes()["main_weights"] == 0
    buffer = buffer_of(plain(torch.bfloat16))
    assert buffer.main_weight("0.weight").dtype == torch.float32
    buffer.main_weight("0.weight").fill_(1 + 2**-12)
    buffer.copy_main_to_weights()
    assert buffer.weight("0.weight").unique().tolist() == [1.0]
    buffer.copy_weights_to_main()
    assert buffer.main_weight("0.weight").unique().tolist() == [1.0]


def test_persistent_bytes_per_parameter_are_those_of_the_table():
    # no_shard, bf16 weights: 2 (weights) + 4 (main) + 4 (fp32 gradients, or 2) bytes a parameter
    for config, grad_bytes in (
        (DistributedDataParallelConfig(), 4),
        (DistributedDataParallelConfig(grad_reduce_in_bf16=True), 2),
    ):
        buffer = buffer_of(plain(torch.bfloat16), config)
        numel = buffer.arenas[0].layout.numel
        assert buffer.persistent_bytes() == {
            "weights": 2 * numel,
            "main_weights": 4 * numel,
            "main_grads": grad_bytes * numel,
            "extra_grads": 0,
        }


def test_gradient_dtypes():
    plain_config = DistributedDataParallelConfig()
    assert main_grad_dtype(torch.bfloat16, plain_config) == torch.float32
    assert main_grad_dtype(torch.float16, plain_config) == torch.float16
    assert main_grad_dtype(torch.float64, plain_config) == torch.float64
    accumulate = DistributedDataParallelConfig(accumulate_allreduce_grads_in_fp32=True)
    assert main_grad_dtype(torch.float16, accumulate) == torch.float32
    bf16 = DistributedDataParallelConfig(grad_reduce_in_bf16=True)
    assert main_grad_dtype(torch.bfloat16, bf16) == torch.bfloat16
    assert main_grad_dtype(torch.float32, bf16) == torch.float32


def test_meta_parameters_get_storage_and_keep_their_identity():
    with torch.device("meta"):
        module = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    module[1].weight.requires_grad_(False)
    objects = {name: id(p) for name, p in module.named_parameters()}
    buffer = buffer_of(module)
    for name in ("0.weight", "0.bias", "1.weight", "1.bias"):
        buffer.weight(name).fill_(0.5)
    assert {name: id(p) for name, p in module.named_parameters()} == objects
    assert [p.requires_grad for p in module.parameters()] == [True, True, False, True]
    assert all(p.device == CPU for p in module.parameters())
    assert module(torch.ones(1, 4)).tolist() == [[4.25, 4.25]]


def test_tied_uses_have_their_own_accumulators_added_once():
    module = nn.Embedding(4, 2)
    meta = {"weight": ParamMeta("weight", (4, 2), uses=("weight", "weight" + LOOKUP))}
    buffer = buffer_of(module, meta=meta)
    assert set(buffer.main_grads_by_key()) == {"weight", "weight" + LOOKUP}
    buffer.main_grad("weight").fill_(1.0)
    buffer.main_grad("weight" + LOOKUP).fill_(2.0)
    assert buffer.param_of_key("weight" + LOOKUP) == "weight"
    buffer.combine_uses("weight")
    buffer.combine_uses("weight")  # the extra accumulator is empty now: nothing is counted twice
    assert buffer.main_grad("weight").unique().tolist() == [3.0]
    assert buffer.persistent_bytes()["extra_grads"] == 4 * 2 * 4
    buffer.main_grad("weight" + LOOKUP).fill_(2.0)
    buffer.zero_grads()
    assert not buffer.main_grad("weight").any()
    assert not buffer.main_grad("weight" + LOOKUP).any()


def test_plainly_shared_parameter_is_stored_once():
    module = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    module[1].weight = module[0].weight
    buffer = buffer_of(module)
    assert buffer.names == ("0.weight",)
    assert module[0].weight is module[1].weight


def test_two_dtypes_are_two_arenas():
    module = nn.Sequential(nn.Linear(4, 4).bfloat16(), nn.Linear(4, 4))
    buffer = buffer_of(module)
    assert sorted(str(a.weights.dtype) for a in buffer.arenas) == ["torch.bfloat16", "torch.float32"]
    assert buffer.has_own_main_weight("0.weight")
    assert not buffer.has_own_main_weight("1.weight")
    assert buffer.main_weight("1.bias").data_ptr() == module[1].bias.data_ptr()


def test_frozen_parameters_stay_out_of_gradients_and_main_weights():
    module = plain(torch.bfloat16)
    module[0].weight.requires_grad_(False)
    buffer = buffer_of(module)
    assert buffer.frozen == ("0.weight",)
    assert "0.weight" not in buffer.names
    assert "0.weight" not in buffer.main_grads_by_key()
    assert torch.equal(buffer.weight("0.weight"), module[0].weight)


def test_unusable_dtype_and_missing_facts_are_refused():
    with pytest.raises(ValueError, match=r"parameter 0 is torch.complex64"):
        buffer_of(nn.ParameterList([nn.Parameter(torch.ones(2, dtype=torch.complex64))]))
    with pytest.raises(AssertionError, match=r"without ParamMeta: \['bias'\]"):
        buffer_of(nn.Linear(2, 2), meta={"weight": ParamMeta("weight", (2, 2))})
