"""What goes wrong with a checkpoint, as one kind of error (floor 0)."""

from __future__ import annotations


class CheckpointError(ValueError):
    """A checkpoint cannot be written, found, trusted or applied; the message names the file (status 3)."""
