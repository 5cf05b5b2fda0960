"""Transient memory: storages that come and go while tensors stay; two slots that units take in turns."""

from __future__ import annotations

import pytest
import torch

from megatron.core.distributed.custom_fsdp.transient_memory import AllocatedMemory, DoubleBuffer
from megatron.core.memory_tracker import MemoryTracker
from megatron.core.module import ModelError

CPU = torch.device("cpu")


def test_allocated_memory_comes_and_goes_under_the_same_tensor():
    tracker = MemoryTracker()
    memory = AllocatedMemory(tracker)
    tensor = memory.new("weights", "a", 10, torch.float32, CPU)
    storage = tensor.untyped_storage()
    assert (tensor.shape, storage.nbytes()) == ((10,), 0)
    memory.acquire("weights", "a", [tensor])
    view = tensor[4:6]
    tensor.fill_(2.0)
    assert (storage.nbytes(), tracker.live("gathered", "a")) == (40, 40)
    with pytest.raises(AssertionError, match="weights of a: acquired twice"):
        memory.acquire("weights", "a", [tensor])
    memory.release("weights", "a", [tensor])
    assert (storage.nbytes(), tracker.live("gathered")) == (0, 0)
    memory.acquire("weights", "a", [tensor])
    tensor.fill_(3.0)
    assert view.tolist() == [3.0, 3.0], "the view is one of the new memory"
    assert tensor.untyped_storage()._cdata == storage._cdata
    assert not memory.is_blocked("weights", "b")


def test_memory_that_numpy_has_pinned_is_told():
    """An array of gathered weights would outlive them: the fix is named."""
    memory = AllocatedMemory(MemoryTracker())
    tensor = memory.new("weights", "a", 10, torch.float32, CPU)
    memory.acquire("weights", "a", [tensor])
    copied = tensor.detach().clone().numpy()
    memory.release("weights", "a", [tensor])
    assert copied.shape == (10,)
    memory.acquire("weights", "a", [tensor])
    array = tensor[2:4].numpy()
    with pytest.raises(
        ModelError, match=r"weights of unit 'a' were made an array .*detach\(\).clone\(\).numpy\(\)"
    ):
        memory.release("weights", "a", [tensor])
    assert array.shape == (2,)


def test_roles_have_their_categories():
    tracker = MemoryTracker()
    memory = AllocatedMemory(tracker)
    for role, category in (("weights", "gathered"), ("grads", "grads"), ("extra", "extra")):
        tensor = memory.new(role, "a", 4, torch.bfloat16, CPU)
        memory.acquire(role, "a", [tensor])
        assert tracker.live(category, "a") == 8, category


def buffer(slot_of: dict[str, int | None]) -> tuple[DoubleBuffer, MemoryTracker]:
    tracker = MemoryTracker()
    return DoubleBuffer(tracker, slot_of), tracker


def test_a_slot_is_as_large_as_its_largest_unit_and_is_shared():
    memory, tracker = buffer({"a": 0, "b": 1, "c": 0})
    a, b, c = (
        memory.new("weights", unit, numel, torch.float32, CPU)
        for unit, numel in (("a", 10), ("b", 5), ("c", 30))
    )
    assert a.untyped_storage()._cdata == c.untyped_storage()._cdata != b.untyped_storage()._cdata
    assert a.untyped_storage().nbytes() == 0, "no memory before the first use"
    memory.acquire("weights", "a", [a])
    assert tracker.live("slots") == 120 == a.untyped_storage().nbytes()
    assert tracker.live("gathered") == 0, "slots are no transient memory"
    a.fill_(1.0)
    assert memory.is_blocked("weights", "c")
    assert not memory.is_blocked("weights", "a")
    assert not memory.is_blocked("weights", "b")
    with pytest.raises(
        ModelError,
        match=r"unit 'c' needs its slot for gathered weights while unit 'a' .*leave out --fsdp-double-buffer",
    ):
        memory.acquire("weights", "c", [c])
    memory.acquire("weights", "b", [b])
    assert tracker.live("slots") == 140
    memory.release("weights", "a", [a])
    assert not memory.is_blocked("weights", "c")
    memory.acquire("weights", "c", [c])
    assert c[:10].tolist() == [1.0] * 10, "the same memory, which lasts"
    assert tracker.live("slots") == 140 == tracker.peak("slots")
    with pytest.raises(AssertionError):
        memory.release("weights", "a", [a])


def test_tensors_of_a_unit_lie_one_behind_the_other_on_boundaries_of_256_bytes():
    memory, tracker = buffer({"a": 0, "b": 1, "c": 0})
    first = memory.new("weights", "a", 3, torch.bfloat16, CPU)
    second = memory.new("weights", "a", 100, torch.float64, CPU)
    third = memory.new("weights", "a", 7, torch.float32, CPU)
    assert [t.storage_offset() * t.element_size() for t in (first, second, third)] == [0, 256, 1280]
    memory.acquire("weights", "a", [first, second, third])
    assert tracker.live("slots") == 1280 + 28
    first.fill_(1)
    second.fill_(2)
    third.fill_(3)
    assert {*first.tolist()} | {*second.tolist()} | {*third.tolist()} == {1.0, 2.0, 3.0}
    assert (first.sum(), second.sum(), third.sum()) == (3, 200, 21)


def test_roles_have_slots_of_their_own_and_further_uses_none():
    memory, tracker = buffer({"a": 0})
    weights = memory.new("weights", "a", 4, torch.float32, CPU)
    grads = memory.new("grads", "a", 8, torch.float32, CPU)
    extra = memory.new("extra", "a", 8, torch.float32, CPU)
    memory.acquire("weights", "a", [weights])
    memory.acquire("grads", "a", [grads])
    memory.acquire("extra", "a", [extra])
    assert (tracker.live("slots", "weights 0"), tracker.live("slots", "grads 0")) == (16, 32)
    assert tracker.live("extra", "a") == 32
    memory.release("extra", "a", [extra])
    assert tracker.live("extra") == 0
    assert extra.untyped_storage().nbytes() == 0


def test_units_that_overflow_have_memory_of_their_own_which_is_counted():
    memory, tracker = buffer({"a": 0, "tied": None})
    tied = memory.new("weights", "tied", 6, torch.float32, CPU)
    a = memory.new("weights", "a", 6, torch.float32, CPU)
    memory.acquire("weights", "a", [a])
    overflows = tracker.overflows
    memory.acquire("weights", "tied", [tied])
    assert tracker.overflows == overflows + 1
    assert tracker.live("gathered", "tied") == 24
    assert not memory.is_blocked("weights", "tied")
    memory.release("weights", "tied", [tied])
    assert (tracker.live("gathered"), tied.untyped_storage().nbytes()) == (0, 0)
