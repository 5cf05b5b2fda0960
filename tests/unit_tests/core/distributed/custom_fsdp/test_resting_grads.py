"""Gradients at rest without memory until their unit's first reduction, unless somebody holds a view of them."""

from __future__ import annotations

import torch

from megatron.core.distributed.custom_fsdp.transient_memory import RestingGrads
from megatron.core.memory_tracker import MemoryTracker


def resting() -> tuple[RestingGrads, list[torch.Tensor], MemoryTracker]:
    tracker = MemoryTracker()
    grads = [torch.ones(10), torch.ones(4, dtype=torch.bfloat16)]
    return RestingGrads("layer", grads, tracker), grads, tracker


def sizes(grads: list[torch.Tensor]) -> list[int]:
    return [grad.untyped_storage().nbytes() for grad in grads]


def test_memory_goes_and_comes_back_under_the_same_tensors():
    rest, grads, tracker = resting()
    assert (sizes(grads), tracker.live("main_grads", "layer")) == ([40, 8], 48)
    rest.release()
    assert (sizes(grads), tracker.live("main_grads", "layer")) == ([0, 0], 0)
    rest.release()
    rest.hold()
    rest.hold()
    assert (sizes(grads), tracker.live("main_grads", "layer")) == ([40, 8], 48)
    grads[0].fill_(2.0)
    assert grads[0].sum() == 20.0
    assert tracker.peak("main_grads") == 48


def test_views_that_were_there_at_the_first_step_are_the_engines_own():
    rest, grads, _ = resting()
    part = grads[0][2:5]
    rest.release()
    assert sizes(grads) == [0, 0]
    rest.hold()
    grads[0].fill_(3.0)
    assert part.tolist() == [3.0] * 3


def test_kept_while_somebody_holds_a_view_that_was_not_there():
    rest, grads, tracker = resting()
    rest.release()
    rest.hold()
    grads[1].fill_(7.0)
    kept = grads[1][:2]  # a `.grad` that a user has not let go of
    rest.release()
    assert sizes(grads) == [40, 8], "all of the unit's, or none"
    assert kept.tolist() == [7.0, 7.0]
    assert tracker.live("main_grads") == 48
    del kept
    rest.release()
    assert (sizes(grads), tracker.live("main_grads")) == ([0, 0], 0)


def test_kept_where_numpy_has_pinned_them():
    rest, grads, tracker = resting()
    rest.release()
    rest.hold()
    array = grads[0].numpy()
    rest.release()
    rest.hold()
    assert sizes(grads) == [40, 8]
    assert tracker.live("main_grads") == 48
    grads[0].fill_(5.0)
    assert array.tolist() == [5.0] * 10


def test_a_unit_without_gradients():
    tracker = MemoryTracker()
    rest = RestingGrads("frozen", [], tracker)
    rest.release()
    rest.hold()
    assert tracker.persistent_bytes == 0
