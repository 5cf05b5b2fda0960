"""Number 4: what `pretrain` refuses, the facade refuses too, by the names that the caller has written."""

import dataclasses
import functools
import json
import math
import os
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.num_microbatches_calculator import init_num_microbatches_calculator
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.training.checkpointing import load_checkpoint, save_checkpoint
from megatron.training.training import get_optimizer_param_scheduler

from megatron.compat.checkpoints import hold
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.files import CheckpointError
from megatron.core.dist_checkpointing.saving import save as save_pieces
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.training import get_args, global_vars, initialize_megatron
from megatron.training.config.saved_config import saved_config
from megatron.training.guard.lease import Holder, LeaseError, look, take
from megatron.training.guard.weight_check import NonFiniteWeightsError
from tests.harness.ranks import run_ranks, share_ranks

SHAPE = {"num_layers": 2, "hidden_size": 16, "num_attention_heads": 4}
NAN = float("nan")


@pytest.mark.parametrize(
    ("of", "fields", "told"),
    [
        (OptimizerConfig, {"optimizer": "nope"}, "OptimizerConfig(optimizer='nope'): expects one of adam, sgd"),
        (OptimizerConfig, {"lr": NAN}, "OptimizerConfig(lr=nan): expects a finite number"),
        (OptimizerConfig, {"lr": "fast"}, "OptimizerConfig(lr='fast'): expects a number"),
        (OptimizerConfig, {"clip_grad": -1}, "OptimizerConfig(clip_grad=-1): -1.0: must be at least 0"),
        (OptimizerConfig, {"clip_grad": True}, "OptimizerConfig(clip_grad=True): expects float, got bool"),
        (OptimizerConfig, {"adam_beta2": 1.0}, "OptimizerConfig(adam_beta2=1.0): 1.0: must be"),
        (OptimizerConfig, {"use_distributed_optimizer": 1}, "expects true or false, got 1"),
        (OptimizerConfig, {"fp16": True, "bf16": True}, "OptimizerConfig: fp16 and bf16 exclude each other"),
        (OptimizerConfig, {"lr": 1e-4, "min_lr": 1e-3}, "OptimizerConfig: min_lr 0.001 is above lr 0.0001"),
        (TransformerConfig, {"normalization": "BatchNorm"}, "expects one of LayerNorm, RMSNorm, got 'BatchNorm'"),
        (TransformerConfig, {"fp16": True, "bf16": True}, "TransformerConfig: fp16 and bf16 exclude each other"),
        (TransformerConfig, {"hidden_size": 10}, "hidden_size 10 is not divisible by num_attention_heads 4"),
        (TransformerConfig, {"num_query_groups": 3}, "num_attention_heads 4 is not divisible by num_query_groups 3"),
        (TransformerConfig, {"num_layers": 2.5}, "TransformerConfig(num_layers=2.5): expects an integer"),
        (TransformerConfig, {"hidden_dropout": 1.5}, "TransformerConfig(hidden_dropout=1.5)"),
        (TransformerConfig, {"layernorm_epsilon": -1.0}, "TransformerConfig(layernorm_epsilon=-1.0)"),
        (TransformerConfig, {"swiglu": True, "squared_relu": True}, "swiglu and squared_relu exclude each other"),
        (TransformerConfig, {"context_parallel_size": 2}, "context_parallel_size 2 is not supported"),
        (TransformerConfig, {"num_moe_experts": 8}, "TransformerConfig(num_moe_experts=8) is not supported"),
        (TransformerConfig, {"num_moe_experts": 8, "moe_router_topk": 4}, "(moe_router_topk=4) is not supported"),
        (TransformerConfig, {"multi_latent_attention": True, "kv_lora_rank": 8}, "(kv_lora_rank=8) is not supported"),
        (TransformerConfig, {"pipeline_model_parallel_size": 3}, "num_layers 2"),
        (ModelParallelConfig, {"tensor_model_parallel_size": 0}, "tensor_model_parallel_size=0"),
        (DistributedDataParallelConfig, {"bucket_size": -1}, "DistributedDataParallelConfig(bucket_size=-1)"),
    ],
)  # fmt: skip
def test_fields_are_held_to_kinds_choices_bounds_and_rules_of_their_flags(of, fields, told):
    with pytest.raises(ValueError) as error:
        of(**{**(SHAPE if of is TransformerConfig else {}), **fields})
    assert told in str(error.value)
    assert "--" not in str(error.value)


def test_all_that_is_wrong_is_told_and_what_is_written_later_too():
    with pytest.raises(ValueError) as error:
        OptimizerConfig(lr=NAN, clip_grad=-1, optimizer="nope")
    assert len(str(error.value).splitlines()) == 3
    assert (
        OptimizerConfig(lr=np.float32(0.5), min_lr=torch.tensor(0.25)).lr == 0.5
    )  # numbers are what they say
    config, of = DistributedDataParallelConfig(), DistributedDataParallel
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel()
    config.ddp_bucket_size = -3
    with pytest.raises(ValueError, match="bucket_size=-3"):
        of(None, config, torch.nn.Linear(1, 1))

    @dataclasses.dataclass
    class Own(TransformerConfig):
        mine: float = NAN
        normalization: str = "BatchNorm"

    with pytest.raises(ValueError, match=r"Own\(normalization='BatchNorm'\)"):
        Own(**SHAPE)
    assert math.isnan(Own(**SHAPE, normalization="RMSNorm").mine)


@pytest.mark.parametrize(
    ("of", "field", "near"),
    [
        (TransformerConfig, "num_layer", "num_layers"),
        (TransformerConfig, "num_moe_expert", "num_moe_experts"),
        (OptimizerConfig, "adam_beta_1", "adam_beta1"),
        (DistributedDataParallelConfig, "overlap_grads_reduce", "overlap_grad_reduce"),
    ],
)
def test_unknown_fields_get_the_nearest(of, field, near):
    with pytest.raises(TypeError, match=rf"{of.__name__}: unknown fields: {field} \(did you mean {near}\?\)"):
        of(**{field: 1})


@pytest.mark.parametrize(
    ("field", "value", "feature"),
    [
        ("moe_router_topk", 4, "num_moe_experts"),
        ("moe_latent_size", 8, "num_moe_experts"),
        ("kv_lora_rank", 512, "multi_latent_attention"),
    ],
)
def test_a_setting_without_its_feature_has_no_effect_as_on_the_command_line(field, value, feature):
    told = f"TransformerConfig({field}={value!r}) has no effect: it is a setting of {feature}, which is not given"
    with pytest.warns(UserWarning, match=re.escape(told)) as warned:
        TransformerConfig(**SHAPE, **{field: value})
    assert [one.filename for one in warned] == [__file__]


def wrapped(**fields):
    """A small model of ours in its wrapper."""
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel()
    config = TransformerConfig(**SHAPE, **fields)
    model = GPTModel(config, get_gpt_layer_local_spec(), vocab_size=32, max_sequence_length=8)
    return DistributedDataParallel(config, DistributedDataParallelConfig(), model)


def forward_step(data_iterator, model):
    ids = next(data_iterator)
    return model(ids, torch.arange(8).expand(1, 8), None, labels=ids), lambda losses: (losses.mean(), {})


def step(model, optimizer, **given):
    model.zero_grad_buffer()
    data = iter(lambda: torch.arange(8).view(1, 8), None)
    given = {"num_microbatches": 1, **given}
    get_forward_backward_func()(forward_step_func=forward_step, data_iterator=data, model=[model], **given)
    model.finish_grad_sync()
    return optimizer.step()


def test_a_step_that_makes_weights_of_nan_is_no_step():
    model = wrapped()
    optimizer = get_megatron_optimizer(OptimizerConfig(lr=3e38, weight_decay=1e30), [model])
    with pytest.raises(
        NonFiniteWeightsError, match=r"optimizer.step\(\) number 1: the weight of .* on rank 0"
    ) as error:
        step(model, optimizer)
    assert "pretrain" not in str(error.value)
    assert "--" not in str(error.value)


@pytest.mark.parametrize("count", [10**12, 0, -1, 1.5, "2", None])
def test_numbers_of_microbatches_that_no_plan_holds_are_refused_at_once(count):
    model = wrapped()
    with pytest.raises(ValueError, match=r"num_microbatches=.*a whole number from 1 to \d+"):
        step(model, None, num_microbatches=count)
    with pytest.raises(ValueError, match=r"init_num_microbatches_calculator\(global_batch_size=0\)"):
        init_num_microbatches_calculator(0, None, 0, 1, 1)


def test_checkpoints_of_nan_are_neither_written_nor_read(tmp_path):
    model = wrapped()
    bad = next(model.parameters())
    with torch.no_grad():
        bad[0, 0] = NAN
    with pytest.raises(NonFiniteWeightsError, match=r"dist_checkpointing.save: model.* is NaN on rank 0"):
        dist_checkpointing.save(model.sharded_state_dict(), str(tmp_path / "never"))
    assert not (tmp_path / "never").exists()
    save_pieces(tmp_path / "bad", 0, model.sharded_state_dict().pieces, {"values": {}}, {}, None)  # by others
    with pytest.raises(CheckpointError, match=r"dist_checkpointing.load: .* is NaN on rank 0"):
        dist_checkpointing.load(wrapped().sharded_state_dict(), str(tmp_path / "bad"))


def test_state_dict_has_the_moments():
    model, config = wrapped(), OptimizerConfig(lr=1e-2)
    optimizer = get_megatron_optimizer(config, [model])
    step(model, optimizer)
    state = optimizer.state_dict()
    assert any("exp_avg_sq" in name and one.abs().sum() > 0 for name, one in state["tensors"].items())
    kept = {name: one.clone() for name, one in state["tensors"].items()}
    again = get_megatron_optimizer(config, [model])
    again.load_state_dict({**state, "tensors": kept})
    assert all(torch.equal(one, kept[name]) for name, one in again.state_dict()["tensors"].items())
    assert again.state_dict()["optimizer"] == state["optimizer"] == {"optimizer": "adam", "num_steps": 1}
    name = next(iter(kept))
    for tensors in ({}, {**kept, "other": kept[name]}, {**kept, name: kept[name][:1]}):
        with pytest.raises(ValueError, match="load_state_dict: tensors of another layout's"):
            again.load_state_dict({**state, "tensors": tensors})


def test_messages_name_the_callers_function_and_argument(tmp_path):
    model = wrapped()
    for call, told in (
        (lambda: GPTModel(model.config, get_gpt_layer_local_spec(), -1, 8), "GPTModel(vocab_size=-1)"),
        (lambda: GPTModel(model.config, get_gpt_layer_local_spec(), 32, 0), "GPTModel(max_sequence_length=0)"),
        (lambda: GPTModel(TransformerConfig(num_layers=1), get_gpt_layer_local_spec(), 32, 8), "without hidden_size"),
        (lambda: GPTModel(None, get_gpt_layer_local_spec(), 32, 8), "GPTModel(NoneType): expects TransformerConfig"),
        (lambda: get_megatron_optimizer(model.config, [model]), "get_megatron_optimizer(TransformerConfig): expects"),
        (lambda: DistributedDataParallel(None, None, model.module), "expects DistributedDataParallelConfig"),
        (lambda: step(model, None, collect_non_loss_data=True), "get_forward_backward_func()"),
        (lambda: model_with(use_custom_fsdp=True), "DistributedDataParallelConfig: use_custom_fsdp"),
        (lambda: save_checkpoint(1, [model], torch.optim.SGD(model.parameters(), 0.1), None), "optimizer=SGD"),
    ):  # fmt: skip
        with pytest.raises(ValueError) as error:
            call()
        assert told in str(error.value)
        assert "pretrain" not in str(error.value)
    global_vars.unset_global_variables()
    with pytest.raises(
        global_vars.NotInitializedError, match=r"get_args\(\) was called before initialize_megatron"
    ):
        get_args()


def model_with(**fields):
    return DistributedDataParallel(None, DistributedDataParallelConfig(**fields), torch.nn.Linear(2, 2))


FLAGS = (
    "--num-layers 2 --hidden-size 16 --num-attention-heads 4 --seq-length 8 --max-position-embeddings 8 --lr 1e-3 "
    "--micro-batch-size 1 --global-batch-size 1 --train-iters 2 --vocab-size 31 --distributed-backend gloo"
    " --tokenizer-type NullTokenizer --make-vocab-size-divisible-by 32 --save-interval 1"
)


def start(folder):
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    global_vars.unset_global_variables()
    sys.argv = ["trainer", *FLAGS.split(), "--save", folder, "--load", folder]
    initialize_megatron()


def another_model(folder):
    """Saved and loaded by the model's own configuration, of which the flags say nothing."""
    args = get_args()
    args.save = args.load = f"{folder}-rope"
    rope = {"position_embedding_type": "rope", "num_query_groups": 2}
    save_checkpoint(1, [wrapped(**rope, rotary_base=500000)], None, None)
    assert load_checkpoint([wrapped(**rope, rotary_base=500000)], None, None) == (1, 0.0)
    with pytest.raises(
        CheckpointError, match="another model: rotary_base: checkpoint 500000, this run 10000"
    ):
        load_checkpoint([wrapped(**rope)], None, None)
    saved = saved_config(args.load)
    assert (saved["rotary_base"], saved["num_query_groups"]) == (500000, 2)
    assert saved["group_query_attention"]


def leased(ctx, folder, other):
    """A run that holds its folder, loses it, and may not take another's. other: held by the parent process."""
    start(folder)
    lease = Path(folder, "lease.json")
    assert json.loads(lease.read_text())["pid"] == os.getpid()
    taken = lease.stat()
    for own in (f"{folder}/", os.path.relpath(folder)):  # the folder that is held, by another word
        hold(own)
    assert lease.stat() == taken, "neither given free nor taken again"
    model = wrapped()
    optimizer = get_megatron_optimizer(OptimizerConfig(lr=1e-2), [model])
    scheduler = get_optimizer_param_scheduler(optimizer)
    step(model, optimizer)
    save_checkpoint(1, [model], optimizer, scheduler)
    assert load_checkpoint([model], optimizer, scheduler) == (1, 0.0)
    holder = lease.read_text()
    lease.write_text(Path(other, "lease.json").read_text())
    with pytest.raises(CheckpointError, match="its lease was taken by another run"):
        save_checkpoint(2, [model], optimizer, scheduler)
    assert not Path(folder, "iter_0000002").exists()
    with pytest.raises(CheckpointError, match="its lease was taken by another run"):
        dist_checkpointing.save(model.sharded_state_dict(), folder)
    lease.write_text(holder)
    for own in (folder, f"{folder}/", os.path.relpath(folder)):
        dist_checkpointing.save(model.sharded_state_dict(), own)
    with torch.no_grad():
        model.module.decoder.final_layernorm.weight[0] = math.inf
    with pytest.raises(NonFiniteWeightsError, match="is infinite on rank 0"):
        save_checkpoint(2, [model], optimizer, scheduler)
    with pytest.raises(CheckpointError, match=r"dist_checkpointing.save\(checkpoint_dir="):
        dist_checkpointing.save(wrapped().sharded_state_dict(), other)
    with pytest.raises(LeaseError, match="another run holds this folder"):
        start(other)
    assert not lease.exists()  # one folder a process: given free for the other
    start(folder)
    another_model(folder)


def test_a_loop_of_ones_own_holds_its_folder_as_every_run(tmp_path):
    folder, other = tmp_path / "own", tmp_path / "other"
    other.mkdir()
    take(other, Holder.this_process(), print)
    run_ranks(leased, 1, str(folder), str(other))
    assert look(other).holder.pid == os.getpid()


def refusals_of_two_ranks(ctx):
    """A weight that only one rank has spoiled is refused on both."""
    model = wrapped()
    with torch.no_grad():
        next(model.parameters())[0, 0] = NAN if ctx.rank else 0.0
    with pytest.raises(NonFiniteWeightsError, match="on rank 1"):
        dist_checkpointing.save(model.sharded_state_dict(), "never")


def test_ranks_refuse_together():
    assert share_ranks(2, {"save": functools.partial(refusals_of_two_ranks)})["save"] == [None, None]
