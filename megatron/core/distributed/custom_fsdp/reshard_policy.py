"""What each unit keeps gathered or unreduced in a loop without a plan: --fsdp-reshard-policy (floor 0, pure).

In a microbatch with everything freed at once, a unit is gathered `gathers` times (2: forward and backward) and its
gradients are reduced once. In a step of m microbatches

    what is kept                          bytes held            travels less by
    weights, from forward to backward     its full weights      (gathers - 1) m gathers
    weights, for the step                 its full weights      gathers m - 1 gathers
    gradients, unreduced                  its full gradients    m - 1 reductions

A budget is filled greedily, by what travels less for a byte held. Layers are equal, so what is left over is less than
one of them, and a better choice (a knapsack) could not save more than that. Source of the formulas: counting.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from enum import Enum

from megatron.core.pipeline_parallel.plan.residency import POLICIES


class ReshardPlanError(ValueError):
    """--fsdp-reshard-policy and --fsdp-memory-budget do not go together, or not with the strategy."""


class Keep(Enum):
    """How long a unit's weights stay gathered."""

    NOTHING = "nothing"  # freed after its forward, and after its backward
    TO_BACKWARD = "to_backward"  # from the forward to the backward of the same microbatch
    STEP = "step"  # gathered once a step, freed after its last backward


@dataclasses.dataclass(frozen=True)
class UnitFacts:
    """gather_bytes: a unit's full weights; reduce_bytes: its full gradients; gathers: in a microbatch that keeps
    nothing: 2, but 1 where backward reads no weights, for the last unit of the forward (its backward follows at once),
    and for one that stays from its first to its last use."""

    gather_bytes: int
    reduce_bytes: int
    gathers: int = 2

    def saved_gathers(self, keep: Keep, num_microbatches: int) -> int:
        """Gathers of a step that keeping its weights saves."""
        if keep is Keep.NOTHING:
            return 0
        return self.gathers * num_microbatches - (1 if keep is Keep.STEP else num_microbatches)


@dataclasses.dataclass(frozen=True)
class UnitPolicy:
    """What a unit keeps. reduce_late: its gradients are reduced once a step, after the last microbatch."""

    keep: Keep = Keep.NOTHING
    reduce_late: bool = False


def budget_misfits(policy: str, budget_bytes: int | None) -> bool:
    """Whether a budget stands without its policy, or the policy without one."""
    return (policy == "budget") != (budget_bytes is not None)


def keeps_nothing(policy: str, *, weights_sharded: bool, grads_sharded: bool) -> bool:
    """Whether the strategy, which shards these, leaves the policy nothing to keep."""
    if policy == "backward":
        return not weights_sharded
    return policy != "memory" and not (weights_sharded or grads_sharded)


def check_policy(
    policy: str, budget_bytes: int | None, *, weights_sharded: bool, grads_sharded: bool
) -> None:
    """weights_sharded, grads_sharded: the strategy shards them.

    Raises ReshardPlanError for a budget without the policy and the reverse, and for a policy without anything to keep.
    """
    assert policy in POLICIES, policy
    if budget_misfits(policy, budget_bytes):
        if budget_bytes is None:
            raise ReshardPlanError(
                "--fsdp-reshard-policy budget needs --fsdp-memory-budget BYTES: what units may keep beyond the least"
            )
        raise ReshardPlanError(
            f"--fsdp-memory-budget {budget_bytes} with --fsdp-reshard-policy {policy}: only policy budget is bound by "
            "it; use --fsdp-reshard-policy budget, or leave the budget out"
        )
    if budget_bytes is not None and budget_bytes < 0:
        raise ReshardPlanError(f"--fsdp-memory-budget {budget_bytes}: give 0 bytes or more")
    if not keeps_nothing(policy, weights_sharded=weights_sharded, grads_sharded=grads_sharded):
        return
    if policy == "backward":
        raise ReshardPlanError(
            "--fsdp-reshard-policy backward keeps weights gathered from forward to backward, and this strategy does "
            "not shard weights: use --data-parallel-sharding-strategy optim_grads_params, or leave the policy out"
        )
    raise ReshardPlanError(
        f"--fsdp-reshard-policy {policy}: this strategy gathers and reduces once a step whatever is kept; use "
        "--data-parallel-sharding-strategy optim_grads or optim_grads_params, or leave the policy out"
    )


def policies(
    facts: Sequence[UnitFacts],
    policy: str,
    *,
    num_microbatches: int,
    weights_sharded: bool,
    grads_sharded: bool,
    budget_bytes: int | None = None,
) -> tuple[UnitPolicy, ...]:
    """What each unit keeps, in the order of facts. weights_sharded, grads_sharded: over several ranks: what is not
    sharded is neither gathered nor reduced by microbatches, so there is nothing to keep.

    memory: nothing; backward: weights to the backward; step: weights for the step, gradients unreduced until its end;
    budget: no more than budget_bytes are held beyond `memory`.
    """
    assert num_microbatches >= 1, num_microbatches
    if policy != "budget":
        keep = {"memory": Keep.NOTHING, "backward": Keep.TO_BACKWARD, "step": Keep.STEP}[policy]
        every = UnitPolicy(
            keep if weights_sharded else Keep.NOTHING, reduce_late=grads_sharded and policy == "step"
        )
        return (every,) * len(facts)
    assert budget_bytes is not None
    # Both ways to keep weights hold the same, so of the two only the one that saves more is offered. Of equal units the
    # last come first: they are held the shortest from forward to backward.
    offers: list[tuple[int, int, int, Keep | None]] = []  # (calls saved, place, bytes, how weights are kept)
    for place, unit in enumerate(facts):
        best = max((Keep.TO_BACKWARD, Keep.STEP), key=lambda keep: unit.saved_gathers(keep, num_microbatches))
        saved = weights_sharded * unit.saved_gathers(best, num_microbatches)
        offers.append((saved, place, unit.gather_bytes, best))
        offers.append((grads_sharded * (num_microbatches - 1), place, unit.reduce_bytes, None))
    chosen = [UnitPolicy()] * len(facts)
    for saved, place, size, kept in sorted(offers, key=lambda offer: offer[:2], reverse=True):
        if saved and 0 < size <= budget_bytes:
            budget_bytes -= size
            change = {"reduce_late": True} if kept is None else {"keep": kept}
            chosen[place] = dataclasses.replace(chosen[place], **change)
    return tuple(chosen)
