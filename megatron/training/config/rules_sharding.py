"""Rules on what is sharded over data parallel ranks, and how it travels (floor 0)."""

from __future__ import annotations

from megatron.core.distributed.sharding import main_grads_dtype
from megatron.core.models.gpt.stage_costs import DTYPE_BYTES
from megatron.core.transport.rank_grid import RankGridError
from megatron.core.transport.rank_groups import check_instances
from megatron.training.config.resolve_sharding import (
    INSTANCES,
    OUTER,
    STRATEGY,
    grads_are_cut,
    weights_are_cut,
)
from megatron.training.config.rule_table import RuleContext, RuleTable, spelled

RULES = RuleTable()
rule = RULES.rule

BUDGET = "budget"  # the policy that goes with --fsdp-memory-budget
_HASH = "check_weight_hash_across_dp_replicas_interval"
_MAIN_PARAMS = "megatron_fsdp_main_params_dtype"
_MAIN_GRADS = "megatron_fsdp_main_grads_dtype"
_GRAD_COMM = "megatron_fsdp_grad_comm_dtype"


@rule(
    "distributed-optimizer-instances",
    "--num-distributed-optimizer-instances --tensor-model-parallel-size --pipeline-model-parallel-size",
    "choose instances that divide the data parallel size (ranks / (TP x PP)), or leave the flag out",
)
def _distributed_optimizer_instances(s: RuleContext) -> str | None:
    if s.value(INSTANCES) < 1:
        return None  # has a rule of its own
    try:
        grid = s.config.grid()
    except RankGridError:
        return None  # has a rule of its own
    try:
        check_instances(grid, s.value(INSTANCES))
    except RankGridError as error:
        return str(error)
    return None


@rule(
    "sharding-strategy",
    "--data-parallel-sharding-strategy --use-custom-fsdp --use-distributed-optimizer",
    "add --use-custom-fsdp (for optim, --use-distributed-optimizer serves too), or leave the strategy out",
)
def _sharding_strategy(s: RuleContext) -> str | None:
    strategy, distributed = s.value(STRATEGY), s.value("use_distributed_optimizer")
    if s.value("use_custom_fsdp") or not s.given(STRATEGY):
        return None
    if not distributed:
        missing = "without --use-custom-fsdp or --use-distributed-optimizer: nothing would be sharded"
        return None if strategy == "no_shard" else f"{s.told(STRATEGY)} {missing}"
    if strategy == "no_shard":
        return f"{s.told(STRATEGY)} contradicts --use-distributed-optimizer, which shards the optimizer state"
    only = "--use-distributed-optimizer shards the optimizer state only"
    return None if strategy == "optim" else f"{s.told(STRATEGY)} needs --use-custom-fsdp: {only}"


@rule(
    "reshard-policy-stages",
    "--fsdp-reshard-policy --pipeline-model-parallel-size",
    "use --fsdp-reshard-policy budget with --fsdp-memory-budget BYTES, which keeps what the bytes allow at each moment",
)
def _reshard_policy_stages(s: RuleContext) -> str | None:
    stages = s.value("pipeline_model_parallel_size")
    if stages <= 1 or s.value("fsdp_reshard_policy") != "backward" or not s.value("use_custom_fsdp"):
        return None
    return (
        f"--fsdp-reshard-policy backward with --pipeline-model-parallel-size {stages}: several microbatches are "
        "between their forward and their backward at any time, so weights would stay gathered for the whole step"
    )


@rule(
    "double-buffer-stages",
    "--fsdp-double-buffer --pipeline-model-parallel-size",
    "leave out --fsdp-double-buffer, or use one stage",
)
def _double_buffer_stages(s: RuleContext) -> str | None:
    stages = s.value("pipeline_model_parallel_size")
    if stages <= 1 or not s.value("fsdp_double_buffer") or not grads_are_cut(s.value(STRATEGY)):
        return None
    return (
        f"--fsdp-double-buffer with --pipeline-model-parallel-size {stages}: forwards and backwards alternate, so "
        "units do not take two slots in turns"
    )


@rule(
    "sharding-instances",
    "--num-distributed-optimizer-instances --data-parallel-sharding-strategy",
    "choose a strategy that shards something, or leave the instances out",
)
def _sharding_instances(s: RuleContext) -> str | None:
    instances = s.value(INSTANCES)
    if instances <= 1 or s.value(STRATEGY) != "no_shard" or not s.value("use_custom_fsdp"):
        return None  # without --use-custom-fsdp a warning
    return f"{s.told(INSTANCES)} with {s.told(STRATEGY)}: there is no sharded state to have instances of"


@rule(
    "outer-sharding",
    "--outer-dp-sharding-strategy --enable-full-sharding-in-hsdp --data-parallel-sharding-strategy",
    "use --use-custom-fsdp --data-parallel-sharding-strategy optim_grads_params, or leave the outer strategy out",
)
def _outer_sharding(s: RuleContext) -> str | None:
    full = s.value("enable_full_sharding_in_hsdp")
    if full and s.given(OUTER) and s.value(OUTER) == "no_shard":
        return f"{spelled(OUTER)} no_shard contradicts --enable-full-sharding-in-hsdp"
    if s.value(OUTER) == "no_shard" or weights_are_cut(s.value(STRATEGY)):
        return None
    flag = "--enable-full-sharding-in-hsdp" if full else s.told(OUTER)
    return f"{flag} with {s.told(STRATEGY)}: the optimizer is cut over instances only with optim_grads_params"


@rule(
    "outer-instances",
    "--num-distributed-optimizer-instances --outer-dp-sharding-strategy --enable-full-sharding-in-hsdp",
    "use fewer instances",
)
def _outer_instances(s: RuleContext) -> str | None:
    place = s.config.shard_place
    if s.value(OUTER) == "no_shard" or place is None or place.outer_size == 1 or place.inner_size > 1:
        return None
    return f"{s.told(INSTANCES)} of one rank each: {spelled(OUTER)} optim needs shards inside of them"


@rule(
    "fsdp-reshard-policy",
    "--fsdp-reshard-policy --data-parallel-sharding-strategy --use-custom-fsdp",
    "use optim_grads_params (for step and budget, optim_grads serves too), or leave the policy out",
)
def _fsdp_reshard_policy(s: RuleContext) -> str | None:
    policy, strategy = s.value("fsdp_reshard_policy"), s.value(STRATEGY)
    if policy == "memory" or not s.value("use_custom_fsdp"):
        return None  # the latter has a rule of its own
    if policy == "backward" and not weights_are_cut(strategy):
        return f"--fsdp-reshard-policy backward with {s.told(STRATEGY)}: weights are not sharded, so none are gathered"
    if not grads_are_cut(strategy):
        return (
            f"--fsdp-reshard-policy {policy} with {s.told(STRATEGY)}: what moves once a step need not be kept"
        )
    return None


@rule(
    "fsdp-memory-budget",
    "--fsdp-memory-budget --fsdp-reshard-policy",
    "give --fsdp-reshard-policy budget and --fsdp-memory-budget BYTES together",
)
def _fsdp_memory_budget(s: RuleContext) -> str | None:
    policy, budget = s.value("fsdp_reshard_policy"), s.value("fsdp_memory_budget")
    if policy == BUDGET and budget is None:
        return "--fsdp-reshard-policy budget needs --fsdp-memory-budget"
    if policy != BUDGET and budget is not None:
        return f"--fsdp-memory-budget {budget} does nothing under --fsdp-reshard-policy {policy}"
    return None


# What is gathered or reduced otherwise than by default, which takes somebody to share with.
_OF_LANE = (
    "fsdp_reshard_policy",
    "fsdp_memory_budget",
    "suggested_communication_unit_size",
    "fsdp_double_buffer",
)


@rule(
    "gathers-without-effect",
    "--fsdp-reshard-policy --fsdp-memory-budget --suggested-communication-unit-size --fsdp-double-buffer "
    "--use-custom-fsdp",
    "leave them out, or use --use-custom-fsdp with optim_grads or optim_grads_params over several data parallel ranks",
)
def _gathers_without_effect(s: RuleContext) -> str | None:
    given = s.differing(_OF_LANE)
    if grads_are_cut(s.value(STRATEGY)):
        place = s.config.shard_place
        if not s.value("use_custom_fsdp") or place is None or place.inner_size != 1:
            return None  # the strategy alone has a rule of its own, and so have ranks that do not divide
        why = "one data parallel rank has nobody to share states with"
    elif s.value("use_custom_fsdp"):
        given = [name for name in given if name not in ("fsdp_reshard_policy", "fsdp_memory_budget")]
        why = f"with {s.told(STRATEGY)} weights and gradients stay whole"
    else:
        why = "without --use-custom-fsdp weights and gradients stay whole"
    return f"{', '.join(map(spelled, given))}: {why}" if given else None


@rule(
    "fsdp-debug",
    "--fsdp-debug --fsdp-double-buffer",
    "leave out one of them",
)
def _fsdp_debug(s: RuleContext) -> str | None:
    both = s.value("fsdp_debug") and s.value("fsdp_double_buffer")
    if not both or not s.value("use_custom_fsdp") or not grads_are_cut(s.value(STRATEGY)):
        return None  # neither has an effect: warnings
    return (
        "--fsdp-debug with --fsdp-double-buffer: a slot's memory is never released, so a view that was kept reads "
        "another unit's weights and cannot be told from one that was not"
    )


@rule(
    "weight-hash",
    "--check-weight-hash-across-dp-replicas-interval --data-parallel-sharding-strategy "
    "--num-distributed-optimizer-instances",
    "leave the check out, use another strategy, or several --num-distributed-optimizer-instances, which are compared",
)
def _weight_hash(s: RuleContext) -> str | None:
    if s.value(_HASH) is None or not weights_are_cut(s.value(STRATEGY)) or s.value(INSTANCES) > 1:
        return None
    return f"{s.told(_HASH)} with {s.told(STRATEGY)}: no two ranks hold the same weights"


# Dtypes


@rule(
    "main-params-dtype",
    "--megatron-fsdp-main-params-dtype --bf16 --fp16 --fp64",
    "give auto (the model's own), or fp32 for 16-bit weights",
)
def _main_params_dtype(s: RuleContext) -> str | None:
    main, weights = s.value(_MAIN_PARAMS), s.config.params_flag
    if main in ("auto", weights) or DTYPE_BYTES[main] > DTYPE_BYTES[weights]:
        return None
    return f"{s.told(_MAIN_PARAMS)} cannot hold the model's {weights} weights"


@rule(
    "main-grads-dtype",
    "--megatron-fsdp-main-grads-dtype --grad-reduce-in-bf16 --accumulate-allreduce-grads-in-fp32",
    "keep one of them; --megatron-fsdp-grad-comm-dtype bf16 is for the transfer alone",
)
def _main_grads_dtype(s: RuleContext) -> str | None:
    asked, in_fp32 = s.value(_MAIN_GRADS), "accumulate_allreduce_grads_in_fp32"
    told = f"{s.told(_MAIN_GRADS)} contradicts"
    if s.value("grad_reduce_in_bf16") and asked not in ("auto", "bf16"):
        return f"{told} --grad-reduce-in-bf16"
    if s.given(in_fp32) and s.value(in_fp32) and asked in ("bf16", "fp16"):
        return f"{told} {spelled(in_fp32)}"
    return None


@rule(
    "grad-comm-dtype",
    "--megatron-fsdp-grad-comm-dtype --megatron-fsdp-main-grads-dtype --data-parallel-sharding-strategy",
    "give auto, accumulate in the same dtype (--megatron-fsdp-main-grads-dtype), or use optim_grads or "
    "optim_grads_params",
)
def _grad_comm_dtype(s: RuleContext) -> str | None:
    wire = s.value(_GRAD_COMM)
    accumulated = main_grads_dtype(s.config.params_flag, s.config.ddp)
    if wire in ("auto", accumulated) or grads_are_cut(s.value(STRATEGY)):
        return None
    where = f"gradients are summed where they are accumulated, in {accumulated}"
    return f"{s.told(_GRAD_COMM)} with {s.told(STRATEGY)}: {where}"
