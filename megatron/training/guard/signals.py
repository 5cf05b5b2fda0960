"""Stop on SIGTERM, SIGINT, SIGHUP and SIGUSR1: the first asks the loop to save and leave, the second stops at once.

[Note: two roads] A Python handler runs only between two bytecodes of the main thread, and the main thread
may sit in a collective that never returns. So the interpreter's wake-up descriptor, written by the C handler
at once, is read by a small thread, and that thread can end the process while the main thread is stuck.

[Note: echo] Slurm signals the launcher and the ranks, and the launcher forwards the signal: the same request
arrives twice within milliseconds. A repetition within ECHO_S of the first is therefore the same request.

SIGUSR1 is what batch systems are asked to send ahead of the end (Slurm's `--signal=USR1@60`).
"""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
ECHO_S = 0.25


def default_second(signum: int) -> int:
    """Status of a process ended by a signal, as shells report it."""
    return 128 + signum


class StopRequested(BaseException):
    """A signal asked to stop while this rank waited for others, with nothing trained yet that would be saved."""

    def __init__(self, name: str) -> None:
        super().__init__(f"{name} before training began; nothing is lost")
        self.name = name


def end_at_once(last_words: Callable[[StopRequested], int]) -> None:
    """Until a SignalHandler takes over, a stop signal ends the process with the status that last_words returns."""

    def end(signum: int, frame: object) -> None:
        os._exit(last_words(StopRequested(signal.Signals(signum).name)))

    if threading.current_thread() is threading.main_thread():
        for number in _ours():
            _before.setdefault(number, signal.signal(number, end))


def forget() -> None:
    """In a fork that becomes another program: signals act as at its start, and none waits."""
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            is_interrupt = number == signal.SIGINT
            signal.signal(number, signal.default_int_handler if is_interrupt else signal.SIG_DFL)
    signal.set_wakeup_fd(-1)
    _before.clear()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, signal.valid_signals())


def _ours() -> list[signal.Signals]:
    """Not a SIGHUP that is ignored: whoever started us with `nohup` means to hang up."""
    ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return [number for number in STOP_SIGNALS if not (ignored and number is signal.SIGHUP)]


class SignalHandler:
    """Installs handlers on entry and puts the old ones back on `close`; main thread only.

    on_second: called in the side thread with the second signal's number; says the last words (`exit.json`)
    and returns the exit status: 75 if a valid checkpoint exists, else 128 + n (the default).
    """

    def __init__(self, on_second: Callable[[int], int] = default_second, *, echo_s: float = ECHO_S) -> None:
        self._on_second, self._echo_s = on_second, echo_s
        self._first: signal.Signals | None = None
        self._first_at = 0.0
        self._asked: str | None = None
        self._old: dict[signal.Signals, Any] = {}
        self._old_fd = -1
        self._ends: tuple[socket.socket, ...] = ()  # to read from, to write to; empty while not installed
        self._thread = threading.Thread(target=self._watch, name="signals", daemon=True)

    def requested(self) -> str | None:
        """Name of the signal that asked to stop ("SIGTERM"), what else did (`ask`), or None. Polled once an iteration,
        and agreed on by all ranks."""
        return self._asked if self._first is None else self._first.name

    def ask(self, why: str) -> None:
        """Ask the loop to save and leave as a first signal does. From any thread."""
        self._asked = why

    def end_waiting(self) -> None:
        """For `waiting.ended_by`: raises StopRequested once a signal asks to stop."""
        if self._first is not None:
            raise StopRequested(self._first.name)

    def __enter__(self) -> SignalHandler:
        assert not self._ends, "signal handlers are already installed"
        self._ends = socket.socketpair()
        self._ends[1].setblocking(False)
        self._old_fd = signal.set_wakeup_fd(self._ends[1].fileno(), warn_on_full_buffer=False)
        self._thread.start()
        for number in _ours():
            # A handler must exist, else the default action kills the process; the thread counts.
            old = signal.signal(number, lambda signum, frame: None)
            self._old[number] = _before.pop(number, old)
        _installed.append(self)
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Put the old handlers back; a second call does nothing."""
        if not self._ends:
            return
        self._restore(self._old_fd)
        _installed.remove(self)
        reading, writing = self._ends
        writing.close()  # end of file ends the thread
        self._thread.join()
        reading.close()
        self._ends = ()

    def _restore(self, wakeup_fd: int) -> None:
        for number, old in self._old.items():
            signal.signal(number, signal.SIG_DFL if old is None else old)
        self._old.clear()
        signal.set_wakeup_fd(wakeup_fd)

    def _watch(self) -> None:
        while data := self._ends[0].recv(64):
            for signum in filter(STOP_SIGNALS.__contains__, data):
                now = time.monotonic()
                if self._first is None:
                    self._first_at, self._first = now, signal.Signals(signum)
                elif now - self._first_at > self._echo_s:
                    status = default_second(signum)
                    try:
                        status = self._on_second(signum)
                    finally:  # whatever the last words met
                        os._exit(status)


_installed: list[SignalHandler] = []
_before: dict[signal.Signals, Any] = {}  # what `end_at_once` took the place of


def _after_fork_in_child() -> None:
    """A forked child (a loader's worker) must die by SIGTERM as usual, and not write into our socket."""
    while _installed:
        handler = _installed.pop()
        handler._restore(-1)
        for end in handler._ends:
            end.close()
        handler._ends = ()


os.register_at_fork(after_in_child=_after_fork_in_child)
