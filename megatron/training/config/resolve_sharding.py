"""Which row of the sharding table the flags of data parallelism ask for, and what follows from it (floor 0)."""

from __future__ import annotations

from typing import Any, Protocol

from megatron.core.distributed.sharding import Cut, main_grads_dtype, sharding_of
from megatron.core.transport.rank_grid import RankGridError
from megatron.core.transport.rank_groups import check_instances
from megatron.training.config.config import Config
from megatron.training.config.rule_table import differs, spelled

STRATEGY = "data_parallel_sharding_strategy"
OUTER = "outer_dp_sharding_strategy"
INSTANCES = "num_distributed_optimizer_instances"

_16_BIT = ("bf16", "fp16")

# What acts with --use-custom-fsdp only, and what of it only where gradients (and weights) are cut.
_BUCKETS = ("ddp_bucket_size", "ddp_num_buckets")
_OF_FSDP = ("fsdp_unit_modules", "fsdp_debug")


class Resolving(Protocol):
    """What `resolve` lends: values by destination name, where they come from, and what is told."""

    values: dict[str, Any]
    warnings: list[str]

    def given(self, name: str) -> bool: ...

    def derive(self, name: str, value: Any, origin: str = "derived") -> None: ...


def grads_are_cut(strategy: str) -> bool:
    """Whether main gradients are sharded at rest: ZeRO-2 and ZeRO-3."""
    return sharding_of(strategy).main_grads is not Cut.WHOLE


def weights_are_cut(strategy: str) -> bool:
    """Whether weights are sharded at rest: ZeRO-3."""
    return sharding_of(strategy).weights is not Cut.WHOLE


def resolve_sharding(r: Resolving) -> None:
    """Strategy, outer strategy, overlaps, instances and dtypes; warnings for what has no effect."""
    _strategy(r)
    _outer_strategy(r)
    _instances(r)
    _overlap(r)
    if r.values["fp64"] and not r.given("megatron_fsdp_main_params_dtype"):
        r.derive("megatron_fsdp_main_params_dtype", "auto")
    _wire(r)
    _without_effect(r)


def _strategy(r: Resolving) -> None:
    if r.given(STRATEGY):
        return  # the rules tell where it stands alone
    if r.values["use_custom_fsdp"]:
        r.derive(STRATEGY, "optim_grads_params")
    elif r.values["use_distributed_optimizer"]:
        r.derive(STRATEGY, "optim")


def _outer_strategy(r: Resolving) -> None:
    v = r.values
    if v["enable_full_sharding_in_hsdp"] and not r.given(OUTER):
        r.derive(OUTER, "optim")
    if v[OUTER] != "no_shard" and v[INSTANCES] == 1 and weights_are_cut(v[STRATEGY]):
        flag = spelled(OUTER) + " optim" if r.given(OUTER) else "--enable-full-sharding-in-hsdp"
        r.warnings.append(f"{flag} has no effect at --num-distributed-optimizer-instances 1")
        r.derive(OUTER, "no_shard")


def _instances(r: Resolving) -> None:
    """Without anything sharded there is one instance: all ranks hold all."""
    v = r.values
    instances = v[INSTANCES]
    if instances <= 1 or v[STRATEGY] != "no_shard" or v["use_custom_fsdp"]:
        return
    try:
        check_instances(Config.from_flat(v).grid(), instances)
    except RankGridError:
        return  # a rule tells
    r.warnings.append(
        f"--num-distributed-optimizer-instances {instances} has no effect without --use-distributed-optimizer or "
        "--use-custom-fsdp: no optimizer state is sharded"
    )
    r.derive(INSTANCES, 1)


def _overlap(r: Resolving) -> None:
    v = r.values
    if grads_are_cut(v[STRATEGY]):
        for name in ("overlap_grad_reduce", "overlap_param_gather"):
            if r.given(name) and not v[name]:
                r.warnings.append(f"{spelled(name)} is always on with {spelled(STRATEGY)} {v[STRATEGY]}")
            r.derive(name, True)
    elif v["overlap_param_gather"] and v[STRATEGY] == "no_shard":
        r.warnings.append(
            "--overlap-param-gather has no effect without a sharded optimizer: every rank updates all weights"
        )
        r.derive("overlap_param_gather", False)


def _wire(r: Resolving) -> None:
    """A unit that reduces once a step accumulates what has not travelled yet, in the dtype of the wire."""
    v = r.values
    wire, policy = v["megatron_fsdp_grad_comm_dtype"], v["fsdp_reshard_policy"]
    if wire not in _16_BIT or policy not in ("step", "budget") or not grads_are_cut(v[STRATEGY]):
        return
    config = Config.from_flat(v)
    accumulated = main_grads_dtype(config.params_flag, config.ddp)
    if wire != accumulated:
        r.warnings.append(
            f"{spelled('megatron_fsdp_grad_comm_dtype')} {wire} with --fsdp-reshard-policy {policy}: units that reduce "
            f"once a step add their microbatches in {wire}, not in {accumulated}"
        )


def _without_effect(r: Resolving) -> None:
    """What has no effect, but for the flags of gathers and reductions: these are refused by rules."""
    v = r.values
    if not v["use_custom_fsdp"]:
        _warn_of(r, _OF_FSDP, "has no effect without --use-custom-fsdp")
        return
    _warn_of(r, _BUCKETS, "has no effect with --use-custom-fsdp: each unit is a bucket")
    if not grads_are_cut(v[STRATEGY]):
        why = f"has no effect with {spelled(STRATEGY)} {v[STRATEGY]}: weights and gradients stay whole"
        _warn_of(r, ("fsdp_debug",), why)


def _warn_of(r: Resolving, names: tuple[str, ...], why: str) -> None:
    """Of those that are not their defaults."""
    r.warnings += [f"{spelled(name)} {why}" for name in names if differs(name, r.values[name])]
