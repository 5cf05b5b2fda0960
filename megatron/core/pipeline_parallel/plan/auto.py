"""Which schedule: the fastest that fits every rank's memory, and why."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from megatron.core.pipeline_parallel.plan.costs import CostModel
from megatron.core.pipeline_parallel.plan.ir import Plan, PlanError
from megatron.core.pipeline_parallel.plan.passes.lower import lower
from megatron.core.pipeline_parallel.plan.request import Request
from megatron.core.pipeline_parallel.plan.simulate import Simulation, simulate

# Merits that differ by less, as shares, are the same: then the plan that holds less is the better one.
_TOLERANCE = 1e-9


def _plainly(value: float) -> str:
    return f"{value:g}"


@dataclass(frozen=True)
class Words:
    """How a choice is told: costs know no units, callers do. time: of costs. activation: of peaks and limits."""

    time: Callable[[float], str] = _plainly
    activation: Callable[[float], str] = _plainly


@dataclass(frozen=True)
class Candidate:
    """One schedule of the choice.

    simulation: of the plan with transfers; None if the schedule cannot be had. over: by how much its activations are
    over a rank's limit, at that rank; None where they fit or no limit was given. problem: why it is not the choice, or
    what it is; one line.
    """

    name: str
    plan: Plan | None
    simulation: Simulation | None
    over: tuple[int, float] | None
    problem: str

    @property
    def fits(self) -> bool:
        """Whether it can be chosen."""
        return self.simulation is not None and self.over is None


@dataclass(frozen=True)
class Choice:
    """best: the schedule to run. candidates: all, as they were given. limits: by rank, None = none. words: of
    times and activations."""

    best: Candidate
    candidates: tuple[Candidate, ...]
    limits: tuple[float, ...] | None
    words: Words = Words()

    @property
    def plan(self) -> Plan:
        """The plan to run, without transfers."""
        assert self.best.plan is not None, f"{self.best.name} has no plan"
        return self.best.plan

    def lines(self) -> list[str]:
        """The reasons, one line a candidate, the fastest first; those without a plan last."""
        ordered = sorted(
            self.candidates,
            key=lambda one: one.simulation.cost if one.simulation is not None else float("inf"),
        )
        return [_line(one, self.best, self.limits, self.words) for one in ordered]


def choose(
    generators: Mapping[str, Callable[[Request], Plan]],
    request: Request,
    costs: Callable[[str, Plan], CostModel] | None = None,
    requests: Mapping[str, Request] | None = None,
    words: Words = Words(),
) -> Choice:
    """The fastest plan that fits `request.memory_limit` on every rank, of equals the one that holds less.

    generators: name -> generator; a generator that raises PlanError is no candidate, and its message is the reason.
    costs: the cost model of a candidate's placement; None: what the request it was made from says (`costs_on`).
    requests: for names whose placement needs a request of its own (costs by its own stages). Their limits count for
    the search, the limits of `request` for the choice. words: for the lines of the choice, and for the error.
    Raises PlanError if nothing fits, with all reasons.
    """
    candidates = tuple(
        _candidate(name, generate, (requests or {}).get(name, request), request.memory_limit, costs, words)
        for name, generate in generators.items()
    )
    fitting = [one for one in candidates if one.fits]
    if not fitting:
        reasons = "; ".join(f"{one.name}: {one.problem}" for one in candidates)
        raise PlanError(f"no pipeline schedule can run within the memory limit of each rank: {reasons}")
    return Choice(min(fitting, key=_merit), candidates, request.memory_limit, words)


def _candidate(
    name: str,
    generate: Callable[[Request], Plan],
    request: Request,
    limits: tuple[float, ...] | None,
    costs: Callable[[str, Plan], CostModel] | None,
    words: Words,
) -> Candidate:
    try:
        plan = generate(request)
        model = costs(name, plan) if costs is not None else request.costs_on(plan.placement)
        simulation = simulate(lower(plan, model), model)
    except PlanError as error:
        return Candidate(name, None, None, None, str(error).removeprefix(f"{name}: "))
    over = None
    for rank, (peak, limit) in enumerate(zip(simulation.peak_activation, limits or (), strict=bool(limits))):
        excess = peak - limit
        if excess > _TOLERANCE * max(1.0, limit) and (over is None or excess > over[1]):
            over = (rank, excess)
    if over is None:
        return Candidate(name, plan, simulation, None, "")
    rank, excess = over
    assert limits is not None, name
    held, allowed = (words.activation(size) for size in (simulation.peak_activation[rank], limits[rank]))
    message = f"rank {rank} would hold {held} of {allowed}"
    return Candidate(name, plan, simulation, over, message)


def _merit(one: Candidate) -> tuple[float, float, float]:
    """Cost, peak, messages: the least is the best."""
    assert one.simulation is not None, one.name
    simulation = one.simulation
    unit = _TOLERANCE * max(simulation.work, 1e-300)
    return (
        round(simulation.cost / unit) * unit,
        max(simulation.peak_activation),
        float(simulation.num_messages),
    )


def _line(one: Candidate, best: Candidate, limits: tuple[float, ...] | None, words: Words) -> str:
    """`zbv: cost 24.5, bubble 2.0%, peak 8 of 8 (rank 0): chosen`; the peak is that of the rank nearest its limit."""
    if one.simulation is None:
        return f"{one.name}: not possible: {one.problem}"
    simulation = one.simulation
    peaks = simulation.peak_activation
    if limits is None:
        rank = peaks.index(max(peaks))
        held = words.activation(peaks[rank])
    else:
        rank = max(range(len(peaks)), key=lambda at: peaks[at] / limits[at] if limits[at] else peaks[at])
        held = f"{words.activation(peaks[rank])} of {words.activation(limits[rank])}"
    text = f"{one.name}: cost {words.time(simulation.cost)}, bubble {100 * simulation.bubble_rate:.1f}%"
    text = f"{text}, peak {held} (rank {rank})"
    if one is best:
        return f"{text}: chosen"
    if one.over is not None:
        return f"{text}: too much memory: {one.problem}"
    assert best.simulation is not None, best.name
    slower = simulation.cost / best.simulation.cost - 1 if best.simulation.cost else 0.0
    if slower > _TOLERANCE:
        return f"{text}: {100 * slower:.1f}% slower than {best.name}"
    return f"{text}: as fast as {best.name}, and holds no less"
