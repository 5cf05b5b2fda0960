"""What cannot be run as asked: found before the first step, all reasons of all stages at once, and said with the fix."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

# Settings of Megatron's configuration, by name: the value that is right, and why others are not.
_SETTINGS: tuple[tuple[str, tuple[Any, ...], str], ...] = (
    ("virtual_pipeline_model_parallel_size", (None, 1), "virtual pipelines have a schedule of Megatron's own; leave out "
     "--num-layers-per-virtual-pipeline-stage"),
    ("overlap_p2p_comm", (False, None), "it is of virtual pipelines; messages are overlapped here in any case"),
    ("enable_cuda_graph", (False, None), "CUDA graphs hold B and W together"),
    ("external_cuda_graph", (False, None), "CUDA graphs hold B and W together"),
    ("cuda_graph_impl", ("none", None), "CUDA graphs hold B and W together"),
    ("defer_embedding_wgrad_compute", (False, None), "it is a W of its own; here the output layer's W waits as others do"),
    ("moe_use_legacy_grouped_gemm", (False, None), "its experts compute B and W in one kernel; use sequential experts or "
     "Transformer Engine's"),
    ("overlap_moe_expert_parallel_comm", (False, None), "it is a schedule of Megatron's own"),
    ("variable_seq_lengths", (False, None), "receives are posted before their shapes are known"),
    ("fine_grained_activation_offloading", (False, None), "it counts on the order of 1F1B"),
    ("cpu_offloading", (False, None), "it counts on the order of 1F1B"),
    ("moe_paged_stash", (False, None), "it counts on the order of 1F1B"),
    ("gtp_weight_remat_size", (1, None), "weights are gathered for B and W together"),
    ("expert_gtp_weight_remat_size", (1, None), "weights are gathered for B and W together"),
    ("mtp_num_layers", (0, None), "the output layer and the embedding of the last stage are one weight with two backwards"),
)  # fmt: skip


def problems(layers: Any, config: Any, chunks: list[nn.Module]) -> list[str]:
    """Of this stage. layers: Megatron's module of linear layers; chunks: its part of the model."""
    reasons = []
    for name, right, reason in _SETTINGS:
        value = getattr(config, name, None)
        if value not in right:
            reasons.append(f"{name} is {value!r}: {reason}")
    if len(chunks) > 1 and getattr(config, "virtual_pipeline_model_parallel_size", None) in (None, 1):
        reasons.append(
            f"{len(chunks)} chunks of the model on a rank: virtual pipelines have a schedule of Megatron's own"
        )
    for chunk in chunks:
        reasons += _model_problems(layers, config, chunk)
    return reasons


def _model_problems(layers: Any, config: Any, model: nn.Module) -> list[str]:
    reasons = []
    for name, module in model.named_modules():
        if type(module).__name__ == "GroupedMLP":
            reasons.append(
                f"{name} is a GroupedMLP: its experts compute B and W in one kernel; use sequential experts"
            )
        elif is_engine_linear(module) and not delays(module, config, model):
            reasons.append(
                f"{name} is a {type(module).__name__} of Transformer Engine, which computes B and W together: set "
                "delay_wgrad_compute in the configurations of the model and of DistributedDataParallel before they are "
                "built (Megatron 0.13 and Transformer Engine 2.3 on), or use --transformer-impl local"
            )
            break  # of many alike
    if any(
        hasattr(parameter, "__fsdp_param__") or hasattr(parameter, "placements")
        for parameter in model.parameters()
    ):
        reasons.append(
            "weights are sharded (FSDP): they are gathered for B and W together; use the distributed optimizer"
        )
    if getattr(getattr(model, "model_type", None), "name", "") == "encoder_and_decoder":
        reasons.append("an encoder and a decoder: messages between stages are more than one tensor")
    return reasons


def can_split(layers: Any, config: Any, model: nn.Module) -> bool:
    """Whether any weight of a stage is computed in W."""
    kinds = (layers.ColumnParallelLinear, layers.RowParallelLinear)
    return any(isinstance(module, kinds) for module in model.modules()) or bool(
        list(engine_linears(config, model))
    )


def embedding_weights(layers: Any, model: nn.Module) -> set[Tensor]:
    """Weights that an embedding of this stage has: where an output layer shares one, both add to its gradient in B."""
    embeddings = (layers.VocabParallelEmbedding, nn.Embedding)
    return {module.weight for module in model.modules() if isinstance(module, embeddings)}


def is_engine_linear(module: nn.Module) -> bool:
    """Whether a module is of Transformer Engine, with weights that are matrices of its own."""
    engine = any(cls.__module__.partition(".")[0] == "transformer_engine" for cls in type(module).__mro__)
    return engine and any(parameter.dim() > 1 for parameter in module.parameters(recurse=False))


def delays(module: nn.Module, config: Any, model: nn.Module) -> bool:
    """Whether a layer of Transformer Engine leaves its weight gradient to `backward_dw`, and DDP waits for it there."""
    ddp = getattr(model, "ddp_config", None)
    asked = getattr(config, "delay_wgrad_compute", False) and (
        ddp is None or getattr(ddp, "delay_wgrad_compute", False)
    )
    return bool(asked) and callable(getattr(module, "backward_dw", None))


def engine_linears(config: Any, model: nn.Module) -> Iterator[nn.Module]:
    """Layers of Transformer Engine whose weight gradients are computed apart."""
    return (
        module for module in model.modules() if is_engine_linear(module) and delays(module, config, model)
    )
