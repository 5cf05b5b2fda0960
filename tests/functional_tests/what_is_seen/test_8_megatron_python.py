"""Line 8: trainers that import Megatron's Python names: its quickstart's loop, and the table of names."""

import functools
import importlib
import importlib.util
import os
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader

import megatron.core.distributed
import megatron.core.tensor_parallel.random
from megatron.compat.names import table
from tests.harness.ranks import run_ranks
from tools import generate_names

SEQUENCE, VOCABULARY, STEPS = 32, 64, 3
ROOT = Path(__file__).resolve().parents[3]


def loss_func(loss_mask, losses):
    kept = loss_mask.view(-1).float()
    loss = torch.sum(losses.view(-1).float() * kept) / kept.sum()
    return loss, {"lm loss": loss.item()}


def forward_step(data_iterator, model):
    batch = next(data_iterator)
    losses = model(batch["tokens"], batch["position_ids"], batch["attention_mask"], labels=batch["labels"])
    return losses, functools.partial(loss_func, batch["loss_mask"])


def batches(share=0, ranks=1):
    """Microbatches `share`, share + ranks, ... of the mock data."""
    from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
    from megatron.core.datasets.utils import compile_helpers
    from megatron.training.tokenizer.tokenizer import _NullTokenizer

    from megatron.core.datasets.gpt_dataset import GPTDatasetConfig, MockGPTDataset

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
    for number, batch in enumerate(DataLoader(train, batch_size=2, shuffle=False)):
        if number % ranks == share:
            yield batch


def build(tp=1, pp=1, **fields):
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(tp, pp)
    model_parallel_cuda_manual_seed(123)
    fields |= {"hidden_dropout": fields.get("hidden_dropout", 0.0)}
    return model_of(tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp, **fields)


def model_of(**fields):
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.transformer_config import TransformerConfig

    from megatron.core import mpu

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


def run_simple_mcore_train_loop(ctx, tp, pp, folder):
    """Megatron-Core's quickstart: torch's Adam over the model's parameters; save and load."""
    from megatron.core.pipeline_parallel.schedules import get_forward_backward_func

    from megatron.core import dist_checkpointing

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


# Once here, so that forked ranks need not.
torch.optim.Adam([torch.zeros(1)])
MODULES = [importlib.import_module(f"megatron.compat.{name}") for name in ("datasets", "model", "training")]


@functools.cache
def alone(folder):
    return run_ranks(run_simple_mcore_train_loop, 1, 1, 1, folder)[0]


@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (1, 2)])
def test_the_quickstart_loop_runs_on_two_ranks_as_on_one(tp, pp, tmp_path_factory):
    reference = alone(str(tmp_path_factory.getbasetemp() / "alone"))
    assert len(reference) == 2 * STEPS
    assert reference[-1] < reference[0]
    *_, last = run_ranks(run_simple_mcore_train_loop, 2, tp, pp, str(tmp_path_factory.mktemp("two")))
    assert last == pytest.approx(reference, rel=1e-5)


def wrapped_loop(ctx, sharded, own_optimizer=True):
    """Ranks with halves of each step's microbatches: `DistributedDataParallel` with Megatron's optimizer or torch's."""
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.pipeline_parallel import get_forward_backward_func

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
    from megatron.core.pipeline_parallel import get_forward_backward_func

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


@pytest.mark.parametrize(("ranks", "sharded", "own"), [(1, False, True), (2, True, True), (2, False, False)])
def test_wrapped_models_train_as_torch_does_in_one_process(ranks, sharded, own):
    ((norms, weights),) = run_ranks(torch_loop, 1, own)
    for got, found in run_ranks(wrapped_loop, ranks, sharded, own):
        assert got == pytest.approx(norms, rel=1e-4)
        for name, weight in weights.items():
            torch.testing.assert_close(found[name], weight, rtol=1e-4, atol=1e-5)


def resumed_loop(ctx, folder):
    """`initialize_megatron`, two steps, a checkpoint, other weights, the checkpoint again."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.num_microbatches_calculator import get_num_microbatches, update_num_microbatches
    from megatron.training.arguments import core_transformer_config_from_args
    from megatron.training.checkpointing import load_checkpoint, save_checkpoint

    from megatron.core import mpu
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.models.gpt import GPTModel
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.training import get_args, initialize_megatron

    os.environ |= {"RANK": str(ctx.rank), "LOCAL_RANK": str(ctx.rank), "WORLD_SIZE": str(ctx.world_size)}
    os.environ |= {"LOCAL_WORLD_SIZE": str(ctx.world_size), "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    sys.argv = ["trainer", *FLAGS.split(), "--save", folder, "--load", folder]
    initialize_megatron(args_defaults={"tokenizer_type": "NullTokenizer"})
    update_num_microbatches(0)
    args = get_args()
    assert (mpu.get_data_parallel_world_size(), get_num_microbatches()) == (
        ctx.world_size,
        4 // ctx.world_size,
    )
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

    data = batches()
    train(data)
    save_checkpoint(7, [model], optimizer, None, 11.0)
    expected = train(batches())
    assert load_checkpoint([model], optimizer, None) == (7, 11.0)
    train(batches(), forward_only=True)  # shifts no dropout masks, nor does the process's past
    assert train(batches()) == expected
    assert load_checkpoint([model], None, None) == (7, 11.0)


FLAGS = (
    "--num-layers 1 --hidden-size 16 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32 --lr 1e-3 "
    "--micro-batch-size 2 --global-batch-size 8 --train-iters 2 --vocab-size 63 --distributed-backend gloo"
    " --hidden-dropout 0.3 --attention-dropout 0 --save-interval 1"
)


def tensor_parallel_calls(ctx):
    """What a loop calls between two tensor parallel ranks, against the whole thing on each."""
    from megatron.core import mpu, parallel_state, tensor_parallel

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


def test_calls_between_tensor_parallel_ranks():
    run_ranks(tensor_parallel_calls, 2)


def test_a_checkpoint_is_resumed(tmp_path):
    run_ranks(resumed_loop, 2, str(tmp_path / "saved"))


@pytest.mark.parametrize("path", sorted({row["path"] for row in table()}))
def test_each_row_is_a_name_or_says_what_to_use(path):
    for row in (row for row in table() if row["path"] == path):
        if not row["name"]:
            with pytest.raises(ModuleNotFoundError, match="is not here") as error:
                importlib.import_module(f"{path}.anything")
            assert row["instead"] in str(error.value)
            continue
        module = importlib.import_module(path)
        if row["instead"]:
            with pytest.raises(ImportError) as error:
                exec(f"from {path} import {row['name']}")
            assert row["instead"] in str(error.value)
            with pytest.raises(AttributeError) as error:  # so that hasattr and a default of getattr work
                getattr(module, row["name"])
            assert row["instead"] in str(error.value)
            continue
        home, _, attribute = row["home"].partition(":")
        home = importlib.import_module(home)
        for name in home.__all__ if row["name"] == "*" else [row["name"]]:
            expected = home if row["name"] != "*" and not attribute else getattr(home, attribute or name)
            found = getattr(module, name)
            if isinstance(found, types.ModuleType) and not isinstance(expected, types.ModuleType):
                found = getattr(
                    found, name
                )  # imported, a path takes the place of its function, which it calls
            assert found is expected  # one meaning: no module of ours has another thing of this name


def test_every_module_of_ours_at_a_path_of_megatrons_passes_unknown_names_on():
    for path in {row["path"] for row in table() if row["name"] and row["home"]}:
        assert "__getattr__" in vars(importlib.import_module(path)), path


def test_names_that_no_row_knows():
    import megatron.core.optimizer

    assert not hasattr(megatron.core.optimizer, "get_nothing")
    with pytest.raises(ImportError, match=r"get_nothing is not here: docs/megatron_compat\.md"):
        from megatron.core.optimizer import get_nothing  # noqa: F401


def test_function_and_module_of_one_name():
    from megatron.core.distributed import finalize_model_grads

    with pytest.raises(ValueError, match="wrap the model"):
        finalize_model_grads([torch.nn.Linear(1, 1)])
    importlib.import_module("megatron.core.distributed.finalize_model_grads")
    with pytest.raises(ValueError, match="wrap the model"):
        megatron.core.distributed.finalize_model_grads([torch.nn.Linear(1, 1)])


def test_asking_whether_a_name_is_there_raises_nothing():
    assert not hasattr(megatron.core.distributed, "FullyShardedDataParallel")
    assert getattr(megatron.core.tensor_parallel.random, "get_cuda_rng_tracker", None) is None
    for path in ("megatron.core.extensions", "megatron.core.transformer.moe", "megatron.core.nothing"):
        assert importlib.util.find_spec(path) is None
    assert importlib.util.find_spec("megatron.core.parallel_state") is not None
    with pytest.raises(AttributeError, match=r"torch\.distributed"):
        megatron.core.parallel_state.get_data_parallel_group_gloo()


def one_rank(**sizes):
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(**sizes)


def test_fields_that_a_loop_cannot_have_are_refused_or_warned_of():
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    one_rank()
    module = torch.nn.Linear(2, 2)
    for fields, told in (
        ({"use_custom_fsdp": True, "fsdp_double_buffer": True}, "--use-custom-fsdp, --fsdp-double-buffer"),
        ({"data_parallel_sharding_strategy": "optim_grads_params"}, "--data-parallel-sharding-strategy"),
        ({"num_distributed_optimizer_instances": 2}, "num_distributed_optimizer_instances=2"),
    ):
        with pytest.raises(ValueError, match=told):
            DistributedDataParallel(None, DistributedDataParallelConfig(**fields), module)
    with pytest.warns(UserWarning, match="overlap_grad_reduce"):
        DistributedDataParallel(None, DistributedDataParallelConfig(overlap_grad_reduce=True), module)


@pytest.mark.parametrize(
    ("flags", "refused"),
    [
        (
            "--pipeline-model-parallel-size 2 --num-layers 4 --zero-bubble-v-schedule",
            "--zero-bubble-v-schedule",
        ),
        (
            "--pipeline-model-parallel-size 2 --num-layers 4 --num-virtual-stages-per-pipeline-rank 2",
            "--num-virtual-stages-per-pipeline-rank",
        ),
        (
            "--use-custom-fsdp --data-parallel-sharding-strategy optim_grads_params",
            "--use-custom-fsdp, --data-parallel-sharding-strategy",
        ),
    ],
)
def test_flags_that_a_loop_cannot_have_are_refused(flags, refused, monkeypatch):
    from megatron.training import initialize_megatron

    for name, value in {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", "1")
    monkeypatch.setattr(sys, "argv", ["trainer", *FLAGS.split(), *flags.split()])
    with pytest.raises(ValueError, match=f"{refused}.*pretrain"):
        initialize_megatron(args_defaults={"tokenizer_type": "NullTokenizer"})


def test_methods_of_the_wrapper():
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    one_rank()
    model = DistributedDataParallel(None, DistributedDataParallelConfig(), torch.nn.Linear(2, 2))
    model.broadcast_params()
    model.zero_grad_buffer()
    with model.no_sync():
        model(torch.ones(1, 2)).sum().backward()
    model.start_grad_sync()
    model.scale_gradients(0.5)
    model.finish_grad_sync()
    assert torch.equal(model.module.weight.grad, torch.full((2, 2), 0.5))
    model.start_param_sync(force_sync=True)
    model.disable_forward_pre_hook(param_sync=False)
    model.enable_forward_pre_hook()
    config = OptimizerConfig(lr=1e-2)
    get_megatron_optimizer(config, [model], use_gloo_process_groups=False)
    with pytest.raises(ValueError, match="wrap the model"):
        get_megatron_optimizer(config, [model.module])
    with pytest.raises(ValueError, match="without conditions"):
        get_megatron_optimizer(config, [model], scale_lr_cond=lambda *_: True)


def test_checkpoints_of_a_model_beside_other_values(tmp_path):
    from megatron.core.dist_checkpointing.serialization import load, save

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


def groups_of_instances(ctx):
    """Of two ranks: two optimizer instances; two tensor parallel ranks; two pipeline ranks."""
    from megatron.core import mpu

    one_rank(num_distributed_optimizer_instances=2)
    partial = {"partial_data_parallel": True}
    assert (mpu.get_data_parallel_world_size(), mpu.get_data_parallel_world_size(**partial)) == (2, 1)
    total = torch.ones(1)
    torch.distributed.all_reduce(total, group=mpu.get_data_parallel_group(**partial))
    assert total == 1
    one_rank(tensor_model_parallel_size=2)
    assert (mpu.get_expert_tensor_parallel_world_size(), mpu.get_expert_model_parallel_world_size()) == (2, 1)
    with pytest.raises(ValueError, match=r"tensor_model_parallel_size=4,.*parallel, 2 and 1"):
        model_of(tensor_model_parallel_size=4)
    one_rank(pipeline_model_parallel_size=2)
    with pytest.raises(ValueError, match=r"pipeline_model_parallel_size=1 .*parallel, 1 and 2"):
        model_of()


def test_groups_of_instances_and_sizes_that_differ():
    run_ranks(groups_of_instances, 2)


def test_the_documentation_has_the_table():
    text = generate_names.DOCS.read_text()
    assert generate_names.with_table(text) == text, "run python tools/generate_names.py"


def test_fields_have_the_verdict_of_the_flags():
    from megatron.core.transformer.transformer_config import TransformerConfig

    with pytest.raises(ValueError, match=r"num_experts=8.*roadmap"):
        TransformerConfig(num_layers=2, hidden_size=16, num_attention_heads=4, num_moe_experts=8)
    with pytest.raises(TypeError, match="num_layer"):
        TransformerConfig(num_layer=2)
    with pytest.warns(UserWarning, match="use_cpu_initialization"):
        TransformerConfig(use_cpu_initialization=True, gradient_accumulation_fusion=False)


MODELOPT = """
import importlib, sys, types
def guarded(*names):  # as modelopt's plugins: a module that is missing turns a plugin off
    for name in names:
        try:
            importlib.import_module(name)
            print(name, "on")
        except ModuleNotFoundError:
            print(name, "off")
guarded("megatron.core.extensions.transformer_engine", "megatron.core.transformer.moe.experts")
"""


def test_guarded_imports_of_plugins_find_them_off():
    found = subprocess.run(
        [sys.executable, "-c", MODELOPT], capture_output=True, text=True, cwd=ROOT, check=True
    )
    states = dict(line.split() for line in found.stdout.splitlines())
    assert states["megatron.core.extensions.transformer_engine"] == "off"
    assert states["megatron.core.transformer.moe.experts"] == "off"
