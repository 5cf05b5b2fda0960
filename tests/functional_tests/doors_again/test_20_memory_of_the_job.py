"""Number 20: `--rank-memory-limit auto` is of the job's own control group, and is shared by the ranks of a host."""

import functools
import re

import pytest

from megatron.core import machine
from megatron.core.datasets.errors import DataError, require_memory
from megatron.core.device import Device
from megatron.training.config.launch_env import LaunchEnv
from megatron.training.run.arguments import parse_config
from tests.harness import launch
from tests.harness.launch_lines import SMALL
from tests.unit_tests.core.test_machine import JOB1, V1, system

AUTO = "--use-custom-fsdp --data-parallel-sharding-strategy auto --rank-memory-limit auto".split()
TRAINER = "tests/functional_tests/trainers/small_groups.py"
JOB = 1_300_000_000


def job(root, limit, used=0):
    """A machine of 12.6 GB, of which the job may have so much."""
    own, groups = "4:memory:/slurm/job_7", {JOB1: (limit, used, 0)}
    return system(root, own, V1.format(root="/"), groups, machine=(12_600_000 * 1024, 12_000_000 * 1024))


@pytest.fixture
def in_job(tmp_path, monkeypatch):
    root = job(tmp_path, JOB, used=1_200_000_000)
    for name in ("total_bytes", "available_bytes"):
        here = functools.partial(getattr(machine, name), root)
        monkeypatch.setattr(machine, name, here)
        for module in ("megatron.core.datasets.errors", "megatron.core.device"):
            monkeypatch.setattr(f"{module}.{name}", here, raising=False)


def limit_of(words, **env):
    config = parse_config([*SMALL, *AUTO, *words.split()], env=LaunchEnv(**env))
    return config.parallel.rank_memory_limit, config.notes


@pytest.mark.usefixtures("in_job")
def test_auto_is_the_jobs_memory_over_the_ranks_of_a_host():
    limit, notes = limit_of("")
    assert limit == JOB
    assert any("1.211 GiB: of the 1.211 GiB" in note and "for 1 rank here" in note for note in notes)
    assert limit_of("", world_size=4, local_world_size=2)[0] == JOB // 2
    limit, notes = limit_of("--check-config --world-size 4")
    assert limit == JOB // 4
    assert any("for 4 ranks here" in note for note in notes)
    # A launcher says how many of them share a host.
    assert limit_of("--check-config --world-size 8", world_size=2, local_world_size=2)[0] == JOB // 2


@pytest.mark.usefixtures("in_job")
def test_every_other_asker_sees_the_job_too():
    assert Device("cpu").free_bytes() == 100_000_000
    assert LaunchEnv.memory_bytes() == JOB
    require_memory(90_000_000, "an index")
    with pytest.raises(DataError, match=re.escape("this machine has 95.37 MiB left")):
        require_memory(110_000_000, "an index")


def test_hosts_that_differ_take_the_least_of_all(tmp_path):
    """Each rank reads its own host; two identical machines differ by some kB."""
    for rank, limit in enumerate((JOB, JOB - 40960)):
        job(tmp_path / "systems" / str(rank), limit)
    words = [*launch.TINY, "--use-custom-fsdp", "--rank-memory-limit", "auto", "--train-iters", "1"]
    options = {"ranks": 2, "cwd": tmp_path, "env": {"SYSTEMS": str(tmp_path / "systems")}}
    run = launch.ok(launch.run_forked(words, script=TRAINER, **options))
    assert re.search(rf"^ > --rank-memory-limit {(JOB - 40960) // 2}: ", run.output, re.MULTILINE), run.output
