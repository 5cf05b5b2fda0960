"""What a pipeline rank holds behind every operation of its row, by kind, from plain data (floor 0, pure).

The plan's automaton (`RowWalk`) says when weights are gathered and gradients summed; this adds what else there is: the
activations of pieces, messages, batches, what sums take beside gradients, gradients at rest without memory.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from megatron.core.pipeline_parallel.plan import ir
from megatron.core.pipeline_parallel.plan.held.lanes import LaneCosts, Lanes
from megatron.core.pipeline_parallel.plan.held.residency_walk import RowWalk
from megatron.core.pipeline_parallel.plan.held.sends import Key, most_sends, send_completion
from megatron.core.pipeline_parallel.plan.held.units import RankUnits, StageUnits, Use
from megatron.core.pipeline_parallel.plan.ir import BW, IS_COMPUTE, B, F, Plan, RawOp, W, op_text
from megatron.core.pipeline_parallel.plan.residency import Residency
from megatron.estimate.description import EVALUATED, ModelPiece
from megatron.estimate.hidden_states import (
    SharedStates,
    batch_ends,
    filed_by_units,
    filed_from_outside,
    is_of,
    joined,
    without_zeros,
)
from megatron.estimate.peak import MOST_HOLDERS, MemoryHolder, Peak, step_peak
from megatron.estimate.rank_parts import SUMS, HeldMoment, RankAccount, RankParts

_NAMES = {F: "F", B: "B", W: "W", BW: "BW"}
_SENDS = (ir.SEND_F, ir.SEND_B)
# What computes, which message brings its input, and to which stage beside its own the result goes.
_TAKES = {F: (ir.RECV_F, 1), B: (ir.RECV_B, -1), BW: (ir.RECV_B, -1)}


def rank_account(
    plan: Plan, rank: int, units: RankUnits | None, residency: Residency | None, parts: RankParts
) -> RankAccount:
    """units, residency: None where data parallelism moves nothing. Raises PlanError for a plan that is wrong."""
    if units is None or residency is None:
        nothing = StageUnits((), (), ())
        units = RankUnits(rank, plan.placement, (nothing,) * plan.placement.num_stages)
        residency = Residency("no_shard")
    walk = _AccountWalk(plan, rank, units, residency, parts)
    walk.run()
    for name in () if walk.step else parts.step:
        walk.take(name)
    peaks = [walk.peak_moment(), *(step_peak(rank, *part) for part in walk.step.items())]
    most = max(peaks, key=lambda peak: peak.total)
    return RankAccount(rank, plan.rows[rank], walk.at_rest, tuple(walk.moments), walk.step, most)


class _AccountWalk(RowWalk):
    """Collects a `HeldMoment` at each boundary."""

    def __init__(
        self, plan: Plan, rank: int, units: RankUnits, residency: Residency, parts: RankParts
    ) -> None:
        lanes = Lanes(tuple(units.stages), residency, LaneCosts())
        super().__init__(plan.rows[rank], units, lanes, every=True, forward_only=plan.forward_only)
        self._plan, self._rank, self._parts = plan, rank, parts
        self._ranks = plan.placement.ranks()
        self.moments: list[HeldMoment] = []
        self.step: dict[str, dict[str, int]] = {}
        # The step before is not decided on: gradients have memory until it is, and copies to take it back to.
        self._undecided = any(op[0] == ir.VALIDATE for op in self.row)
        self._copies = self._undecided * parts.snapshot_bytes
        self._whole = {stage: joined(pieces) for stage, pieces in parts.stages.items()}
        lasting = sum(piece.lasting_bytes for piece in self._whole.values())
        self.at_rest = without_zeros({**parts.at_rest, "activations": lasting, "snapshot": self._copies})
        self._started = Counter[str]()  # units: how often they were summed
        self._exchanged: dict[int, int] = {}  # by unit, of its sum under way
        # Activations: by (stage, microbatch), what only the stage itself has.
        self._own: Counter[tuple[int, int]] = Counter()
        self._shared, self._lasting = SharedStates(), lasting
        self._filed: dict[tuple[int, int], list[tuple[frozenset[int], int]]] = {}
        self._drawn = parts.drawn if parts.batch_bytes else 0
        # The computation under way: its place, and by access what it has left and what it makes at most.
        self._under: tuple[int, RawOp] | None = None
        self._progress: list[tuple[int, int]] = []
        self._all_progress: dict[tuple[int, int, int, int], list[tuple[int, int]]] = {}
        # Messages
        self._ends = batch_ends(self.row)
        self._completed = send_completion(plan, rank)
        self._sends: dict[Key, Key] = {}  # under way, the oldest first: which tensor each carries
        self._proven: list[Key] = []
        self._most_sends = most_sends(plan.placement.num_ranks)
        # The moment with the most, and what it takes to name who had it.
        self._phases: dict[tuple[int, int], str] = {}
        self._most = -1
        self._fullest: tuple[HeldMoment, dict[tuple[int, int], str], str, list[str]]

    # --- the row

    def do(self, place: int, op: RawOp, clock: float) -> float:
        if IS_COMPUTE[op[0]]:
            self._begin_computation(place, op)
        clock = super().do(place, op, clock)
        if op[0] in (ir.VALIDATE, ir.STEP):
            self._decide(op[0])
            self._note(place, -1, clock)
        if ir.IS_TRANSFER[op[0]]:
            self._transfer(place, op)
            for posted in self._ends.get(place, ()):
                self._note(posted, -1, clock)
        return clock

    def end(self, clock: float) -> None:
        for key in list(self._sends):
            self._shared.let_go(self._sends.pop(key), "sent")
        super().end(clock)

    def take(self, name: str) -> None:
        """A part of what ends a step."""
        self.step[name] = dict(Counter(self._held(-1)) + Counter(self._parts.step.get(name, {})))

    def _decide(self, kind: int) -> None:
        """The step before may be taken back and taken rightly; this one is taken, and not decided on."""
        if kind == ir.VALIDATE:
            self._copies = 0
            self.take("rollback")
        else:
            for name in (SUMS, "grad-norm", "optimizer"):
                self.take(name)
            self._copies = self._parts.snapshot_bytes
        self._undecided = kind == ir.STEP

    def _note(self, place: int, access: int, clock: float) -> None:
        if access < 0 and self._under is not None and self._under[0] == place:
            self._end_computation()
        super()._note(place, access, clock)
        moment = HeldMoment(place, access, self._held(access))
        self.moments.append(moment)
        if moment.total > self._most:
            self._most = moment.total
            self._fullest = moment, dict(self._phases), self._in_use(access), self._whole_units()

    def _begin(self, place: int, op: RawOp, access: int, use: Use, clock: float) -> float:
        for unit in use.begins if self._grads_sharded else ():
            slot = self._parts.slots.get(self.units.units[unit].name)
            inner = [one for _, one, (size, _) in self.under.entries if size and isinstance(one, int)]
            others = {self._parts.slots.get(self.units.units[one].name) for one in inner if one != unit}
            if slot is not None and unit not in self._gradients.whole and slot in others:
                for one in inner:
                    self.under.of(one)
        return super()._begin(place, op, access, use, clock)

    def _effect(self, place: int, op: RawOp, unit: int, in_use: tuple[int, ...]) -> int:
        if op[0] in (ir.REDUCE, ir.HSDP_ALL_REDUCE):
            name, outer = self.units.units[unit].name, op[0] == ir.HSDP_ALL_REDUCE
            again = bool(self._started[name]) and not outer
            self._exchanged[unit] = self._parts.exchange.get((name, outer, again), 0)
            self._started[name] += not outer
        return super()._effect(place, op, unit, in_use)

    def _held(self, access: int) -> dict[str, int]:
        parts, units = self._parts, self.units.units
        left, made = (
            self._progress[min(access, len(self._progress) - 1)] if access >= 0 and self._progress else (0, 0)
        )
        without = sum(parts.resting.get(one.name, 0) for one in units if not self._started[one.name])
        without *= not self._undecided
        under_way = {unit for _, unit, _ in self.under.entries if isinstance(unit, int)}
        return without_zeros(
            {
                **parts.at_rest,
                "main_grads": parts.at_rest.get("main_grads", 0) - without,
                "gathered": self._gathered_bytes(),
                "grads": self._grad_bytes(),
                "exchange": sum(self._exchanged.get(unit, 0) for unit in under_way),
                "activations": self._lasting + sum(self._own.values()) + self._shared.kept + left,
                "messages": self._shared.in_messages,
                "batches": self._drawn * parts.batch_bytes,
                "temporaries": made,
                "snapshot": self._copies,
            }
        )

    def _gathered_bytes(self) -> int:
        if not self._parts.slots:
            return self._whole_weights
        units = self.units.units
        own = (one for one in self._readable if units[one].name not in self._parts.slots)
        return sum(units[one].weight_bytes for one in own) if self._weights_sharded else 0

    def _grad_bytes(self) -> int:
        grads, units, slots = self._gradients, self.units, self._parts.slots
        held = grads.growing + grads.under_way
        if slots:
            taken = [unit for _, unit, (size, _) in self.under.entries if size and isinstance(unit, int)]
            held -= sum(
                units.grad_bytes[one] for one in (*grads.whole, *taken) if units.units[one].name in slots
            )
        return held

    # --- computations

    def _begin_computation(self, place: int, op: RawOp) -> None:
        kind, stage, microbatch = op[:3]
        self._under = place, op
        if kind == F:
            drawn = self._parts.drawn + microbatch + 1
            self._drawn = max(self._drawn, drawn) if self._parts.batch_bytes else 0
        if kind in _TAKES:
            receive, _ = _TAKES[kind]
            key = (receive, stage, microbatch)
            if key in self._completed:
                self._proven += self._completed[key]
        self._progress = self._progress_of(op)

    def _progress_of(self, op: RawOp) -> list[tuple[int, int]]:
        """By access of a computation."""
        kind, stage = op[:2]
        key = kind, stage, op[4], op[5]
        if key in self._all_progress:
            return self._all_progress[key]
        pieces = list(self._parts.stages[stage])
        ordered = pieces if kind == F else pieces[::-1]
        if kind == W and op[4] >= 0:
            ordered = self._of_units(op, pieces)[::-1]
        evaluates = self._plan.forward_only
        name, left, found = EVALUATED if evaluates else _NAMES[kind], 0, list[tuple[int, int]]()
        if len(ordered) == len(self.units.uses(op)):
            for piece in ordered:
                found.append((left, piece.most_bytes[name]))
                left = left * (not evaluates) + piece.left_bytes(name)
        elif ordered:
            found = [(0, self._whole[stage].most_bytes[name])]
        self._all_progress[key] = found
        return found

    def _end_computation(self) -> None:
        assert self._under is not None, "no computation is under way"
        (_, op), self._under, self._progress = self._under, None, []
        kind, stage, microbatch = op[:3]
        whole, mine = self._whole[stage], (stage, microbatch)
        self._phases[mine] = {F: "kept_bytes", B: "filed_bytes"}.get(kind, "")
        ends, shared = whole.ends, self._shared
        back = filed_from_outside(whole)
        first, last = stage == 0, stage == len(self._ranks) - 1
        given, made = (ir.RECV_F, stage, microbatch), (ir.RECV_F, stage + 1, microbatch)
        grad, handed_back = (ir.RECV_B, stage, microbatch), (ir.RECV_B, stage - 1, microbatch)
        if kind == F:
            keeps = not self._plan.forward_only
            self._own[mine] = keeps * (whole.kept_bytes - ends.keeps_input * ends.input_bytes)
            if not last:
                self._own[mine] -= keeps * ends.keeps_output * ends.output_bytes
                way, keepers = self._way(stage + 1), [f"F{mine}"] * (keeps and ends.keeps_output)
                shared.hold(made, ends.output_bytes, way, *keepers)
            if not first:
                if keeps and ends.keeps_input:
                    shared.hold(given, ends.input_bytes, f"F{mine}")
                shared.let_go(given, "arriving")
        elif kind in (B, BW):
            split = kind == B
            self._own[mine] = whole.filed_bytes - back - ends.files_back * ends.input_bytes if split else 0
            shared.let_go(made, f"F{mine}")
            shared.let_go(given, f"F{mine}")
            if not last:
                if split and back:
                    shared.hold(grad, ends.output_bytes, f"B{mine}")
                shared.let_go(grad, "arriving")
            if not first:
                files = split and ends.files_back
                shared.hold(
                    handed_back, ends.input_bytes, self._way(stage - 1), *([f"B{mine}"] if files else [])
                )
            if split:
                names = [one.name for one in self.units.stages[stage].units]
                own = self._parts.filed.get(stage)
                self._filed[mine] = list(own or filed_by_units(self._parts.stages[stage], names))
        else:
            filed, units = self._filed[mine], range(op[4], op[5])
            left = [(rest, size) for of, size in filed if (rest := of.difference(units)) or not of]
            if op[4] >= 0 and any(rest for rest, _ in left):
                self._own[mine] -= sum(size for _, size in filed) - sum(size for _, size in left)
                self._filed[mine] = left
                return
            self._own[mine] = 0
            shared.let_go(grad, f"B{mine}")
            shared.let_go(handed_back, f"B{mine}")
        if not self._own[mine]:
            del self._own[mine]

    def _of_units(self, op: RawOp, pieces: Sequence[ModelPiece]) -> list[ModelPiece]:
        """Pieces of the units that a W in parts is of."""
        names = [one.name for one in self.units.stages[op[1]].units[op[4] : op[5]]]
        return [piece for piece in pieces if any(is_of(piece, name) for name in names)]

    def _way(self, stage: int) -> str:
        """How what goes to a stage is held: by who sends it, or straight by the other stage."""
        return "arriving" if self._ranks[stage] == self._rank else "leaving"

    # --- messages

    def _transfer(self, place: int, op: RawOp) -> None:
        kind, stage, microbatch = op[:3]
        if kind in _SENDS:
            receive, step = (ir.RECV_F, 1) if kind == ir.SEND_F else (ir.RECV_B, -1)
            tensor = (receive, stage + step, microbatch)
            ends = self._whole[stage].ends
            self._shared.hold(tensor, ends.output_bytes if kind == ir.SEND_F else ends.input_bytes, "sent")
            self._shared.let_go(tensor, "leaving")
            self._sends[op[:3]] = tensor
        else:
            ends = self._whole[stage].ends
            size = ends.input_bytes if kind == ir.RECV_F else ends.output_bytes
            self._shared.hold(op[:3], size, "arriving")
        if place not in self._ends:
            return
        while self._proven:
            self._through(self._proven.pop())
        while len(self._sends) > self._most_sends:
            self._through(next(iter(self._sends)))

    def _through(self, send: Key) -> None:
        if (tensor := self._sends.pop(send, None)) is not None:
            self._shared.let_go(tensor, "sent")

    # --- the peak

    def _in_use(self, access: int) -> str:
        """The units of the access under way."""
        if self._under is None or access < 0:
            return ""
        op = self._under[1]
        names = [self.units.units[unit].name for unit in self.units.uses(op)[access].units]
        return " and ".join(names)

    def _whole_units(self) -> list[str]:
        """Whose weights are gathered."""
        return [self.units.units[unit].name for unit in self._readable] if self._weights_sharded else []

    def peak_moment(self) -> Peak:
        moment, phases, unit, whole = self._fullest
        found, rest = Counter[tuple[str, str]](), dict(moment.held)
        for (stage, _), figures in phases.items():
            for piece in self._parts.stages[stage] if figures else ():
                for path, module in piece.modules.items():
                    found["activations", path] += getattr(module, figures)
        found += Counter(
            {("gathered", one.name): one.weight_bytes for one in self.units.units if one.name in whole}
        )
        for kind in ("activations", "gathered"):
            rest.pop(kind, None)
        found += Counter({(kind, ""): size for kind, size in rest.items()})
        holders = sorted(
            (MemoryHolder(*key, size) for key, size in found.items()), key=lambda one: -one.num_bytes
        )
        where = op_text(self._under_at(moment))
        return Peak(self._rank, where, unit, moment.held, tuple(holders[:MOST_HOLDERS]))

    def _under_at(self, moment: HeldMoment) -> RawOp:
        """The operation that a moment belongs to: of one in the middle of a computation that computation."""
        place = moment.place
        while moment.access >= 0 and not IS_COMPUTE[self.row[place][0]]:
            place += 1
        return self.row[place]
