"""Run a function on N ranks: fork, gloo, every rank's value back or that rank's traceback.

    def check(ctx, x):
        ...collectives over ctx.ps...
        return ctx.rank * x

    assert run_ranks(check, 2, 10) == [0, 10]

Ranks are forked, not spawned (8 ranks in 0.3 s against 17 s), so functions, closures and fixtures need no
pickling; only what they return does. They meet through a file and die with the parent. Never after CUDA was
initialised.
"""

from __future__ import annotations

import ctypes
import dataclasses
import datetime
import functools
import os
import pickle
import selectors
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from megatron.core.device import Device
    from megatron.core.transport.parallel_state import ParallelState
    from megatron.core.transport.rank_grid import RankGrid

GRACE_S = 2.0  # after the first failure: time for the other ranks to report theirs


class RanksError(AssertionError):
    """A rank failed, died, or stayed silent; the message carries its traceback."""


@dataclasses.dataclass
class RankOutcome:
    """What became of one rank: exactly one of the three. `died` says how the process ended without a word."""

    rank: int
    value: Any = None
    error: str | None = None
    died: str | None = None

    @property
    def ok(self) -> bool:
        return self.error is None and self.died is None


class RankContext:
    """What a rank's function gets as its first argument."""

    def __init__(self, rank: int, world_size: int, timeout: float) -> None:
        self.rank = rank
        self.world_size = world_size
        self.timeout = timeout

    @functools.cached_property
    def device(self) -> Device:
        from megatron.core.device import current_device

        return current_device(kind="cpu")

    @functools.cached_property
    def ps(self) -> ParallelState:
        """All ranks data parallel."""
        return self.make_ps(dp=self.world_size)

    def make_ps(
        self, *, instances: int = 1, experts: RankGrid | None = None, **grid_arguments: Any
    ) -> ParallelState:
        """Any other grid: `ctx.make_ps(dp=2, pp=2)`, `order=...` too; instances: of the distributed optimizer; experts:
        their grid, where it is another one."""
        from megatron.core.transport.parallel_state import make_parallel_state
        from megatron.core.transport.rank_grid import RankGrid

        return make_parallel_state(
            RankGrid(self.world_size, **grid_arguments),
            self.device,
            datetime.timedelta(seconds=self.timeout),
            num_distributed_optimizer_instances=instances,
            experts=experts,
        )


def run_ranks(
    fn: Callable[..., Any], world_size: int, *args: Any, timeout: float = 60.0, **kwargs: Any
) -> list[Any]:
    """`fn(ctx, *args, **kwargs)` on `world_size` ranks; returns their values in rank order.

    Raises RanksError with the traceback of the rank that failed first, or naming the ranks that were silent
    when `timeout` seconds had passed. All ranks are gone when it returns, whatever happened.
    """
    outcomes, order = _run(fn, world_size, args, kwargs, timeout)
    failed = [outcomes[rank] for rank in order if not outcomes[rank].ok]
    if failed:
        first = failed[0]
        others = "".join(f"\n--- then rank {o.rank}: {_last_line(o)}" for o in failed[1:])
        raise RanksError(f"rank {first.rank} of {world_size}: {first.died or ''}{first.error or ''}{others}")
    return [outcome.value for outcome in outcomes]


def rank_outcomes(
    fn: Callable[..., Any], world_size: int, *args: Any, timeout: float = 60.0, **kwargs: Any
) -> list[RankOutcome]:
    """Like `run_ranks` for tests in which ranks are meant to fail or die: waits for all, raises nothing."""
    return _run(fn, world_size, args, kwargs, timeout, grace_s=timeout)[0]


def share_ranks(
    world_size: int, checks: dict[str, Callable[[RankContext], Any]], timeout: float = 60.0
) -> dict[str, list[Any]]:
    """Several checks on the same forked ranks, one after the other: each check's values in rank order."""

    def all_checks(ctx: RankContext) -> dict[str, Any]:
        return {name: check(ctx) for name, check in checks.items()}

    by_rank = run_ranks(all_checks, world_size, timeout=timeout)
    return {name: [values[name] for values in by_rank] for name in checks}


def _run(
    fn: Callable[..., Any],
    world_size: int,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    timeout: float,
    grace_s: float = GRACE_S,
) -> tuple[list[RankOutcome], list[int]]:
    """Outcomes by rank, and the ranks in the order in which their outcome became known."""
    assert world_size >= 1, f"world_size {world_size}"
    assert not torch.cuda.is_initialized(), (
        "CUDA is initialised in this process: forked ranks could not use it"
    )
    sys.stdout.flush()
    sys.stderr.flush()  # what is buffered here would be printed once more by every child
    pids: dict[int, int] = {}
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        pipes: dict[int, int] = {}
        try:
            for rank in range(world_size):
                reader, writer = os.pipe()
                pid = os.fork()
                if pid == 0:
                    for other in (*pipes.values(), reader):
                        os.close(other)
                    ctx = RankContext(rank, world_size, timeout)
                    _child(ctx, os.path.join(folder, "store"), writer, fn, args, kwargs)
                os.close(writer)
                pids[rank], pipes[rank] = pid, reader
            return _collect(pids, pipes, timeout, grace_s)
        finally:
            for pid in pids.values():
                os.kill(pid, signal.SIGKILL)  # not yet waited for, so the pid is still ours
                os.waitpid(pid, 0)
            for reader in pipes.values():
                os.close(reader)


def _collect(
    pids: dict[int, int], pipes: dict[int, int], timeout: float, grace_s: float
) -> tuple[list[RankOutcome], list[int]]:
    """Read the pipes until every rank has spoken or died, time is up, or the grace after a failure is up."""
    deadline = time.monotonic() + timeout
    received = {rank: bytearray() for rank in pipes}
    outcomes: dict[int, RankOutcome] = {}
    order: list[int] = []
    with selectors.DefaultSelector() as selector:
        for rank, reader in pipes.items():
            selector.register(reader, selectors.EVENT_READ, rank)
        while len(order) < len(pipes) and (left := deadline - time.monotonic()) > 0:
            for key, _ in selector.select(left):
                rank = key.data
                if chunk := os.read(key.fd, 1 << 20):
                    received[rank] += chunk
                    continue
                selector.unregister(key.fd)
                outcomes[rank] = _outcome(rank, bytes(received[rank]), pids[rank])
                order.append(rank)
                if not outcomes[rank].ok:
                    deadline = min(deadline, time.monotonic() + grace_s)
    failed_already = any(not outcome.ok for outcome in outcomes.values())
    silent = [rank for rank in pipes if rank not in outcomes]
    for rank in silent:
        why = "stopped after another rank's failure" if failed_already else f"silent after {timeout:g} s"
        outcomes[rank] = RankOutcome(rank, died=f"{why} (silent ranks: {silent})")
        order.append(rank)
    return [outcomes[rank] for rank in pipes], order


def _outcome(rank: int, message: bytes, pid: int) -> RankOutcome:
    """The rank closed its pipe: what it said, or how it died without saying anything."""
    if message:
        kind, content = pickle.loads(message)
        return RankOutcome(rank, value=content) if kind == "value" else RankOutcome(rank, error=content)
    # WNOWAIT leaves the process to be reaped by _run.
    status = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    assert status is not None
    if status.si_code in (os.CLD_KILLED, os.CLD_DUMPED):
        return RankOutcome(rank, died=f"killed by {signal.Signals(status.si_status).name}")
    return RankOutcome(rank, died=f"exited with status {status.si_status} without returning")


def _last_line(outcome: RankOutcome) -> str:
    return outcome.died or (outcome.error or "").strip().splitlines()[-1]


def _child(
    ctx: RankContext,
    store_path: str,
    writer: int,
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> None:
    """Never returns: leaves through os._exit, so that no exit handler of the parent (pytest) runs twice."""
    torch.set_num_threads(1)  # first: else ranks hang once the parent has computed
    status = 1
    try:
        _die_with_parent()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        try:
            message = ("value", _in_process_group(ctx, store_path, fn, args, kwargs))
            data, status = pickle.dumps(message), 0
        except BaseException:  # a test's SystemExit is an outcome too
            data = pickle.dumps(("error", "\n" + traceback.format_exc()))
        with os.fdopen(writer, "wb") as pipe:
            pipe.write(data)
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(status)


def _in_process_group(
    ctx: RankContext, store_path: str, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    if os.path.exists("/sys/class/net/lo"):
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"  # this machine's name need not resolve
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(store_path, ctx.world_size),
        rank=ctx.rank,
        world_size=ctx.world_size,
        timeout=datetime.timedelta(seconds=ctx.timeout + 30),  # the harness's own limit comes first
    )
    dist.barrier()  # all connected: a rank that dies now dies in the test, not in the set-up of another
    value = fn(ctx, *args, **kwargs)
    if dist.is_initialized():
        dist.barrier()  # a rank that tears down while others still talk aborts them
        dist.destroy_process_group()
    return value


def _die_with_parent() -> None:
    """A killed test run leaves no ranks behind (Linux)."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
