"""The ranks over which the experts of a layer lie, as the layer sees them."""

from __future__ import annotations

import dataclasses

from megatron.core.tensor_parallel.mappings import TensorParallel
from megatron.core.transport.parallel_state import Group, ParallelState


@dataclasses.dataclass(frozen=True)
class ExpertRanks:
    """A grid of experts of their own: each of ep_size ranks has other experts, each rank of `etp` another part of each.

    peers: all of these, to whom tokens are sent. gathers: tokens are gathered over them, instead of sent to those that
    need them.
    """

    ep_rank: int
    ep_size: int
    etp: TensorParallel
    peers: Group
    gathers: bool = False

    @classmethod
    def of(cls, ps: ParallelState, dispatcher: str) -> ExpertRanks | None:
        """This rank's; None where experts lie as dense layers do. dispatcher: --moe-token-dispatcher-type."""
        if ps.experts is None:
            return None
        etp = TensorParallel(ps.etp_group)
        return cls(ps.ep_rank, ps.ep_group.size, etp, ps.ep_etp_group, dispatcher == "allgather")

    def own(self, num_experts: int) -> range:
        """The experts that this rank has, of so many."""
        count, left = divmod(num_experts, self.ep_size)
        assert not left, f"{num_experts} experts over {self.ep_size} ranks"
        return range(self.ep_rank * count, (self.ep_rank + 1) * count)
