"""What the optimizer's step takes beside what lasts: of an optimizer that is there, or of regions that are counted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor

from megatron.core.distributed.custom_fsdp.flat_buffer import FlatBuffer
from megatron.core.distributed.custom_fsdp.squared_sums import SUM_BYTES, sums_bytes
from megatron.core.optimizer.converted_grads import ConvertedGrads
from megatron.core.optimizer.flat_update import FlatUpdate


def changed_by_step(buffer: FlatBuffer, update: FlatUpdate) -> Iterator[Tensor]:
    """Everything that a step changes and cannot be made of the rest: this rank's part of main weights, moments."""
    for memory in buffer.buckets:
        if memory.main_weights is not None:
            yield memory.main_weights
    yield from update.mutable()


def figure_bytes(own: int, whole: int, rows: int, ranks: int, device: torch.device) -> int:
    """What sums of squares (and with two rows counts of zeros) of so many regions take, of so many in the whole model.
    ranks: whose vectors are gathered; 0: none are."""
    gathered = (ranks + 1) * (ranks > 0)
    of_model = rows * whole * (1 + gathered)
    return max(sums_bytes(own, device) + (rows - 1) * own * SUM_BYTES, (rows * own + of_model) * SUM_BYTES)


def update_bytes(update: FlatUpdate, conversion: ConvertedGrads, *, in_place: bool) -> dict[str, int]:
    """What `step` takes, by the tracker's categories. in_place: without a snapshot."""
    return {"casts": conversion.most_bytes(in_place=in_place), "tails": update.tail_bytes}


def validated_bytes(
    figures: Mapping[str, int], update: Callable[..., dict[str, int]], copies: int, *, inverse: bool
) -> dict[str, dict[str, int]]:
    """`step_bytes` of steps that are validated. update: `update_bytes`, in_place or not."""
    rollback = Counter(update(in_place=True)) | Counter(update(in_place=False) if inverse else {})
    optimizer = update(in_place=False) | {"snapshot": copies}
    return {"grad-norm": dict(figures), "optimizer": optimizer, "rollback": dict(rollback)}
