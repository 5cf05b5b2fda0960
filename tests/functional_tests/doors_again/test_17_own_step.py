"""Number 17: the parts of Megatron's training script, called as it calls them, over two ranks as in one process."""

import argparse
import functools
import os
import sys

import numpy as np
import pytest
import torch
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.datasets.indexed_dataset import IndexedDataset, IndexedDatasetBuilder
from megatron.core.datasets.utils import Split, get_blend_from_list
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.num_microbatches_calculator import get_num_microbatches
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.utils import get_model_config
from megatron.training.arguments import core_transformer_config_from_args, parse_args
from megatron.training.checkpointing import save_checkpoint
from megatron.training.tokenizer import build_tokenizer
from megatron.training.training import get_model, setup_model_and_optimizer, train_step
from megatron.training.utils import average_losses_across_data_parallel_group, get_batch_on_this_tp_rank

from megatron.core import mpu
from megatron.core.distributed import finalize_model_grads
from megatron.core.enums import ModelType
from megatron.core.tensor_parallel import broadcast_data
from megatron.training import get_args, get_timers, get_tokenizer, global_vars, initialize_megatron
from tests.harness.ranks import share_ranks

FLAGS = (
    "--num-layers 2 --hidden-size 16 --num-attention-heads 4 --seq-length 16 --max-position-embeddings 16 --lr 1e-2 "
    "--micro-batch-size 2 --global-batch-size 4 --train-iters 6 --tokenizer-type NullTokenizer --vocab-size 31 "
    "--distributed-backend gloo --hidden-dropout 0 --attention-dropout 0 --lr-decay-style cosine --lr-warmup-iters 2 "
    "--make-vocab-size-divisible-by 16 --untie-embeddings-and-output-weights "
    "--log-num-zeros-in-grad"
)
STEPS = 3


def start(ctx, flags):
    """`initialize_megatron` of a launch of these flags."""
    global_vars.unset_global_variables()
    places = {"RANK": ctx.rank, "LOCAL_RANK": ctx.rank}
    places |= {"WORLD_SIZE": ctx.world_size, "LOCAL_WORLD_SIZE": ctx.world_size}
    os.environ |= {name: str(one) for name, one in places.items()}
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    sys.argv = ["trainer", *FLAGS.split(), *flags.split()]


def provider(pre_process=True, post_process=True, vp_stage=None):
    args = get_args()
    return GPTModel(
        config=core_transformer_config_from_args(args),
        transformer_layer_spec=get_gpt_layer_local_spec(),
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        pre_process=pre_process,
        post_process=post_process,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type,
    )


def batches():
    """On the first rank of its tensor parallel group; None elsewhere, as Megatron's loaders are."""
    if mpu.get_tensor_model_parallel_rank():
        return None

    def forever():
        generator = torch.Generator().manual_seed(3)
        while True:
            every = torch.randint(0, 31, (2 * mpu.get_data_parallel_world_size(), 17), generator=generator)
            text = every.chunk(mpu.get_data_parallel_world_size())[mpu.get_data_parallel_rank()]
            yield {
                "tokens": text[:, :-1].contiguous(),
                "labels": text[:, 1:].contiguous(),
                "loss_mask": torch.ones(2, 16),
                "position_ids": torch.arange(16).expand(2, 16).contiguous(),
            }

    return forever()


def loss_func(loss_mask, output):
    losses, kept = output.view(-1).float(), loss_mask.view(-1)
    loss = torch.sum(losses * kept) / kept.sum()
    (averaged,) = average_losses_across_data_parallel_group([loss])
    return loss, {"lm loss": averaged}


def forward_step(data_iterator, model):
    batch = get_batch_on_this_tp_rank(data_iterator)
    assert batch["attention_mask"] is None
    assert (batch["tokens"] is None) == (not mpu.is_pipeline_first_stage())
    assert (batch["labels"] is None) == (not mpu.is_pipeline_last_stage())
    output = model(batch["tokens"], batch["position_ids"], None, labels=batch["labels"])
    return output, functools.partial(loss_func, batch["loss_mask"])


def trained(ctx, flags="", save=""):
    """Losses, norms and rates of some steps."""
    start(ctx, flags + (f" --save {save} --load {save} --save-interval 1" if save else ""))
    initialize_megatron(args_defaults={"tokenizer_type": "NullTokenizer"})
    model, optimizer, scheduler = setup_model_and_optimizer(provider, ModelType.encoder_or_decoder)
    assert get_args().iteration == 0
    config, data, told = get_model_config(model[0]), batches(), []
    config.finalize_model_grads_func = finalize_model_grads
    for _ in range(STEPS):
        get_timers()("step", log_level=0).start()
        reduced, skipped, saves, ends, status, norm, zeros = train_step(
            forward_step, data, model, optimizer, scheduler, config
        )
        get_timers()("step").stop()
        assert (skipped, saves, ends, status) == (0, False, False, 0)
        assert zeros > 0  # of words that no batch has
        assert (list(reduced) == ["lm loss"]) == mpu.is_pipeline_last_stage()
        told.append([float(reduced.get("lm loss", 0)), norm, optimizer.param_groups[0]["lr"]])
    if save:
        save_checkpoint(STEPS, model, optimizer, scheduler, 5)
        again = setup_model_and_optimizer(provider, ModelType.encoder_or_decoder)
        assert (get_args().iteration, again[2].state_dict()) == (STEPS, scheduler.state_dict())
        tensors = optimizer.state_dict()["tensors"]
        assert all(torch.equal(one, tensors[n]) for n, one in again[1].state_dict()["tensors"].items())
    return told


def flat(rows):
    return [number for row in rows for number in row]


def parsed(ctx):
    """`parse_args`, `set_args`, and what is written into it."""
    start(ctx, "")
    args = parse_args()
    assert (args.lr, args.rank, args.ffn_hidden_size) == (1e-2, ctx.rank, 64)
    global_vars.set_args(args)
    assert get_args() is args
    args.lr, args.hidden_size = 5e-3, 32
    initialize_megatron(parsed_args=args)
    assert get_args() is args
    assert get_num_microbatches() == 2 // ctx.world_size
    (model,) = get_model(provider, ModelType.encoder_or_decoder, wrap_with_ddp=False)
    assert isinstance(model, MegatronModule)
    assert model.config.hidden_size == 32
    _, optimizer, _ = setup_model_and_optimizer(provider, ModelType.encoder_or_decoder)
    assert optimizer.config.lr == 5e-3
    args.padded_vocab_size = None
    assert build_tokenizer(args).vocab_size == get_tokenizer().vocab_size == 32
    assert args.padded_vocab_size == 32
    args.clip_grad = -2
    with pytest.raises(ValueError, match=r"args\(clip_grad=-2\): -2.0: must be at least 0"):
        get_model(provider)
    global_vars.set_args(argparse.Namespace(rank=0, world_size=1, mine=3))
    assert get_args().mine == 3
    whole = {"a": torch.arange(3), "b": torch.ones(2, 2, dtype=torch.int64)}
    found = broadcast_data(["a", "b"], whole, torch.int64)
    assert all(torch.equal(found[name], one) for name, one in whole.items())


@pytest.fixture(scope="module")
def on_two_ranks(tmp_path_factory):
    save = str(tmp_path_factory.mktemp("run") / "saved")
    return share_ranks(
        2,
        {
            "tp": functools.partial(trained, flags="--tensor-model-parallel-size 2 --sequence-parallel"),
            "pp": functools.partial(trained, flags="--pipeline-model-parallel-size 2"),
            "dp": functools.partial(trained, flags="--use-distributed-optimizer", save=save),
        },
    )


@pytest.mark.grid
def test_steps_of_megatrons_parts_over_two_ranks_as_in_one_process(on_two_ranks):
    alone = share_ranks(1, {"steps": trained, "args": parsed})
    (reference,) = alone["steps"]
    assert [rate for _, _, rate in reference] == pytest.approx([5e-3, 1e-2, 1e-2 * 0.8535534], rel=1e-6)
    for way, found in on_two_ranks.items():
        assert flat(found[-1]) == pytest.approx(flat(reference), rel=1e-4), way


def test_the_schedule_over_an_optimizer_of_torch():
    """Megatron's arguments; rates as docs/numerics.md has them."""
    layer = torch.nn.Linear(1, 1)
    optimizer = torch.optim.AdamW(
        [{"params": [layer.weight]}, {"params": [layer.bias], "wd_mult": 0.0}], lr=1
    )
    make = functools.partial(
        OptimizerParamScheduler,
        optimizer,
        init_lr=0.0,
        max_lr=1.0,
        min_lr=0.1,
        lr_warmup_steps=2,
        lr_decay_steps=10,
        lr_decay_style="linear",
        start_wd=0.1,
        end_wd=0.1,
        wd_incr_steps=10,
        wd_incr_style="constant",
    )
    scheduler, rates = make(), []
    for _ in range(5):
        scheduler.step(increment=2)
        rates.append(optimizer.param_groups[0]["lr"])
    assert rates == pytest.approx([1.0, 0.775, 0.55, 0.325, 0.1])
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]
    other = make(lr_decay_steps=20)
    other.load_state_dict(scheduler.state_dict())  # use_checkpoint_opt_param_scheduler
    assert other.state_dict() == scheduler.state_dict()
    for wrong, told in (
        ({"max_lr": float("nan")}, r"OptimizerParamScheduler\(max_lr=nan\)"),
        ({"min_lr": 2.0}, "min_lr 2.0 is above max_lr 1.0"),
        ({"lr_decay_style": "steps"}, "lr_decay_style='steps'"),
        ({"lr_warmup_steps": 11}, "the whole schedule 10"),
    ):
        with pytest.raises(ValueError, match=told):
            make(**wrong)


def test_corpora_by_megatrons_arguments(tmp_path):
    """Written item by item, read, joined, and sampled as the builder samples it."""
    prefix = str(tmp_path / "corpus")
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.uint16)
    builder.add_item(torch.arange(5))
    builder.add_item(torch.arange(7), mode=0)
    builder.end_document()
    builder.add_document(torch.arange(90), [40, 50])
    with pytest.raises(ValueError, match="expects"):
        builder.finalize(f"{prefix}-other.idx")
    builder.finalize(f"{prefix}.idx")
    corpus = IndexedDataset(prefix, multimodal=False, mmap=True)
    assert IndexedDataset.exists(prefix)
    assert (corpus.sequence_lengths.tolist(), corpus.document_indices.tolist()) == ([5, 7, 40, 50], [0, 2, 4])
    assert [part.tolist() for part in corpus[:2]] == [list(range(5)), list(range(7))]
    assert corpus[-1].tolist() == list(range(40, 90))
    assert corpus.get(idx=2, offset=3, length=2).tolist() == [3, 4]
    with pytest.raises(IndexError):
        corpus[4]
    joined = IndexedDatasetBuilder(str(tmp_path / "joined.bin"), dtype=np.uint16)
    joined.add_index(prefix)
    joined.add_index(prefix)
    joined.finalize(str(tmp_path / "joined.idx"))
    assert len(IndexedDataset(str(tmp_path / "joined"))) == 8

    tokenizer = argparse.Namespace(eod=99, vocab_size=100)
    config = GPTDatasetConfig(
        random_seed=1,
        sequence_length=16,
        blend=get_blend_from_list([prefix]),
        split="1,0,0",
        tokenizer=tokenizer,
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
        num_dataset_builder_threads=1,
        path_to_cache=str(tmp_path / "cache"),
        mmap_bin_files=True,
    )
    built = BlendedMegatronDatasetBuilder(GPTDataset, [12, 0, 0], lambda: True, config).build()[0]
    mine = GPTDataset(corpus, prefix, np.arange(4, dtype=np.int32), 12, Split.train, config)
    assert len(mine) == len(built) >= 12
    assert all(
        np.array_equal(mine[i][name], built[i][name]) for i in range(12) for name in ("tokens", "labels")
    )
    with pytest.raises(ValueError, match="consecutive"):
        GPTDataset(corpus, prefix, np.array([0, 2]), 12, Split.train, config)


def test_words_of_a_blend_and_kinds_of_masks():
    assert get_blend_from_list(None) is None
    assert get_blend_from_list(["a", "b", "c"]) == (["a", "b", "c"], None)
    assert get_blend_from_list(["30", "a", "70", "b"]) == (["a", "b"], [30.0, 70.0])
    assert [kind.value for kind in AttnMaskType] == [1, 2, 3, 4, 5, 6]
    assert AttnMaskType["causal"] is AttnMaskType.causal


@pytest.mark.parametrize(
    ("path", "names"),
    [
        ("megatron.core.transformer.attention", "SelfAttention CoreAttention"),
        ("megatron.core.transformer.mlp", "MLP"),
        ("megatron.core.transformer", "TransformerLayer MLATransformerConfig"),
        ("megatron.core.tensor_parallel.mappings", "all_to_all"),  # the path that was asked for, not its home
        ("megatron.core.transformer.transformer_block", "TransformerBlock"),
        ("megatron.core.datasets.blended_dataset", "BlendedDataset"),
    ],
)
def test_layers_of_one_kind_are_refused(path, names):
    for name in names.split():
        with pytest.raises(ImportError, match=rf"{path}\.{name} is not here: (use|.*planned)"):
            exec(f"from {path} import {name}")
