"""Runs that Slurm starts, beside the same run without Slurm and undisturbed."""

import functools
import re
import tempfile
from pathlib import Path

from tests.harness import launch

FAULTY = launch.ROOT / "tests" / "functional_tests" / "trainers" / "faulty.py"
ITERATIONS = 16
FLAGS = [
    *launch.TINY,
    *f"--threads-per-rank 1 --train-iters {ITERATIONS} --save-interval 1 --use-custom-fsdp".split(),
    *"--data-parallel-sharding-strategy optim_grads_params --slow-s 0.1".split(),
]
# Fully sharded in two pipeline stages.
FOUR_RANKS = ("--pipeline-model-parallel-size", "2", "--pipeline-schedule", "zb-h1")
TRAIN = "examples/slurm/train.sbatch"
VARIABLES = {"SCRIPT": str(FAULTY), "GLOO_SOCKET_IFNAME": "lo"}  # nodes have no names that resolve


@functools.cache
def undisturbed(ranks=2, *more):
    """What the run writes down and saves: (losses and norms of each iteration, digests of the last checkpoint)."""
    with tempfile.TemporaryDirectory() as folder:
        # Without the sleeps, which change no bits.
        flags = [*FLAGS[:-2], *more, "--save", "ck"]
        launch.ok(launch.run_forked(flags, ranks=ranks, script=str(FAULTY), cwd=Path(folder)))
        return trained(Path(folder) / "ck")


def trained(checkpoints):
    """As `undisturbed`, of a folder; each iteration is there once, and no save was left undone."""
    lines = [line for line in launch.metrics_lines(checkpoints) if "lm loss" in line]
    assert [line["iteration"] for line in lines] == list(range(1, ITERATIONS + 1))
    assert not list(checkpoints.glob("iter_*.tmp-*"))
    return [(line["lm loss"], line["grad-norm"]) for line in lines], launch.digests(checkpoints, ITERATIONS)


def started(slurm, folder, *more, nodes=2, ranks_per_node=1, script=TRAIN, before=("ck",), **how):
    """A job of the run. before: the script's words before the flags. how: as `Cluster.submit`."""
    env = {**VARIABLES, "RANKS_PER_NODE": str(ranks_per_node), **how.pop("env", {})}
    return slurm.sbatch(script, *before, *FLAGS, *more, cwd=folder, nodes=nodes, env=env, **how)


def reaches(job, folder, iteration):
    """Wait until this attempt has saved an iteration."""
    tracker = folder / "ck" / "latest_checkpointed_iteration.txt"
    job.until(lambda: tracker.exists() and int(tracker.read_text()) >= iteration, f"iteration {iteration}")


def resumed_at(log):
    """The iterations that attempts have begun behind."""
    return [int(n) for n in re.findall(r"successfully loaded checkpoint from .*? at iteration +(\d+)", log)]


def ends_as_undisturbed(job, folder, *, restarts, attempts):
    """restarts: how often Slurm put it back into the queue. attempts: how often its ranks were started; a job that goes
    on with another's checkpoints begins with one."""
    shown = job.wait()
    assert trained(folder / "ck") == undisturbed()
    assert launch.exit_record(folder / "ck")["status"] == 0
    assert int(shown["Restarts"]) == restarts, job.log
    assert len(list((folder / "ck" / f"slurm-{job.id}").iterdir())) == attempts, job.log
    assert len(resumed_at(job.log)) in (attempts - 1, attempts), job.log
    assert not list((folder / "ck").glob("*lease.json*"))
