"""What `initialize` makes of the flags, on ranks of their own."""

import json

from tests.harness import launch

SCRIPT = """
import json
import sys

import torch

from megatron.training.run.arguments import parse_config
from megatron.training.config.launch_env import LaunchEnv
from megatron.training.guard.run_folder import RunFolder
from megatron.training.run.session import initialize

env = LaunchEnv.read()
session = initialize(parse_config(sys.argv[1:], env=env), env, RunFolder(None, print))
groups = {name: session.ps.groups[name].ranks for name in ("dp", "dp_gather", "dp_outer")}
found = session.gather({"threads": torch.get_num_threads(), **groups})
session.print_rank_0("found: " + json.dumps(found))
session.close()
"""


def found(tmp_path, flags, ranks):
    script = tmp_path / "look.py"
    script.write_text(SCRIPT)
    words = [*launch.TINY, "--train-iters", "1", *flags.split()]
    run = launch.ok(launch.run_forked(words, ranks=ranks, script=str(script), cwd=tmp_path))
    (line,) = (line for line in run.output.splitlines() if line.startswith("found: "))
    return json.loads(line.removeprefix("found: ")), run.output


def test_threads_are_those_of_the_flag_and_told(tmp_path):
    for ranks, threads in ((1, 3), (2, 2)):
        told, output = found(tmp_path, f"--threads-per-rank {threads}", ranks)
        assert [rank["threads"] for rank in told] == [threads] * ranks
        assert f" > threads per rank: {threads} (" in output


def test_without_the_flag_the_ranks_share_the_cores(tmp_path):
    told, _ = found(tmp_path, "", 2)  # each rank sees one core
    assert [rank["threads"] for rank in told] == [1, 1]


def test_instances_divide_the_data_parallel_ranks(tmp_path):
    flags = "--use-distributed-optimizer --num-distributed-optimizer-instances 2"
    told, _ = found(tmp_path, flags, 4)
    assert [rank["dp"] for rank in told] == [[0, 1, 2, 3]] * 4
    assert [rank["dp_gather"] for rank in told] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert [rank["dp_outer"] for rank in told] == [[0, 2], [1, 3], [0, 2], [1, 3]]
    told, _ = found(tmp_path, "", 2)
    assert [rank["dp_gather"] for rank in told] == [[0, 1], [0, 1]]
