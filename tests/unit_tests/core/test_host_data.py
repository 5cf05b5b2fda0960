"""Small data of the host, told among ranks."""

from __future__ import annotations

from megatron.core.transport import host_data
from megatron.core.transport.parallel_state import single_process
from tests.harness.ranks import run_ranks


def test_values_of_three_ranks():
    def check(ctx):
        value = {"rank": ctx.rank, "text": "ü" * ctx.rank, "nan": float("nan")}
        everyone = host_data.all_gather_json(value, ctx.ps.control_group)
        empty = host_data.all_gather_bytes(b"", ctx.ps.control_group)
        return [v["rank"] for v in everyone], [v["text"] for v in everyone], empty

    assert run_ranks(check, 3) == [([0, 1, 2], ["", "ü", "üü"], [b"", b"", b""])] * 3


def test_a_group_of_one_communicates_nothing():
    group = single_process().control_group  # no process group exists: any real collective would raise
    assert host_data.all_gather_json({"a": 1}, group) == [{"a": 1}]
    assert host_data.all_gather_bytes(b"x", group) == [b"x"]
