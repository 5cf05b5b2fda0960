"""Biases that keep experts equally busy without a loss (arXiv 2408.15664), moved once a step, where it is taken."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from megatron.core.memory_tracker import MemoryTracker
from megatron.core.protocols import Stepper
from megatron.core.transformer.experts.counted import TOKENS
from megatron.core.transformer.experts.router import Router
from megatron.core.transport import collectives
from megatron.core.transport.parallel_state import Group


class ExpertBiases(Stepper):
    """Those of a rank's routers, which are copies of those of its data and tensor parallel peers. A step adds `rate`
    to the bias of each expert that had fewer tokens than the mean, and takes it from those that had more.

    gather: to be called once a step's last forward has run, and before `step`. tracker: is told of snapshots.
    """

    def __init__(
        self,
        modules: Iterable[nn.Module],
        rate: float,
        dp_group: Group,
        tracker: MemoryTracker | None = None,
    ) -> None:
        self._tracker = MemoryTracker() if tracker is None else tracker
        routers = [one for module in modules for one in module.modules() if isinstance(one, Router)]
        self.routers = [one for one in routers if one.expert_bias is not None]
        self._rate, self._dp_group = rate, dp_group
        self._counts: list[Tensor] = []
        self._kept: list[Tensor] | None = None

    def materialise(self, device: torch.device) -> None:
        """Give memory to those that were built without."""
        for one in self.routers:
            if one.expert_bias is not None and one.expert_bias.device != device:
                one.expert_bias = torch.zeros(one.num_experts, dtype=torch.float32, device=device)

    def gather(self) -> None:
        """Sum the step's tokens by expert. Communicates over dp."""
        if not self.routers:
            return
        counts = torch.cat([self._tokens(one) for one in self.routers])
        collectives.all_reduce(counts, self._dp_group)
        self._counts = list(counts.split([one.num_experts for one in self.routers]))

    def _tokens(self, router: Router) -> Tensor:
        """By expert. A router does not count tokens without values."""
        known = router.context.counts.totals.get((router.layer, TOKENS))
        if known is None:
            assert router.weight.is_meta, f"layer {router.layer} has counted no tokens"
            known = torch.zeros(router.num_experts, dtype=torch.float64, device="meta")
        return known

    def step(self, divisor: float, clip_coefficient: float = 1.0) -> None:
        for bias, counts in zip(self.tensors, self._counts, strict=True):
            bias.add_(torch.sign(counts.mean() - counts).to(bias), alpha=self._rate)

    def snapshot(self) -> None:
        self._tracker.hold("snapshot", "", self.snapshot_bytes())
        self._kept = [bias.clone() for bias in self.tensors]

    def rollback(self) -> None:
        assert self._kept is not None, "rollback() without snapshot()"
        for bias, kept in zip(self.tensors, self._kept, strict=True):
            bias.copy_(kept)

    def commit(self) -> None:
        self._tracker.free("snapshot", "", self.snapshot_bytes())
        self._kept = None

    def snapshot_bytes(self) -> int:
        return sum(bias.nbytes for bias in self.tensors)

    def named(self) -> dict[str, Tensor]:
        """By their names in the model."""
        return {one.key("expert_bias"): bias for one, bias in zip(self.routers, self.tensors, strict=True)}

    @property
    def tensors(self) -> list[Tensor]:
        """fp32, [experts] of each router."""
        return [one.expert_bias for one in self.routers if one.expert_bias is not None]
