"""Stop on SIGTERM, SIGINT and SIGHUP: the first asks the loop to save and leave, the second stops at once.

    with SignalHandler(on_second=last_words) as signals:
        ...
        if signals.requested():  # "SIGTERM"; polled once an iteration and agreed on by all ranks
            ...save and leave...

[Note: two roads] A Python handler runs only between two bytecodes of the main thread, and the main thread
may sit in a collective that never returns. So the interpreter's wake-up descriptor, written by the C handler
at once, is read by a small thread, and that thread can end the process while the main thread is stuck.

[Note: echo] Slurm signals the launcher and the ranks, and the launcher forwards the signal: the same request
arrives twice within milliseconds. A repetition within ECHO_S of the first is therefore the same request.

A SIGHUP that is ignored when we come stays ignored: whoever started us with `nohup` means to hang up.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
ECHO_S = 0.25


def default_second(signum: int) -> int:
    """Status of a process ended by a signal, as shells report it."""
    return 128 + signum


class SignalHandler:
    """Installs handlers for `signals` on entry and puts the old ones back on `close`; main thread only.

    on_second: called in the side thread with the second signal's number; says the last words (`exit.json`)
    and returns the exit status: 75 if a valid checkpoint exists, else 128 + n (the default).
    """

    def __init__(
        self,
        on_second: Callable[[int], int] = default_second,
        *,
        signals: Sequence[signal.Signals] = STOP_SIGNALS,
        echo_s: float = ECHO_S,
    ) -> None:
        self._on_second = on_second
        self._signals = tuple(signals)
        self._echo_s = echo_s
        self._first: signal.Signals | None = None
        self._first_at = 0.0
        self._old: dict[signal.Signals, Any] = {}
        self._old_fd = -1
        self._read_end: socket.socket | None = None
        self._write_end: socket.socket | None = None
        self._thread: threading.Thread | None = None

    def install(self) -> SignalHandler:
        """Take the signals over. Called by `with`."""
        assert self._thread is None, "signal handlers are already installed"
        self._read_end, self._write_end = socket.socketpair()
        self._write_end.setblocking(False)
        self._old_fd = signal.set_wakeup_fd(self._write_end.fileno(), warn_on_full_buffer=False)
        self._thread = threading.Thread(
            target=self._watch, args=(self._read_end,), name="signals", daemon=True
        )
        self._thread.start()
        for number in self._signals:
            if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
                self._old[number] = signal.signal(number, self._handle)
        _installed.add(self)
        return self

    def close(self) -> None:
        """Put the old handlers back; a second call does nothing."""
        if self._thread is None or self._write_end is None or self._read_end is None:
            return
        self._restore()
        self._write_end.close()  # end of file ends the thread
        self._thread.join()
        self._read_end.close()
        self._thread = None

    def requested(self) -> str | None:
        """Name of the signal that asked to stop ("SIGTERM"), or None."""
        return self._first.name if self._first is not None else None

    def __enter__(self) -> SignalHandler:
        return self.install()

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _restore(self) -> None:
        for number, old in self._old.items():
            signal.signal(number, signal.SIG_DFL if old is None else old)
        self._old.clear()
        signal.set_wakeup_fd(self._old_fd)
        _installed.discard(self)

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        """Must exist, else the default action kills the process; the thread counts."""

    def _watch(self, read_end: socket.socket) -> None:
        while data := read_end.recv(64):
            for signum in data:
                if signum in self._signals:
                    self._count(signum)

    def _count(self, signum: int) -> None:
        now = time.monotonic()
        if self._first is None:
            self._first_at = now
            self._first = signal.Signals(signum)
        elif now - self._first_at > self._echo_s:
            status = default_second(signum)
            try:
                status = self._on_second(signum)
            finally:  # whatever the last words met
                os._exit(status)

    def _forget_in_child(self) -> None:
        """A forked child (a loader's worker) must die by SIGTERM as usual, and not write into our socket."""
        for number, old in self._old.items():
            signal.signal(number, signal.SIG_DFL if old is None else old)
        signal.set_wakeup_fd(-1)
        self._old.clear()
        self._thread = None
        for end in (self._read_end, self._write_end):
            if end is not None:
                end.close()


_installed: weakref.WeakSet[SignalHandler] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for handler in list(_installed):
        handler._forget_in_child()
    _installed.clear()


os.register_at_fork(after_in_child=_after_fork_in_child)
