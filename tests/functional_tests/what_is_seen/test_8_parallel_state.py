"""Line 8: what a trainer asks of Megatron's `parallel_state` (`mpu`), and its calls between tensor parallel ranks."""

import pytest
import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

from megatron.core import mpu, parallel_state, tensor_parallel
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer import TransformerConfig
from tests.harness.ranks import share_ranks


def part_of_a_model(**sizes):
    config = TransformerConfig(num_layers=2, hidden_size=16, num_attention_heads=4, **sizes)
    return GPTModel(config, get_gpt_layer_local_spec(), vocab_size=64, max_sequence_length=32)


def groups(**sizes):
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(**sizes)


def tensor_parallel_calls(ctx):
    """What a loop calls between two tensor parallel ranks, against the whole thing on each."""
    parallel_state.initialize_model_parallel(2)
    assert (mpu.get_tensor_model_parallel_rank(), mpu.get_tensor_model_parallel_world_size()) == (ctx.rank, 2)
    assert (mpu.get_data_parallel_rank(with_context_parallel=True), mpu.get_context_parallel_rank()) == (0, 0)
    assert mpu.get_tensor_model_parallel_src_rank() == 0
    total = torch.ones(1)
    torch.distributed.all_reduce(total, group=mpu.get_tensor_model_parallel_group())
    torch.distributed.all_reduce(total, group=mpu.get_data_parallel_group())  # a group of one, not the world
    assert total == 2
    logits, target = torch.randn(3, 8, generator=torch.Generator().manual_seed(0)), torch.tensor([1, 6, 3])
    part = logits.chunk(2, -1)[ctx.rank].clone().requires_grad_()
    whole = tensor_parallel.gather_from_tensor_model_parallel_region(part)
    assert torch.equal(whole, logits)
    whole.square().sum().backward()
    assert torch.equal(part.grad, 2 * part)
    losses = tensor_parallel.vocab_parallel_cross_entropy(logits.chunk(2, -1)[ctx.rank].clone(), target)
    torch.testing.assert_close(losses, torch.nn.functional.cross_entropy(logits, target, reduction="none"))
    told = tensor_parallel.broadcast_data(["x"], {"x": target} if ctx.rank == 0 else None, torch.int64)
    assert torch.equal(told["x"], target)
    with pytest.raises(ValueError, match="context_parallel_size"):
        parallel_state.initialize_model_parallel(context_parallel_size=2)


def groups_of_instances(ctx):
    """Of two ranks: two optimizer instances; two tensor parallel ranks; two pipeline ranks."""
    groups(num_distributed_optimizer_instances=2)
    partial = {"partial_data_parallel": True}
    assert (mpu.get_data_parallel_world_size(), mpu.get_data_parallel_world_size(**partial)) == (2, 1)
    total = torch.ones(1)
    torch.distributed.all_reduce(total, group=mpu.get_data_parallel_group(**partial))
    assert total == 1
    groups(tensor_model_parallel_size=2)
    assert (mpu.get_expert_tensor_parallel_world_size(), mpu.get_expert_model_parallel_world_size()) == (2, 1)
    with pytest.raises(ValueError, match=r"tensor_model_parallel_size=4,.*parallel, 2 and 1"):
        part_of_a_model(tensor_model_parallel_size=4)
    groups(pipeline_model_parallel_size=2)
    with pytest.raises(ValueError, match=r"pipeline_model_parallel_size=1 .*parallel, 1 and 2"):
        part_of_a_model()


def test_calls_between_ranks():
    share_ranks(2, {"tensor parallel": tensor_parallel_calls, "instances": groups_of_instances})
