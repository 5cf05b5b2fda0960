"""Rules on the cut of the model over ranks: tensor parallel, sequence parallel, stages (floor 0)."""

from __future__ import annotations

import contextlib

from megatron.core.asked_schedules import V_BY_MEMORY
from megatron.core.models.gpt.stage_layers import MAX_LAYERS, MAX_STAGES, StageLayersError
from megatron.core.models.gpt.stage_schedule import stages_of
from megatron.core.pipeline_parallel.plan.schedules import AUTO
from megatron.training.config.resolve import known_vocabulary
from megatron.training.config.rule_table import RuleContext, RuleTable

RULES = RuleTable()
rule = RULES.rule


# Tensor and sequence parallel


@rule(
    "heads-tensor-parallel",
    "--num-attention-heads --num-query-groups --tensor-model-parallel-size",
    "choose a tensor parallel size that divides the heads and divides (or is a multiple of) the query groups",
)
def _heads_tensor_parallel(s: RuleContext) -> str | None:
    heads, groups, tp = (
        s.value("num_attention_heads"),
        s.value("num_query_groups"),
        s.value("tensor_model_parallel_size"),
    )
    if not heads or not groups or groups < 1 or tp < 1:
        return None
    if heads % tp:
        return s.undivided("num_attention_heads", "tensor_model_parallel_size")
    if groups % tp and tp % groups:
        return f"--num-query-groups {groups} and --tensor-model-parallel-size {tp} do not divide each other"
    return None


@rule(
    "ffn-tensor-parallel", "--ffn-hidden-size --tensor-model-parallel-size", "choose a width that it divides"
)
def _ffn_tensor_parallel(s: RuleContext) -> str | None:
    return s.undivided("ffn_hidden_size", "tensor_model_parallel_size")


@rule(
    "sequence-context-parallel", "--seq-length --context-parallel-size", "choose a length that 2 x CP divides"
)
def _sequence_context_parallel(s: RuleContext) -> str | None:
    length, cp = s.value("seq_length"), s.value("context_parallel_size")
    if length is None or cp <= 1 or length % (2 * cp) == 0:
        return None
    return f"--seq-length {length} is not divisible by 2 x --context-parallel-size {cp}"


@rule(
    "sequence-tensor-parallel",
    "--seq-length --sequence-parallel --tensor-model-parallel-size",
    "choose a length that TP x CP divides, or leave --sequence-parallel out",
)
def _sequence_tensor_parallel(s: RuleContext) -> str | None:
    length, ranks = (
        s.value("seq_length"),
        s.value("tensor_model_parallel_size") * s.value("context_parallel_size"),
    )
    if not s.value("sequence_parallel") or length is None or ranks < 1 or length % ranks == 0:
        return None
    return f"--seq-length {length} does not divide into {ranks} parts for --sequence-parallel"


@rule(
    "vocabulary",
    "--padded-vocab-size --vocab-size --make-vocab-size-divisible-by --tensor-model-parallel-size",
    "leave --padded-vocab-size out, or make it hold the vocabulary and divide by the tensor parallel size",
)
def _vocabulary(s: RuleContext) -> str | None:
    padded, tp = s.value("padded_vocab_size"), s.value("tensor_model_parallel_size")
    known = known_vocabulary(s.value("tokenizer_type"), s.value("vocab_size")) or s.value("vocab_size")
    if padded is None or tp < 1:
        return None
    saved = s.config.origin.get("padded_vocab_size") == "checkpoint"
    told = f"the checkpoint's padded vocabulary of {padded}" if saved else f"--padded-vocab-size {padded}"
    if padded % tp:
        return f"{told} is not divisible by --tensor-model-parallel-size {tp}"
    if known is not None and padded < known:
        return f"{told} is smaller than the tokenizer's vocabulary of {known}"
    return None


# Stages


@rule(
    "pipeline-layers",
    "--num-layers --pipeline-model-parallel-size --num-layers-per-virtual-pipeline-stage "
    "--num-virtual-stages-per-pipeline-rank --pipeline-model-parallel-layout "
    "--decoder-first-pipeline-num-layers --decoder-last-pipeline-num-layers "
    "--account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split --allow-padding-num-layers",
    "choose layers that stages x chunks divide, uneven first and last stages, padding, or a layout",
)
def _pipeline_layers(s: RuleContext) -> str | None:
    names = (
        "num_layers",
        "pipeline_model_parallel_size",
        "num_layers_per_virtual_pipeline_stage",
        "num_virtual_stages_per_pipeline_rank",
        "decoder_first_pipeline_num_layers",
        "decoder_last_pipeline_num_layers",
    )
    beyond = (s.value("num_layers") or 0) > MAX_LAYERS or s.value("pipeline_model_parallel_size") > MAX_STAGES
    below = any(s.value(name) is not None and s.value(name) < 1 for name in names)
    if s.value("num_layers") is None or beyond or below:
        return None  # has a rule of its own
    try:
        _all_stages(s)
    except StageLayersError as error:
        return str(error)
    return None


def _all_stages(s: RuleContext) -> int:
    """How many stages the schedule makes of the layers; of `auto`, those of the flags or of a V.

    Raises StageLayersError. A plan from a file has a rule of its own.
    """
    parallel, num_layers = s.config.parallel, s.value("num_layers") or 0
    if parallel.pipeline_schedule_file is not None:
        return parallel.pipeline_model_parallel_size
    try:
        return len(stages_of(parallel, num_layers, parallel.pipeline_schedule))
    except StageLayersError:
        if parallel.pipeline_schedule != AUTO or parallel.pipeline_model_parallel_size == 1:
            raise
        with contextlib.suppress(StageLayersError):
            return len(stages_of(parallel, num_layers, V_BY_MEMORY["zb"]))
        raise


def chunks_of(s: RuleContext) -> int | None:
    """Model chunks on a rank, or None where the layers do not divide (told by its own rule)."""
    ranks: int = s.value("pipeline_model_parallel_size")
    if ranks < 1:
        return None
    try:
        return _all_stages(s) // ranks
    except StageLayersError:
        return None
