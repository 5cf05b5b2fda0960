"""Ranks that would run different plans hear of it before the first step."""

from __future__ import annotations

import pytest

from megatron.training.exit_status import ExitStatus, TrainingExit
from megatron.training.replan import check_same_plan


def test_ranks_with_different_plans_are_refused_and_named():
    check_same_plan(["a" * 64] * 4)
    with pytest.raises(TrainingExit, match=r"rank 0 has aaaaaaaaaaaa, rank 2 has bbbbbbbbbbbb") as refused:
        check_same_plan(["a" * 64, "a" * 64, "b" * 64, "a" * 64])
    assert refused.value.status is ExitStatus.CONFIGURATION
    assert "--pipeline-schedule-file" in refused.value.reason
