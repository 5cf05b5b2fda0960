"""The peak of memory in use, against tensors whose sizes are known."""

import sys
import time

import pytest
import torch

from megatron.core.device import Device
from tests.harness import live_peak
from tests.harness.live_peak import LivePeak

CPU = Device("cpu")
MIB = 2**20


def test_the_peak_is_that_of_what_lives_at_once_and_not_of_what_was_ever_made():
    with LivePeak(CPU) as live:
        for _ in range(5):  # 40 MiB in turn, 8 at once
            block = torch.ones(8 * MIB // 4)
            time.sleep(0.01)
            del block
        short = torch.ones(32 * MIB // 4)
        time.sleep(0.02)
        del short
    assert live.above_baseline == live.peak_bytes - live.baseline
    assert live.above_baseline == pytest.approx(32 * MIB, rel=0.05)
    assert live.num_looks > 5


def test_a_look_sees_what_lives_between_two_of_the_threads():
    with LivePeak(CPU, interval_s=3600) as live:
        block = torch.ones(16 * MIB // 4)
        seen = live.look()
        del block
    assert live.peak_bytes == seen
    assert seen - live.baseline == pytest.approx(16 * MIB, rel=0.05)
    assert live.num_looks == 3  # at the beginning, asked for, at the end


def test_memory_that_lives_from_before_belongs_to_the_baseline():
    block = torch.ones(16 * MIB // 4)
    with LivePeak(CPU) as live:
        del block
        again = torch.ones(8 * MIB // 4)
        time.sleep(0.01)
    assert live.above_baseline < MIB
    assert again.numel() == 8 * MIB // 4


def test_the_thread_ends_with_the_block_whatever_happens():
    live, before = LivePeak(CPU), sys.getswitchinterval()
    with pytest.raises(KeyError), live:
        raise KeyError("of the block")
    assert sys.getswitchinterval() == before
    assert not live._thread.is_alive()
    with pytest.raises(AssertionError, match="used once"), live:
        pass


def test_without_mallinfo_it_is_the_resident_set(monkeypatch):
    monkeypatch.setattr(live_peak, "heap_bytes", lambda: None)
    with LivePeak(CPU, interval_s=0.005) as live:
        pass
    assert live.peak_bytes >= live.baseline > 50 * MIB
