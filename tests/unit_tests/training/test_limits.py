"""What a process needs of the system, and what it says when it is refused."""

import errno
import os
import resource

import pytest

from megatron.training.config import limits
from megatron.training.config.launch_env import LaunchEnv
from megatron.training.config.limits import SystemLimitError, limit_behind
from megatron.training.run.arguments import parse_config
from tests.harness import launch
from tests.harness.ranks import run_ranks

WORDS = [*launch.TINY, "--train-iters", "1"]


def needed(rank, world_size, *more, **env):
    where = LaunchEnv(rank=rank, world_size=world_size, local_world_size=world_size, **env)
    return limits.files_needed(parse_config([*WORDS, *more], env=where), where)


def test_files_grow_with_ranks_groups_and_loaders():
    assert needed(0, 1) == 16
    assert needed(0, 1, "--num-workers", "2") > needed(0, 1) + 30
    assert needed(1, 4) > needed(1, 2)
    assert needed(0, 4) == needed(1, 4) > needed(1, 4, agent_store=True), "rank 0 hosts the store"
    assert needed(1, 4, "--pipeline-model-parallel-size", "2") != needed(1, 4)
    many = needed(1, 4096, "--global-batch-size", "8192")
    assert many > 5 * 4095, "a socket to every peer of each group"


def test_ranks_have_no_more_files_open_than_was_said():
    """Of the sockets and pipes of a real world."""

    def body(ctx):
        before = len(os.listdir("/proc/self/fd"))
        ps = ctx.make_ps(dp=2, pp=2)
        made = len(os.listdir("/proc/self/fd")) - before
        sizes = [group.size for group in ps.groups.values() if group.size > 1]
        return made, sum(limits.FILES_OF_COMMUNICATOR + size - 1 for size in sizes)

    for made, said in run_ranks(body, 4):
        assert made <= said


def test_the_soft_limit_is_raised_and_the_hard_one_is_told():
    def body(ctx):
        resource.setrlimit(resource.RLIMIT_NOFILE, (24, 300))
        note = limits.allow_files(50)
        raised = resource.getrlimit(resource.RLIMIT_NOFILE)
        nothing = limits.allow_files(50)
        with pytest.raises(SystemLimitError, match=r"at most 300 files .* about 301: .* `ulimit -n 4096`"):
            limits.allow_files(301)
        return note, raised, nothing

    ((note, raised, nothing),) = run_ranks(body, 1)
    assert raised == (300, 300)
    assert note == "note: at most 24 files could be open at once (ulimit -n); raised to 300"
    assert nothing is None


def test_threads_that_cannot_start_are_a_message():
    def body(ctx):
        limits.try_threads(8)
        with open("/proc/self/statm") as file:
            used = int(file.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + (64 << 20), resource.RLIM_INFINITY))
        with pytest.raises(SystemLimitError, match=r"no more than \d+ of 64 threads: .*ulimit -u.*ulimit -v"):
            limits.try_threads(64)

    run_ranks(body, 1)


def caused(error, cause):
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (OSError(errno.EMFILE, "Too many open files"), "ulimit -n is "),
        (caused(RuntimeError("worker died"), OSError(errno.ENFILE, "x")), "ulimit -n is "),
        (RuntimeError("Too many open files. Communication with the workers is no longer possible."), "ulimit -n 4096"),
        (RuntimeError("can't start new thread"), "ulimit -u"),
        (RuntimeError("DataLoader worker (pid 1) is killed by signal: Bus error. It is possible that dataloader's"
                      " workers are out of shared memory."), "--shm-size"),
        (MemoryError(), "out of memory: address space"),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), "out of memory"),
        (RuntimeError("[enforce fail at alloc_cpu.cpp:127] . DefaultCPUAllocator: can't allocate memory: you tried to"
                      " allocate 4 bytes."), "--micro-batch-size"),
        (RuntimeError("CUDA out of memory. Tried to allocate 20.00 MiB."), "(CUDA out of memory."),
    ],
)  # fmt: skip
def test_what_runs_out_later_is_named_with_its_limit(error, told):
    assert told in str(limit_behind(error))


def test_other_errors_stay_what_they_are():
    assert limit_behind(ValueError("shape")) is None
    ring = RuntimeError("a")
    ring.__cause__ = KeyError("b")
    ring.__cause__.__cause__ = ring
    assert limit_behind(ring) is None
