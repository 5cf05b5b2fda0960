#!/usr/bin/env python3
"""Train a GPT on bytes with the framework's parts and no command line: what `pretrain` does, on one page.

One process, or data parallel with the same losses:

    python examples/minimal/train.py
    torchrun --nproc-per-node 2 examples/minimal/train.py
"""

import argparse
from pathlib import Path

import torch

from megatron.core.device import current_device
from megatron.core.distributed.custom_fsdp.data_parallel_config import DistributedDataParallelConfig
from megatron.core.distributed.data_parallel import DistributedDataParallel
from megatron.core.models.gpt.gpt import GPTModel
from megatron.core.models.gpt.loss import gpt_loss
from megatron.core.optimizer.clip_grads import clip_coefficient
from megatron.core.optimizer.mixed_precision import build_optimizer
from megatron.core.optimizer.optimization_config import OptimizerConfig
from megatron.core.transformer.model_config import TransformerConfig
from megatron.core.transport import collectives
from megatron.core.transport.parallel_state import (
    destroy_process_group,
    init_process_group,
    make_parallel_state,
)
from megatron.core.transport.rank_grid import dense_grid
from megatron.training.config.launch_env import LaunchEnv

STEPS, GLOBAL_BATCH, MICRO_BATCH, SEQ, VOCAB = 40, 8, 2, 64, 256


def batch_of_step(text, step):
    """Tokens and labels [GLOBAL_BATCH, SEQ]: the same on every rank; each takes its own rows."""
    generator = torch.Generator().manual_seed(step)
    starts = torch.randint(len(text) - SEQ, (GLOBAL_BATCH,), generator=generator)
    rows = torch.stack([text[start : start + SEQ + 1] for start in starts])  # [b, s + 1]
    return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()  # a label is the next token


def train(ps, seed=1234):
    """Returns the losses. ps: who this rank is and whom it talks to; a world of one communicates nothing."""
    text = torch.tensor(list(Path(argparse.__file__).read_bytes()))  # the text: a source file of Python's own
    config = TransformerConfig(
        num_layers=2, hidden_size=64, num_attention_heads=4, seq_length=SEQ, max_position_embeddings=SEQ
    ).resolved()  # fills in what follows: MLP width 4 h, head size h / heads
    # Weights depend on the seed and on each parameter's name: every rank draws the same ones, none is sent.
    model = GPTModel(config, padded_vocab_size=VOCAB, seed=seed, device=ps.device.torch_device)

    # The engine keeps weights and gradients in flat buffers and sums gradients over ranks, bucket by bucket.
    # Layers hand weight gradients to model.context.grads, the sink, which adds them to those buffers.
    ddp_config = DistributedDataParallelConfig(overlap_grad_reduce=True)
    ddp = DistributedDataParallel(model, ps, ddp_config, model.param_meta, model.context.grads)
    optimizer = build_optimizer(OptimizerConfig(lr=3e-3, weight_decay=0.1), ddp.buffer, ps)

    num_microbatches = GLOBAL_BATCH // (MICRO_BATCH * ps.dp_size)  # of each rank in one step
    losses = []
    for step in range(STEPS):
        tokens, labels = batch_of_step(text, step)
        ddp.begin_step(num_microbatches)  # gradients travel during the backward of the last microbatch
        step_loss = torch.zeros(())
        for index in range(num_microbatches):
            # Which samples: the same step sees the same microbatches, however many ranks share them.
            global_index = index * ps.dp_size + ps.dp_rank
            rows = slice(global_index * MICRO_BATCH, (global_index + 1) * MICRO_BATCH)
            # Dropout masks are a function of (seed, step, global microbatch, layer, site): nothing to save.
            model.context.begin_microbatch(step, index, global_index)
            positions = torch.arange(SEQ).expand_as(tokens[rows])
            token_losses = ddp(tokens[rows], positions, labels=labels[rows])  # [b, s]
            loss_sum, num_tokens, _ = gpt_loss(torch.ones_like(token_losses), token_losses)
            loss = loss_sum / num_tokens
            loss.backward()
            step_loss += loss.detach()
        ddp.finish()  # the buffer now holds the sum over all microbatches of all ranks
        divisor = float(num_microbatches * ps.dp_size)  # the one division that makes a mean of it
        stats = optimizer.prepare(divisor)  # norm, and whether all is finite: the same answer on every rank
        assert not stats.nonfinite, f"step {step}: {stats.nonfinite_names}"
        optimizer.step(divisor, clip_coefficient(stats.norm, 1.0))
        collectives.all_reduce(step_loss, ps.dp_group)
        losses.append(step_loss.item() / divisor)
        if step % 5 == 0 and ps.is_first_rank:
            print(f"step {step:3d} | loss {losses[-1]:.4f} | grad norm {stats.norm:.4f}", flush=True)
    return losses


if __name__ == "__main__":
    env = LaunchEnv.read()  # what torchrun says: rank, world size, ... ; a world of one without it
    torch.set_num_threads(1)  # matrices this small gain nothing from more
    device = current_device(env.local_rank, kind="cpu")
    init_process_group(device, rank=env.rank, world_size=env.world_size)
    ps = make_parallel_state(dense_grid(env.world_size), device)
    train(ps)
    destroy_process_group(ps)
