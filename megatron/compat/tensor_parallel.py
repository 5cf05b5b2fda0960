"""Megatron's `tensor_parallel` functions: what is moved between tensor parallel ranks, with gradients by autograd."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron.compat.parallel_state import current, process_group
from megatron.core.tensor_parallel import mappings, vocab_loss
from megatron.core.tensor_parallel.mappings import Move, TensorParallel
from megatron.core.transport import collectives, host_data


def ranks(caller: str, group: Any = None) -> TensorParallel:
    """Those of `parallel_state`. group: none, or torch's group of them. Raises ValueError for another."""
    ps = current()
    if group is not None and group is not process_group(ps.tp_group):
        raise ValueError(f"{caller}: of the tensor parallel group of parallel_state alone, not of {group}")
    return TensorParallel.of(ps, False)


def _region(name: str, there: Move, back: Move, dim: int) -> Callable[..., Tensor]:
    def move(input_: Tensor, group: Any = None, **others: Any) -> Tensor:
        others.pop("use_global_buffer", None)  # of memory alone
        if any(one is not None for one in others.values()):
            raise ValueError(f"{name}({', '.join(others)}): leave it out, parts are even here")
        return mappings.moved(input_, ranks(f"{name}(group)", group), there, back, dim)

    along = "the first dim" if dim == 0 else "the last dim"
    move.__doc__ = f"{there.__name__}, along {along}; its gradient: {back.__name__}. Communicates over tp."
    move.__name__ = move.__qualname__ = name
    return move


_AS_IT_IS, _SUMMED, _PART = mappings.as_it_is, mappings.summed, mappings.own_part
_GATHERED, _PART_OF_SUM = mappings.gathered, mappings.own_part_of_sum
_REGIONS: dict[str, tuple[Move, Move, int]] = {  # what is done, and with the gradient, along which dim
    "copy_to_tensor_model_parallel_region": (_AS_IT_IS, _SUMMED, 0),
    "reduce_from_tensor_model_parallel_region": (_SUMMED, _AS_IT_IS, 0),
    "scatter_to_tensor_model_parallel_region": (_PART, _GATHERED, -1),
    "gather_from_tensor_model_parallel_region": (_GATHERED, _PART, -1),
    "scatter_to_sequence_parallel_region": (_PART, _GATHERED, 0),
    "reduce_scatter_to_sequence_parallel_region": (_PART_OF_SUM, _GATHERED, 0),
    "all_gather_last_dim_from_tensor_parallel_region": (_GATHERED, _PART_OF_SUM, -1),
    "reduce_scatter_last_dim_to_tensor_parallel_region": (_PART_OF_SUM, _GATHERED, -1),
}
globals().update({name: _region(name, *moves) for name, moves in _REGIONS.items()})


def gather_from_sequence_parallel_region(
    input_: Tensor, tensor_parallel_output_grad: bool = True, group: Any = None, **others: Any
) -> Tensor:
    """[s/tp, ...] -> [s, ...]. tensor_parallel_output_grad: ranks use the result each in its own way, so that the
    gradient is this rank's part of the sum. Communicates over tp."""
    back = _PART_OF_SUM if tensor_parallel_output_grad else _PART
    return _region("gather_from_sequence_parallel_region", _GATHERED, back, 0)(input_, group, **others)


def vocab_parallel_cross_entropy(vocab_parallel_logits: Tensor, target: Tensor) -> Tensor:
    """Losses [...] of logits [..., v/tp], which are consumed, and ids [...]. Communicates over tp."""
    tp = TensorParallel.of(current(), False)
    return vocab_loss.vocab_parallel_cross_entropy(vocab_parallel_logits, target, tp)


def broadcast_data(keys: Sequence[str], data: Any, datatype: torch.dtype) -> dict[str, Tensor]:
    """The first tensor parallel rank's tensors, by name, on all of them, in this dtype. Communicates over tp."""
    return broadcast_tensors({key: data[key].to(datatype) for key in keys} if current().tp_rank == 0 else {})


def broadcast_tensors(mine: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The first tensor parallel rank's, whatever others give. Communicates over tp."""
    ps, out = current(), {}
    told = [[name, str(one.dtype).removeprefix("torch."), list(one.shape)] for name, one in mine.items()]
    for name, dtype, shape in host_data.all_gather_json(told, ps.tp_group)[0]:
        out[name] = torch.empty(shape, dtype=getattr(torch, dtype), device=ps.device.torch_device)
        if ps.tp_rank == 0:
            out[name].copy_(mine[name])
        collectives.broadcast(out[name], ps.tp_group)
    return out


def model_parallel_cuda_manual_seed(seed: int, *_: Any, **__: Any) -> None:
    """Of torch alone. Weights and masks of our layers are keyed by `TransformerConfig(seed=...)`, on any device."""
    torch.manual_seed(seed)
