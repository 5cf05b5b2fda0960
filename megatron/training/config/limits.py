"""What the system lets this process have: open files, threads, memory (floor 0).

What can be told beforehand is asked for before the run needs it; what runs out later is named with its limit.
"""

from __future__ import annotations

import errno
import os
import re
import resource
import threading
import traceback

from megatron.core.transport.rank_grid import PURPOSES
from megatron.training.config.config import Config
from megatron.training.config.launch_env import LaunchEnv

ENOUGH_FILES = 4096
# Measured: a process by itself has 11 files open at most, saving included; each communicator has 4 and one a peer.
FILES_OF_PROCESS, FILES_OF_COMMUNICATOR, FILES_OF_STORE = 16, 4, 12
FILES_OF_LOADER = 12  # of each of its processes, batches under way included, and once more for all
THREADS_OF_PROCESS, THREADS_OF_COMMUNICATOR = 8, 3


class SystemLimitError(ValueError):
    """The system gives this process less than the run needs (exit status 2). of_memory: it is memory that is short."""

    def __init__(self, message: str, *, of_memory: bool = False) -> None:
        super().__init__(message)
        self.of_memory = of_memory


def _communicators(config: Config, env: LaunchEnv) -> list[int]:
    """The sizes of those that this rank takes part in, torch's default one included."""
    if env.world_size == 1:
        return []
    world = config.world_part()
    own = [purpose for purpose in PURPOSES if world.shared_purpose(purpose) is None]
    sizes = [len(world.own_ranks(purpose, env.rank)) for purpose in own]
    return [env.world_size, *(size for size in sizes if size > 1)]


def files_needed(config: Config, env: LaunchEnv) -> int:
    """About how many files this rank has open at once: sockets to its peers, loaders, and a few of its own."""
    workers, loaders = config.data.num_workers, 3 if config.evaluation.eval_iters else 1
    files = FILES_OF_PROCESS + (loaders * FILES_OF_LOADER * (workers + 1) if workers else 0)
    sizes = _communicators(config, env)
    files += sum(FILES_OF_COMMUNICATOR + size - 1 for size in sizes)
    if sizes:
        files += FILES_OF_STORE + env.local_world_size  # ranks of this host watch each other
        if env.rank < env.local_world_size and not env.agent_store:
            # Who comes to the store of rank 0. Its whole machine asks for as much, so that all are refused together.
            files += 3 * env.world_size
    return files


def allow_files(needed: int) -> str | None:
    """Raise the soft limit on open files where it is too low; what to tell of that. Raises SystemLimitError where the
    hard limit is too low as well."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return None
    wanted = max(needed, ENOUGH_FILES)
    allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if allowed < needed:
        raise SystemLimitError(
            f"at most {hard} files may be open at once (ulimit -n), and this rank needs about {needed}: sockets to "
            f"other ranks, data loaders, checkpoints; run `ulimit -n {wanted}` before the launch (where the system "
            "refuses that, ask for a higher hard limit), or lower --num-workers"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    return f"note: at most {soft} files could be open at once (ulimit -n); raised to {allowed}"


def threads_needed(config: Config, env: LaunchEnv, threads: int) -> int:
    """About how many threads this rank has besides its first. threads: that it computes with."""
    return threads + THREADS_OF_PROCESS + THREADS_OF_COMMUNICATOR * len(_communicators(config, env))


def try_threads(needed: int) -> None:
    """Start so many threads at once, and end them: libraries that are refused one end the process without a word of
    what to do. Raises SystemLimitError."""
    done = threading.Event()
    started: list[threading.Thread] = []
    try:
        for _ in range(needed):
            thread = threading.Thread(target=done.wait, daemon=True)
            thread.start()
            started.append(thread)
    except (RuntimeError, MemoryError):
        raise SystemLimitError(_threads_message(f"{len(started)} of {needed} threads")) from None
    finally:
        done.set()
        for thread in started:
            thread.join()


def _threads_message(what: str) -> str:
    return (
        f"the system gives this process no more than {what}: processes and threads are limited to "
        f"{_shown(resource.RLIMIT_NPROC)} a user (ulimit -u), its address space to {_shown(resource.RLIMIT_AS)} bytes "
        "(ulimit -v), a container perhaps further (pids.max); raise the limit, or lower --threads-per-rank or "
        "--num-workers"
    )


def _shown(limit: int) -> str:
    soft, _ = resource.getrlimit(limit)
    return "unlimited" if soft == resource.RLIM_INFINITY else str(soft)


_SHARED = re.compile("(out of|insufficient) shared memory|/dev/shm|shared memory (object|file)")
_MEMORY = re.compile("can.t allocate memory|cannot allocate memory|out of memory|bad_alloc")


def limit_behind(error: BaseException) -> SystemLimitError | None:
    """The limit that an error nobody foresaw comes from, told with its fix; None where it comes from none."""
    seen: BaseException | None = error
    for _ in range(16):  # a chain may be a ring
        if seen is None:
            break
        if (message := _limit_message(seen)) is not None:
            # Where it hit, in place of the whole traceback.
            frames = traceback.extract_tb(seen.__traceback__)[-1:]
            message += "".join(f" (in {at.name}, {at.filename}:{at.lineno})" for at in frames)
            return SystemLimitError(message, of_memory=_is_of_memory(seen))
        seen = seen.__cause__ or seen.__context__
    return None


def _is_of_memory(error: BaseException) -> bool:
    number = error.errno if isinstance(error, OSError) else None
    return (
        isinstance(error, MemoryError) or number == errno.ENOMEM or bool(_MEMORY.search(str(error).lower()))
    )


def _limit_message(error: BaseException) -> str | None:
    text, number = str(error).strip(), error.errno if isinstance(error, OSError) else None
    lower = text.lower()
    if number in (errno.EMFILE, errno.ENFILE) or "too many open files" in lower:
        return (
            f"no more files can be open at once (ulimit -n is {_shown(resource.RLIMIT_NOFILE)}): run `ulimit -n "
            f"{ENOUGH_FILES}` before the launch, or lower --num-workers"
        )
    if "can't start new thread" in lower:
        return _threads_message("those it has")
    if _SHARED.search(lower):
        return (
            f"shared memory is full: /dev/shm has {_shared_bytes()} bytes free; give the container more (docker "
            "run --shm-size), or load data with --num-workers 0"
        )
    if _is_of_memory(error):
        told = f" ({text.splitlines()[0]})" if text else ""
        return (
            f"out of memory{told}: address space is limited to {_shown(resource.RLIMIT_AS)} bytes (ulimit -v), "
            f"data to {_shown(resource.RLIMIT_DATA)} (ulimit -d); use "
            "more memory, a smaller --micro-batch-size, --recompute-granularity, or cut the model over more ranks"
        )
    return None


def _shared_bytes() -> int | str:
    try:
        found = os.statvfs("/dev/shm")  # noqa: S108 - asked about, not written
    except OSError:
        return "unknown"
    return found.f_bavail * found.f_frsize
