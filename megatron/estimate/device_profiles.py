"""Devices by name: what a rank of theirs computes on, and how much memory that has (floor 0)."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal, NamedTuple


class DeviceProfile(NamedTuple):
    """kind: as torch calls it. num_bytes: of one device, as nvidia-smi counts them; None: what the machine has.
    machine_ranks: as many as a machine has devices; None: all that there are."""

    kind: Literal["cpu", "cuda"]
    num_bytes: int | None = None
    machine_ranks: int | None = None


_MIB = 2**20
DEVICE_PROFILES: Mapping[str, DeviceProfile] = MappingProxyType(
    {
        "cpu": DeviceProfile("cpu"),
        "a100-40gb": DeviceProfile("cuda", 40_960 * _MIB, 8),
        "a100-80gb": DeviceProfile("cuda", 81_920 * _MIB, 8),
        "h100-80gb": DeviceProfile("cuda", 81_559 * _MIB, 8),
        "h200": DeviceProfile("cuda", 143_771 * _MIB, 8),
        "b200": DeviceProfile("cuda", 183_359 * _MIB, 8),
        "gb200": DeviceProfile("cuda", 189_471 * _MIB, 4),
    }
)
