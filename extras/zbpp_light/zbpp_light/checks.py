"""What cannot be run as asked, found before the first step: all reasons at once, each with its fix."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

_GRAPHS, _ORDER = "CUDA graphs hold B and W together", "it counts on the order of 1F1B"
# Settings of Megatron's configuration: values that are right beside None, and why others are not.
_SETTINGS: dict[str, tuple[tuple[Any, ...], str]] = {
    "virtual_pipeline_model_parallel_size": ((1,), "virtual pipelines have a schedule of Megatron's own"),
    "overlap_p2p_comm": ((False,), "it is of virtual pipelines; messages are overlapped here in any case"),
    "enable_cuda_graph": ((False,), _GRAPHS),
    "external_cuda_graph": ((False,), _GRAPHS),
    "cuda_graph_impl": (("none",), _GRAPHS),
    "defer_embedding_wgrad_compute": ((False,), "leave it out: the output layer's W waits here as others do"),
    "moe_use_legacy_grouped_gemm": ((False,), "its kernel computes B and W together: use sequential experts"),
    "overlap_moe_expert_parallel_comm": ((False,), "it is a schedule of Megatron's own"),
    "variable_seq_lengths": ((False,), "receives are posted before their shapes are known"),
    "fine_grained_activation_offloading": ((False,), _ORDER),
    "cpu_offloading": ((False,), _ORDER),
    "moe_paged_stash": ((False,), _ORDER),
    "gtp_weight_remat_size": ((1,), "weights are gathered for B and W together"),
    "expert_gtp_weight_remat_size": ((1,), "weights are gathered for B and W together"),
    "mtp_num_layers": ((0,), "the last stage's embedding and output layer share a weight, one in B and one in W"),
}


def problems(config: Any, chunks: list[nn.Module]) -> list[str]:
    """Of this stage. chunks: its part of the model."""
    reasons = []
    for name, (right, why) in _SETTINGS.items():
        if getattr(config, name, None) not in (None, *right):
            reasons.append(f"{name} is {getattr(config, name)!r}: {why}")
    if len(chunks) > 1:
        reasons.append(f"a rank has {len(chunks)} chunks of the model: virtual pipelines have a schedule of their own")
    modules = [(name, module, chunk) for chunk in chunks for name, module in chunk.named_modules()]
    for name, _, _ in [some for some in modules if type(some[1]).__name__ == "GroupedMLP"][:1]:
        reasons.append(f"{name} is a GroupedMLP, whose kernel computes B and W together: use sequential experts")
    for name, module, _ in [some for some in modules if _of_engine(some[1]) and not _delays(some[1], config, some[2])][
        :1
    ]:
        reasons.append(
            f"{name} is a {type(module).__name__} of Transformer Engine, which computes B and W together: set "
            "delay_wgrad_compute in the configurations of model and DistributedDataParallel before they are built "
            "(Megatron 0.13 and Transformer Engine 2.3 on), or use --transformer-impl local"
        )
    weights = [weight for chunk in chunks for weight in chunk.parameters()]
    if any(hasattr(weight, "__fsdp_param__") or hasattr(weight, "placements") for weight in weights):
        reasons.append("weights are sharded (FSDP), and gathered for B and W together: use the distributed optimizer")
    if any(getattr(model_type(chunk), "name", "") == "encoder_and_decoder" for chunk in chunks):
        reasons.append("the model has encoder and decoder: messages between stages are more than one tensor")
    return reasons


def model_type(model: nn.Module) -> Any:
    """Megatron's, of a model that may be wrapped, or None."""
    return next((module.model_type for module in model.modules() if hasattr(module, "model_type")), None)


def can_split(layers: Any, config: Any, model: nn.Module) -> bool:
    """Whether W has weights of a stage to compute."""
    kinds = (layers.ColumnParallelLinear, layers.RowParallelLinear)
    return any(isinstance(module, kinds) for module in model.modules()) or any(engine_linears(config, model))


def embedding_weights(layers: Any, model: nn.Module) -> list[Any]:
    """Weights of this stage's embeddings: what else uses one adds to its gradient in the same B."""
    kinds = (layers.VocabParallelEmbedding, nn.Embedding)
    return [module.weight for module in model.modules() if isinstance(module, kinds)]


def engine_linears(config: Any, model: nn.Module) -> Iterator[nn.Module]:
    """Layers of Transformer Engine whose weight gradients are computed apart."""
    return (module for module in model.modules() if _of_engine(module) and _delays(module, config, model))


def _of_engine(module: nn.Module) -> bool:
    engine = any(cls.__module__.partition(".")[0] == "transformer_engine" for cls in type(module).__mro__)
    return engine and any(weight.dim() > 1 for weight in module.parameters(recurse=False))


def _delays(module: nn.Module, config: Any, model: nn.Module) -> bool:
    """Whether a layer leaves its weight gradient to `backward_dw`, and DDP, if there is one, waits for it there."""
    settings = [config] + [model.ddp_config for _ in range(hasattr(model, "ddp_config"))]
    return hasattr(module, "backward_dw") and all(getattr(one, "delay_wgrad_compute", False) for one in settings)
