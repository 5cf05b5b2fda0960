"""Python's collector of cycles while plans are made: they are hundreds of thousands of tuples without any."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def without_collector() -> Iterator[None]:
    """What is made in here is not walked through for cycles again and again, which takes a sixth of the time."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
