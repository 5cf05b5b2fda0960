"""Megatron's way to name a model: `TransformerConfig`, a layer spec, and `GPTModel` with its own arguments.

The model is ours; its weight gradients arrive in `parameter.grad`, where torch's optimizers look, until an engine
(`DistributedDataParallel`) takes them.
"""

from __future__ import annotations

import dataclasses
import difflib
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from megatron.compat import parallel_state
from megatron.compat.sharded_tensor import ShardedTensor
from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.models.gpt.gpt_model import GPTModel as OurGPTModel
from megatron.core.models.gpt.stage_layers import split_stages
from megatron.core.tensor_parallel.mappings import TensorParallel
from megatron.core.transformer.transformer_config import TransformerConfig as OurTransformerConfig
from megatron.training.config.flag_table import FlagState, flag_table

__all__ = [
    "GPTModel",
    "ModuleSpec",
    "TransformerConfig",
    "get_gpt_decoder_block_spec",
    "get_gpt_layer_local_spec",
]

# Names of Megatron's fields for those of ours, and fields that only a Python caller sets.
_ALIASES = {"layernorm_epsilon": "norm_epsilon", "layernorm_zero_centered_gamma": "apply_layernorm_1p"}
_ACTIVATIONS = {  # (function's name, gated) -> the flag that says so
    ("gelu", False): None,
    ("silu", True): "swiglu",
    ("gelu", True): "geglu",
    ("quick_gelu", True): "quick_geglu",
    ("squared_relu", False): "squared_relu",
}
_CALLER: dict[str, Any] = {
    "params_dtype": torch.float32,
    "pipeline_dtype": None,
    "autocast_dtype": None,
    "bf16": False,
    "fp16": False,
    "seed": 1234,
    "use_cpu_initialization": False,
    "perform_initialization": True,
    "gated_linear_unit": False,
    "activation_func": F.gelu,
    "virtual_pipeline_model_parallel_size": None,
    "finalize_model_grads_func": None,
    "grad_scale_func": None,
    "no_sync_func": None,
    "grad_sync_func": None,
    "param_sync_func": None,
    "timers": None,
    "variable_seq_lengths": False,
    "deallocate_pipeline_outputs": False,
    "batch_p2p_comm": True,
    "overlap_p2p_comm": False,
}


def _fields() -> dict[str, Any]:
    """By name, the defaults of everything that a `TransformerConfig` holds."""
    groups = (ModelParallelConfig, OurTransformerConfig)
    ours = {one.name: one.default for group in groups for one in dataclasses.fields(group)}  # type: ignore[arg-type]
    names = {theirs: ours[name] for theirs, name in _ALIASES.items()}
    return ours | names | _CALLER


def _check_values(values: dict[str, Any]) -> dict[str, Any]:
    """Those that are fields. Warns of fields of Megatron's without effect here, raises TypeError for what no release
    knows and ValueError for what is not built, with what to use."""
    known, kept = _fields(), {}
    for name, value in values.items():
        entry = flag_table().get({"num_moe_experts": "num_experts"}.get(name, name))
        if name in known:
            kept[name] = value
        elif entry is None:
            close = difflib.get_close_matches(name, known, 1)
            hint = f"; did you mean {close[0]}?" if close else ""
            raise TypeError(f"TransformerConfig got an unknown field {name!r}{hint}")
        elif value not in (None, False) and not entry.asks_for_nothing((str(value),)):
            if entry.state is not FlagState.INERT:
                raise ValueError(f"TransformerConfig({name}={value!r}) is not supported: {entry.fix}")
            warnings.warn(f"TransformerConfig({name}={value!r}) has no effect: {entry.why}", stacklevel=4)
    return kept


class _Checked(type):
    """Checks the names of values before a dataclass refuses them in its own words."""

    def __call__(cls, *args: Any, **values: Any) -> Any:
        return super().__call__(*args, **_check_values(values))


@dataclasses.dataclass
class _Base(metaclass=_Checked):
    """What `TransformerConfig` does with its fields."""

    def model_config(self, **more: Any) -> OurTransformerConfig:
        """Ours. more: what Megatron says to `GPTModel` instead. Raises ValueError where the activation is none of
        ours."""
        v: dict[str, Any] = {one.name: getattr(self, one.name) for one in dataclasses.fields(self)} | more
        names = {one.name for one in dataclasses.fields(OurTransformerConfig)}
        given = {name: v[name] for name in names & v.keys()}
        for theirs, name in _ALIASES.items():
            if v[theirs] != _fields()[theirs]:
                given[name] = v[theirs]
        activation = (v["activation_func"].__name__, bool(v["gated_linear_unit"]))
        if activation not in _ACTIVATIONS:
            names_of = sorted({name for name, _ in _ACTIVATIONS})
            raise ValueError(
                f"activation_func {activation[0]} with gated_linear_unit {activation[1]}: use one of {names_of}, or a"
                " flag such as swiglu=True"
            )
        if (flag := _ACTIVATIONS[activation]) is not None:
            given[flag] = True
        if v["num_query_groups"] not in (None, 1):
            given["group_query_attention"] = True
        return OurTransformerConfig(**given).resolved()

    @property
    def weights_dtype(self) -> torch.dtype:
        """Of `bf16`, `fp16`, else `params_dtype`."""
        v = vars(self)
        return torch.bfloat16 if v["bf16"] else torch.float16 if v["fp16"] else v["params_dtype"]


TransformerConfig = dataclasses.make_dataclass(
    "TransformerConfig",
    [(name, Any, dataclasses.field(default=value)) for name, value in _fields().items()],
    bases=(_Base,),
    namespace={
        "__doc__": "Shape, arithmetic and parallelism of a model, under Megatron's names.",
        "__module__": __name__,
    },
)


@dataclasses.dataclass(frozen=True)
class ModuleSpec:
    """What Megatron builds layers by; ours are of one kind, so it says only whose they are."""

    module: str = "local"


def get_gpt_layer_local_spec(num_experts: int | None = None, **others: Any) -> ModuleSpec:
    """The layers of this framework. Raises ValueError for experts and latent attention."""
    asked = {"num_experts": num_experts, **others}
    told = {
        name: value
        for name, value in asked.items()
        if value and name in ("num_experts", "multi_latent_attention")
    }
    if told:
        raise ValueError(
            f"get_gpt_layer_local_spec({told}): not here, planned in docs/roadmap.md; leave it out"
        )
    return ModuleSpec()


def get_gpt_decoder_block_spec(
    config: Any, use_transformer_engine: bool = False, **others: Any
) -> ModuleSpec:
    """The same, for all layers of a model."""
    if use_transformer_engine:
        raise ValueError("use_transformer_engine=True: not here, planned in docs/roadmap.md; pass False")
    return get_gpt_layer_local_spec(**others)


class _ParameterGrads:
    """A `GradListener` that leaves sums in `parameter.grad`: a contribution starts a new one where there is none."""

    def __init__(self, model: OurGPTModel) -> None:
        parameters = dict(model.named_parameters())
        self.sums = model.context.grads.main_grads
        self._parameters = {
            key: parameters[name] for name, meta in model.param_meta.items() for key in meta.grad_keys
        }
        model.context.grads.bind({key: one.detach() for key, one in self._parameters.items()}, self)
        self.sums = model.context.grads.main_grads

    def grad_begins(self, key: str) -> bool:
        parameter = self._parameters[key]
        grad = parameter.grad
        self.sums[key] = torch.empty_like(parameter.detach()) if grad is None else grad
        return grad is None

    def grad_ready(self, key: str, microbatch: int) -> None:
        self._parameters[key].grad = self.sums[key]


class GPTModel(OurGPTModel):
    """Our GPT by Megatron's arguments, as the part of it that this pipeline rank holds.

    vocab_size: padded to a multiple of the tensor parallel size. parallel_output: logits are this rank's part
    [b, s, v/tp], as in Megatron; with labels the losses [b, s] are whole either way. vp_stage: which of the rank's
    chunks. Raises ValueError for what is not built, with what to use.
    """

    def __init__(
        self,
        config: Any,
        transformer_layer_spec: Any,
        vocab_size: int,
        max_sequence_length: int,
        pre_process: bool = True,
        post_process: bool = True,
        fp16_lm_cross_entropy: bool = False,
        parallel_output: bool = True,
        share_embeddings_and_output_weights: bool = False,
        position_embedding_type: str = "learned_absolute",
        rotary_percent: float = 1.0,
        rotary_base: int = 10000,
        rope_scaling: bool = False,
        rope_scaling_factor: float = 8.0,
        scatter_embedding_sequence_parallel: bool = True,
        seq_len_interpolation_factor: int | None = None,
        vp_stage: int | None = None,
        **others: Any,
    ) -> None:
        if not isinstance(transformer_layer_spec, ModuleSpec):
            raise ValueError(
                "transformer_layer_spec: use get_gpt_layer_local_spec(); layers of other makers are not built"
            )
        asked = {
            name: value for name, value in others.items() if value is not None and name != "pg_collection"
        }
        if fp16_lm_cross_entropy or asked:
            told = sorted([*asked, *["fp16_lm_cross_entropy"] * fp16_lm_cross_entropy])
            raise ValueError(f"GPTModel({', '.join(told)}): not here; leave it out, docs/megatron_compat.md")
        ps, parallel = parallel_state.current(), _parallel_of(config)
        chunks = parallel_state.get_virtual_pipeline_model_parallel_world_size() or 1
        stages = split_stages(parallel, config.num_layers, chunks=chunks)
        chunk = (
            vp_stage
            if vp_stage is not None
            else parallel_state.get_virtual_pipeline_model_parallel_rank() or 0
        )
        inner = config.model_config(
            seq_length=max_sequence_length,
            max_position_embeddings=max_sequence_length,
            untie_embeddings_and_output_weights=not share_embeddings_and_output_weights,
            position_embedding_type=position_embedding_type,
            rotary_percent=rotary_percent,
            rotary_base=rotary_base,
            use_rope_scaling=rope_scaling,
            rope_scaling_factor=rope_scaling_factor,
            rotary_seq_len_interpolation_factor=seq_len_interpolation_factor,
        )
        super().__init__(
            inner,
            padded_vocab_size=vocab_size,
            seed=config.seed,
            params_dtype=config.weights_dtype,
            device=ps.device.torch_device,
            pre_process=pre_process,
            post_process=post_process,
            layers=stages[chunk * ps.pp_size + ps.pp_rank].layers,
            tp=TensorParallel.of(ps, config.sequence_parallel),
        )
        self.model_config, self.parallel_output = inner, parallel_output
        self.config = config
        self.share_embeddings_and_output_weights = share_embeddings_and_output_weights
        _ParameterGrads(self)

    def forward(  # type: ignore[override]
        self,
        input_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        decoder_input: Tensor | None = None,
        labels: Tensor | None = None,
        loss_mask: Tensor | None = None,
        **others: Any,
    ) -> Tensor:
        """See the class. attention_mask: bool [b or 1, 1, s, s], True = masked; None: causal."""
        assert decoder_input is None, "decoder_input is not taken: give input_ids"
        output = super().forward(input_ids, position_ids, attention_mask, labels, loss_mask).contiguous()
        if self.post_process and labels is None and self.parallel_output and self.tp.size > 1:
            return output.chunk(self.tp.size, -1)[self.tp.rank]
        return output

    def shared_embedding_or_output_weight(self) -> nn.Parameter | None:
        """The matrix of word embeddings, or that of the output layer."""
        if self.embedding is not None:
            return self.embedding.word_embeddings.weight
        return None if self.output_layer is None else self.output_layer.weight

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Sequence[Any] = (), metadata: Any = None
    ) -> dict[str, ShardedTensor]:
        """By name, this rank's part of every parameter: for `dist_checkpointing`."""
        parameters = dict(self.named_parameters())
        return {
            prefix + name: ShardedTensor(meta, parameters[name]) for name, meta in self.param_meta.items()
        }


def _parallel_of(config: Any) -> ModelParallelConfig:
    names = (one.name for one in dataclasses.fields(ModelParallelConfig))
    return ModelParallelConfig(**{name: getattr(config, name) for name in names})


def config_from_args(args: Any, config_class: Callable[..., Any] | None = None) -> Any:
    """Megatron's `core_transformer_config_from_args`: the fields that `args` has, under the same names."""
    make = TransformerConfig if config_class is None else config_class
    names = [one.name for one in dataclasses.fields(make)]  # type: ignore[arg-type]
    values = {name: getattr(args, name) for name in names if getattr(args, name, None) is not None}
    values.pop("params_dtype", None)
    return make(**values)
