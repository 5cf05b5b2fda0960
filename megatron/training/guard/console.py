"""What is printed, whatever becomes of the terminal, the pipe or the disk behind it (floor 0).

[Note: a dead console] A run outlives whoever listens to it: `| head` has seen enough, a terminal hangs up, a disk fills
up, stdout was closed from the start. Python would raise from whatever prints next, a user's `print` and the
interpreter's own flush at the end included, which makes a status of 120 out of success. So the bytes below
`sys.stdout` and `sys.stderr` go through `ConsoleFile`, whose writes do not fail: the first loss is kept for
metrics.jsonl, and said on the other stream.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import select
import sys
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

STREAMS = {1: "stdout", 2: "stderr"}


class ConsoleFile(io.RawIOBase):
    """Descriptor `fd` as a file that takes everything. lost: why the first write failed, None so far."""

    def __init__(self, fd: int) -> None:
        self.fd, self.name = fd, f"<{STREAMS[fd]}>"
        self.lost: str | None = None

    def write(self, data: ReadableBuffer, /) -> int:
        left = memoryview(data).cast("B")
        size = len(left)
        while left:
            try:
                left = left[os.write(self.fd, left) :]
            except BlockingIOError:  # somebody made the pipe or terminal non-blocking
                select.select([], [self.fd], [])
            except OSError as error:  # tried again at the next write: a disk may have room by then
                self.lose(error)
                break
        return size

    def lose(self, error: OSError) -> None:
        """A write has failed."""
        if self.lost is not None:
            return
        self.lost = error.strerror
        if error.errno != errno.EPIPE:  # who has closed a pipe has seen enough
            other = next(fd for fd in STREAMS if fd != self.fd)
            with contextlib.suppress(OSError):
                text = f"WARNING: {self.name[1:-1]} cannot be written: {self.lost}; what is printed there is lost\n"
                os.write(other, text.encode())

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self.fd

    def isatty(self) -> bool:
        return os.isatty(self.fd)

    def close(self) -> None:
        """The process ends with its console open."""


_FILES = {fd: ConsoleFile(fd) for fd in STREAMS}  # of this process, like the descriptors


class ConsoleStream(io.TextIOWrapper):
    """`sys.stdout` or `sys.stderr` over a ConsoleFile."""

    def __init__(self, file: ConsoleFile, like: TextIO | None) -> None:
        if not isinstance(like, io.TextIOWrapper):  # there is none where the descriptor was closed
            like = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
        super().__init__(
            file if like.write_through else io.BufferedWriter(file),
            encoding=like.encoding,
            # What no terminal can show (a file's name of foreign bytes) is escaped, as Python does on stderr.
            errors="backslashreplace" if like.errors in ("strict", "surrogateescape") else like.errors,
            line_buffering=file.fd == 2 or like.line_buffering,
            write_through=like.write_through,
        )

    def close(self) -> None:
        """Others go on printing: nothing is closed before the process ends."""
        self.flush()


def guard_console() -> None:
    """Make descriptors 0 to 2 exist and `sys.stdout`, `sys.stderr` unbreakable; a second call does nothing.

    A stream that somebody has put in place of the process's own stays as it is.
    """
    for fd in (0, *STREAMS):
        try:
            os.fstat(fd)
        except OSError:
            nowhere = os.open(os.devnull, os.O_RDWR)
            assert nowhere == fd, f"the lowest free descriptor is {nowhere}, not {fd}"
            os.set_inheritable(fd, True)
            if fd in _FILES:
                _FILES[fd].lost = "closed from the start"
    sys.stdout = _guarded(sys.stdout, _FILES[1])
    sys.stderr = _guarded(sys.stderr, _FILES[2])


def lost_output() -> list[str]:
    """The streams on which something was lost, each with the reason."""
    return [f"{STREAMS[file.fd]}: {file.lost}" for file in _FILES.values() if file.lost is not None]


def say(text: object) -> None:
    """Print a line in one write: `print` makes two when output is unbuffered, and ranks share one pipe."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def _guarded(stream: TextIO | None, file: ConsoleFile) -> TextIO:
    if isinstance(stream, ConsoleStream):
        return stream
    if stream is not None:
        try:
            if stream.fileno() != file.fd:
                return stream
            stream.flush()
        except (ValueError, AttributeError):  # a stream of somebody's own, without a descriptor, or closed
            return stream
        except OSError as error:
            file.lose(error)
    return ConsoleStream(file, stream)
