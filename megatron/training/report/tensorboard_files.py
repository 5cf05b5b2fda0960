"""TensorBoard's event files of a run that goes on: what lies after the iteration that it resumes from is cut off.

[Note: no purge step] TensorBoard's own way, `purge_step`, hides all points at and after one step, whatever their tag
counts: with iterations it would hide nearly all of `TAG vs samples`, with samples nothing of the rest. Points are
written in the order of time, so one place in a file divides what is trained again from what stays, on every axis, and
what user code has written with it.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatron.core import optional
from megatron.core.safe_files import open_for_append, opened

VS_SAMPLES = " vs samples"
_LENGTH = struct.Struct("<Q4x")  # of a record, with its checksum
_TRAILER_BYTES = 4  # the content's checksum


def drop_after(directory: str, iteration: int) -> str:
    """Cut the files of earlier attempts; a word about it. Newest first, and no further back than to the file that
    begins before `iteration`: it was begun when the older ones were cut. Raises OSError."""
    if "://" in directory:
        return " (not a local folder: points of earlier attempts after the iteration resumed from stay in it)"
    cut = 0
    for path in sorted(Path(directory).glob("*tfevents*"), reverse=True):
        first, place = _first_and_place(path, iteration)
        if place is not None:
            fd = open_for_append(path)
            try:
                os.ftruncate(fd, place)
            finally:
                os.close(fd)
            cut += 1
        if first is not None and first <= iteration:
            break
    return f" (what {cut} files had after iteration {iteration} is dropped)" if cut else ""


def _first_and_place(path: Path, iteration: int) -> tuple[int | None, int | None]:
    """The first iteration that a file has a record of, and where those after `iteration` begin; None: nowhere.

    A point of an iteration is known by the one behind it, of the same tag over samples; timers have no such.
    """
    first, before = None, (0, "", 0)
    for place, tag, step in _points(path):
        begin, last_tag, last_step = before
        if tag == last_tag + VS_SAMPLES:
            first = last_step if first is None else first
            if last_step > iteration:
                return first, begin
        elif tag.endswith("-time") and step > iteration:
            return first, place
        before = place, tag, step
    return first, None


def _points(path: Path) -> Iterator[tuple[int, str, int]]:
    """(offset of the record, tag, step) of each event; ends at a record that a kill cut short."""
    event: Any = optional.require("tensorboard.compat.proto.event_pb2", "tb").Event
    broken = optional.require("google.protobuf.message", "tb").DecodeError
    with opened(path) as file:
        size, place = os.fstat(file.fileno()).st_size, 0
        while len(header := file.read(_LENGTH.size)) == _LENGTH.size:
            (length,) = _LENGTH.unpack(header)
            end = place + _LENGTH.size + length + _TRAILER_BYTES
            if end > size:
                return
            try:
                found = event.FromString(file.read(length + _TRAILER_BYTES)[:-_TRAILER_BYTES])
            except broken:
                return
            for value in found.summary.value[:1]:
                yield place, value.tag, found.step
            place = end
