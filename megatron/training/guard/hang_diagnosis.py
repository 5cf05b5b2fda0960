"""Who is to blame when a peer is lost: decided from the ranks' progress records. Pure: no store, no clock.

[Note: what the records can tell] Three kinds of culprits: a rank that *ended* by an error of its own (it
says so in its last record), a *silent* rank (its record does not change any more: killed, stopped, or
holding the GIL), and a *late* rank (its record changes, but it keeps others waiting). Whom does a waiting rank
wait for? A member of its last group that has begun fewer of that group's collectives; that rank may itself wait
in another group, so the chain is followed to its end. Collectives are also begun ahead, gathers among them: where
all have begun as many, it is the member that stands in no wait. Ranks that lost a peer say "failing" and are never
culprits.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence

RUNNING, FAILING, ENDED = "running", "failing", "ended"


@dataclasses.dataclass(frozen=True)
class ProgressRecord:
    """What one rank publishes.

    beat: counts publications. step, phase: where the main thread is. op, group, sequence: its newest
    collective; members: that group's ranks (empty: unknown). sequences: group instance -> collectives begun.
    waits: the main thread stands in the wait for a collective, or lost a peer there; on a device that queues work
    the host hardly ever does. published_at, progressed_at: wall time of this record, and of the last change of
    anything else in it.
    """

    rank: int
    host: str
    pid: int
    beat: int = 0
    state: str = RUNNING
    reason: str = ""
    step: int = 0
    phase: str = "start"
    op: str = ""
    group: str = ""
    sequence: int = 0
    members: tuple[int, ...] = ()
    sequences: Mapping[str, int] = dataclasses.field(default_factory=dict)
    waits: bool = False
    published_at: float = 0.0
    progressed_at: float = 0.0

    def to_json(self) -> str:
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return json.dumps({**fields, "members": _pack(self.members)})

    @classmethod
    def from_json(cls, text: bytes | str) -> ProgressRecord:
        fields = json.loads(text)
        return cls(**{**fields, "members": _unpack(fields["members"])})

    @property
    def instance(self) -> str:
        """The newest collective's group, told apart from groups of the same name over other ranks."""
        return group_instance(self.group, self.members)

    @property
    def name(self) -> str:
        return f"rank {self.rank} (host {self.host}, pid {self.pid})"


def group_instance(group: str, ranks: Sequence[int]) -> str:
    """Groups of one name do not overlap, so the first rank tells them apart."""
    return f"{group}@{ranks[0]}" if ranks else group


def _pack(ranks: Sequence[int]) -> list[int] | dict[str, list[int]]:
    """Ranks of a group are nearly always evenly spaced: three numbers instead of thousands."""
    if len(ranks) > 3:
        stride = ranks[1] - ranks[0]
        if stride and list(ranks) == list(range(ranks[0], ranks[-1] + (1 if stride > 0 else -1), stride)):
            return {"range": [ranks[0], len(ranks), stride]}
    return list(ranks)


def _unpack(packed: list[int] | dict[str, list[int]]) -> tuple[int, ...]:
    if isinstance(packed, dict):
        first, count, stride = packed["range"]
        return tuple(first + i * stride for i in range(count))
    return tuple(packed)


def find_culprit(
    mine: ProgressRecord,
    records: Mapping[int, ProgressRecord],
    alive: set[int],
    world_size: int,
    now: float,
) -> str:
    """The line that names who is to blame. Pure; see [Note: what the records can tell]."""
    unseen = [rank for rank in range(world_size) if rank not in records and rank != mine.rank]
    if unseen:
        return f"rank {_list(unseen)} never reported: not started, or lost before the first record"
    for record in records.values():
        if record.state == ENDED and record.rank != mine.rank and record.reason:
            return f"{record.name} ended at step {record.step}, phase {record.phase}: {record.reason}"
    silent = [record for rank, record in sorted(records.items()) if rank not in alive and rank != mine.rank]
    if silent:
        return "; ".join(_blame(record, mine, now, silent=True) for record in silent)
    others = {**records, mine.rank: mine}
    late, waiter = _follow(mine, others)
    if late is not None:
        return _blame(late, waiter, now, silent=False)
    ended = [record for record in records.values() if record.state == ENDED and record.rank != mine.rank]
    if ended:
        return "; ".join(_blame(record, mine, now, silent=False) for record in ended)
    return _mismatch(mine, others) or _slowest(mine, others, now)


def _follow(
    start: ProgressRecord, records: Mapping[int, ProgressRecord]
) -> tuple[ProgressRecord | None, ProgressRecord]:
    """(the rank at the end of the chain of waiting, the one that waits for it); None when nobody is late."""
    late, waiter = None, start
    seen = {start.rank}
    while found := _late_for(late or start, records, seen):
        waiter, late = late or start, found
        seen.add(found.rank)
    return late, waiter


def _late_for(
    waiter: ProgressRecord, records: Mapping[int, ProgressRecord], seen: set[int]
) -> ProgressRecord | None:
    """The running member of the waiter's group with the fewest of its collectives, if fewer than the waiter has; else
    the one without a wait, where the waiter stands in one."""
    if not waiter.op:
        return None
    members = [
        record
        for rank, record in records.items()
        if rank not in seen and record.state == RUNNING and (rank in waiter.members or not waiter.members)
    ]
    behind = [
        record
        for record in members
        # A rank without a wait has begun this one ahead: members that wait do not hold it up.
        if record.sequences.get(waiter.instance, 0) < waiter.sequence and record.waits <= waiter.waits
    ]
    if not behind and waiter.waits:
        behind = [record for record in members if not record.waits]
    return min(behind, key=lambda r: (r.sequences.get(waiter.instance, 0), r.progressed_at), default=None)


def _blame(culprit: ProgressRecord, waiter: ProgressRecord, now: float, *, silent: bool) -> str:
    text = culprit.name
    shared = not waiter.members or culprit.rank in waiter.members
    begun = culprit.sequences.get(waiter.instance, 0)
    if waiter.op and shared and begun < waiter.sequence:
        text += f" missed {waiter.op} #{waiter.sequence} of group '{waiter.group}'"
    elif waiter.op and shared:
        text += f" was lost during {waiter.op} #{waiter.sequence} of group '{waiter.group}'"
    else:
        text += " was lost"
    text += f" at step {waiter.step}, phase {waiter.phase}"
    if culprit.state == ENDED:
        return f"{text}; it had ended after step {culprit.step}"
    if silent:
        age_s = max(0.0, now - culprit.published_at)
        return (
            f"{text}; last heard of {age_s:.1f} s ago, then in step {culprit.step}, phase {culprit.phase}"
            " (killed, stopped, or busy without giving the interpreter free)"
        )
    age_s = max(0.0, now - culprit.progressed_at)
    where = f"in step {culprit.step}, phase {culprit.phase}"
    return f"{text}; last heard of {age_s:.1f} s ago, then {where} (alive, but it makes no progress)"


def _mismatch(mine: ProgressRecord, records: Mapping[int, ProgressRecord]) -> str | None:
    """Ranks that called different collectives as the same number of one group."""
    for record in records.values():
        same_place = (record.instance, record.sequence) == (mine.instance, mine.sequence)
        if mine.op and same_place and record.op != mine.op:
            return (
                f"the ranks disagree on collective #{mine.sequence} of group '{mine.group}': {mine.name} "
                f"calls {mine.op} (step {mine.step}, phase {mine.phase}), {record.name} calls {record.op} "
                f"(step {record.step}, phase {record.phase})"
            )
    return None


def _slowest(mine: ProgressRecord, records: Mapping[int, ProgressRecord], now: float) -> str:
    """Nobody of the group is late: what is known."""
    running = [record for rank, record in records.items() if rank != mine.rank and record.state == RUNNING]
    behind = [record for record in running if record.step < mine.step]
    if not behind and mine.waits:
        behind = [record for record in running if not record.waits]
    if behind:
        return _blame(min(behind, key=lambda r: (r.step, r.progressed_at)), mine, now, silent=False)
    return (
        f"no rank is behind: all have begun{newest_collective(mine) or ' the same step'} "
        f"(step {mine.step}, phase {mine.phase}); "
        "the connection between them broke, or their tensors differ in shape"
    )


def newest_collective(record: ProgressRecord) -> str:
    return f" {record.op} #{record.sequence} of group '{record.group}'" if record.op else ""


def _list(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")


def first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
