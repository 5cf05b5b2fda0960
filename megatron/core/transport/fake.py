"""One rank that is there, and peers that are not: `--fake-process-group`. It waits for nobody, on real tensors.

What the ranks that hold a copy of the model tell each other of it, and the shapes that stages hand on, are true: ranks
of an `ImaginedWorld` have said so before. Whatever else ranks tell each other, all say what this one says. Collectives
and messages bring nobody's numbers: memory is filled with finite ones, so that a step runs as it would.
"""

from __future__ import annotations

from collections import Counter

import torch
from torch import Tensor

from megatron.core.device import Device, new_generator
from megatron.core.transport.imagined import OF_A_COPY, ImaginedWorld
from megatron.core.transport.parallel_state import Group
from megatron.core.transport.pending import UNDER_WAY, Call, Imagined

_OF_A_COPY = frozenset(purpose.name for purpose in OF_A_COPY)
# Numbers that come again and again: a prime, so that no two tokens are alike.
_VALUES = 65_537
# As small as weights begin: layers scale gradients up by it.
_STD = 0.02


class FakePeers:
    """`ImaginedPeers` of a rank on `device`. world: in which its copy of the model was built and run once, before this
    rank's is."""

    def __init__(self, world: ImaginedWorld, device: Device) -> None:
        where = device.torch_device
        self.world = world
        self._values = torch.randn(_VALUES, generator=new_generator(where, 0), device=where).mul_(_STD)
        self._calls = Counter[str]()
        self._said: dict[int, Tensor] = {}  # figures of a step, by place

    def all_gather(self, data: bytes, group: Group) -> list[bytes]:
        """`ImaginedPeers`."""
        if group.purpose not in _OF_A_COPY:
            return [data] * group.size
        by_rank = self.world.told(group.purpose, group.ranks, self._calls[group.purpose])
        self._calls[group.purpose] += 1
        by_rank[group.rank] = data
        return by_rank

    def fill(self, call: Call, temporaries: tuple[Tensor, ...]) -> None:
        """Gathered is this rank's part again and again; sums are its own addend; of what is exchanged nothing."""
        for tensor in temporaries:
            tensor.zero_()
        rank, size = call.group.rank, call.group.size
        for output, input in zip(call.buffers[::2], call.buffers[1::2], strict=False):
            if not output.numel():
                continue
            if call.op == "all_gather":
                rows, own = output.view(size, -1), input.view(-1)
                rows[:rank].copy_(own)
                rows[rank + 1 :].copy_(own)
                if rows[rank].data_ptr() != own.data_ptr():
                    rows[rank].copy_(own)
            elif call.op == "reduce_scatter" and call.group.backend != "gloo":  # which writes to it itself
                output.view(-1).copy_(input.view(size, -1)[rank])
            elif call.op == "all_to_all":
                self._fill(output)

    def message(self, op: str, tensor: Tensor, group: Group, place: int) -> Imagined:
        """`ImaginedPeers`. What a later stage says of a step is what it has heard of this one; earlier ones have
        nothing to add."""
        if group.purpose == "control":
            if op == "send":
                self._said[place] = tensor
            elif place > group.rank:
                tensor.copy_(self._said[place])
            else:
                tensor.zero_()
        elif op == "receive" and tensor.is_floating_point():
            self._fill(tensor)
        elif op == "receive":
            ends = group.ranks[group.rank], group.ranks[place]
            # A gradient has the shape of what was handed on.
            source, target = ends if group.purpose == "pp_backward" else ends[::-1]
            tensor.copy_(self.world.first_message("pp_forward", source, target))
        return UNDER_WAY

    def _fill(self, tensor: Tensor) -> None:
        flat = tensor.view(-1)
        whole = flat.numel() - flat.numel() % _VALUES
        flat[:whole].view(-1, _VALUES).copy_(self._values)
        flat[whole:].copy_(self._values[: flat.numel() - whole])
