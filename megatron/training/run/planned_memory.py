"""What a rank was planned to hold, beside what it holds: at the start, after two steps, and when memory runs out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from megatron.core import machine
from megatron.core.memory_tracker import GRADIENTS, PERSISTENT, TRANSIENT
from megatron.core.pipeline_parallel.plan.ir import PlanError
from megatron.core.transport.peer_loss import PeerLostError
from megatron.core.words import size_text
from megatron.estimate.description import ModelDescription, ModelPiece
from megatron.estimate.own_description import OwnDescription
from megatron.estimate.peak import kinds_text, peak_lines
from megatron.estimate.rank_parts import BETWEEN_STEPS, SUMS, RankAccount
from megatron.training.report import metrics
from megatron.training.report.session import Session
from megatron.training.run.parts import RunParts
from megatron.training.run.rehearse.comparison import (
    full_account,
    parts_of,
    step_bytes,
)
from megatron.training.state import StepTask


class PlannedMemory:
    """Made on every rank, at the start; communicates then, and in `after_step`, over the world. num_microbatches: of
    the first step. Without a description of the model, or of one that is not it, nothing is known."""

    def __init__(self, parts: RunParts, num_microbatches: int) -> None:
        self._parts, self._steps = parts, 0
        parallel = parts.session.config.parallel
        # Before so many steps not all is in use.
        self._behind = 2 + parallel.post_validation_after * parallel.enable_optimizer_post_validation
        self._account, self._why = _account(parts, num_microbatches)
        # By pipeline rank: at rest, at most, and where.
        self._ranks: dict[int, tuple[int, int, str]] = {}
        if parts.session.config.description is not None:
            own = self._account
            mine = None if own is None else [sum(own.at_rest.values()), own.peak.total, own.peak.operation]
            steps = {} if own is None else {**own.step, **own.beside}
            by_rank: dict[int, Mapping[str, Mapping[str, int]]] = {}
            for rank, planned, step in parts.session.gather([parts.session.ps.pp_rank, mine, steps]):
                self._ranks |= {} if planned is None else {rank: tuple(planned)}
                by_rank[rank] = step
            self._say_what_exceeds(by_rank)

    def _say_what_exceeds(self, by_rank: Mapping[int, Mapping[str, Mapping[str, int]]]) -> None:
        """Plans are made under --rank-memory-limit, which the optimizer's step, evaluations, saves and loads may go
        beyond all the same. by_rank: of pipeline ranks, the most that each of them holds, by kind."""
        limit = self._parts.session.config.parallel.rank_memory_limit
        if not isinstance(limit, int):
            return
        for rank, step in by_rank.items():
            part, held = max(step.items(), key=lambda item: sum(item[1].values()), default=("", {}))
            if (total := sum(held.values())) > limit:
                of_step = "" if part in (*BETWEEN_STEPS, SUMS) else " of the optimizer's step"
                self._parts.session.print_rank_0(
                    f"WARNING: --rank-memory-limit {limit}: on pipeline rank {rank} {part}{of_step} "
                    f"holds {size_text(total)} ({kinds_text(held)}), more than the limit; shard further, or raise it"
                )

    def report(self) -> None:
        """--report-theoretical-memory, and of a rank without peers."""
        session = self._parts.session
        if not _is_wanted(session):
            return
        lines = [
            metrics.theoretical_memory_line(rank, *self._ranks[rank][:2]) for rank in sorted(self._ranks)
        ]
        session.print_rank_0(*(lines or [f"Theoretical memory footprints are not known: {self._why}"]))

    def after_step(self, task: StepTask) -> None:
        """What the fullest pipeline rank holds of each kind at most, beside what was planned; once, when a second step
        has run and all is in use."""
        parts, ps = self._parts, self._parts.session.ps
        self._steps += 1
        if self._steps != self._behind or not (self._ranks or _is_wanted(parts.session)):
            return
        tracker, profiler = parts.engine.memory_tracker, parts.pipeline.profiler
        found = Counter(
            {kind: tracker.peak(kind) for kind in (*PERSISTENT, *TRANSIENT) if kind not in GRADIENTS}
        )
        found["grads"] = tracker.most_gradients
        step = None if profiler is None else profiler.step_of(task.iteration)
        found["activations"] = 0 if step is None else step.peak_bytes
        own = None if self._account is None else self._account.most
        told = parts.session.gather([ps.pp_rank, own, dict(+found)])
        if self._ranks:
            fullest = max(self._ranks, key=lambda rank: self._ranks[rank][1])
        else:
            fullest = max(told, key=lambda one: sum(one[2].values()))[0]
        planned, measured = next(one[1:] for one in told if one[0] == fullest)
        planned = planned or {}
        line = metrics.memory_by_kind_line(task.iteration, fullest, planned, measured)
        parts.session.print_rank_last(line, brief="")
        parts.reporter.writers.event(
            "memory", task.iteration, rank=fullest, planned=planned, measured=measured
        )

    def when_full(self) -> list[str]:
        """What this rank holds by kind, and what was planned, for an error of memory."""
        tracker, device = self._parts.engine.memory_tracker, self._parts.session.device
        held = {kind: tracker.live(kind) for kind in (*PERSISTENT, *TRANSIENT) if tracker.live(kind)}
        used = size_text(device.memory().allocated_bytes)
        lines = [f"it holds {used}, of which the engine {kinds_text(held)}"]
        if self._account is not None:
            first, *rest = peak_lines(self._account.peak)
            lines += [f"planned: {first}", *rest]
        return lines

    def when_lost(self, error: BaseException) -> list[str]:
        """What a lost rank was to hold, beside what its container has: the kernel kills without a word."""
        session = self._parts.session
        if not isinstance(error, PeerLostError) or session.device.kind != "cpu":
            return []
        peers = [rank for rank in error.ranks if rank != error.rank] if error.peer is None else [error.peer]
        known = {rank: self._ranks.get(session.ps.grid.coordinates(rank)["pp"]) for rank in peers}
        planned = [one[1:] for one in known.values() if one is not None]
        if not planned:
            return []
        most, operation = max(planned)
        who = f"rank {peers[0]}" if len(peers) == 1 else "the lost rank"
        room, ranks = size_text(machine.total_bytes()), session.env.local_world_size
        told = f"{who} was planned to hold at most {size_text(most)}, in {operation}; this machine or its control "
        told += f"group has {room} for {ranks} of the ranks: what the kernel kills for memory leaves no other trace"
        return [told]


def _is_wanted(session: Session) -> bool:
    """Whether somebody asks for what is planned."""
    return session.config.logging.report_theoretical_memory or session.ps.is_fake


def _account(parts: RunParts, num_microbatches: int) -> tuple[RankAccount | None, str]:
    """Of this rank; None where nobody has looked at its model, and why."""
    session, engine, spec = parts.session, parts.engine, parts.pipeline.spec
    config, description = session.config, session.config.description
    seen: ModelDescription | Mapping[int, ModelPiece]
    if isinstance(description, OwnDescription):
        seen = description.stages(spec.placement)
    elif description is not None and engine.is_described:
        seen = (description.gathered or description) if spec.keeps_gathered else description
    else:
        why = session.undescribed
        return None, f"{why}: what it holds is measured alone" if why else "nobody asks"
    held = parts_of(config, spec, seen, engine.model, step_bytes(config, engine))
    own = session.ps.pp_rank, held, engine.model.buffer
    try:
        return full_account(config, parts.pipeline.planner, num_microbatches, *own), ""
    except PlanError as error:  # which whoever runs it says
        return None, str(error)
