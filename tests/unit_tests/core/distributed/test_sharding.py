"""The table of strategies, and where a rank stands in it."""

from __future__ import annotations

import subprocess
import sys

import pytest

from megatron.core.sharding_table import STRATEGIES, Sharding, ShardOver, ShardPlace, sharding_of

W, I, F = ShardOver.NONE, ShardOver.INNER, ShardOver.FULL  # noqa: E741


def test_the_table():
    rows = {name: sharding_of(name) for name in STRATEGIES}
    assert rows == {
        "no_shard": Sharding(W, W, W),
        "optim": Sharding(W, W, I),
        "optim_grads": Sharding(W, I, I),
        "optim_grads_params": Sharding(I, I, I),
    }
    assert sharding_of("optim_grads_params", "optim") == Sharding(I, I, F)
    for strategy in ("no_shard", "optim", "optim_grads"):
        with pytest.raises(ValueError, match=f"--outer-dp-sharding-strategy optim with .* {strategy}: "):
            sharding_of(strategy, "optim")


def test_parts_are_numbered_so_that_outer_ones_lie_inside_inner_ones():
    places = [ShardPlace(i, 3, o, 2) for i in range(3) for o in range(2)]
    assert [place.index(F) for place in places] == list(range(6))
    assert [place.index(I) for place in places] == [0, 0, 1, 1, 2, 2]
    assert {place.index(W) for place in places} == {0}
    assert [places[0].ways(cut) for cut in (W, I, F)] == [1, 3, 6]
    assert all(place.index(F) // 2 == place.index(I) for place in places)
    for wrong in ((3, 3), (0, 1, 2, 2), (-1, 3)):
        with pytest.raises(AssertionError):
            ShardPlace(*wrong)


def test_a_cut_into_one_part_is_whole():
    assert sharding_of("optim_grads_params").at(ShardPlace()) == Sharding(W, W, W)
    assert sharding_of("optim_grads_params").at(ShardPlace(0, 2)) == Sharding(I, I, I)
    assert sharding_of("optim_grads_params", "optim").at(ShardPlace(0, 1, 1, 2)) == Sharding(W, W, F)


def test_is_pure():
    check = "sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    code = f"import sys, megatron.core.distributed.custom_fsdp.sharding; {check}"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
