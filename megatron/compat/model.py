"""Megatron's configuration classes, its layer spec, and `GPTModel` with its own arguments.

A field that is a flag of Megatron's has the verdict of the flag table: without effect (a warning), or refused with what
to use. `fields.csv`: fields that are not named as their flags, of what is done otherwise, or of pretrain() only. A
name that no release knows is a TypeError, with the nearest that is known.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from megatron.compat import parallel_state
from megatron.compat.fields import FLAG_OF, check_fields, config_class, expect
from megatron.compat.layers import ModuleOfConfig, dtype_of
from megatron.core.distributed.custom_fsdp.data_parallel_config import (
    DistributedDataParallelConfig as EngineFlags,
)
from megatron.core.models.gpt import gpt
from megatron.core.models.gpt.stage_layers import split_stages
from megatron.core.optimizer.optimization_config import OptimizerConfig as OptimizerFlags
from megatron.core.parallelism_config import ModelParallelConfig as ParallelFlags
from megatron.core.tensor_parallel.mappings import TensorParallel
from megatron.core.transformer.model_config import TransformerConfig as ModelFlags
from megatron.training.config.config import FIELDS

_ACTIVATIONS = {("gelu", False): "", ("silu", True): "swiglu", ("gelu", True): "geglu"}  # (function, gated)
# Fields that are no flags of the group; those without effect are about what is done otherwise here.
_MORE_OF_PARALLEL: dict[str, Any] = dict.fromkeys(("finalize_model_grads_func", "grad_scale_func"))
_MORE_OF_PARALLEL |= dict.fromkeys(("bf16", "fp16", "deterministic_mode"), False)
_MORE_OF_PARALLEL |= {"params_dtype": torch.float32, "seed": 1234}
_MORE_OF_MODEL = {
    "num_query_groups": None,
    "activation_func": torch.nn.functional.gelu,
    "gated_linear_unit": False,
}
_REQUIRED = "num_layers", "hidden_size", "num_attention_heads"
_OF_MODEL = [name for name, (group, _) in FIELDS.items() if group in ("model", "parallel")] + ["vocab_size"]
_MORE_OF_OPTIMIZER: dict[str, Any] = dict.fromkeys(
    ("params_dtype", "use_distributed_optimizer", "overlap_param_gather", "log_num_zeros_in_grad")
)
ModelParallelConfig = config_class("ModelParallelConfig", ParallelFlags, **_MORE_OF_PARALLEL)
TransformerConfig = config_class("TransformerConfig", ModelFlags, base=ModelParallelConfig, **_MORE_OF_MODEL)
DistributedDataParallelConfig = config_class("DistributedDataParallelConfig", EngineFlags)
OptimizerConfig = config_class("OptimizerConfig", OptimizerFlags, **_MORE_OF_OPTIMIZER)


def core_transformer_config_from_args(args: Any, config_class: Any = TransformerConfig) -> Any:
    """A `TransformerConfig` of the values of `get_args()`."""
    names = {one.name for one in dataclasses.fields(TransformerConfig)}
    values = {name: value for name, value in vars(args).items() if name in names}
    grouped = args.num_query_groups if args.group_query_attention else None
    return config_class(**{**values, "num_query_groups": grouped})


@dataclasses.dataclass(frozen=True)
class ModuleSpec:
    """What Megatron builds layers by. Ours are of one kind, so it says only whose they are."""

    module: str = "local"


def get_gpt_layer_local_spec(*given: Any, **named: Any) -> ModuleSpec:
    """The layers of this framework. Raises ValueError for experts and latent attention."""
    named.pop("qk_layernorm", None)  # the configuration's
    if any(given) or any(named.values()):
        raise ValueError(f"get_gpt_layer_local_spec({given or named}): docs/roadmap.md; leave it out")
    return ModuleSpec()


def _activation_of(config: Any, spec: Any) -> str:
    """The flag that a configuration asks for with `activation_func`, "" for the default. Raises ValueError for what is
    no model of ours."""
    expect(config, TransformerConfig, "GPTModel")
    if missing := [name for name in _REQUIRED if getattr(config, name) is None]:
        raise ValueError(f"GPTModel: TransformerConfig without {', '.join(missing)}")
    function = config.activation_func
    activation = getattr(function, "__name__", function), config.gated_linear_unit
    if not isinstance(spec, ModuleSpec) or activation not in _ACTIVATIONS:
        raise ValueError(
            f"{spec}, activation_func {activation}: use get_gpt_layer_local_spec(), and flags "
            "such as swiglu=True or squared_relu=True for an activation"
        )
    return _ACTIVATIONS[activation]


class GPTModelOfSpec(gpt.GPTModel, ModuleOfConfig):
    """The part of our GPT that this pipeline rank holds, by Megatron's arguments.

    Weight gradients arrive in `parameter.grad`, where torch's optimizers look, until an engine takes them. vocab_size:
    padded to a multiple of the tensor parallel size. others: fields of the model that Megatron takes here.
    resolved_config: our flags of the model, as `config` and the arguments have decided them. Raises
    ValueError for layers and an activation that are not here, and sizes other than mpu's; TypeError for other names.
    """

    def __init__(
        self,
        config: Any,
        transformer_layer_spec: ModuleSpec,
        vocab_size: int,
        max_sequence_length: int,
        pre_process: bool = True,
        post_process: bool = True,
        *,
        parallel_output: bool = True,
        share_embeddings_and_output_weights: bool = False,
        **others: Any,
    ) -> None:
        activation = _activation_of(config, transformer_layer_spec)
        if config.deterministic_mode:
            torch.use_deterministic_algorithms(True)
        flags = {FLAG_OF.get(name, name): value for name, value in others.items() if value}
        flags.pop("scatter_embedding_sequence_parallel", None)  # it follows from sequence_parallel
        if activation:
            flags[activation] = True
        ps = parallel_state.current()
        tp, pp = config.tensor_model_parallel_size, config.pipeline_model_parallel_size
        if tp not in (1, ps.tp_size) or pp != ps.pp_size:  # Megatron's quickstart tells mpu alone of tp
            told = f"tensor_model_parallel_size={tp}, pipeline_model_parallel_size={pp} in TransformerConfig"
            raise ValueError(
                f"{told}: give it those of initialize_model_parallel, {ps.tp_size} and {ps.pp_size}"
            )
        stages = split_stages(config.group(ParallelFlags), config.num_layers, chunks=1)
        flags |= dict.fromkeys(lengths := ("seq_length", "max_position_embeddings"), max_sequence_length)
        flags["untie_embeddings_and_output_weights"] = not share_embeddings_and_output_weights
        flags["group_query_attention"] = config.num_query_groups is not None
        flags["padded_vocab_size"] = vocab_size
        called = {**config.called, **dict.fromkeys(lengths, "max_sequence_length")}
        called["padded_vocab_size"] = "vocab_size"
        if unknown := flags.keys() - FIELDS.keys():
            raise TypeError(f"GPTModel: unknown arguments: {', '.join(unknown)}")
        check_fields("GPTModel", config.values() | flags, _OF_MODEL, called)
        made_with = dataclasses.replace(config.group(ModelFlags), **flags).resolved()
        if made_with.num_experts is not None:  # whose losses and biases a loop of one's own knows nothing of
            raise ValueError("GPTModel: num_experts is for pretrain(), docs/roadmap.md; leave it out")
        super().__init__(
            made_with,
            padded_vocab_size=vocab_size,
            seed=config.seed,
            params_dtype=dtype_of(config),
            device=ps.device.torch_device,
            pre_process=pre_process,
            post_process=post_process,
            layers=stages[ps.pp_rank].layers,
            tp=TensorParallel.of(ps, config.sequence_parallel),
        )
        self.config, self.resolved_config, self.parallel_output = config, made_with, parallel_output
        _ParameterGrads(self)

    def forward(self, input_ids: Any, *where: Any, labels: Any = None, **named: Any) -> Tensor:  # type: ignore[override]
        """Losses [b, s] with labels, else logits [b, s, v], with parallel_output this rank's part [b, s, v/tp]."""
        output = super().forward(input_ids, *where, **named, labels=labels).contiguous()  # type: ignore[misc]
        if self.post_process and labels is None and self.parallel_output:
            return output.chunk(self.tp.size, -1)[self.tp.rank]
        return output


GPTModel = GPTModelOfSpec  # Megatron's name


class _ParameterGrads:
    """A `GradListener` that leaves sums in `parameter.grad`: a contribution starts one where there is none."""

    def __init__(self, model: gpt.GPTModel) -> None:
        named, facts = dict(model.named_parameters()), model.param_meta
        self.parameters = {key: named[name] for name, meta in facts.items() for key in meta.grad_keys}
        model.context.grads.bind({key: one.detach() for key, one in self.parameters.items()}, self)
        self.sums = model.context.grads.main_grads

    def grad_begins(self, key: str) -> bool:
        grad = self.parameters[key].grad
        self.sums[key] = torch.empty_like(self.parameters[key]) if grad is None else grad
        return grad is None

    def grad_ready(self, key: str, microbatch: int) -> None:
        self.parameters[key].grad = self.sums[key]
