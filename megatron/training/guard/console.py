"""What is printed, whatever becomes of the terminal, the pipe or the disk behind it (floor 0).

[Note: a dead console] A run outlives whoever listens to it: `| head` has seen enough, a terminal hangs up, a disk fills
up, stdout was closed from the start. Python would raise from whatever prints next, a user's `print` and the
interpreter's own flush at the end included, which makes a status of 120 out of success. So the bytes below
`sys.stdout` and `sys.stderr` go through `ConsoleFile`, whose writes do not fail: the first loss is kept for
metrics.jsonl, and said on the other stream.

[Note: one bar, many writers] The ranks of a machine share a terminal, with their launcher and with what libraries
print. So nobody relies on where others have left it: the cursor stands on a blank line above the bar; in a run that has
one, whoever prints erases what is below the cursor first; the rank whose bar it is draws it again behind its own lines.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import select
import shutil
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from megatron.core.dist_checkpointing.catalog import CONSOLE_FILE
from megatron.core.safe_files import open_for_append
from megatron.training.config.launch_env import colour_is_unwanted, terminal_is_dumb
from megatron.training.guard.colours import painted

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

STREAMS = {1: "stdout", 2: "stderr"}
_MOST_EARLY = 1 << 20  # bytes
_NARROWEST = 20  # characters: lines are not broken into less
_ERASE_BELOW, _UP = b"\x1b[J", b"\x1b[A\r"


class ConsoleFile(io.RawIOBase):
    """Descriptor `fd` as a file that takes everything. lost: why the first write failed, None so far."""

    def __init__(self, fd: int, name: str) -> None:
        self.fd, self.name = fd, f"<{name}>"
        self.lost: str | None = None

    def write(self, data: ReadableBuffer, /) -> int:
        told = bytes(data)
        self.show(told, told)
        return len(told)

    def show(self, shown: bytes, logged: bytes) -> None:
        """shown: what is written here. logged: what the log file has of it, if there is one."""
        if self.isatty():
            _TERMINAL.keep(logged)
            shown = shown and _TERMINAL.above_bar(shown)
        self._put(shown)

    def _put(self, data: bytes) -> None:
        left = memoryview(data)
        while left:
            try:
                left = left[os.write(self.fd, left) :]
            except BlockingIOError:  # somebody made the pipe or terminal non-blocking
                select.select([], [self.fd], [])
            except OSError as error:  # tried again at the next write: a disk may have room by then
                self.lose(error)
                break

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


class _Terminal:
    """What a terminal shows below the lines of this process, and where the lines go besides.

    bar: None without one in this run, empty where another rank has it.
    """

    def __init__(self) -> None:
        self.bar: bytes | None = None
        self._log: ConsoleFile | None = None
        self._early = bytearray()  # what the log file will have of the time before it
        self._in_line = False  # this process has printed the beginning of a line

    def keep(self, data: bytes) -> None:
        """In the log file, or for it: tools, which have none, are not kept in memory beyond a run's first lines."""
        if self._log is not None:
            self._log.write(data)
        elif len(self._early) < _MOST_EARLY:
            self._early += data

    def log_to(self, file: ConsoleFile) -> None:
        """From now on, and of what was printed before."""
        self._log = file
        file.write(self._early)
        self._early.clear()

    def above_bar(self, data: bytes = b"") -> bytes:
        """The bytes that show `data`, and the bar below it. [Note: one bar, many writers]"""
        if data:
            self._in_line = not data.endswith(b"\n")
        if self.bar is None:
            return data
        return _ERASE_BELOW + data + (b"\n" + self.bar + _UP if self.bar and not self._in_line else b"")


_TERMINAL = _Terminal()
_FILES = {fd: ConsoleFile(fd, name) for fd, name in STREAMS.items()}  # of this process, like the descriptors


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


def on_terminal(fd: int = 1) -> bool:
    """Whether standard output (fd 2: error) is read by a person, on a terminal on which a line can be written over."""
    return (
        isinstance(sys.stdout if fd == 1 else sys.stderr, ConsoleStream)
        and _FILES[fd].isatty()
        and not terminal_is_dumb()
    )


def terminal_width() -> int:
    """In characters, as COLUMNS or the terminal says."""
    return max(shutil.get_terminal_size().columns, _NARROWEST)


def say(text: object, brief: str | None = None) -> None:
    """Print a line in one write: `print` makes two when output is unbuffered, and ranks share one pipe.

    A terminal breaks it between words, and shows it in colours. brief: what a terminal shows in its place, nothing
    where it is empty; the log file has the text.
    """
    if not on_terminal():
        sys.stdout.write(f"{text}\n")
        sys.stdout.flush()
        return
    sys.stdout.flush()
    shown = "" if brief == "" else f"{text if brief is None else brief}\n"
    rows = _in_colours("".join(wrapped(line, terminal_width()) for line in shown.splitlines(keepends=True)))
    _FILES[1].show(*(told.encode(sys.stdout.encoding, "backslashreplace") for told in (rows, f"{text}\n")))


def complain(text: str) -> None:
    """The same on standard error, not broken."""
    if not on_terminal(2):
        print(text, file=sys.stderr, flush=True)
        return
    sys.stderr.flush()
    rows, plain = (
        f"{shown}\n".encode(sys.stderr.encoding, "backslashreplace") for shown in (_in_colours(text), text)
    )
    _FILES[2].show(rows, plain)


def _in_colours(text: str) -> str:
    return text if colour_is_unwanted() else "".join(map(painted, text.splitlines(keepends=True)))


def wrapped(line: str, width: int) -> str:
    """Broken between words where a terminal is narrower, two blanks further in than it begins. line: with its end."""
    if len(line) <= width:
        return line
    inward = " " * (len(line) - len(line.lstrip()) + 2)
    rows = textwrap.wrap(
        line, width - 1, subsequent_indent=inward, break_long_words=False, break_on_hyphens=False
    )
    return "\n".join(rows) + "\n"


def open_log(folder: Path) -> Path | None:
    """On a terminal: a file in this folder has what a pipe would have got so far, and gets the rest. None elsewhere.
    Raises OSError."""
    if not on_terminal():
        return None
    path = folder / CONSOLE_FILE
    path.parent.mkdir(parents=True, exist_ok=True)
    _TERMINAL.log_to(ConsoleFile(open_for_append(path), str(path)))
    return path


def show_bar(text: str | None) -> None:
    """Below what is printed, on a terminal; None: no more. text: shorter than the terminal is wide, empty where another
    rank draws the bar. Every rank of a run that has one calls it."""
    if on_terminal():
        erased = _ERASE_BELOW if text is None and _TERMINAL.bar else b""
        _TERMINAL.bar = None if text is None else _in_colours(text).encode(sys.stdout.encoding, "replace")
        _FILES[1]._put(_TERMINAL.above_bar() or erased)


@contextlib.contextmanager
def torch_quiet() -> Iterator[None]:
    """What torch's C++ says on descriptor 2 meanwhile is dropped."""
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
    os.dup2(nowhere, 2)
    os.close(nowhere)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


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
