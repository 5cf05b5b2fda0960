"""How busy the machine is with others, and how much live memory there is."""

from __future__ import annotations

import os
from pathlib import Path

from megatron.core.device import Device
from megatron.core.machine import heap_bytes


def busy_s() -> float:
    """CPU seconds that everything on this machine has used since it started. Linux."""
    fields = [int(field) for field in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]]
    user, nice, system, _idle, _iowait, irq, softirq, steal = fields[:8]
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def live_bytes(device: Device) -> int:
    """Bytes in use now: torch's allocator on CUDA, the C heap on CPU (tensors are nearly all of it)."""
    if device.kind == "cuda":
        return device.memory().allocated_bytes
    held = heap_bytes()
    if held is None:
        raise RuntimeError("this C library has no mallinfo2 (glibc 2.33 or later): memory cannot be measured")
    return held
