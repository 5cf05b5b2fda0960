"""How the model and the batch are spread over ranks (floor 0)."""

import dataclasses
from typing import Literal

from megatron.core.config_base import arg


@dataclasses.dataclass(frozen=True)
class ModelParallelConfig:
    """Degrees of every kind of parallelism, the order of ranks, and the process groups' backend."""

    tensor_model_parallel_size: int = arg(1, "tensor parallel degree (TP)", unit="ranks")
    pipeline_model_parallel_size: int = arg(1, "pipeline stages (PP)", unit="ranks")
    context_parallel_size: int = arg(1, "context parallel degree (CP)", unit="ranks")
    expert_model_parallel_size: int = arg(1, "expert parallel degree (EP)", unit="ranks")
    expert_tensor_parallel_size: int = arg(
        None, "tensor parallel degree inside experts (ETP)", unit="ranks", derived="TP"
    )
    sequence_parallel: bool = arg(
        False, "split activations of norms and dropout along the sequence over TP; no effect at TP = 1"
    )
    use_tp_pp_dp_mapping: bool = arg(False, "order of ranks tp-cp-ep-pp-dp instead of tp-cp-ep-dp-pp")
    num_layers_per_virtual_pipeline_stage: int | None = arg(
        None, "layers of one model chunk; turns on interleaving", unit="layers"
    )
    num_virtual_stages_per_pipeline_rank: int | None = arg(
        None, "model chunks a rank; turns on interleaving", unit="chunks"
    )
    pipeline_model_parallel_layout: str | None = arg(None, "layers of each stage, as in Et*2|(tt|)*5t|tmL")
    decoder_first_pipeline_num_layers: int | None = arg(None, "layers of the first stage", unit="layers")
    decoder_last_pipeline_num_layers: int | None = arg(None, "layers of the last stage", unit="layers")
    account_for_embedding_in_pipeline_split: bool = arg(False, "the embedding counts as a layer")
    account_for_loss_in_pipeline_split: bool = arg(False, "the loss counts as a layer")
    distributed_backend: Literal["nccl", "gloo"] = arg(
        None, "backend of the process groups", derived="nccl with a GPU, else gloo"
    )
