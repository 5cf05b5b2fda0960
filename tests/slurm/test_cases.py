"""Functional cases started by Slurm, on two nodes where their ranks divide, have the values of forked ranks."""

import pytest

from tests.functional_tests.test_cases import NAMES, interrupted, same_values_as_forked
from tools.cases.case import find, read_case

IN_CI = "schedule_zbv_validated"


@pytest.mark.parametrize(
    "name", [n if n == IN_CI else pytest.param(n, marks=pytest.mark.full) for n in NAMES]
)
def test_values_are_those_of_forked_ranks(slurm, tmp_path, monkeypatch, capfd, name):
    for variable, value in slurm.env.items():
        monkeypatch.setenv(variable, value)
    nodes = 1 if any(run.ranks % 2 for run in read_case(find(name)).runs) else 2
    same_values_as_forked(name, tmp_path, capfd, "slurm", "--nodes", str(nodes))


@pytest.mark.full
def test_an_interrupted_tool_cancels_its_job(slurm, tmp_path):
    interrupted(tmp_path, "slurm", environ=slurm.env)
    slurm.until(lambda: not slurm.commands("squeue", "-h"), "no job is left")
