"""A run on a pseudo terminal, and what a person sees on it."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import select
import struct
import termios
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from tests.harness import launch

ROWS = 50
_CONTROL = re.compile(r"\x1b\[([JA])|\r|\n")


class Terminal:
    """A pseudo terminal of a width; what is written to it is collected until it is closed."""

    def __init__(self, columns: int) -> None:
        self._master, self._slave = pty.openpty()
        fcntl.ioctl(self._slave, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, columns, 0, 0))
        self.path, self.written = os.ttyname(self._slave), b""
        self._ended = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        while not (self._ended.is_set() and not select.select([self._master], [], [], 0)[0]):
            if select.select([self._master], [], [], 0.02)[0]:
                self.written += os.read(self._master, 1 << 16)

    def wait_for(self, text: str, alive: Callable[[], bool]) -> None:
        while text.encode() not in self.written:
            assert alive(), f"ended without {text!r}:\n{self.written.decode()}"
            self._ended.wait(0.02)

    def close(self) -> str:
        self._ended.set()
        self._reader.join()
        os.close(self._slave)
        os.close(self._master)
        return self.written.decode()


@contextlib.contextmanager
def on_terminal(
    flags: Sequence[str], columns: int, **options: Any
) -> Iterator[tuple[Terminal, launch.Ranks]]:
    """`launch.forked` on a terminal of its own."""
    terminal = Terminal(columns)
    env = {"TERM": "xterm-256color", "COLUMNS": str(columns)}
    try:
        with launch.forked(flags, env=env, terminal=terminal.path, **options) as ranks:
            yield terminal, ranks
    finally:
        terminal.close()


def seen(written: str) -> list[str]:
    """The lines on a screen that is high and wide enough, without their colours."""
    written = re.sub(r"\x1b\[\d*m", "", written)
    lines, row, column, place = [""], 0, 0, 0
    for control in [*_CONTROL.finditer(written), None]:
        text = written[place : control.start() if control else len(written)]
        if text:
            lines[row] = lines[row][:column].ljust(column) + text + lines[row][column + len(text) :]
            column += len(text)
        if control is None:
            break
        place = control.end()
        if control[0] == "\r":
            column = 0
        elif control[0] == "\n":
            row += 1
            lines += [""] * (row == len(lines))
        elif control[1] == "A":
            row -= 1
        else:
            lines[row:] = [lines[row][:column]]
    assert "\x1b" not in "".join(lines), "a control code that this screen does not know"
    return lines


def frames(written: str) -> list[list[str]]:
    """The screen after each time that something was drawn below the cursor."""
    ends = [found.end() for found in re.finditer(r"\x1b\[A\r", written)]
    return [seen(written[:end]) for end in ends]


def log_of(folder: Path) -> str:
    return (launch.run_folder(folder) / "console.log").read_text()
