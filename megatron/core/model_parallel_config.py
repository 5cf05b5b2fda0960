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
    pipeline_model_parallel_layout: str | None = arg(
        None,
        "what each stage holds, as in Et*2|(tt|)*5t|tL: E embedding, t layer, L loss; stages may be empty",
    )
    decoder_first_pipeline_num_layers: int | None = arg(
        None, "layers of the first pipeline rank, all its chunks together", unit="layers"
    )
    decoder_last_pipeline_num_layers: int | None = arg(
        None, "layers of the last pipeline rank, all its chunks together", unit="layers"
    )
    account_for_embedding_in_pipeline_split: bool = arg(
        False, "the embedding counts as a layer: the first stage holds one layer less"
    )
    account_for_loss_in_pipeline_split: bool = arg(
        False, "the loss counts as a layer: the last stage holds one layer less"
    )
    allow_padding_num_layers: bool = arg(
        False,
        "stages as of the next number of layers that they divide; the missing layers are taken from the last stage, "
        "then from stages 0, 1, ..., one each",
        ours=True,
    )
    microbatch_group_size_per_vp_stage: int | None = arg(
        None,
        "microbatches that a chunk takes in turn before the next chunk, with interleaving",
        flags=("--microbatch-group-size-per-virtual-pipeline-stage", "--microbatch-group-size-per-vp-stage"),
        unit="microbatches",
        derived="PP, with interleaving",
    )
    pipeline_schedule: Literal["gpipe", "1f1b", "interleaved"] = arg(
        None,
        "order of the pipeline's forwards and backwards",
        derived="interleaved with more than one chunk a rank, else 1f1b",
        ours=True,
    )
    distributed_backend: Literal["nccl", "gloo"] = arg(
        None, "backend of the process groups", derived="nccl with a GPU, else gloo"
    )
