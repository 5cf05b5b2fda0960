"""What data parallelism asks of a plan: how weights and gradients are cut, and what a rank may hold of them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Residency:
    """The same on all ranks.

    strategy: a row of `distributed.sharding.STRATEGIES`. ways, outer: ranks that share the states, and instances of them.
    outer_optimizer: the optimizer is cut over instances too. policy: --fsdp-reshard-policy. budget: by pipeline rank, bytes
    of gathered weights and whole gradients that it may hold beyond what policy `memory` does; None for other policies.
    ahead: bytes of whole weights at any time that gathers ahead of their use keep to, the unit in use included; 0: two
    units. overlap_gather, overlap_reduce: whether gathers and reductions run beside computations.
    """

    strategy: str
    ways: int = 1
    outer: int = 1
    outer_optimizer: bool = False
    policy: str = "memory"
    budget: tuple[int, ...] | None = None
    ahead: int = 0
    overlap_gather: bool = True
    overlap_reduce: bool = True
