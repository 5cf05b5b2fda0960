"""Line 8: trainers with a loop of their own over Megatron's Python names: its quickstart, its wrapper and optimizer."""

import functools
import itertools
import os
import sys

import pytest
import torch
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDatasetConfig, MockGPTDataset
from megatron.core.datasets.utils import compile_helpers
from megatron.core.dist_checkpointing.serialization import load, save
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.num_microbatches_calculator import get_num_microbatches, update_num_microbatches
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.training.arguments import core_transformer_config_from_args
from megatron.training.checkpointing import load_checkpoint, save_checkpoint
from megatron.training.tokenizer.tokenizer import _NullTokenizer
from torch.utils.data import DataLoader

from megatron.core import dist_checkpointing, mpu, parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.training import get_args, global_vars, initialize_megatron
from tests.harness.ranks import run_ranks, share_ranks

SEQUENCE, VOCABULARY, STEPS = 32, 64, 3


def loss_func(loss_mask, losses):
    kept = loss_mask.view(-1).float()
    loss = torch.sum(losses.view(-1).float() * kept) / kept.sum()
    return loss, {"lm loss": loss.item()}


def forward_step(data_iterator, model):
    batch = next(data_iterator)
    losses = model(batch["tokens"], batch["position_ids"], batch["attention_mask"], labels=batch["labels"])
    return losses, functools.partial(loss_func, batch["loss_mask"])


@functools.cache
def microbatches():
    """Of the mock data. Made here once, as forked ranks would each for itself; so is what torch imports late."""
    torch.optim.Adam([torch.zeros(1)])
    compile_helpers()
    config = GPTDatasetConfig(
        random_seed=0,
        sequence_length=SEQUENCE,
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        tokenizer=_NullTokenizer(vocab_size=VOCABULARY - 1),
        mid_level_dataset_surplus=0.005,
    )
    train, valid, test = BlendedMegatronDatasetBuilder(
        MockGPTDataset, [200, None, None], lambda: True, config
    ).build()
    assert min(len(valid), len(test)) > 0
    return list(itertools.islice(DataLoader(train, batch_size=2, shuffle=False), 4 * STEPS))


def batches(share=0, ranks=1):
    """Microbatches `share`, share + ranks, ..."""
    return iter(microbatches()[share::ranks])


def groups(**sizes):
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(**sizes)


def build(tp=1, pp=1, **fields):
    sizes = {"tensor_model_parallel_size": tp, "pipeline_model_parallel_size": pp}
    groups(**sizes)
    model_parallel_cuda_manual_seed(123)
    return model_of(**{**sizes, "hidden_dropout": 0.0, **fields})


def model_of(**fields):
    config = TransformerConfig(
        num_layers=2,
        hidden_size=16,
        num_attention_heads=4,
        attention_dropout=0.0,
        pipeline_dtype=torch.float32,
        **fields,
    )
    return GPTModel(
        config=config,
        transformer_layer_spec=get_gpt_layer_local_spec(),
        vocab_size=VOCABULARY,
        max_sequence_length=SEQUENCE,
        pre_process=mpu.is_pipeline_first_stage(),
        post_process=mpu.is_pipeline_last_stage(),
    )


def quickstart(ctx, tp, pp, folder):
    """Megatron-Core's quickstart: torch's Adam over the model's parameters; save and load."""
    model = build(tp, pp)
    optimizer, data, losses = torch.optim.Adam(model.parameters(), lr=1e-3), batches(), []
    for _ in range(STEPS):
        optimizer.zero_grad()
        reported = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=data,
            model=model,
            num_microbatches=2,
            seq_length=SEQUENCE,
            micro_batch_size=2,
            decoder_seq_length=SEQUENCE,
            forward_only=False,
        )
        optimizer.step()
        losses += [one["lm loss"] for one in reported]
    dist_checkpointing.save(sharded_state_dict=model.sharded_state_dict(prefix=""), checkpoint_dir=folder)
    trained = {name: one.detach().clone() for name, one in model.named_parameters()}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    state = dist_checkpointing.load(sharded_state_dict=model.sharded_state_dict(), checkpoint_dir=folder)
    model.load_state_dict(state)
    assert all(torch.equal(one, trained[name]) for name, one in model.named_parameters())
    return losses


def wrapped_loop(ctx, sharded, own_optimizer=True):
    """Ranks with halves of each step's microbatches: `DistributedDataParallel` with Megatron's optimizer or torch's."""
    inner = build(finalize_model_grads_func=finalize_model_grads)
    ddp_config = DistributedDataParallelConfig(use_distributed_optimizer=sharded, grad_reduce_in_fp32=True)
    model = DistributedDataParallel(inner.config, ddp_config, inner)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    if own_optimizer:
        config = OptimizerConfig(optimizer="adam", lr=1e-2, clip_grad=0.5, use_distributed_optimizer=sharded)
        optimizer = get_megatron_optimizer(config, [model])
    data, norms = batches(ctx.rank, ctx.world_size), []
    for _ in range(STEPS):
        model.zero_grad_buffer()
        optimizer.zero_grad()
        get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=data,
            model=[model],
            num_microbatches=4 // ctx.world_size,
        )
        taken = optimizer.step()
        norms.append(taken[1] if own_optimizer else 0.0)
    return norms, {name: one.detach().clone() for name, one in inner.named_parameters()}


def torch_loop(ctx, own_optimizer=True):
    """The same steps by torch's AdamW over `.grad`, clipped by torch; or by its Adam, unclipped."""
    model, data, norms = build(), batches(), []
    groups = [
        {"params": [one for one in model.parameters() if one.dim() > 1], "weight_decay": 0.01},
        {"params": [one for one in model.parameters() if one.dim() < 2], "weight_decay": 0.0},
    ]
    optimizer = (
        torch.optim.AdamW(groups, lr=1e-2) if own_optimizer else torch.optim.Adam(model.parameters(), 1e-2)
    )
    for _ in range(STEPS):
        optimizer.zero_grad()
        get_forward_backward_func()(
            forward_step_func=forward_step, data_iterator=data, model=model, num_microbatches=4
        )
        clipped = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5 if own_optimizer else 1e9)
        norms.append(float(clipped) if own_optimizer else 0.0)
        optimizer.step()
    return norms, {name: one.detach().clone() for name, one in model.named_parameters()}


@pytest.fixture(scope="module")
def on_one_rank(tmp_path_factory):
    microbatches()
    loops = {
        "quickstart": functools.partial(quickstart, tp=1, pp=1, folder=str(tmp_path_factory.mktemp("one"))),
        "wrapped": functools.partial(wrapped_loop, sharded=False),
        "AdamW": torch_loop,
        "Adam": functools.partial(torch_loop, own_optimizer=False),
    }
    return share_ranks(1, loops)


@pytest.fixture(scope="module")
def on_two_ranks(tmp_path_factory):
    microbatches()
    folders = [str(tmp_path_factory.mktemp("two")) for _ in range(2)]
    loops = {
        "quickstart, TP": functools.partial(quickstart, tp=2, pp=1, folder=folders[0]),
        "quickstart, PP": functools.partial(quickstart, tp=1, pp=2, folder=folders[1]),
        "wrapped, sharded": functools.partial(wrapped_loop, sharded=True),
        "wrapped, Adam": functools.partial(wrapped_loop, sharded=False, own_optimizer=False),
    }
    return share_ranks(2, loops)


@pytest.mark.grid
def test_the_quickstart_loop_runs_on_two_ranks_as_on_one(on_one_rank, on_two_ranks):
    (reference,) = on_one_rank["quickstart"]
    assert len(reference) == 2 * STEPS
    assert reference[-1] < reference[0]
    for parallelism in ("TP", "PP"):
        *_, last = on_two_ranks[f"quickstart, {parallelism}"]
        assert last == pytest.approx(reference, rel=1e-5)


def test_wrapped_models_train_as_torch_does_in_one_process(on_one_rank, on_two_ranks):
    for found, reference in (
        (on_one_rank["wrapped"], "AdamW"),
        (on_two_ranks["wrapped, sharded"], "AdamW"),
        (on_two_ranks["wrapped, Adam"], "Adam"),
    ):
        ((norms, weights),) = on_one_rank[reference]
        for got, trained in found:
            assert got == pytest.approx(norms, rel=1e-4)
            for name, weight in weights.items():
                torch.testing.assert_close(trained[name], weight, rtol=1e-4, atol=1e-5)


def resumed_loop(ctx, folder):
    """`initialize_megatron`, two steps, a checkpoint, other weights, the checkpoint again."""
    os.environ |= {"RANK": str(ctx.rank), "LOCAL_RANK": str(ctx.rank), "WORLD_SIZE": str(ctx.world_size)}
    os.environ |= {"LOCAL_WORLD_SIZE": str(ctx.world_size), "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    sys.argv = ["trainer", *FLAGS.split(), "--save", folder, "--load", folder]
    initialize_megatron(args_defaults={"tokenizer_type": "NullTokenizer"})
    update_num_microbatches(0)
    args = get_args()
    ranks = ctx.world_size
    assert (mpu.get_data_parallel_world_size(), get_num_microbatches()) == (ranks, 4 // ranks)
    model = GPTModel(
        core_transformer_config_from_args(args), get_gpt_layer_local_spec(), args.padded_vocab_size, SEQUENCE
    )
    model = DistributedDataParallel(model.config, DistributedDataParallelConfig(), model)
    optimizer = get_megatron_optimizer(OptimizerConfig(lr=args.lr), [model])
    assert load_checkpoint([model], optimizer, None) == (0, 0.0)

    def train(data, forward_only=False):
        model.zero_grad_buffer()
        get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=data,
            model=model,
            num_microbatches=get_num_microbatches(),
            forward_only=forward_only,
        )
        if forward_only:
            return None
        model.finish_grad_sync()
        return optimizer.step()[1]

    train(batches())
    save_checkpoint(7, [model], optimizer, None, 11.0)
    expected = train(batches())
    assert load_checkpoint([model], optimizer, None) == (7, 11.0)
    train(batches(), forward_only=True)  # shifts no dropout masks, nor does the process's past
    assert train(batches()) == expected
    assert load_checkpoint([model], None, None) == (7, 11.0)
    global_vars.unset_global_variables()
    sys.argv += ["--make-vocab-size-divisible-by", "64"]
    initialize_megatron(args_defaults={"tokenizer_type": "NullTokenizer"})
    assert get_args().padded_vocab_size == args.padded_vocab_size == 128  # the checkpoint's, as in every run


def test_a_checkpoint_is_resumed(tmp_path):
    microbatches()
    run_ranks(resumed_loop, 2, str(tmp_path / "saved"))


FLAGS = (
    "--num-layers 1 --hidden-size 16 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32 --lr 1e-3 "
    "--micro-batch-size 2 --global-batch-size 8 --train-iters 2 --vocab-size 63 --distributed-backend gloo"
    " --hidden-dropout 0.3 --attention-dropout 0 --save-interval 1"
)


def test_methods_of_the_wrapper():
    groups()
    model = DistributedDataParallel(None, DistributedDataParallelConfig(), torch.nn.Linear(2, 2))
    model.broadcast_params()
    model.zero_grad_buffer()
    with model.no_sync():
        model(torch.ones(1, 2)).sum().backward()
    model.start_grad_sync()
    model.scale_gradients(0.5)
    model.finish_grad_sync()
    assert torch.equal(model.module.weight.grad, torch.full((2, 2), 0.5))
    assert list(model.sharded_state_dict(prefix="a.")) == ["a.weight", "a.bias"]
    model.start_param_sync(force_sync=True)
    model.disable_forward_pre_hook(param_sync=False)
    model.enable_forward_pre_hook()
    config = OptimizerConfig(lr=1e-2)
    get_megatron_optimizer(config, [model], use_gloo_process_groups=False)
    with pytest.raises(ValueError, match="wrap the model"):
        get_megatron_optimizer(config, [model.module])
    with pytest.raises(ValueError, match="without conditions"):
        get_megatron_optimizer(config, [model], scale_lr_cond=lambda *_: True)


def test_main_weights_follow_what_a_checkpoint_loads(tmp_path):
    groups()
    module = torch.nn.Linear(2, 2).bfloat16()
    model = DistributedDataParallel(None, DistributedDataParallelConfig(), module)
    optimizer = get_megatron_optimizer(OptimizerConfig(optimizer="sgd", lr=0.0, bf16=True), [model])
    saved = module.weight.detach().clone()
    save(model.sharded_state_dict(), str(tmp_path / "saved"))
    model.load_state_dict({name: torch.full_like(one, 7.0) for name, one in module.state_dict().items()})
    load(model.sharded_state_dict(), str(tmp_path / "saved"))
    model.zero_grad_buffer()
    model(torch.ones(1, 2, dtype=torch.bfloat16)).sum().backward()
    model.finish_grad_sync()
    optimizer.step()
    assert torch.equal(module.weight, saved)


def test_checkpoints_of_a_model_beside_other_values(tmp_path):
    model = build()
    saved = {name: one.detach().clone() for name, one in model.named_parameters()}
    save({"model": model.sharded_state_dict(), "iteration": 3}, str(tmp_path / "nested"))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    state = load({"model": model.sharded_state_dict(), "iteration": 0}, str(tmp_path / "nested"))
    assert state["iteration"] == 3
    model.load_state_dict(state["model"])
    assert all(torch.equal(one, saved[name]) for name, one in model.named_parameters())
    for wrong, options in (
        ({"iteration": 3}, {}),
        (model.sharded_state_dict(), {"sharded_strategy": "zarr"}),
    ):
        with pytest.raises(ValueError, match="one model, no strategies"):
            save(wrong, str(tmp_path / "wrong"), **options)
    with pytest.raises(ValueError, match="vars"):
        save({"model": model.sharded_state_dict(), "args": object()}, str(tmp_path / "wrong"))
