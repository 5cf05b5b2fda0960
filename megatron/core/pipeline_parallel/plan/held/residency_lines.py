"""What log and record say of weights and gradients in a plan: what a rank holds, and what a step moves. Pure."""

from __future__ import annotations

import dataclasses

from megatron.core.pipeline_parallel.plan.residency import Residency
from megatron.core.pipeline_parallel.plan.sizes import mib_text
from megatron.core.transport.traffic import Moved


@dataclasses.dataclass(frozen=True)
class HeldBytes:
    """The most that one rank holds of each kind in a step.

    at_rest: its parts of weights, main weights, gradients and moments, as between steps. gathered: whole weights.
    gradients: whole ones that grow, wait or are being reduced. activations: None where they are not known.
    """

    at_rest: int
    gathered: int
    gradients: int
    activations: int | None

    @property
    def total(self) -> int:
        return sum(self.kinds().values())

    def kinds(self) -> dict[str, int]:
        """Bytes by kind, in the order in which they are told."""
        held = {"at rest": self.at_rest, "gathered": self.gathered, "gradients": self.gradients}
        return held if self.activations is None else {**held, "activations": self.activations}


@dataclasses.dataclass(frozen=True)
class StepMoves:
    """What data parallelism moves in one step of one rank.

    gathers, reductions: collectives over the ranks that share its states. outer_gathers, outer_sums: over instances.
    payload_bytes: of all these, what they gathered or summed, each buffer counted once and whole. lane_share: of the
    step's time, how long the wire was busy. exposed_share: how long computations waited for it. step_s: the step's
    seconds. The last three are None where they are not known: of a plan, seconds are unknown until costs are measured.
    """

    gathers: int
    reductions: int
    outer_gathers: int
    outer_sums: int
    payload_bytes: int
    lane_share: float | None = None
    exposed_share: float | None = None
    step_s: float | None = None

    @classmethod
    def of(cls, gathers: Moved, reductions: Moved, outer_gathers: Moved, outer_sums: Moved) -> StepMoves:
        """Nothing is said of times."""
        every = gathers + reductions + outer_gathers + outer_sums
        calls = (gathers.calls, reductions.calls, outer_gathers.calls, outer_sums.calls)
        return cls(*calls, payload_bytes=every.payload_bytes)

    @property
    def exposed_s(self) -> float | None:
        """Seconds in which computations waited."""
        if self.exposed_share is None or self.step_s is None:
            return None
        return self.exposed_share * self.step_s


@dataclasses.dataclass(frozen=True)
class StepResidency:
    """Plan and measurement of one iteration, on the pipeline rank `rank`, the fullest by plan. measured: of the ranks
    of the world that run its row, the one that held the most."""

    iteration: int
    rank: int
    planned: HeldBytes
    measured: HeldBytes
    planned_moves: StepMoves
    measured_moves: StepMoves

    @property
    def _comparable(self) -> HeldBytes:
        """The plan's, without activations where these are not measured."""
        unknown = self.measured.activations is None
        return dataclasses.replace(self.planned, activations=None) if unknown else self.planned

    def lines(self) -> list[str]:
        """After an interval's line: its last iteration, by plan and as counted."""
        where = f"iteration {self.iteration}, pipeline rank {self.rank}"
        planned, measured = _moves(self.planned_moves), _moves(self.measured_moves)
        return [
            f" residency of {where}: planned {_held(self._comparable)}; measured {_held(self.measured)}",
            f" moves of {where}: planned {planned}; measured {measured}",
        ]

    def scalars(self) -> dict[str, float]:
        """The same for the record; what is not known has no field."""
        scalars: dict[str, float] = {}
        for prefix, held, moves in (
            ("planned", self._comparable, self.planned_moves),
            ("measured", self.measured, self.measured_moves),
        ):
            kinds = {f"{kind.replace(' ', '-')}-bytes": size for kind, size in held.kinds().items()}
            known = {
                "held-bytes": held.total,
                **kinds,
                "gathers": moves.gathers,
                "reductions": moves.reductions,
                "hsdp-all-gathers": moves.outer_gathers,
                "hsdp-all-reduces": moves.outer_sums,
                "moved-bytes": moves.payload_bytes,
                "lane-share": moves.lane_share,
                "exposed-share": moves.exposed_share,
                "exposed-time": moves.exposed_s,
            }
            scalars |= {f"{prefix}-{name}": value for name, value in known.items() if value is not None}
        return scalars


def residency_line(schedule: str, asked: Residency, rank: int, planned: HeldBytes) -> str:
    """At start-up. rank: the fullest pipeline rank."""
    outer = f" in {asked.outer} instances" if asked.outer > 1 else ""
    shared = f"{asked.strategy} over {_counted(asked.ways, 'rank')}{outer}, policy {asked.policy}"
    return f" > residency: {schedule}, {shared}; fullest is pipeline rank {rank}: {_held(planned)}"


def moves_line(rank: int, planned: StepMoves) -> str:
    """At start-up, below it."""
    return f" > a step moves on pipeline rank {rank}: {_moves(planned)}"


def _held(held: HeldBytes) -> str:
    kinds = ", ".join(f"{kind} {mib_text(size)}" for kind, size in held.kinds().items())
    return f"{mib_text(held.total)} ({kinds})"


def _moves(moves: StepMoves) -> str:
    outer = ((moves.outer_gathers, "HSDP all-gather"), (moves.outer_sums, "HSDP all-reduce"))
    counts = ((moves.gathers, "gather"), (moves.reductions, "reduction"), *(one for one in outer if one[0]))
    words = [*(_counted(*one) for one in counts), mib_text(moves.payload_bytes)]
    if moves.lane_share is not None:
        words.append(f"lane busy {100 * moves.lane_share:.2f}%")
    if moves.exposed_share is not None:
        seconds = "" if moves.exposed_s is None else f" ({moves.exposed_s:.4f} s)"
        words.append(f"exposed {100 * moves.exposed_share:.2f}%{seconds}")
    return ", ".join(words)


def _counted(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"
