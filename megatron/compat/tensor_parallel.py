"""Megatron's `tensor_parallel` functions that a loop calls; layers are in `core.tensor_parallel.parallel_layers`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megatron.compat.parallel_state import current
from megatron.core.tensor_parallel import mappings, vocab_loss
from megatron.core.tensor_parallel.mappings import TensorParallel
from megatron.core.transport import collectives, host_data


def gather_from_tensor_model_parallel_region(input_: Tensor, *_: Any, **__: Any) -> Tensor:
    """[..., v/tp] -> [..., v], such as logits; its gradient is this rank's part. Communicates over tp."""
    return mappings.gather_vocabulary(input_, TensorParallel.of(current(), False))


def vocab_parallel_cross_entropy(vocab_parallel_logits: Tensor, target: Tensor) -> Tensor:
    """Losses [...] of logits [..., v/tp], which are consumed, and ids [...]. Communicates over tp."""
    tp = TensorParallel.of(current(), False)
    return vocab_loss.vocab_parallel_cross_entropy(vocab_parallel_logits, target, tp)


def broadcast_data(keys: Sequence[str], data: Any, datatype: torch.dtype) -> dict[str, Tensor]:
    """The first tensor parallel rank's tensors, by name, on all of them. Communicates over tp."""
    ps, out = current(), {}
    shapes = host_data.all_gather_json(data and [list(data[key].shape) for key in keys], ps.tp_group)[0]
    for key, shape in zip(keys, shapes, strict=True):
        out[key] = torch.empty(shape, dtype=datatype, device=ps.device.torch_device)
        if ps.tp_rank == 0:
            out[key].copy_(data[key])
        collectives.broadcast(out[key], ps.tp_group)
    return out


def model_parallel_cuda_manual_seed(seed: int, *_: Any, **__: Any) -> None:
    """Of torch alone. Weights and masks of our layers are keyed by `TransformerConfig(seed=...)`, on any device."""
    torch.manual_seed(seed)
