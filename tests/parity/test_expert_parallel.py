"""Experts over ranks of their own: fp64 to 1e-10 of one process after ten clipped steps, norms included, routes as
integers."""

from __future__ import annotations

import pytest

from tests.harness.layouts import Layout
from tests.parity.test_moe_layouts import FSDP, FULL, check


def ep(size, *more, etp=1, by="alltoall"):
    sizes = f"--expert-model-parallel-size {size} --expert-tensor-parallel-size {etp}"
    return (*sizes.split(), "--moe-token-dispatcher-type", by, *more)


TWO = [
    (Layout(dp=2, more=ep(2)), "mixtral"),
    (Layout(dp=2, more=ep(2, by="allgather")), "drops"),
    (Layout(tp=2, sp=True, more=ep(2)), "deepseek"),
    (Layout(tp=2, sp=True, more=ep(1)), "qwen2"),
    (Layout(dp=2, more=ep(1, etp=2)), "drops"),
    (Layout(dp=2, more=ep(2, *FULL)), "first_dense"),
]


ZERO3 = (*FSDP, "optim_grads_params")
FOUR = [
    (Layout(dp=4, more=ep(2, *ZERO3)), "qwen2"),
    (Layout(dp=4, more=ep(4, *ZERO3)), "mixtral"),  # each expert on one rank alone
    (Layout(tp=2, sp=True, dp=2, more=ep(2, *FSDP, "optim_grads", etp=2)), "drops"),
    (Layout(tp=2, sp=True, dp=2, more=ep(2, "--use-distributed-optimizer")), "deepseek"),
    (Layout(pp=2, dp=2, schedule="zb-1p", more=ep(2, *ZERO3)), "first_dense"),
    (Layout(tp=2, sp=True, pp=2, schedule="zbv", more=ep(2)), "mixtral"),
    (Layout(dp=4, more=ep(2, etp=2, by="allgather")), "qwen2"),
    (Layout(dp=4, more=ep(2, *ZERO3, "--num-distributed-optimizer-instances", "2")), "drops"),
    (Layout(tp=4, sp=True, more=ep(2, *ZERO3, by="allgather")), "drops"),
]


@pytest.mark.parametrize(
    "number", [0, *(pytest.param(n, marks=pytest.mark.grid) for n in range(1, len(TWO)))]
)
def test_a_layout_of_two_ranks_equals_one_process(number):
    check(TWO[number : number + 1], "--fp64")


@pytest.mark.full
@pytest.mark.timeout(600)
def test_layouts_of_four_ranks_equal_one_process():
    check(FOUR, "--fp64")
