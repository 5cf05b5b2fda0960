"""A tiny GPT of megatron-core on CPU ranks: some steps under Megatron's 1F1B, the same steps under ZB-H1.

    torchrun --nproc-per-node 2 tiny_gpt.py

The losses are equal to the last digit. The CPU's shims are beside this file; on GPUs leave them out.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import cpu_shims
import torch
import torch.distributed as dist

torch.set_num_threads(1)
cpu_shims.install()

from megatron.core import parallel_state  # noqa: E402
from megatron.core.distributed import (  # noqa: E402
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec  # noqa: E402
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer  # noqa: E402
from megatron.core.pipeline_parallel import get_forward_backward_func  # noqa: E402
from megatron.core.transformer import TransformerConfig  # noqa: E402

import zbpp_light  # noqa: E402

STEPS, MICROBATCHES, LENGTH, VOCABULARY = 5, 6, 16, 64


def build():
    """This rank's stage in Megatron's DDP, and its optimizer."""
    torch.manual_seed(1)
    config = TransformerConfig(
        num_layers=2 * dist.get_world_size(),
        hidden_size=32,
        num_attention_heads=4,
        pipeline_model_parallel_size=dist.get_world_size(),
        pipeline_dtype=torch.float32,
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
        attention_dropout=0.0,
        hidden_dropout=0.0,
    )
    model = GPTModel(
        config,
        get_gpt_layer_local_spec(),
        vocab_size=VOCABULARY,
        max_sequence_length=LENGTH,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
    )
    model = DistributedDataParallel(config, DistributedDataParallelConfig(), model)
    config.finalize_model_grads_func = finalize_model_grads
    return model, get_megatron_optimizer(OptimizerConfig(optimizer="adam", lr=1e-2), [model])


def microbatches(step):
    source = torch.Generator().manual_seed(step)
    for _ in range(MICROBATCHES):
        yield torch.randint(0, VOCABULARY, (2, LENGTH + 1), generator=source)


def forward_step(data, model):
    text = next(data)
    positions = torch.arange(LENGTH).expand(2, -1)
    mask = torch.ones(1, 1, LENGTH, LENGTH).triu(1).bool()
    output = model(text[:, :-1].contiguous(), positions, mask, labels=text[:, 1:].contiguous())

    def mean(losses):
        loss = losses.mean()
        return loss, {"loss": loss.detach()}

    return output, mean


def train():
    """The loss of each step, on the last stage."""
    model, optimizer = build()
    found = []
    for step in range(STEPS):
        model.zero_grad_buffer()
        optimizer.zero_grad()
        losses = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=microbatches(step),
            model=[model],
            num_microbatches=MICROBATCHES,
            seq_length=LENGTH,
            micro_batch_size=2,
            forward_only=False,
        )
        optimizer.step()
        if losses:
            found.append(sum(one["loss"].item() for one in losses) / MICROBATCHES)
    return found


def main():
    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=dist.get_world_size())
    own = train()
    zbpp_light.patch_megatron()
    ours = train()
    zbpp_light.unpatch_megatron()
    if own:
        print("1F1B  ", *own)
        print("ZB-H1 ", *ours)
        print("equal" if own == ours else "DIFFERENT", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
