"""The digits themselves are checked through the tool; here, that the tables follow their arguments and formulas."""

import pytest

from megatron.planner.communication import Rates
from megatron.planner.published_tables import all_tables, criteria_rows, intensity_rows


def test_criteria_by_gradient_dtype_and_recompute():
    """(2 + g) / 4, or / 6 with recompute, times F/BW; experts at EP 8 need 256 / (8 * 8) times as many."""
    rows = criteria_rows(Rates(600e12, 340e9))
    ratio = 600e3 / 340
    assert [(row["grad_dtype"], row["recompute"]) for row in rows] == [
        ("fp32", "none"),
        ("fp32", "full"),
        ("bf16", "none"),
        ("bf16", "full"),
    ]
    assert [row["backward"] / ratio for row in rows] == pytest.approx([1.5, 1, 1, 2 / 3])
    assert [row["forward"] / ratio for row in rows] == pytest.approx([1] * 4)
    for row in rows:
        assert row["moe_backward"] == pytest.approx(4 * row["backward"])
        assert row["moe_forward"] == pytest.approx(4 * row["forward"])


def test_bandwidths_of_the_paper():
    """At 1 sample a rank 70 GB/s feed half of a V100; at 2 samples optimizer states take 1.5 TB/s for nine tenths,
    and checkpoints at hidden size 8K less than 1 GB/s for half."""
    weights, optimizer, checkpoints = intensity_rows()
    assert 2 * weights["gb_per_s_at_50%"] == pytest.approx(68.4, abs=0.1)
    assert optimizer["gb_per_s_at_50%"] == pytest.approx(4 * weights["gb_per_s_at_50%"])
    assert 1000 < optimizer["gb_per_s_at_90%"] < 1500
    assert checkpoints["gb_per_s_at_50%"] < 1


def test_half_the_rates_give_the_same_tokens():
    one, half = (all_tables(600e12 / by, 340e9 / by) for by in (1, 2))
    for name in ("moe", "criteria", "case_study"):
        assert [row.values() for row in map(dict, one[name])] != []
        for first, second in zip(one[name], half[name], strict=True):
            assert first == pytest.approx(second)
