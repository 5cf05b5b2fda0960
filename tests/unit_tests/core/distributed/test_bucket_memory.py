"""Which dtypes the buffers of a bucket have, and how transient tensors get memory."""

from __future__ import annotations

import pytest
import torch

from megatron.core.distributed.custom_fsdp.bucket_memory import (
    bucket_name,
    grad_comm_dtype,
    main_grad_dtype,
    main_weight_dtype,
)
from megatron.core.distributed.custom_fsdp.data_parallel_config import DistributedDataParallelConfig
from megatron.core.distributed.custom_fsdp.shard_layout import Bucket
from megatron.core.distributed.custom_fsdp.transient_memory import own_storage, with_memory
from megatron.core.module import ModelError

FP64, FP32, BF16, FP16 = torch.float64, torch.float32, torch.bfloat16, torch.float16


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
    asked = DistributedDataParallelConfig(megatron_fsdp_main_grads_dtype="bf16")
    assert {main_grad_dtype(dtype, asked) for dtype in (FP32, BF16, FP16)} == {BF16}


def test_what_gradients_travel_in():
    assert grad_comm_dtype(BF16, DistributedDataParallelConfig()) == FP32
    assert grad_comm_dtype(BF16, DistributedDataParallelConfig(grad_reduce_in_bf16=True)) == BF16
    asked = DistributedDataParallelConfig(megatron_fsdp_grad_comm_dtype="fp16")
    assert grad_comm_dtype(FP32, asked) == FP16


@pytest.mark.parametrize(
    ("flag", "expected"),
    [
        ("fp32", {FP64: FP64, FP32: FP32, BF16: FP32, FP16: FP32}),
        ("auto", {FP64: FP64, FP32: FP32, BF16: BF16, FP16: FP16}),
        ("bf16", {FP64: None, FP32: None, BF16: BF16, FP16: None}),
        ("fp16", {FP64: None, FP32: None, BF16: None, FP16: FP16}),
    ],
)
def test_main_weights_hold_at_least_what_the_models_do(flag, expected):
    config = DistributedDataParallelConfig(megatron_fsdp_main_params_dtype=flag)
    for weights, main in expected.items():
        if main is None:
            with pytest.raises(ModelError, match=f"--megatron-fsdp-main-params-dtype {flag}: .*use fp32"):
                main_weight_dtype(weights, config)
        else:
            assert main_weight_dtype(weights, config) == main


def test_transient_tensors_have_memory_only_inside():
    tensor = own_storage("weights", "unit", 10, FP32, torch.device("cpu"))
    assert (tensor.shape, tensor.untyped_storage().nbytes()) == ((10,), 0)
    with with_memory(tensor) as whole:
        assert whole.untyped_storage().nbytes() == 40
        whole[3:5].fill_(1.0)
    assert tensor.untyped_storage().nbytes() == 0
    lasting = torch.ones(10)
    with with_memory(lasting[2:]):
        pass
    assert lasting.sum() == 10.0  # a slot of somebody else's stays as it is


def test_buckets_are_named_after_their_units():
    assert bucket_name(0, Bucket(3, 0, 128, ("a",), "layer 1")) == "layer 1"
    assert bucket_name(1, Bucket(3, 0, 128, ("a",), "")) == "bucket 1.3"
