"""What cannot be run as asked, found before the first step: all reasons at once, each with its fix."""

from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor

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
    settings = [(name, getattr(config, name, None), *rule) for name, rule in _SETTINGS.items()]
    reasons = [f"{name} is {value!r}: {why}" for name, value, right, why in settings if value not in (None, *right)]
    if len(chunks) > 1:
        reasons.append(f"a rank has {len(chunks)} chunks of the model: virtual pipelines have a schedule of their own")
    modules = [(name, module) for chunk in chunks for name, module in chunk.named_modules()]
    delayed = [module for chunk in chunks for module in engine_linears(config, chunk)]
    grouped = [name for name, module in modules if type(module).__name__ == "GroupedMLP"]
    engine = [pair for pair in modules if _of_engine(pair[1]) and pair[1] not in delayed]
    for name in grouped[:1]:
        reasons.append(f"{name} is a GroupedMLP, whose kernel computes B and W together: use sequential experts")
    for name, module in engine[:1]:
        reasons.append(
            f"{name} is a {type(module).__name__} of Transformer Engine, which computes B and W together: set "
            "delay_wgrad_compute in the configurations of model and DistributedDataParallel before they are built "
            "(Megatron 0.13 and Transformer Engine 2.3 on), or use --transformer-impl local"
        )
    weights = [weight for chunk in chunks for weight in chunk.parameters()]
    if any(isinstance(weight, DTensor) or "__fsdp_param__" in vars(weight) for weight in weights):
        reasons.append("weights are sharded (FSDP), and gathered for B and W together: use the distributed optimizer")
    if any(getattr(model_type(chunk), "name", "") == "encoder_and_decoder" for chunk in chunks):
        reasons.append("the model has encoder and decoder: messages between stages are more than one tensor")
    return reasons


def model_type(model: nn.Module) -> Any:
    """Megatron's, of a model that may be wrapped, or None."""
    return next((vars(module)["model_type"] for module in model.modules() if "model_type" in vars(module)), None)


def can_split(layers: Any, config: Any, model: nn.Module) -> bool:
    """Whether W has weights of a stage to compute."""
    kinds = (layers.ColumnParallelLinear, layers.RowParallelLinear)
    return any(isinstance(module, kinds) for module in model.modules()) or bool(engine_linears(config, model))


def embedding_weights(layers: Any, model: nn.Module) -> list[Any]:
    """Weights of this stage's embeddings: what else uses one adds to its gradient in the same B."""
    return [each.weight for each in model.modules() if isinstance(each, (layers.VocabParallelEmbedding, nn.Embedding))]


def engine_linears(config: Any, model: nn.Module) -> list[nn.Module]:
    """Layers of Transformer Engine that leave weight gradients to `backward_dw`, for which DDP, if any, waits."""
    settings = (config, getattr(model, "ddp_config", config))
    if not all(getattr(some, "delay_wgrad_compute", False) for some in settings):
        return []
    return [layer for layer in model.modules() if _of_engine(layer) and callable(getattr(layer, "backward_dw", None))]


def _of_engine(module: nn.Module) -> bool:
    engine = any(cls.__module__.partition(".")[0] == "transformer_engine" for cls in type(module).__mro__)
    return engine and any(weight.dim() > 1 for weight in module.parameters(recurse=False))
