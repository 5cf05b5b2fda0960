"""What goes wrong in tests: peers that sleep, and faults at the system calls that change files.

Faults at system calls stop the process, or fail, at exactly the n-th one:

    trace = count_points(save)                  # a forked child runs it and says which calls it made
    for point in range(len(trace)):
        assert run_killed(save, point) == KILLED
        ...the folder must hold a whole checkpoint

Calls are counted from the moment the shim is entered, in the order they are made; a killed write has written half.
"""

from __future__ import annotations

import errno
import json
import os
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from tests.harness import launch

KILLED = 137  # as a shell reports SIGKILL
CHANGES = ("open", "write", "fsync", "mkdir", "rename", "replace", "unlink", "rmdir")


class FileFaults:
    """While entered, every call of `CHANGES` in this process is traced, and the chosen one goes wrong.

    kill_at: number of the call at which the process ends, the call not made (a write half made).
    fail_at: number of the call that raises OSError(`code`) instead. full_after_bytes: writes beyond this many
    bytes in all raise ENOSPC, as on a full disk, after what still fits.
    """

    def __init__(
        self,
        *,
        kill_at: int | None = None,
        fail_at: int | None = None,
        code: int = errno.EIO,
        full_after_bytes: int | None = None,
    ) -> None:
        self.trace: list[tuple[str, str]] = []
        self._kill_at = kill_at
        self._fail_at = fail_at
        self._code = code
        self._left = full_after_bytes
        self._real: dict[str, Callable[..., Any]] = {}
        self._paths: dict[int, str] = {}

    def __enter__(self) -> FileFaults:
        for name in CHANGES:
            self._real[name] = getattr(os, name)
            setattr(os, name, self._wrapped(name))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        for name, real in self._real.items():
            setattr(os, name, real)

    def _wrapped(self, name: str) -> Callable[..., Any]:
        real = self._real[name]

        def call(*args: Any, **kwargs: Any) -> Any:
            if name == "open" and not args[1] & os.O_CREAT:
                return self._opened(real(*args, **kwargs), args[0])
            self._point(name, real, args)
            if name == "write" and self._left is not None:
                return self._write_until_full(real, *args)
            result = real(*args, **kwargs)
            return self._opened(result, args[0]) if name == "open" else result

        return call

    def _opened(self, fd: int, path: Any) -> int:
        self._paths[fd] = os.fspath(path)
        return fd

    def _point(self, name: str, real: Callable[..., Any], args: tuple[Any, ...]) -> None:
        target = args[0] if not isinstance(args[0], int) else self._paths.get(args[0], "?")
        point = len(self.trace)
        self.trace.append((name, os.path.basename(os.fspath(target))))
        if point == self._kill_at:
            if name == "write":
                real(args[0], args[1][: len(args[1]) // 2])
            os._exit(KILLED)
        if point == self._fail_at:
            raise OSError(self._code, os.strerror(self._code))

    def _write_until_full(self, real: Callable[..., int], fd: int, data: Any) -> int:
        assert self._left is not None
        if self._left == 0 and len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written = real(fd, data[: self._left])
        self._left -= written
        return written


def count_points(action: Callable[[], object]) -> list[tuple[str, str]]:
    """The calls that `action` makes, as (call, file name), found by running it in a forked child."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            with FileFaults() as faults:
                action()
            os.write(writer, json.dumps(faults.trace).encode())
            status = 0
        except BaseException:
            traceback.print_exc()
        os._exit(status)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        text = pipe.read()
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert status == 0, f"the action failed without a fault: exit status {status}"
    return [tuple(point) for point in json.loads(text)]


def run_killed(action: Callable[[], object], point: int) -> int:
    """Run `action` in a forked child that ends at call number `point`; the exit status (KILLED, or 0 if it got by)."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            with FileFaults(kill_at=point):
                action()
            status = 0
        except BaseException:
            traceback.print_exc()
        os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def check_survivor_of_a_sleeping_peer(
    flags: Sequence[str], *, script: str, folder: Path, within_s: float
) -> None:
    """Two ranks, of which the second sleeps in step 4: the first gives up after the timeout with status 6, and says who
    does not move. flags: of a run that saves into ck. within_s: from the beginning of the sleep to the end."""
    words = [*flags, "--sleep-iteration", "4", "--timeout-s", "3"]
    with launch.forked(words, ranks=2, script=script, cwd=folder) as group:
        group.wait_for("rank 1 sleeps")
        start = time.monotonic()
        while group.alive(0):
            assert time.monotonic() - start < within_s, group.output
            time.sleep(0.05)
        output = group.output
    assert "error (peer lost, exit status 6)" in output
    reason = launch.exit_record(folder / "ck")["reason"]
    assert "rank 1 (host " in reason
    assert "in step 4, phase forward-backward (alive, but it makes no progress" in reason, reason
