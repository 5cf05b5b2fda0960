"""Megatron's `tensor_parallel` names for layers of one's own: plain autograd over the tensor parallel group.

Layers here keep their gradients in `parameter.grad`, so schedules that split backwards refuse them; those of
`megatron.core.tensor_parallel.layers` put theirs into a sink.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from megatron.compat import parallel_state
from megatron.core.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy as our_cross_entropy
from megatron.core.tensor_parallel.mappings import TensorParallel
from megatron.core.transport import host_data
from megatron.core.transport.collectives import all_gather, all_reduce, broadcast, reduce_scatter

__all__ = [
    "ColumnParallelLinear",
    "RowParallelLinear",
    "VocabParallelEmbedding",
    "broadcast_data",
    "checkpoint",
    "copy_to_tensor_model_parallel_region",
    "gather_from_sequence_parallel_region",
    "gather_from_tensor_model_parallel_region",
    "get_cuda_rng_tracker",
    "model_parallel_cuda_manual_seed",
    "param_is_not_tensor_parallel_duplicate",
    "reduce_from_tensor_model_parallel_region",
    "reduce_scatter_to_sequence_parallel_region",
    "scatter_to_sequence_parallel_region",
    "scatter_to_tensor_model_parallel_region",
    "set_tensor_model_parallel_attributes",
    "vocab_parallel_cross_entropy",
]

Move = Callable[[Tensor], Tensor]


def _same(x: Tensor) -> Tensor:
    return x


def _sum(x: Tensor) -> Tensor:
    total = x.detach().clone()
    all_reduce(total, parallel_state.current().tp_group)
    return total


def _gather(dim: int) -> Move:
    def move(x: Tensor) -> Tensor:
        group = parallel_state.current().tp_group
        parts = x.new_empty(group.size, *x.shape)
        all_gather(parts, x.detach().contiguous(), group)
        return torch.cat(parts.unbind(), dim)

    return move


def _scatter(dim: int) -> Move:
    def move(x: Tensor) -> Tensor:
        group = parallel_state.current().tp_group
        return x.detach().chunk(group.size, dim)[group.rank].clone()

    return move


def _reduce_scatter(x: Tensor) -> Tensor:
    group = parallel_state.current().tp_group
    part = x.new_empty(x.shape[0] // group.size, *x.shape[1:])
    reduce_scatter(part, x.detach().contiguous(), group)
    return part


class _Region(torch.autograd.Function):
    """One move forwards, another backwards; none over one rank."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, there: Move, back: Move) -> Tensor:
        ctx.back = back
        return there(x) if parallel_state.current().tp_size > 1 else x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return (ctx.back(grads[0]) if parallel_state.current().tp_size > 1 else grads[0]), None, None


def _region(there: Move, back: Move, what: str) -> Callable[..., Tensor]:
    def move(input_: Tensor, *unused: Any, **also: Any) -> Tensor:
        moved: Tensor = _Region.apply(input_, there, back)
        return moved

    move.__doc__ = f"{what} Communicates over tp."
    return move


copy_to_tensor_model_parallel_region = _region(_same, _sum, "The tensor; gradients are summed.")
reduce_from_tensor_model_parallel_region = _region(_sum, _same, "The sum over ranks; gradients pass.")
scatter_to_tensor_model_parallel_region = _region(_scatter(-1), _gather(-1), "[..., h] -> [..., h/tp].")
gather_from_tensor_model_parallel_region = _region(_gather(-1), _scatter(-1), "[..., h/tp] -> [..., h].")
scatter_to_sequence_parallel_region = _region(_scatter(0), _gather(0), "[s, ...] -> [s/tp, ...].")
reduce_scatter_to_sequence_parallel_region = _region(
    _reduce_scatter, _gather(0), "[s, ...] -> the sum over ranks, [s/tp, ...]."
)
_gather_summing = _region(_gather(0), _reduce_scatter, "[s/tp, ...] -> [s, ...]; gradients are summed.")
_gather_sequence = _region(_gather(0), _scatter(0), "[s/tp, ...] -> [s, ...].")


def gather_from_sequence_parallel_region(
    input_: Tensor, tensor_parallel_output_grad: bool = True, *unused: Any, **also: Any
) -> Tensor:
    """[s/tp, ...] -> [s, ...]. tensor_parallel_output_grad: each rank has a part of the gradient, which are summed.
    Communicates over tp."""
    return _gather_summing(input_) if tensor_parallel_output_grad else _gather_sequence(input_)


def vocab_parallel_cross_entropy(
    vocab_parallel_logits: Tensor, target: Tensor, label_smoothing: float = 0.0
) -> Tensor:
    """Losses [...] of logits [..., v/tp], which are consumed, and ids [...]. Communicates over tp."""
    assert not label_smoothing, f"label_smoothing {label_smoothing} is not here: leave it out"
    return our_cross_entropy(
        vocab_parallel_logits, target, TensorParallel.of(parallel_state.current(), False)
    )


def broadcast_data(
    keys: Sequence[str], data: dict[str, Tensor] | None, datatype: torch.dtype
) -> dict[str, Tensor]:
    """The first tensor parallel rank's tensors, on all of them. Communicates over tp, and its shapes before."""
    ps = parallel_state.current()
    told = None if ps.tp_rank or data is None else [list(data[key].shape) for key in keys]
    shapes = host_data.all_gather_json(told, ps.tp_group)[0]
    out = {}
    for key, shape in zip(keys, shapes, strict=True):
        tensor = torch.empty(shape, dtype=datatype, device=ps.device.torch_device)
        if ps.tp_rank == 0 and data is not None:
            tensor.copy_(data[key])
        broadcast(tensor, ps.tp_group)
        out[key] = tensor
    return out


class _RngTracker:
    """Random states by name beside torch's own: what ranks of one tensor parallel group draw differently."""

    def __init__(self) -> None:
        self.states: dict[str, Tensor] = {}

    def add(self, name: str, seed: int) -> None:
        """A state of this seed. Raises ValueError for a name that there is."""
        if name in self.states:
            raise ValueError(f"random state {name!r} is there already: reset() forgets all")
        self.states[name] = torch.Generator().manual_seed(seed).get_state()

    def reset(self) -> None:
        """Forget all states."""
        self.states.clear()

    @contextlib.contextmanager
    def fork(self, name: str = "model-parallel-rng") -> Iterator[None]:
        """torch's CPU generator draws from this state inside."""
        outside = torch.get_rng_state()
        torch.set_rng_state(self.states[name])
        try:
            yield
        finally:
            self.states[name] = torch.get_rng_state()
            torch.set_rng_state(outside)


_TRACKER = _RngTracker()


def get_cuda_rng_tracker(*unused: Any, **also: Any) -> _RngTracker:
    """The states that `model_parallel_cuda_manual_seed` has made."""
    return _TRACKER


def model_parallel_cuda_manual_seed(seed: int, *unused: Any, **also: Any) -> None:
    """torch's generator has this seed on all tensor parallel ranks, `fork()` one of its own a rank. Masks of our own
    layers depend on neither."""
    torch.manual_seed(seed)
    _TRACKER.reset()
    _TRACKER.add("model-parallel-rng", seed + 2718 + parallel_state.current().tp_rank)


def checkpoint(function: Callable[..., Any], distribute_saved_activations: bool, *args: Any) -> Any:
    """Run now, run again in the backward. Raises ValueError for activations that are to be divided over ranks."""
    if distribute_saved_activations:
        raise ValueError(
            "tensor_parallel.checkpoint(distribute_saved_activations=True): not here; pass False"
        )
    return torch_checkpoint(function, *args, use_reentrant=False)


def set_tensor_model_parallel_attributes(
    tensor: Tensor, is_parallel: bool, dim: int, stride: int = 1
) -> None:
    """Say which dim of a parameter is divided over tp."""
    vars(tensor).update(tensor_model_parallel=is_parallel, partition_dim=dim, partition_stride=stride)


def param_is_not_tensor_parallel_duplicate(param: Tensor) -> bool:
    """Whether this rank counts it: it is divided, or this is the first rank."""
    return bool(getattr(param, "tensor_model_parallel", False)) or parallel_state.current().tp_rank == 0


class _Linear(nn.Module):
    """weight [out, in] of which dim `cut` is divided. init_method fills the whole weight, of which ranks take theirs."""

    cut: int

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        config: Any,
        init_method: Callable[[Tensor], Any] | None = None,
        bias: bool = True,
        skip_bias_add: bool = False,
        **others: Any,
    ) -> None:
        super().__init__()
        ps, shape = parallel_state.current(), [output_size, input_size]
        assert shape[self.cut] % ps.tp_size == 0, (
            f"{shape[self.cut]} features over {ps.tp_size} tensor parallel ranks"
        )
        whole = torch.empty(shape, dtype=config.params_dtype)
        (init_method or (lambda w: nn.init.normal_(w, std=config.init_method_std)))(whole)
        part = whole.chunk(ps.tp_size, self.cut)[ps.tp_rank].clone().to(ps.device.torch_device)
        self.weight = nn.Parameter(part)
        set_tensor_model_parallel_attributes(self.weight, ps.tp_size > 1, self.cut)
        features = output_size if self.cut else output_size // ps.tp_size
        self.bias = (
            nn.Parameter(torch.zeros(features, dtype=config.params_dtype, device=part.device))
            if bias
            else None
        )
        self.skip_bias_add = skip_bias_add

    def _end(self, output: Tensor) -> tuple[Tensor, Tensor | None]:
        if self.bias is None or self.skip_bias_add:
            return output, self.bias
        return output + self.bias, None


class ColumnParallelLinear(_Linear):
    """[..., in] -> ([..., out/tp], or [..., out] with gather_output; the bias where it is left to the caller)."""

    cut = 0

    def __init__(self, *sizes: int, gather_output: bool = False, **kwargs: Any) -> None:
        super().__init__(*sizes, **kwargs)
        self.gather_output = gather_output

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        output, bias = self._end(F.linear(copy_to_tensor_model_parallel_region(x), self.weight))
        return (gather_from_tensor_model_parallel_region(output) if self.gather_output else output), bias


class RowParallelLinear(_Linear):
    """[..., in/tp] (or [..., in] without input_is_parallel) -> ([..., out]; the bias where it is left to the caller)."""

    cut = 1

    def __init__(self, *sizes: int, input_is_parallel: bool = False, **kwargs: Any) -> None:
        super().__init__(*sizes, **kwargs)
        self.input_is_parallel = input_is_parallel

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        x = x if self.input_is_parallel else scatter_to_tensor_model_parallel_region(x)
        return self._end(reduce_from_tensor_model_parallel_region(F.linear(x, self.weight)))


class VocabParallelEmbedding(nn.Module):
    """ids [...] -> [..., h]; a rank holds rows [v/tp, h] of the table."""

    def __init__(
        self, num_embeddings: int, embedding_dim: int, *, config: Any, init_method: Any = None, **others: Any
    ):
        super().__init__()
        ps = parallel_state.current()
        self.rows = math.ceil(num_embeddings / ps.tp_size)
        whole = torch.empty(num_embeddings, embedding_dim, dtype=config.params_dtype)
        (init_method or (lambda w: nn.init.normal_(w, std=config.init_method_std)))(whole)
        self.start = ps.tp_rank * self.rows
        part = whole[self.start : self.start + self.rows].clone()
        self.weight = nn.Parameter(part.to(ps.device.torch_device))
        set_tensor_model_parallel_attributes(self.weight, ps.tp_size > 1, 0)

    def forward(self, ids: Tensor) -> Tensor:
        held = (ids >= self.start) & (ids < self.start + self.rows)
        found = F.embedding((ids - self.start).clamp(0, len(self.weight) - 1), self.weight)
        return reduce_from_tensor_model_parallel_region(found * held.unsqueeze(-1))
