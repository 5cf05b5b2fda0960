"""`--verify-data`: corpora are compared with their checksums before anything is trained on them."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from megatron.core import device
from megatron.core.datasets.checksums import check_corpus, require_checksums
from megatron.core.datasets.errors import DataError
from megatron.training.report.session import Session


def verify_data(session: Session, named: Callable[[], Iterable[str]]) -> None:
    """named: the prefixes of the corpora. The ranks of a machine share the blocks, since machines may have own disks.

    Communicates over the world. Raises DataError on every rank, with all that was found.
    """
    part, parts = _share(session)
    threads = max(1, device.available_cores() // session.env.local_world_size)
    count, failure = 0, None
    try:
        for prefix in dict.fromkeys(named()):
            check_corpus(prefix, require_checksums(prefix), part=part, parts=parts, threads=threads)
            count += 1
    except DataError as error:
        failure = str(error)
    told: dict[str, int] = {}
    for rank, reason in enumerate(session.gather(failure)):
        if reason is not None:
            told.setdefault(reason, rank)
    if told:
        raise DataError("; ".join(f"{reason} (seen by rank {rank})" for reason, rank in told.items()))
    session.print_rank_0(f"data: the checksums of {count} {'corpus' if count == 1 else 'corpora'} are right")


def _share(session: Session) -> tuple[int, int]:
    """(part, parts) of this rank; all of it where the launcher does not number the ranks of each machine."""
    rank, size = session.env.local_rank, session.env.local_world_size
    told = session.gather([rank, size])
    numbered = [[k, size] for k in range(size) for _ in range(len(told) // size)]
    return (rank, size) if sorted(told) == numbered else (0, 1)
