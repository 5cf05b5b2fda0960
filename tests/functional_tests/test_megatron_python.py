"""Trainers that import Megatron's Python names: its quickstart's loop, and the table of names."""

import functools
import importlib
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader

from megatron.compat import names
from tests.harness.ranks import run_ranks

SEQUENCE, VOCABULARY, STEPS = 32, 64, 4
DOCS = Path(__file__).resolve().parents[2] / "docs" / "megatron_compat.md"


def loss_func(loss_mask, losses):
    kept = loss_mask.view(-1).float()
    loss = torch.sum(losses.view(-1).float() * kept) / kept.sum()
    return loss, {"lm loss": float(loss)}


def forward_step(data_iterator, model):
    batch = next(data_iterator)
    losses = model(batch["tokens"], batch["position_ids"], batch["attention_mask"], labels=batch["labels"])
    return losses, functools.partial(loss_func, batch["loss_mask"])


def batches(share, ranks):
    """Microbatches `share`, share + ranks, ... of the mock data."""
    from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
    from megatron.core.datasets.gpt_dataset import GPTDatasetConfig, MockGPTDataset
    from megatron.core.datasets.utils import compile_helpers
    from megatron.training.tokenizer.tokenizer import _NullTokenizer

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
    assert len(valid) > 0 and len(test) > 0
    for number, batch in enumerate(DataLoader(train, batch_size=2, shuffle=False)):
        if number % ranks == share:
            yield batch


def build(tp, pp, **fields):
    from megatron.core import mpu, parallel_state
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer.transformer_config import TransformerConfig

    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(tp, pp)
    model_parallel_cuda_manual_seed(123)
    config = TransformerConfig(
        num_layers=2,
        hidden_size=16,
        num_attention_heads=4,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cpu_initialization=True,
        pipeline_dtype=torch.float32,
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
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


def simple_loop(ctx, tp, pp, folder):
    """Megatron-Core's quickstart: torch's Adam over the model's parameters; save and load."""
    from megatron.core import dist_checkpointing
    from megatron.core.pipeline_parallel.schedules import get_forward_backward_func

    model = build(tp, pp)
    optimizer, data = torch.optim.Adam(model.parameters(), lr=1e-3), batches(0, 1)
    losses = []
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
    loaded = dist_checkpointing.load(
        sharded_state_dict=model.sharded_state_dict(prefix=""), checkpoint_dir=folder
    )
    model.load_state_dict(loaded)
    assert all(torch.equal(one, trained[name]) for name, one in model.named_parameters())
    return losses


@functools.cache
def alone(folder):
    return run_ranks(simple_loop, 1, 1, 1, folder)[0]


@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (1, 2)])
def test_the_quickstart_loop_runs_on_two_ranks(tp, pp, tmp_path_factory):
    reference = alone(str(tmp_path_factory.getbasetemp() / "alone"))
    assert len(reference) == 2 * STEPS and reference[-1] < reference[0]
    *_, last = run_ranks(simple_loop, 2, tp, pp, str(tmp_path_factory.mktemp("two")))
    assert last == pytest.approx(reference, rel=1e-5)


def wrapped_loop(ctx, sharded):
    """Data parallel ranks with halves of each step's microbatches: `DistributedDataParallel`, Megatron's optimizer."""
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.pipeline_parallel import get_forward_backward_func

    ranks = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    inner = build(1, 1, finalize_model_grads_func=finalize_model_grads)
    ddp_config = DistributedDataParallelConfig(use_distributed_optimizer=sharded)
    model = DistributedDataParallel(inner.config, ddp_config, inner)
    optimizer = get_megatron_optimizer(OptimizerConfig(optimizer="adam", lr=1e-2, clip_grad=0.5), [model])
    data, norms = batches(ctx.rank, ranks), []
    for _ in range(STEPS):
        model.zero_grad_buffer()
        optimizer.zero_grad()
        get_forward_backward_func()(
            forward_step_func=forward_step, data_iterator=data, model=[model], num_microbatches=4 // ranks
        )
        done, norm, _ = optimizer.step()
        assert done
        norms.append(norm)
    return norms, {name: one.detach().clone() for name, one in inner.named_parameters()}


@pytest.mark.parametrize("sharded", [False, True])
def test_wrapped_models_train_as_one_process_does(sharded):
    ((norms, weights),) = run_ranks(wrapped_loop, 1, False)
    for got, found in run_ranks(wrapped_loop, 2, sharded):
        assert got == pytest.approx(norms, rel=1e-4)
        for name, weight in weights.items():
            torch.testing.assert_close(found[name], weight, rtol=1e-4, atol=1e-5)


def torch_loop(ctx):
    """The same steps by torch's AdamW over `.grad`, clipped by torch."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    model, data = build(1, 1), batches(0, 1)
    groups = [
        {"params": [one for one in model.parameters() if one.dim() > 1], "weight_decay": 0.01},
        {"params": [one for one in model.parameters() if one.dim() < 2], "weight_decay": 0.0},
    ]
    optimizer, norms = torch.optim.AdamW(groups, lr=1e-2), []
    for _ in range(STEPS):
        optimizer.zero_grad()
        get_forward_backward_func()(
            forward_step_func=forward_step, data_iterator=data, model=model, num_microbatches=4
        )
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
        optimizer.step()
    return norms, {name: one.detach().clone() for name, one in model.named_parameters()}


def test_the_optimizer_does_what_torchs_does():
    ((norms, weights),) = run_ranks(wrapped_loop, 1, False)
    ((expected, reference),) = run_ranks(torch_loop, 1)
    assert norms == pytest.approx(expected, rel=1e-4)
    for name, weight in reference.items():
        torch.testing.assert_close(weights[name], weight, rtol=1e-4, atol=1e-5)


ROWS = [row for rows in names.table().values() for row in rows]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.path}:{row.name}")
def test_each_row_is_a_name_or_says_what_to_use(row):
    if not row.name:
        with pytest.raises(ModuleNotFoundError, match="is not here"):
            importlib.import_module(row.path)
        return
    module = importlib.import_module(row.path)
    if row.name == "*":
        home = importlib.import_module(row.home)
        assert all(getattr(module, name) is not None for name in home.__all__)
    elif row.home:
        assert getattr(module, row.name) is not None
        assert not (callable(getattr(module, row.name)) and row.name == "module")
    else:
        with pytest.raises(ImportError) as error:
            getattr(module, row.name)
        assert row.instead in str(error.value)


def test_what_no_table_knows_names_the_documentation():
    with pytest.raises(ImportError, match=r"get_nothing.*docs/megatron_compat\.md"):
        from megatron.core.optimizer import get_nothing  # noqa: F401


def test_the_documentation_lists_every_path():
    text = DOCS.read_text()
    missing = sorted({row.path for row in ROWS if f"`{row.path}`" not in text})
    assert not missing, missing


def test_a_field_says_why_it_cannot_be_had():
    from megatron.core.transformer.transformer_config import TransformerConfig

    with pytest.raises(ValueError, match=r"num_moe_experts=8.*mixture of experts"):
        TransformerConfig(num_layers=2, hidden_size=16, num_attention_heads=4, num_moe_experts=8)
    with pytest.raises(TypeError, match="did you mean num_layers"):
        TransformerConfig(num_layer=2)
