"""Orphans: a rank whose launcher or store is gone ends, whatever its main thread waits for.

Nobody stops the ranks of a torchrun that was killed with -9: they would train on, and the same command, started again,
would be a second run. The main thread may sit in a collective for as long as its timeout, so a thread beside it looks.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

POLL_S = 0.4
GRACE_S = 2.0  # in which the main thread may meet the loss itself and name who is to blame


class OrphanedError(RuntimeError):
    """The launcher or the store of this rank is gone (exit status 6)."""


class OrphanGuard:
    """Looks until `close`, and calls `end` once, in its thread, with an OrphanedError.

    launcher: pid of the parent where that lives as long as its ranks (torchrun), None where it may end before them
    (srun, mpirun, a shell). store_trouble(s): what is wrong with the store, None while nothing is; called every s
    seconds. where: what this rank is doing, for the message.
    """

    def __init__(
        self,
        launcher: int | None,
        store_trouble: Callable[[float], str | None],
        where: Callable[[], str],
        end: Callable[[OrphanedError], None],
        *,
        poll_s: float = POLL_S,
        grace_s: float = GRACE_S,
    ) -> None:
        self._launcher, self._store_trouble, self._where, self._end = launcher, store_trouble, where, end
        self._poll_s, self._grace_s = poll_s, grace_s
        self._closed = threading.Event()
        threading.Thread(target=self._watch, name="orphans", daemon=True).start()

    def close(self) -> None:
        """This rank ends by itself from here on: others may be gone before it."""
        self._closed.set()

    def _watch(self) -> None:
        while not self._closed.wait(self._poll_s):
            if self._launcher is not None and os.getppid() != self._launcher:
                gone = f"the launcher (pid {self._launcher}) is gone"
            elif (trouble := self._store_trouble(self._poll_s)) is not None:
                gone = trouble
                if self._closed.wait(self._grace_s):
                    return
            else:
                continue
            self._end(
                OrphanedError(f"{gone}; this rank was {self._where()}: it ends rather than train on alone")
            )
            return
