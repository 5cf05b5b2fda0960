"""Rules on the cut of the model over ranks: tensor parallel, sequence parallel, stages, schedules (floor 0)."""

from __future__ import annotations

from megatron.core.models.gpt.stage_layers import (
    MAX_LAYERS,
    MAX_STAGES,
    StageLayersError,
    num_chunks,
    split_stages,
)
from megatron.training.resolve import known_vocabulary
from megatron.training.rule_table import RuleTable, Situation

RULES = RuleTable()
rule = RULES.rule

INTERLEAVED = "interleaved"


# Tensor and sequence parallel


@rule(
    "heads-tensor-parallel",
    "--num-attention-heads --num-query-groups --tensor-model-parallel-size",
    "choose a tensor parallel size that divides the heads and divides (or is a multiple of) the query groups",
)
def _heads_tensor_parallel(s: Situation) -> str | None:
    heads, groups, tp = (
        s.value("num_attention_heads"),
        s.value("num_query_groups"),
        s.value("tensor_model_parallel_size"),
    )
    if not heads or not groups or groups < 1 or tp < 1:
        return None
    if heads % tp:
        return f"--num-attention-heads {heads} is not divisible by --tensor-model-parallel-size {tp}"
    if groups % tp and tp % groups:
        return f"--num-query-groups {groups} and --tensor-model-parallel-size {tp} do not divide each other"
    return None


@rule(
    "ffn-tensor-parallel", "--ffn-hidden-size --tensor-model-parallel-size", "choose a width that it divides"
)
def _ffn_tensor_parallel(s: Situation) -> str | None:
    ffn, tp = s.value("ffn_hidden_size"), s.value("tensor_model_parallel_size")
    if ffn is None or tp < 1 or ffn % tp == 0:
        return None
    return f"--ffn-hidden-size {ffn} is not divisible by --tensor-model-parallel-size {tp}"


@rule(
    "sequence-context-parallel", "--seq-length --context-parallel-size", "choose a length that 2 x CP divides"
)
def _sequence_context_parallel(s: Situation) -> str | None:
    length, cp = s.value("seq_length"), s.value("context_parallel_size")
    if length is None or cp <= 1 or length % (2 * cp) == 0:
        return None
    return f"--seq-length {length} is not divisible by 2 x --context-parallel-size {cp}"


@rule(
    "sequence-tensor-parallel",
    "--seq-length --sequence-parallel --tensor-model-parallel-size",
    "choose a length that TP x CP divides, or leave --sequence-parallel out",
)
def _sequence_tensor_parallel(s: Situation) -> str | None:
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
def _vocabulary(s: Situation) -> str | None:
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
def _pipeline_layers(s: Situation) -> str | None:
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
        split_stages(s.config.parallel, s.value("num_layers"))
    except StageLayersError as error:
        return str(error)
    return None


def _chunks(s: Situation) -> int | None:
    """Model chunks on a rank, or None where the layers do not divide (told by its own rule)."""
    try:
        return num_chunks(s.config.parallel, s.value("num_layers") or 0)
    except StageLayersError:
        return None


# Schedules


@rule(
    "pipeline-schedule",
    "--pipeline-schedule --num-layers-per-virtual-pipeline-stage --num-virtual-stages-per-pipeline-rank "
    "--pipeline-model-parallel-layout --pipeline-model-parallel-size",
    "leave --pipeline-schedule out, or: interleaved with several chunks a rank, gpipe or 1f1b with one",
)
def _pipeline_schedule(s: Situation) -> str | None:
    schedule, chunks = s.value("pipeline_schedule"), _chunks(s)
    if schedule is None or chunks is None:
        return None
    if schedule != INTERLEAVED and chunks > 1:
        return f"--pipeline-schedule {schedule} has one chunk of the model a rank, and the flags ask for {chunks}"
    if schedule == INTERLEAVED and s.value("pipeline_model_parallel_size") == 1:
        return "--pipeline-schedule interleaved needs --pipeline-model-parallel-size 2 or more"
    if schedule == INTERLEAVED and chunks == 1:
        return "--pipeline-schedule interleaved: the flags ask for one chunk of the model a rank"
    return None


@rule(
    "microbatch-group",
    "--microbatch-group-size-per-virtual-pipeline-stage --pipeline-model-parallel-size",
    "leave it out, or interleave and give the number of pipeline ranks at least",
)
def _microbatch_group(s: Situation) -> str | None:
    group, ranks = s.value("microbatch_group_size_per_vp_stage"), s.value("pipeline_model_parallel_size")
    chunks = _chunks(s)
    if group is None or group < 1 or chunks is None:
        return None
    told = f"--microbatch-group-size-per-virtual-pipeline-stage {group}"
    if chunks == 1:
        return f"{told} without interleaving: there is one chunk of the model a rank"
    return f"{told} is below --pipeline-model-parallel-size {ranks}" if group < ranks else None


@rule(
    "interleaving-microbatches",
    "--global-batch-size --micro-batch-size --rampup-batch-size --pipeline-model-parallel-size "
    "--microbatch-group-size-per-virtual-pipeline-stage",
    "use a larger global batch (and a larger first batch of the ramp), smaller microbatches, or no interleaving",
)
def _interleaving_microbatches(s: Situation) -> str | None:
    group = s.value("microbatch_group_size_per_vp_stage")
    if group is None or s.value("pipeline_schedule") != INTERLEAVED or (_chunks(s) or 1) == 1:
        return None
    schedule = s.config.batch_schedule_or_none()
    if schedule is None:
        return None  # has a rule of its own
    fewest = schedule.num_microbatches(0)  # a ramp only rises: its first batch is the smallest of the run
    if fewest >= group:
        return None
    batch = f"--global-batch-size {s.value('global_batch_size')}"
    where = "the first batch of --rampup-batch-size" if s.value("rampup_batch_size") else batch
    given = s.given("microbatch_group_size_per_vp_stage")
    flag = "--microbatch-group-size-per-virtual-pipeline-stage" if given else "--pipeline-model-parallel-size"
    noun = "microbatch" if fewest == 1 else "microbatches"
    return (
        f"{where} has {fewest} {noun} a rank, fewer than the {group} that interleaving takes in turn ({flag})"
    )
