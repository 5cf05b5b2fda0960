"""All ranks begin with the same weights: for modules that are initialised from the rank's own generator."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from torch import nn

from megatron.core.transport import collectives
from megatron.core.transport.parallel_state import ParallelState


def broadcast_weights(
    modules: Iterable[nn.Module], ps: ParallelState, *, without: Collection[int] = ()
) -> None:
    """Every rank takes data parallel rank 0's parameters and buffers: before an engine cuts them. without: ids of
    tensors that ranks have alike. Communicates over dp."""
    for module in modules:
        for tensor in (*module.parameters(), *module.buffers()):
            if not tensor.is_meta and id(tensor) not in without:
                collectives.broadcast(tensor.detach(), ps.dp_group)
