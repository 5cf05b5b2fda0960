"""Is a plan right? Run after every pass, and before a plan is executed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from megatron.core.pipeline_parallel.plan import ir
from megatron.core.pipeline_parallel.plan.costs import CostModel
from megatron.core.pipeline_parallel.plan.held.units import StageUnits
from megatron.core.pipeline_parallel.plan.held.verify_residency import verify_lanes, verify_residency
from megatron.core.pipeline_parallel.plan.ir import IS_BESIDE, IS_COMPUTE, IS_VALIDATION, NAMES
from megatron.core.pipeline_parallel.plan.residency import Residency
from megatron.core.pipeline_parallel.plan.timeline import execute
from megatron.core.pipeline_parallel.plan.verify_state import verify_state
from megatron.core.words import counted

_DONE_F, _DONE_B, _DONE_W = 1, 2, 4
_DOES = {ir.F: _DONE_F, ir.B: _DONE_B, ir.W: _DONE_W, ir.BW: _DONE_B | _DONE_W}
SMALL = 1 << 20  # inputs that are walked even where operations are missing, to say which


def verify(
    plan: ir.Plan,
    costs: CostModel | None = None,
    *,
    deadlock: bool = True,
    stages: Sequence[StageUnits] | None = None,
    residency: Residency | None = None,
) -> None:
    """Check that a plan computes everything exactly once, in an order that can run.

    Every microbatch of every stage has one F, one B and one W (or a BW for both), on the stage's rank, W after B after
    F; if the plan has transfers, each input from another rank has one send after its producer and one receive before
    its consumer, alike at both ends and in one order a route; no deadlock although sends block until they are met; W
    (or BW) of a stage in microbatch order, unless the plan is not bitwise: gradients are
    added there alone. A forward_only plan has one F each and no backward. Operations of post-validation are all there
    or none, see `verify_state`. Parts of a W are together all units once.
    deadlock: False leaves that check to a pass that walks the plan next. stages, residency: what gathers and reductions
    are held to, see `verify_residency`; without, to the plan's own words (`verify_lanes`).
    Raises PlanError naming rank, place and operation.
    """
    if plan.num_microbatches < 1:
        raise ir.PlanError(f"a plan has at least 1 microbatch, not {plan.num_microbatches}")
    if len(plan.rows) != plan.placement.num_ranks:
        raise ir.PlanError(f"{len(plan.rows)} rows for {counted(plan.placement.num_ranks, 'rank')}")
    needed, found = plan.placement.num_stages * plan.num_microbatches, plan.num_ops
    if needed > max(found, SMALL):  # before anything is allocated by numbers that a file may claim
        raise ir.PlanError(
            f"{found} operations cannot compute {needed} inputs, one of each stage and microbatch"
        )
    costs = costs or CostModel.of_ranks(plan.placement)
    check = _Check(plan)
    for rank in range(len(plan.rows)):
        check.row(rank)
    check.all_computed()
    check.all_matched()
    verify_state(plan)
    if stages is not None:
        assert residency is not None, "units without what is asked of them"
        verify_residency(plan, stages, residency, costs)
    elif check.has_lanes or plan.residency is not None:
        verify_lanes(plan)
    if plan.bitwise and check.out_of_order:
        raise ir.PlanError(
            f"{check.out_of_order}: weight gradients of a stage must be added in increasing microbatch order, or the"
            " plan must say that it is not bitwise"
        )
    if deadlock:
        _no_deadlock(plan, costs)


class _Check:
    """One pass over all rows. Inputs are numbered: stage that needs it x microbatch, backward ones behind."""

    def __init__(self, plan: ir.Plan) -> None:
        self.plan, self.total = plan, plan.num_microbatches
        self.ranks = plan.placement.ranks()
        self.size = len(self.ranks) * self.total
        self.by_message = plan.has_transfers
        self.state = bytearray(self.size)
        self.sent = [-1] * (2 * self.size)
        self.received = [-1] * (2 * self.size)
        # (sender, receiver, kind of send) -> inputs in order, where they are sent and where they are received
        self.routes: dict[tuple[int, int, int], tuple[list[int], list[int]]] = defaultdict(lambda: ([], []))
        # By stage, by unit and behind these for all together, the last microbatch whose W (or BW) was there; by input,
        # units of a W that has parts, a bit each.
        words = plan.residency
        self.named = words is not None and len(words.units) == len(self.ranks)
        self.units = [len(names) for names in words.units] if words and self.named else [0] * len(self.ranks)
        self.added = [[-1] * (count + 1) for count in self.units]
        self.parts: dict[int, int] = {}
        self.has_lanes = False
        self.out_of_order = ""
        self.states: list[int] = []  # numbers of post-validation's messages at both ends, -1 of what is none

    def row(self, rank: int) -> None:
        """Check one rank's operations in order."""
        row = self.plan.rows[rank]
        mine = [one == rank for one in self.ranks]
        partner = -1
        for place, op in enumerate(row):
            kind, stage, microbatch, part, first, _, _, pair = op
            if IS_VALIDATION[kind]:
                self.states.append(pair)
                continue
            if IS_BESIDE[kind]:
                self.has_lanes = True
                continue
            if part or (first >= 0 and not ir.KINDS[kind].has_units):
                wrong = "only a W has parts, of units"
            elif not 0 <= stage < len(mine) or not mine[stage]:
                wrong = "the stage is not on this rank"
            elif not 0 <= microbatch < self.total:
                wrong = f"microbatches are 0 to {self.total - 1}"
            elif not IS_COMPUTE[kind]:
                wrong = self._transfer(rank, op)
            else:
                wrong = self._compute(rank, op)
                if pair >= 0:
                    alone, partner = place != partner, ir.partner_of(row, place)
                    if alone and partner < 0:
                        wrong = "overlaps with nothing beside it"
            if wrong:
                raise ir.wrong_op(rank, place, op, wrong)
            if ir.WRITES_GRADS[kind] and self._behind_later(op) and not self.out_of_order:
                self.out_of_order = f"rank {rank}, place {place}, {ir.op_text(op)}"

    def _behind_later(self, op: ir.RawOp) -> bool:
        """Whether weight gradients of a later microbatch were added before, to any of the units."""
        added, mine = self.added[op[1]], slice(op[4], op[5]) if op[4] >= 0 else slice(None)
        latest = max(added[mine])
        added[mine] = [op[2]] * len(added[mine])
        return op[2] < latest

    def _compute(self, rank: int, op: ir.RawOp) -> str:
        """What is wrong with a computation, or nothing."""
        kind, stage, microbatch, _, first, end, _, _ = op
        at, gives = stage * self.total + microbatch, _DOES[kind]
        state, units, part = self.state[at], self.units[stage], 0
        if self.plan.forward_only and kind != ir.F:
            return "is no forward, and the plan is forward_only"
        if first >= 0:
            if not self.named:
                return "the plan does not say which units a stage has"
            if end > units:
                return f"stage {stage} has {units} units"
            part = (1 << end) - (1 << first)
        done = self.parts.get(at, 0) if gives & _DONE_W else 0
        if state & gives or (done & part if part else done):
            return "is there twice"
        if kind != ir.F and not state & _DONE_F:
            return f"comes before {stage}F{microbatch}"
        if kind == ir.W and not state & _DONE_B:
            return f"comes before {stage}B{microbatch}"
        if part:
            self.parts[at] = done | part
        if not part or done | part == (1 << units) - 1:
            self.state[at] = state | gives
        need, source = (at, stage - 1) if kind == ir.F else (at + self.size, stage + 1)
        if kind == ir.W or not 0 <= source < len(self.ranks):
            return ""
        missing = self.by_message and self.ranks[source] != rank and self.received[need] < 0
        return f"has no receive before it for its input from stage {source}" if missing else ""

    def _transfer(self, rank: int, op: ir.RawOp) -> str:
        """What is wrong with one end of a message, or nothing."""
        kind, stage, microbatch, peer, pair = op[0], op[1], op[2], op[6], op[7]
        sends, forward = kind in (ir.SEND_F, ir.SEND_B), kind in (ir.SEND_F, ir.RECV_F)
        other = stage + 1 if kind in (ir.SEND_F, ir.RECV_B) else stage - 1
        if not 0 <= other < len(self.ranks) or self.ranks[other] == rank:
            return "no other rank needs this" if sends else "this comes from no other rank"
        if peer != self.ranks[other]:
            return f"stage {other} is on rank {self.ranks[other]}, not {peer}"
        if sends and not self.state[stage * self.total + microbatch] & (_DONE_F if forward else _DONE_B):
            return f"comes before {stage}{'F' if forward else 'B'}{microbatch}"
        need = (other if sends else stage) * self.total + microbatch + (0 if forward else self.size)
        pairs = self.sent if sends else self.received
        if pairs[need] >= 0:
            return "is there twice"
        if pair < 0:
            return "has no message number"
        pairs[need] = pair
        name = ir.SEND_F if forward else ir.SEND_B
        ends = (rank, peer) if sends else (peer, rank)
        self.routes[(*ends, name)][not sends].append(need)
        return ""

    def all_computed(self) -> None:
        """Nothing is missing."""
        complete = _DONE_F if self.plan.forward_only else _DONE_F | _DONE_B | _DONE_W
        if self.state.count(complete) == self.size:
            return
        at = next(at for at, state in enumerate(self.state) if state != complete)
        stage, microbatch = divmod(at, self.total)
        missing = complete & ~self.state[at]
        absent = [f"{stage}{NAMES[kind]}{microbatch}" for kind in (ir.F, ir.B, ir.W) if missing & _DOES[kind]]
        raise ir.PlanError(f"rank {self.ranks[stage]}: {' and '.join(absent)} is missing")

    def all_matched(self) -> None:
        """Every send has its receive, with one number of its own, in one order at both ends of a route."""
        if self.sent != self.received:
            need = next(need for need in range(2 * self.size) if self.sent[need] != self.received[need])
            backward, at = divmod(need, self.size)
            stage, microbatch = divmod(at, self.total)
            name, source = ("B", stage + 1) if backward else ("F", stage - 1)
            send, receive = f"{source}SEND_{name}{microbatch}", f"{stage}RECV_{name}{microbatch}"
            here, there = f"rank {self.ranks[stage]}", f"rank {self.ranks[source]}"
            if self.sent[need] < 0:
                raise ir.PlanError(f"{here}: {receive} has no {send} on {there}")
            if self.received[need] < 0:
                raise ir.PlanError(f"{there}: {send} has no {receive} on {here}")
            raise ir.PlanError(
                f"{send} is message {self.sent[need]} and {receive} is message {self.received[need]}"
            )
        states = [pair for pair in self.states if pair >= 0]  # at both ends: each number twice
        numbers = [pair for pair in self.sent if pair >= 0] + sorted(states)[::2]
        if len(numbers) != len(set(numbers)):
            raise ir.PlanError("two messages have the same number")
        for (sender, receiver, kind), ends in self.routes.items():
            for place, (one, other) in enumerate(zip(*ends, strict=True)):
                if one != other:
                    raise ir.PlanError(
                        f"message {place} of {NAMES[kind]} from rank {sender} to rank {receiver} is of microbatch "
                        f"{one % self.total} where it is sent and of microbatch {other % self.total} where it is "
                        "received"
                    )


def _no_deadlock(plan: ir.Plan, costs: CostModel) -> None:
    stopped = execute(plan, costs, blocking_sends=True).stopped
    if stopped:
        words = [
            f"rank {rank} stops at place {place}, {ir.op_text(plan.rows[rank][place])}, waiting for {what}"
            for rank, (place, what) in stopped.items()
        ]
        more = f"; and {len(words) - 4} more ranks" if len(words) > 4 else ""
        raise ir.PlanError("deadlock: " + "; ".join(words[:4]) + more)
