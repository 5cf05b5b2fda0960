"""The batch of a microbatch, and what a stage takes of it."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor


def stage_batch(
    batch: Mapping[str, Tensor], device: torch.device, *, embeds: bool, ends: bool
) -> dict[str, Tensor | None]:
    """What a stage needs of a batch, on its device; the rest is None.

    tokens, position_ids [b, s] where the stage embeds; labels, loss_mask [b, s] where the loss is; attention_mask on
    all stages, None = causal.
    """
    names = ["attention_mask", *["tokens", "position_ids"] * embeds, *["labels", "loss_mask"] * ends]
    moved = {name: batch[name].to(device, non_blocking=True) for name in names if batch.get(name) is not None}
    return {
        name: moved.get(name) for name in ("tokens", "labels", "loss_mask", "attention_mask", "position_ids")
    }


def empty_batch(
    micro_batch_size: int, seq_length: int, device: torch.device, *, masked: bool
) -> dict[str, Tensor]:
    """A batch as loaders give it, without values. masked: with a mask of attention, as loaders make them."""
    shape = micro_batch_size, seq_length
    names = ("tokens", "labels", "position_ids")
    batch = {name: torch.zeros(shape, dtype=torch.int64, device=device) for name in names}
    if masked:
        square = micro_batch_size, 1, seq_length, seq_length
        batch["attention_mask"] = torch.zeros(square, dtype=torch.bool, device=device)
    return batch | {"loss_mask": torch.ones(shape, device=device)}
