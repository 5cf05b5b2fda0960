"""The one buffer behind all data parallelism: weights, main weights and main gradients, each flat.

Per dtype of the model's weights there is one `Arena`, laid out by `shard_layout`:

    weights       the model's dtype; parameters are views of it
    main_weights  what the optimizer updates: fp32 for 16-bit weights, else the very tensor of the weights
    main_grads    what gradients are accumulated in, and what collectives move

A parameter with several uses (tied embeddings) has one accumulator a use: the first is its slot in
main_grads, the others live outside the layout and are added to it once, after the last microbatch
(`combine_uses`). Frozen parameters keep a storage of their own: nothing is ever reduced or updated there.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from megatron.core.distributed.distributed_data_parallel_config import DistributedDataParallelConfig
from megatron.core.distributed.shard_layout import FlatLayout, ParamSpec, plan_layouts
from megatron.core.module import ModelError
from megatron.core.param_meta import ParamMeta

_DTYPES = {str(dtype): dtype for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16)}


@dataclasses.dataclass(frozen=True)
class Arena:
    """The flat buffers of one dtype of weights. All have `layout.numel` elements; padding stays zero."""

    layout: FlatLayout
    weights: Tensor
    main_weights: Tensor
    main_grads: Tensor

    @property
    def has_main_weights(self) -> bool:
        """Whether main weights are a buffer of their own."""
        return self.main_weights is not self.weights


class FlatBuffer:
    """Allocates the arenas and makes parameters views of them.

    parameters: by global name, in the order of the model. stages: name -> global pipeline stage (0 where left out);
    with its place in `names` it says where in the whole model a parameter stands. Shapes are this rank's
    (`ParamMeta.local_shape`).

    Values of the parameters are kept; parameters on the meta device get storage here and no value: the caller
    fills them (`weight`, then `copy_weights_to_main`; or `main_weight`, then `copy_main_to_weights`).
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        param_meta: Mapping[str, ParamMeta],
        config: DistributedDataParallelConfig,
        *,
        dp_size: int,
        device: torch.device,
        stages: Mapping[str, int] | None = None,
    ) -> None:
        unknown = sorted(parameters.keys() - param_meta.keys())
        assert not unknown, f"parameters without ParamMeta: {unknown}"
        for name, parameter in parameters.items():
            expected = param_meta[name].local_shape
            assert tuple(parameter.shape) == expected, (
                f"{name}: shape {tuple(parameter.shape)}, by its ParamMeta {expected}"
            )
        self.param_meta = dict(param_meta)
        self._stages = dict(stages or {})
        self.frozen = tuple(name for name, p in parameters.items() if not p.requires_grad)
        trained = {name: p for name, p in parameters.items() if p.requires_grad}
        self.names = tuple(trained)
        self._shapes = {name: tuple(p.shape) for name, p in parameters.items()}

        specs = [_spec(name, p, param_meta[name]) for name, p in trained.items()]
        layouts = plan_layouts(
            specs, dp_size, bucket_size=config.ddp_bucket_size, num_buckets=config.ddp_num_buckets
        )
        self.arenas = tuple(_allocate(layout, config, device) for layout in layouts)
        self._arena_of = {slot.name: arena for arena in self.arenas for slot in arena.layout.slots}
        self._extra_grads = {
            key: torch.zeros(self._shapes[name], dtype=self._arena_of[name].main_grads.dtype, device=device)
            for name in self.names
            for key in param_meta[name].grad_keys[1:]
        }
        self._param_of_key = {key: name for name in self.names for key in param_meta[name].grad_keys}
        for name, parameter in parameters.items():
            if name in trained:
                _repoint(parameter, self._view(self._arena_of[name].weights, name))
            elif parameter.device != device:
                _repoint(parameter, torch.empty_like(parameter, device=device))
        self._frozen_weights = {name: parameters[name].detach() for name in self.frozen}
        self.grads_divided_by = 1  # main_grads * this = the sum over microbatches and ranks
        self.copy_weights_to_main()

    def weight(self, name: str) -> Tensor:
        """The model's weight, a view without autograd."""
        if name in self._frozen_weights:
            return self._frozen_weights[name]
        return self._view(self._arena_of[name].weights, name)

    def main_weight(self, name: str) -> Tensor:
        """What the optimizer updates; the same memory as `weight` when the dtypes agree."""
        return self._view(self._arena_of[name].main_weights, name)

    def main_grad(self, key: str) -> Tensor:
        """Where contributions filed under `key` are added (`ParamMeta.grad_keys`)."""
        if key in self._extra_grads:
            return self._extra_grads[key]
        return self._view(self._arena_of[key].main_grads, key)

    def main_grads_by_key(self) -> dict[str, Tensor]:
        """Every accumulator."""
        return {key: self.main_grad(key) for key in self._param_of_key}

    def stage_of(self, name: str) -> int:
        """The global pipeline stage whose chunk holds the parameter; of several, the first."""
        return self._stages.get(name, 0)

    def has_own_main_weight(self, name: str) -> bool:
        return self._arena_of[name].has_main_weights

    def param_of_key(self, key: str) -> str:
        return self._param_of_key[key]

    def view_like(self, flat: Tensor, name: str) -> Tensor:
        """The part of any flat tensor of the parameter's arena that belongs to it, in its shape."""
        return self._view(flat, name)

    def arena_of(self, name: str) -> Arena:
        return self._arena_of[name]

    def copy_main_to_weights(self) -> None:
        for arena in self.arenas:
            if arena.has_main_weights:
                arena.weights.copy_(arena.main_weights)

    def copy_weights_to_main(self) -> None:
        for arena in self.arenas:
            if arena.has_main_weights:
                arena.main_weights.copy_(arena.weights)

    def zero_grads(self) -> None:
        self.grads_divided_by = 1
        for arena in self.arenas:
            arena.main_grads.zero_()
        for grad in self._extra_grads.values():
            grad.zero_()

    def combine_uses(self, name: str) -> None:
        """Add the accumulators of a parameter's further uses to its first, and empty them."""
        for key in self.param_meta[name].grad_keys[1:]:
            extra = self._extra_grads[key]
            self.main_grad(name).add_(extra)
            extra.zero_()

    def persistent_bytes(self) -> dict[str, int]:
        """Bytes held for the whole run, by what they are for (the optimizer's moments come on top)."""
        frozen = sum(weight.numel() * weight.element_size() for weight in self._frozen_weights.values())
        return {
            "weights": sum(_bytes(arena.weights) for arena in self.arenas) + frozen,
            "main_weights": sum(_bytes(a.main_weights) for a in self.arenas if a.has_main_weights),
            "main_grads": sum(_bytes(arena.main_grads) for arena in self.arenas),
            "extra_grads": sum(_bytes(grad) for grad in self._extra_grads.values()),
        }

    def _view(self, flat: Tensor, name: str) -> Tensor:
        slot = self._arena_of[name].layout.by_name[name]
        return flat[slot.start : slot.end].view(self._shapes[name])


def group_of(meta: ParamMeta) -> str:
    """The layout group: parameters that the optimizer treats alike (see optimizer/param_groups)."""
    return ("decay" if meta.decay else "no_decay") + ("+embedding_or_output" * meta.embedding_or_output)


def main_grad_dtype(weights: torch.dtype, config: DistributedDataParallelConfig) -> torch.dtype:
    """What gradients are accumulated and reduced in.

    fp32 and fp64 weights: their own. bf16: fp32 unless --grad-reduce-in-bf16. fp16: fp16 unless
    --accumulate-allreduce-grads-in-fp32.
    """
    if weights == torch.bfloat16:
        return torch.bfloat16 if config.grad_reduce_in_bf16 else torch.float32
    if weights == torch.float16:
        return torch.float32 if config.accumulate_allreduce_grads_in_fp32 else torch.float16
    return weights


def _spec(name: str, parameter: nn.Parameter, meta: ParamMeta) -> ParamSpec:
    dtype = str(parameter.dtype)
    if dtype not in _DTYPES:
        raise ModelError(f"parameter {name} is {dtype}: trained parameters are one of {sorted(_DTYPES)}")
    assert meta.grad_keys[0] == name, f"parameter {name}: its first use is {meta.grad_keys[0]!r}"
    return ParamSpec(name, parameter.numel(), dtype, group_of(meta))


def _allocate(layout: FlatLayout, config: DistributedDataParallelConfig, device: torch.device) -> Arena:
    dtype = _DTYPES[layout.dtype]
    weights = torch.zeros(layout.numel, dtype=dtype, device=device)
    main_weights = weights
    if dtype.itemsize < 4:
        main_weights = torch.zeros(layout.numel, dtype=torch.float32, device=device)
    main_grads = torch.zeros(layout.numel, dtype=main_grad_dtype(dtype, config), device=device)
    return Arena(layout, weights, main_weights, main_grads)


def _repoint(parameter: nn.Parameter, storage: Tensor) -> None:
    """Give a parameter this storage and keep its value and its identity: others hold references to it."""
    if parameter.is_meta:  # no value, and `.data` cannot change the kind of device
        torch.utils.swap_tensors(parameter, nn.Parameter(storage, requires_grad=parameter.requires_grad))
        return
    storage.copy_(parameter.detach())
    parameter.data = storage


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
