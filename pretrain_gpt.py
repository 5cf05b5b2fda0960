#!/usr/bin/env python3
"""Pre-train a GPT model, with Megatron-LM's command line.

    python tools/launch.py --nproc-per-node 2 -- pretrain_gpt.py --num-layers 8 ... --data-path my_corpus_text_document

Three providers (model, batch and loss, data sets) and a call of `pretrain`: copy this file to train another model.
Flags are parsed and checked before torch is imported, so a wrong launch line is refused within half a second.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor, nn


def model_provider(
    pre_process: bool = True, post_process: bool = True, vp_stage: int | None = None
) -> nn.Module:
    """The model, or the part of it that this rank holds: its stage of the pipeline, of that the chunk vp_stage."""
    from megatron.training.global_vars import get_config, get_parallel_state
    from megatron.training.run.build import build_gpt_model

    return build_gpt_model(
        get_config(),
        get_parallel_state(),
        pre_process=pre_process,
        post_process=post_process,
        vp_stage=vp_stage,
    )


def get_batch(data_iterator: Iterator[Any], model: nn.Module) -> dict[str, Tensor | None]:
    """What this stage needs of the next microbatch, on its device; the rest is None.

    tokens, position_ids [b, s] where the model embeds; labels, loss_mask [b, s] where the loss is; attention_mask on
    all stages, None = causal.
    """
    from megatron.core.models.gpt.batch import stage_batch
    from megatron.training.global_vars import get_device

    device = get_device().torch_device
    return stage_batch(next(data_iterator), device, embeds=model.pre_process, ends=model.post_process)


def loss_func(loss_mask: Tensor, losses: Tensor) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """Sum of the losses [b, s] that count, how many they are, and what is reported."""
    from megatron.core.models.gpt.loss import gpt_loss

    return gpt_loss(loss_mask, losses)


def forward_step(data_iterator: Iterator[Any], model: nn.Module) -> tuple[Tensor, Any]:
    """One microbatch forward: per-token losses [b, s] (hidden states on the stages before the last), and the function
    that makes a number of them."""
    batch = get_batch(data_iterator, model)
    losses = model(batch["tokens"], batch["position_ids"], batch["attention_mask"], labels=batch["labels"])
    return losses, partial(loss_func, batch["loss_mask"])


def train_valid_test_datasets_provider(num_samples: Sequence[int | None]) -> tuple[Any, Any, Any]:
    """Data sets for training, validation and test, of at least these sizes."""
    from megatron.training.global_vars import get_config, get_tokenizer
    from megatron.training.run.data import build_gpt_datasets

    return build_gpt_datasets(get_config(), get_tokenizer(), num_samples)


def main() -> None:
    """Train as the command line says."""
    from megatron.training.run.arguments import launch_config

    config = launch_config()  # exits with status 2 on a wrong launch line

    from megatron.core.enums import ModelType
    from megatron.training import pretrain

    pretrain(
        train_valid_test_datasets_provider,
        model_provider,
        ModelType.encoder_or_decoder,
        forward_step,
        config=config,
    )


if __name__ == "__main__":
    main()
