"""What each unit keeps gathered or unreduced, so that the fewest bytes travel in the memory given (floor 0, pure).

In a microbatch with everything freed at once, a unit is gathered `gathers` times (2: forward and backward) and its
gradients are reduced once. In a step of m microbatches

    what is kept                          bytes held            travels less by
    weights, from forward to backward     its full weights      (gathers - 1) m gathers
    weights, for the step                 its full weights      gathers m - 1 gathers
    gradients, unreduced                  its full gradients    m - 1 reductions

These add up, so the choice within a budget is a knapsack. Held bytes are whole buckets: the shard at rest is memory
of its own. Source of the formulas: counting; a ring moves (ways - 1) / ways of each, the same share of all.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from enum import Enum

from megatron.core.distributed.custom_fsdp.knapsack import Item, best_subset


class ReshardPlanError(ValueError):
    """--fsdp-reshard-policy and --fsdp-memory-budget do not go together, or not with the strategy."""


class Keep(Enum):
    """How long a unit's weights stay gathered."""

    NOTHING = "nothing"  # freed after its forward, and after its backward
    TO_BACKWARD = "to_backward"  # from the forward to the backward of the same microbatch
    STEP = "step"  # gathered once a step, freed after its last backward


@dataclasses.dataclass(frozen=True)
class UnitFacts:
    """What the plan needs to know of a unit.

    gather_bytes: its full weights; reduce_bytes: its full gradients as they travel; gathers: in a microbatch that
    keeps nothing: 2, but 1 where backward reads no weights, for the last unit of the forward (its backward follows at
    once), and for one that stays from its first to its last use; late_bytes: what its gradients hold while they stay
    unreduced (0: reduce_bytes).
    """

    name: str
    gather_bytes: int
    reduce_bytes: int
    gathers: int = 2
    late_bytes: int = 0

    def __post_init__(self) -> None:
        assert min(self.gather_bytes, self.reduce_bytes, self.late_bytes) >= 0, self
        assert self.gathers >= 1, self

    @property
    def unreduced_bytes(self) -> int:
        return self.late_bytes or self.reduce_bytes


@dataclasses.dataclass(frozen=True)
class UnitPolicy:
    """What a unit keeps. reduce_late: its gradients are reduced once a step, after the last microbatch."""

    keep: Keep = Keep.NOTHING
    reduce_late: bool = False


POLICIES = ("memory", "backward", "step", "budget")


def policies(
    facts: Sequence[UnitFacts],
    policy: str,
    *,
    num_microbatches: int,
    shard_ways: int,
    weights_cut: bool,
    grads_cut: bool,
    budget_bytes: int | None = None,
) -> tuple[UnitPolicy, ...]:
    """What each unit keeps under --fsdp-reshard-policy, in the order of facts.

    memory: nothing; backward: weights to the backward; step: weights for the step, gradients unreduced until its end;
    budget: what moves the fewest bytes while no more than budget_bytes are held beyond `memory`. weights_cut,
    grads_cut: the strategy cuts them, over shard_ways ranks: what is not cut is neither gathered nor reduced by
    microbatches, and one rank alone moves nothing, so there is nothing to keep.

    Raises ReshardPlanError for a budget without the policy and the reverse, and for a policy without anything to keep.
    """
    assert policy in POLICIES, policy
    assert num_microbatches >= 1, num_microbatches
    _check_budget(policy, budget_bytes)
    _check_strategy(policy, weights_cut=weights_cut, grads_cut=grads_cut)
    weights_cut, grads_cut = weights_cut and shard_ways > 1, grads_cut and shard_ways > 1
    if policy == "budget":
        assert budget_bytes is not None
        return _within(
            facts,
            budget_bytes,
            num_microbatches=num_microbatches,
            weights_cut=weights_cut,
            grads_cut=grads_cut,
        )
    keep = {"memory": Keep.NOTHING, "backward": Keep.TO_BACKWARD, "step": Keep.STEP}[policy]
    every = UnitPolicy(keep if weights_cut else Keep.NOTHING, reduce_late=grads_cut and policy == "step")
    return (every,) * len(facts)


def _check_budget(policy: str, budget_bytes: int | None) -> None:
    if policy == "budget" and budget_bytes is None:
        raise ReshardPlanError(
            "--fsdp-reshard-policy budget needs --fsdp-memory-budget BYTES: what units may keep beyond the least"
        )
    if policy != "budget" and budget_bytes is not None:
        raise ReshardPlanError(
            f"--fsdp-memory-budget {budget_bytes} with --fsdp-reshard-policy {policy}: only policy budget is bound by "
            "it; use --fsdp-reshard-policy budget, or leave the budget out"
        )
    if budget_bytes is not None and budget_bytes < 0:
        raise ReshardPlanError(f"--fsdp-memory-budget {budget_bytes}: give 0 bytes or more")


def _check_strategy(policy: str, *, weights_cut: bool, grads_cut: bool) -> None:
    if policy == "backward" and not weights_cut:
        raise ReshardPlanError(
            "--fsdp-reshard-policy backward keeps weights gathered from forward to backward, and this strategy does "
            "not shard weights: use --data-parallel-sharding-strategy optim_grads_params, or leave the policy out"
        )
    if policy in ("step", "budget") and not (weights_cut or grads_cut):
        raise ReshardPlanError(
            f"--fsdp-reshard-policy {policy}: this strategy gathers and reduces once a step whatever is kept; use "
            "--data-parallel-sharding-strategy optim_grads or optim_grads_params, or leave the policy out"
        )


def _within(
    facts: Sequence[UnitFacts], budget: int, *, num_microbatches: int, weights_cut: bool, grads_cut: bool
) -> tuple[UnitPolicy, ...]:
    """The policies that move the fewest bytes while at most `budget` are held.

    Both ways to keep weights hold the same, so of the two only the one that saves more is worth a thought: an item is
    a unit's weights or its gradients. Of equal units the last come first: they are held the shortest from forward to
    backward.
    """
    keeps, items = [], []
    for unit in reversed(facts):
        to_backward = saved_gathers(unit, Keep.TO_BACKWARD, num_microbatches)
        step = saved_gathers(unit, Keep.STEP, num_microbatches)
        keeps.append(Keep.STEP if step > to_backward else Keep.TO_BACKWARD)
        items.append(Item(unit.gather_bytes, weights_cut * max(step, to_backward) * unit.gather_bytes))
    for unit in reversed(facts):
        items.append(Item(unit.unreduced_bytes, grads_cut * (num_microbatches - 1) * unit.reduce_bytes))
    chosen = best_subset(items, budget)
    kept, late = chosen[: len(facts)], chosen[len(facts) :]
    rows = zip(keeps, kept, late, strict=True)
    return tuple(UnitPolicy(keep if k else Keep.NOTHING, reduce_late=d) for keep, k, d in rows)[::-1]


def saved_gathers(unit: UnitFacts, keep: Keep, num_microbatches: int) -> int:
    """Gathers of a step that keeping the unit's weights saves."""
    if keep is Keep.NOTHING:
        return 0
    all_gathers = unit.gathers * num_microbatches
    return all_gathers - (1 if keep is Keep.STEP else num_microbatches)
