"""How busy the machine is with others, and how much live memory a stretch of code has at most."""

from __future__ import annotations

import gc
import os
import sys
import threading
import time
from pathlib import Path
from types import TracebackType

from megatron.core.device import Device, heap_bytes

SAMPLE_S = 1e-3
SWITCH_S = 2e-4  # the sampler waits no longer than this for Python's lock


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


class LivePeak:
    """Most bytes alive inside the `with`; on CPU as seen every millisecond by a thread, while torch computes.

    The resident set cannot tell: the C library keeps what is freed.
    """

    def __init__(self, device: Device) -> None:
        self.device = device
        self.bytes = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> LivePeak:
        gc.collect()
        if self.device.kind == "cuda":
            self.device.synchronize()
            self.device.reset_peak()
        else:
            self._interval = sys.getswitchinterval()
            sys.setswitchinterval(SWITCH_S)
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.device.kind == "cuda":
            self.device.synchronize()
            self.bytes = self.device.memory().max_allocated_bytes
            return
        self._stop.set()
        self._thread.join()
        sys.setswitchinterval(self._interval)

    def _watch(self) -> None:
        while not self._stop.is_set():
            self.bytes = max(self.bytes, live_bytes(self.device))
            time.sleep(SAMPLE_S)
