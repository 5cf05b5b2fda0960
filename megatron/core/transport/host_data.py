"""Small data of the host, such as names and sizes, told among the ranks of a group."""

from __future__ import annotations

import json
from typing import Any

import torch
from torch import Tensor

from megatron.core.transport import collectives
from megatron.core.transport.parallel_state import Group


def all_gather_bytes(data: bytes, group: Group) -> list[bytes]:
    """Every rank's bytes, in group order. For small host data: lengths first, then padded to the longest."""
    if group.size == 1:
        return [data]
    if group.peers is not None:
        return group.peers.all_gather(data, group)
    device = device_of(group)
    lengths = torch.empty(group.size, dtype=torch.int64, device=device)
    collectives.all_gather(lengths, torch.tensor([len(data)], device=device), group)
    sizes = lengths.tolist()  # sync: the sizes of host data
    if not (longest := max(sizes)):
        return [b""] * group.size
    mine = torch.frombuffer(bytearray(data.ljust(longest, b"\0")), dtype=torch.uint8)
    everyone = torch.empty(group.size * mine.numel(), dtype=torch.uint8, device=device)
    collectives.all_gather(everyone, mine.to(device), group)
    rows = everyone.view(group.size, -1).cpu().numpy()  # sync: host data
    return [rows[rank, :size].tobytes() for rank, size in enumerate(sizes)]


def all_gather_json(value: Any, group: Group) -> list[Any]:
    """Every rank's value, in group order, through JSON: plain data only, nothing is executed when it is read.

    NaN and infinities pass. Keys of mappings become strings, tuples become lists, on every rank alike.
    """
    told = all_gather_bytes(json.dumps(value).encode(), group)
    if group.peers is None:
        return [json.loads(data) for data in told]
    known = {
        id(data): json.loads(data) for data in {id(data): data for data in told}.values()
    }  # few speak for many
    return [known[id(data)] for data in told]


def host_values(tensor: Tensor, imagined: float = 0.0) -> Any:
    """A tensor's numbers on the host, in lists where it has dimensions; it is waited for. imagined: each of them where
    the tensor has no memory."""
    if tensor.is_meta:
        tensor = torch.full(tensor.shape, imagined, dtype=tensor.dtype, device="cpu")
    return tensor.tolist()


def device_of(group: Group) -> torch.device:
    """Where small host data has to be for this group's backend to carry it."""
    on_host = group.backend == "gloo" or group.peers is not None
    return torch.device("cpu") if on_host else group.device.torch_device
