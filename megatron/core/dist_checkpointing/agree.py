"""What ranks tell each other about a checkpoint: small JSON values, and errors that all of them raise together.

torch's own checkpoint entry points gather plans as pickles; ours travel as JSON over the host's group.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from megatron.core.dist_checkpointing.files import CheckpointError
from megatron.core.transport import host_data
from megatron.core.transport.parallel_state import ParallelState


def gather_json(value: Any, ps: ParallelState | None) -> list[Any]:
    """Every rank's value, in rank order, on every rank. Communicates over the whole world."""
    if ps is None or ps.world_size == 1:
        return [value]
    return list(host_data.all_gather_json(value, ps.control_group))


@dataclasses.dataclass
class Outcome:
    """What one rank's part of a step came to: its `value`, or why it failed."""

    value: Any = None
    error: str | None = None

    def gather(self, ps: ParallelState | None) -> list[Any]:
        """Every rank's value; if any rank failed, all raise CheckpointError with the first one's message."""
        answers = gather_json([self.error, self.value], ps)
        told = [f"rank {rank}: {error}" for rank, (error, _) in enumerate(answers) if error is not None]
        if told and len(answers) == 1:
            raise CheckpointError(answers[0][0])
        if told:
            raise CheckpointError(told[0] + (f" (and {len(told) - 1} more ranks)" if len(told) > 1 else ""))
        return [value for _, value in answers]


@contextmanager
def step() -> Iterator[Outcome]:
    """A part that each rank does alone; CheckpointError and OSError wait for `Outcome.gather`.

    Programmer errors pass: a rank that raises one leaves, and its peers notice the lost rank.
    """
    outcome = Outcome()
    try:
        yield outcome
    except CheckpointError as error:
        outcome.error = str(error)
    except OSError as error:
        outcome.error = f"{error.filename or 'checkpoint'}: {error.strerror}"
