"""Megatron's layers of one's own: modules whose gradients come from autograd, over our mappings and parallel state.

Which part of a parameter a rank holds is told by the attributes that Megatron gives to parameters
(`set_tensor_model_parallel_attributes`, `sequence_parallel`), so that the engine, the optimizer and checkpoints of ours
know it of any module made of these layers.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from megatron.compat import tensor_parallel
from megatron.compat.parallel_state import current
from megatron.core import module as ours
from megatron.core.dist_checkpointing.state import LocalPiece, pieces_of
from megatron.core.param_meta import ParamMeta, infer_param_meta
from megatron.core.tensor_parallel import mappings, parallel_layers
from megatron.core.tensor_parallel.mappings import TensorParallel
from megatron.core.tensor_parallel.sink_module import band_regions, even_bands, whole_region

AttnMaskType = enum.Enum(
    "AttnMaskType", ["padding", "causal", "no_mask", "padding_causal", "arbitrary", "causal_bottom_right"]
)


def set_tensor_model_parallel_attributes(tensor: Tensor, is_parallel: bool, dim: int, stride: int) -> None:
    """Say of a parameter that tensor parallel ranks hold parts of it along `dim`, in `stride` bands each."""
    vars(tensor).update(tensor_model_parallel=is_parallel, partition_dim=dim, partition_stride=stride)


def param_meta_of(module: nn.Module) -> dict[str, ParamMeta]:
    """Of a module's parameters, by their attributes; where there are none, every rank holds the whole."""
    tp, meta = TensorParallel.of(current(), False), infer_param_meta(module)
    for name, parameter in module.named_parameters():
        facts, shape = vars(parameter), tuple(parameter.shape)
        regions = whole_region(shape, tp, partial=bool(facts.get("sequence_parallel")))
        if facts.get("tensor_model_parallel"):
            dim = facts["partition_dim"]
            shape = (*shape[:dim], shape[dim] * tp.size, *shape[dim + 1 :])
            regions = band_regions(shape, even_bands(shape[dim], tp, facts["partition_stride"]), dim, tp)
        meta[name] = dataclasses.replace(meta[name], global_shape=shape, regions=regions)
    return meta


class ShardedStateDict(dict[str, Tensor]):
    """A model's parameters by name. pieces: as checkpoints know what parts of them this rank holds. loaded: is called
    when these have been filled."""

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        pieces: list[LocalPiece],
        loaded: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(parameters)
        self.pieces, self.loaded = pieces, loaded


class ModuleOfConfig(ours.MegatronModule):
    """A model of one's own, of any modules; one of a pipeline has its own `set_input_tensor`."""

    def __init__(self, config: Any = None) -> None:
        super().__init__()
        self.config, self.context = config, ours.ModelContext(1234 if config is None else config.seed)

    @functools.cached_property
    def param_meta(self) -> dict[str, ParamMeta]:  # type: ignore[override]
        """Facts about the parameters, as they are when this is first asked for."""
        return param_meta_of(self)

    def state_dict_for_save_checkpoint(self, prefix: str = "", keep_vars: bool = False) -> dict[str, Any]:
        """`state_dict`."""
        return self.state_dict(prefix=prefix, keep_vars=keep_vars)

    def sharded_state_dict(self, prefix: str = "", *_: Any, **__: Any) -> ShardedStateDict:
        """For `dist_checkpointing.save` and `load`."""
        named, of = dict(self.named_parameters()), self.param_meta.items()
        pieces = [piece for name, meta in of for piece in pieces_of("model", meta, named[name])]
        return ShardedStateDict({prefix + name: one for name, one in named.items()}, pieces)


MegatronModule = ModuleOfConfig  # Megatron's name


def dtype_of(config: Any) -> torch.dtype:
    """Of weights. Raises ValueError for a `params_dtype` that is none."""
    if not isinstance(config.params_dtype, torch.dtype) or not config.params_dtype.is_floating_point:
        told = f"{type(config).__name__}(params_dtype={config.params_dtype})"
        raise ValueError(f"{told}: expects a floating point dtype of torch")
    return torch.bfloat16 if config.bf16 else torch.half if config.fp16 else config.params_dtype


# Arguments that ask for what is not here.
_NOT_HERE = {
    "disable_grad_reduce",
    "embedding_activation_buffer",
    "grad_output_buffer",
    "is_expert",
    "keep_master_weight_for_test",
}


class _ParallelLayer(nn.Module):
    """config: `ModelParallelConfig` or `TransformerConfig`. tp_comm_buffer_name is without effect. Weights start as one
    process has them, where torch's generator is the same on all ranks."""

    def __init__(
        self, config: Any, tp_group: Any = None, tp_comm_buffer_name: str | None = None, **others: Any
    ) -> None:
        super().__init__()
        name = type(self).__name__
        if unknown := others.keys() - _NOT_HERE:
            raise TypeError(f"{name}: unknown arguments: {', '.join(unknown)}")
        if asked := [argument for argument, value in others.items() if value]:
            raise ValueError(f"{name}({', '.join(asked)}): not here, leave it out; docs/roadmap.md")
        self.config, self.tp = config, tensor_parallel.ranks(f"{name}(tp_group)", tp_group)
        self.sequence_parallel = bool(config.sequence_parallel and self.tp.size > 1)
        self.weight: nn.Parameter | None = None
        self.bias: nn.Parameter | None = None

    def _part(self, whole: Tensor, dim: int | None, stride: int = 1) -> nn.Parameter:
        """This rank's part of a parameter; dim: None where ranks hold all of it."""
        part = whole
        if dim is not None:
            if whole.shape[dim] % (self.tp.size * stride):
                told = f"{list(whole.shape)} does not divide over {self.tp.size} ranks in {stride} bands"
                raise ValueError(f"{type(self).__name__}: a weight of {told} along dim {dim}")
            bands = even_bands(whole.shape[dim], self.tp, stride)
            part = torch.cat([whole.narrow(dim, band.offset, band.size) for band in bands], dim)
        found = nn.Parameter(part.to(current().device.torch_device, dtype_of(self.config), copy=True))
        if dim is not None:
            set_tensor_model_parallel_attributes(found, True, dim, stride)
        return found


def _started(init_method: Callable[[Tensor], Any], *shape: int) -> Tensor:
    whole = torch.empty(*shape)
    init_method(whole)
    return whole


class ColumnLinear(_ParallelLayer):
    """y = x W^T + b whose output features are sharded; forward returns (y, b where it is left to the caller).

    x [s, b, in] (sequence parallel: [s/tp, b, in]) -> [s, b, out/tp], gathered: [s, b, out]. Communicates over tp.
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        config: Any,
        init_method: Callable[[Tensor], Any],
        bias: bool = True,
        gather_output: bool = False,
        stride: int = 1,
        skip_bias_add: bool = False,
        skip_weight_param_allocation: bool = False,
        **others: Any,
    ) -> None:
        super().__init__(config, **others)
        self.gather_output, self.skip_bias_add = gather_output, skip_bias_add
        if not skip_weight_param_allocation:
            self.weight = self._part(_started(init_method, output_size, input_size), 0, stride)
        if bias:
            self.bias = self._part(torch.zeros(output_size), 0, stride)

    def forward(
        self, input_: Tensor, weight: Tensor | None = None, runtime_gather_output: bool | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """weight: instead of one's own."""
        weight = self.weight if weight is None else weight
        if weight is None:
            raise ValueError(
                "ColumnParallelLinear(skip_weight_param_allocation=True): forward needs a weight"
            )
        there = mappings.gathered if self.sequence_parallel else mappings.as_it_is
        back = mappings.own_part_of_sum if self.sequence_parallel else mappings.summed
        whole = mappings.moved(input_, self.tp, there, back, 0)
        output = F.linear(whole, weight, None if self.skip_bias_add else self.bias)
        if self.gather_output if runtime_gather_output is None else runtime_gather_output:
            output = mappings.gather_vocabulary(output, self.tp)
        return output, self.bias if self.skip_bias_add else None


class RowLinear(_ParallelLayer):
    """y = x W^T + b whose input features are sharded; forward returns (y, b where it is left to the caller).

    x [s, b, in/tp] (not input_is_parallel: [s, b, in]) -> [s, b, out], sequence parallel [s/tp, b, out]. Every rank has
    the whole gradient of the bias. Communicates over tp.
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        config: Any,
        init_method: Callable[[Tensor], Any],
        bias: bool,
        input_is_parallel: bool,
        skip_bias_add: bool,
        stride: int = 1,
        **others: Any,
    ) -> None:
        super().__init__(config, **others)
        self.input_is_parallel, self.skip_bias_add = input_is_parallel, skip_bias_add
        self.weight = self._part(_started(init_method, output_size, input_size), 1, stride)
        if bias:
            self.bias = self._part(torch.zeros(output_size), None)

    def forward(self, input_: Tensor) -> tuple[Tensor, Tensor | None]:
        """See the class."""
        assert self.weight is not None, "a row layer has a weight"
        if not self.input_is_parallel:
            input_ = mappings.moved(input_, self.tp, mappings.own_part, mappings.gathered, -1)
        bias: Tensor | None = self.bias
        output = _summed(F.linear(input_, self.weight), self.tp, self.sequence_parallel)
        if bias is not None and self.sequence_parallel:  # each rank's tokens have a part of its gradient
            bias = mappings.moved(bias, self.tp, mappings.as_it_is, mappings.summed, 0)
        if bias is None or self.skip_bias_add:
            return output, bias
        return output + bias, None


def _summed(partial: Tensor, tp: TensorParallel, sequence_parallel: bool) -> Tensor:
    there = mappings.own_part_of_sum if sequence_parallel else mappings.summed
    back = mappings.gathered if sequence_parallel else mappings.as_it_is
    return mappings.moved(partial, tp, there, back, 0)


class VocabEmbedding(_ParallelLayer):
    """Rows looked up by id, sharded: ids [b, s] -> [b, s, h]; reduce_scatter_embeddings: [s/tp, b, h], under sequence
    parallel. Communicates over tp."""

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        *,
        init_method: Callable[[Tensor], Any],
        reduce_scatter_embeddings: bool = False,
        config: Any,
        tp_group: Any = None,
    ) -> None:
        super().__init__(config, tp_group)
        self.reduce_scatter_embeddings = reduce_scatter_embeddings
        self.weight = self._part(_started(init_method, num_embeddings, embedding_dim), 0)

    def forward(self, input_: Tensor) -> Tensor:
        """See the class."""
        assert self.weight is not None, "a table has a weight"
        held, outside = parallel_layers.local_ids(input_, len(self.weight) * self.tp.size, self.tp)
        rows = F.embedding(held, self.weight).masked_fill(outside.unsqueeze(-1), 0.0)
        if self.reduce_scatter_embeddings:
            rows = rows.transpose(0, 1).contiguous()
        return _summed(rows, self.tp, self.reduce_scatter_embeddings)


ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding = ColumnLinear, RowLinear, VocabEmbedding
ColumnLinear.__name__, RowLinear.__name__ = (
    "ColumnParallelLinear",
    "RowParallelLinear",
)  # in messages, and shown
VocabEmbedding.__name__ = "VocabParallelEmbedding"
