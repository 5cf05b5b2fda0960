"""Who is to blame when a peer is lost: decided from the ranks' progress records. Pure: no store, no clock.

[Note: what the records can tell] Three kinds of ranks are to blame: one that *ended* by an error of its own (it
says so in its last record), a *silent* one (its record does not change any more: killed, stopped, or
holding the GIL), and a *late* one (its record changes, but it keeps others waiting). Whom does a waiting rank
wait for? A member of its last group that has begun fewer of that group's collectives; that rank may itself wait
in another group, so the chain is followed to its end. Collectives are also begun ahead, gathers among them: where
all have begun as many, it is the member that stands in no wait. Ranks that lost a peer say "failing" and are never
to blame.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence

from megatron.core.words import first_of

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
        return json.dumps({**vars(self), "members": _pack(self.members)})

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

    @property
    def place(self) -> str:
        return f"step {self.step}, phase {self.phase}"

    @property
    def collective(self) -> str:
        """The newest one, for a message; empty before the first."""
        return f"{self.op} #{self.sequence} of group '{self.group}'" if self.op else ""


def group_instance(group: str, ranks: Sequence[int]) -> str:
    """Groups of one name do not overlap, so the first rank tells them apart."""
    return f"{group}@{ranks[0]}" if ranks else group


def _pack(ranks: Sequence[int]) -> list[int] | dict[str, list[int]]:
    """Ranks of a group are nearly always evenly spaced: three numbers instead of thousands."""
    if len(ranks) > 3 and (stride := ranks[1] - ranks[0]):
        if [*ranks] == [*range(ranks[0], end := ranks[0] + len(ranks) * stride, stride)]:
            return {"range": [ranks[0], end, stride]}
    return list(ranks)


def _unpack(packed: list[int] | dict[str, list[int]]) -> tuple[int, ...]:
    return tuple(range(*packed["range"]) if isinstance(packed, dict) else packed)


def diagnose(
    mine: ProgressRecord, records: Mapping[int, ProgressRecord], alive: set[int], world_size: int, now: float
) -> str:
    """The line that names who is to blame; see [Note: what the records can tell].

    alive: ranks whose record still changes, or is a last word. now: wall time, s.
    """
    unseen = [rank for rank in range(world_size) if rank not in records and rank != mine.rank]
    if unseen:
        named = first_of([*map(str, unseen)])
        return f"rank {named} never reported: not started, or lost before the first record"
    others = [record for rank, record in sorted(records.items()) if rank != mine.rank]
    ended = [record for record in others if record.state == ENDED]
    for record in ended:
        if record.reason:
            return f"{record.name} ended at {record.place}: {record.reason}"
    if silent := [record for record in others if record.rank not in alive]:
        return "; ".join(_blame(record, mine, now, silent=True) for record in silent)
    everyone = {**records, mine.rank: mine}
    chain = [mine]  # of waiting: each waits for the next
    while found := _late_for(chain[-1], everyone, {one.rank for one in chain}):
        chain.append(found)
    if len(chain) > 1:
        return _blame(chain[-1], chain[-2], now)
    if ended:
        return "; ".join(_blame(record, mine, now) for record in ended)
    return _mismatch(mine, everyone) or _slowest(mine, everyone, now)


def _late_for(
    waiter: ProgressRecord, records: Mapping[int, ProgressRecord], seen: set[int]
) -> ProgressRecord | None:
    """The running member of the waiter's group with the fewest of its collectives, if fewer than the waiter has; else
    the one without a wait, where the waiter stands in one."""

    def begun(record: ProgressRecord) -> int:
        return record.sequences.get(waiter.instance, 0)

    if not waiter.op:
        return None
    members = [
        record
        for rank, record in records.items()
        if rank not in seen and record.state == RUNNING and (rank in waiter.members or not waiter.members)
    ]
    # A rank without a wait has begun this one ahead: members that wait do not hold it up.
    behind = [one for one in members if begun(one) < waiter.sequence and one.waits <= waiter.waits]
    if not behind and waiter.waits:
        behind = [one for one in members if not one.waits]
    return min(behind, key=lambda one: (begun(one), one.progressed_at), default=None)


def _blame(late: ProgressRecord, waiter: ProgressRecord, now: float, *, silent: bool = False) -> str:
    if not waiter.op or (waiter.members and late.rank not in waiter.members):
        text = f"{late.name} was lost at {waiter.place}"
    elif late.sequences.get(waiter.instance, 0) < waiter.sequence:
        text = f"{late.name} missed {waiter.collective} at {waiter.place}"
    else:
        text = f"{late.name} was lost during {waiter.collective} at {waiter.place}"
    if late.state == ENDED:
        return f"{text}; it had ended after step {late.step}"
    age_s = max(0.0, now - (late.published_at if silent else late.progressed_at))
    kind = "alive, but it makes no progress"
    if silent:
        kind = "killed, stopped, or busy without giving the interpreter free"
    return f"{text}; last heard of {age_s:.1f} s ago, then in {late.place} ({kind})"


def _mismatch(mine: ProgressRecord, records: Mapping[int, ProgressRecord]) -> str | None:
    """Ranks that called different collectives as the same number of one group."""
    for record in records.values():
        is_same_number = (record.instance, record.sequence) == (mine.instance, mine.sequence)
        if mine.op and is_same_number and record.op != mine.op:
            return (
                f"the ranks disagree on collective #{mine.sequence} of group '{mine.group}': {mine.name} "
                f"calls {mine.op} ({mine.place}), {record.name} calls {record.op} ({record.place})"
            )
    return None


def _slowest(mine: ProgressRecord, records: Mapping[int, ProgressRecord], now: float) -> str:
    """Nobody of the group is late: what is known."""
    running = [record for rank, record in records.items() if rank != mine.rank and record.state == RUNNING]
    behind = [record for record in running if record.step < mine.step]
    if not behind and mine.waits:
        behind = [record for record in running if not record.waits]
    if behind:
        return _blame(min(behind, key=lambda one: (one.step, one.progressed_at)), mine, now)
    return (
        f"no rank is behind: all have begun {mine.collective or 'the same step'} ({mine.place}); the connection "
        "between them broke, or their tensors differ in shape"
    )
