"""What tools/show_schedule.py says of data parallelism: a plan's gathers and reductions, what they move and hold.

Units are layers of equal size. What they take is counted in layers, or in bytes where --layer-bytes says how many a
layer has.
"""

from __future__ import annotations

import argparse
import dataclasses

from megatron.core.pipeline_parallel.plan.build import build_plan
from megatron.core.pipeline_parallel.plan.costs import CostModel
from megatron.core.pipeline_parallel.plan.held.lanes import LaneCosts, Lanes
from megatron.core.pipeline_parallel.plan.held.residency_walk import RowWalk
from megatron.core.pipeline_parallel.plan.held.units import Share, StageUnits, UnitCosts, groups_of
from megatron.core.pipeline_parallel.plan.held.verify_residency import verify_residency
from megatron.core.pipeline_parallel.plan.ir import IS_BESIDE, IS_COMPUTE, PlanError, Row, op_text
from megatron.core.pipeline_parallel.plan.passes.add_residency import add_residency
from megatron.core.pipeline_parallel.plan.placement import Placement
from megatron.core.pipeline_parallel.plan.request import Request
from megatron.core.pipeline_parallel.plan.residency import Residency, over_ranks
from megatron.core.pipeline_parallel.plan.schedules import AUTO
from megatron.core.pipeline_parallel.plan.simulate import Simulation, simulate
from megatron.core.sharding_table import RankGroup
from megatron.core.words import counted, plain, share_text, size_text


@dataclasses.dataclass(frozen=True)
class Shown:
    """A schedule on the clock with its operations of data parallelism. walks: what each rank's row moves and holds.
    unit: of what it moves and holds."""

    simulation: Simulation
    residency: Residency
    stages: tuple[StageUnits, ...]
    walks: tuple[RowWalk, ...]
    unit: str

    def peak(self, rank: int) -> float:
        """The most that a rank holds in all, states at rest too, where activations are bytes."""
        return self.simulation.timeline.lanes[rank].units.bytes_at_rest + self.walks[rank].peak.total


def check(args: argparse.Namespace) -> None:
    """Raises PlanError where the flags ask for what is said of one schedule's plan, beside something else."""
    given = [args.data_parallel_size, args.num_layers]
    if given == [None, None]:
        alone = [flag for flag, (value, default) in _of_lanes(args).items() if value != default]
        if alone:
            raise PlanError(
                f"{', '.join(alone)} without --data-parallel-size and --num-layers, of ranks that share: give both"
            )
        return
    if None in given:
        raise PlanError("gathers and reductions take both --data-parallel-size and --num-layers")
    of_one = len(args.schedule or []) == 1 and args.schedule != ["all"]
    if not of_one or args.measured or args.pictures or args.format not in ("text", "json", "html"):
        raise PlanError(
            "--data-parallel-size and --num-layers show the plan of one --schedule, by --format text, json or html: "
            "leave out --measured, --pictures and further schedules"
        )


def _of_lanes(args: argparse.Namespace) -> dict[str, tuple[object, object]]:
    """Flags that only gathers and reductions have, with their defaults."""
    return {
        "--data-parallel-sharding-strategy": (args.data_parallel_sharding_strategy, None),
        "--fsdp-reshard-policy": (args.fsdp_reshard_policy, "memory"),
        "--fsdp-memory-budget": (args.fsdp_memory_budget, None),
        "--layer-bytes": (args.layer_bytes, None),
        "--time-gather": (args.time_gather, 0.0),
    }


def shown(args: argparse.Namespace, simulation: Simulation) -> Shown | None:
    """The schedule with what the flags ask for; None where they do not. Raises PlanError for what cannot be had."""
    if args.data_parallel_size is None:
        return None
    plan, costs, size = simulation.plan, simulation.costs, args.layer_bytes or 1
    residency, ways = _residency(args, plan.placement.num_ranks), args.data_parallel_size
    stages = _equal_layers(args.num_layers, size, plan.placement, costs, ways)
    plan = add_residency(plan, stages, residency, costs)
    lane = LaneCosts()
    if args.time_gather:
        lane = LaneCosts(bandwidth=size * (ways - 1) / (ways * args.time_gather))
    return Shown(
        simulate(plan, costs, Lanes(stages, residency, lane)),
        residency,
        stages,
        verify_residency(plan, stages, residency),
        "bytes" if args.layer_bytes else "layers",
    )


def moves_of_one_stage(strategy: str, num_layers: int, num_microbatches: int, ways: int) -> tuple[int, int]:
    """Gathers and reductions of a step by the plan of one stage of equal layers, each a unit."""
    plan = build_plan("1f1b", Request(1, num_microbatches))
    costs, residency = CostModel.of_ranks(plan.placement), Residency(strategy)
    stages = _equal_layers(num_layers, 1, plan.placement, costs, ways)
    moves = verify_residency(add_residency(plan, stages, residency, costs), stages, residency)[0].moves
    return moves.gathers.calls, moves.reductions.calls


def _residency(args: argparse.Namespace, num_ranks: int) -> Residency:
    policy, budget = args.fsdp_reshard_policy, args.fsdp_memory_budget
    if args.data_parallel_size < 2:
        raise PlanError(
            f"--data-parallel-size {args.data_parallel_size}: one rank has nobody to share a stage with"
        )
    if (policy == "budget") != (budget is not None):
        raise PlanError("--fsdp-reshard-policy budget and --fsdp-memory-budget go together")
    strategy = args.data_parallel_sharding_strategy or "optim_grads_params"
    if strategy == AUTO:
        raise PlanError(
            f"--data-parallel-sharding-strategy {AUTO} without --rank-memory-limit, under which it chooses: give it"
        )
    return Residency(
        strategy,
        policy=policy,
        budget=None if budget is None else (budget,) * num_ranks,
    )


def _equal_layers(
    num_layers: int, layer_bytes: int, placement: Placement, costs: CostModel, ways: int
) -> tuple[StageUnits, ...]:
    """Each stage has as many, and a layer its share of the stage's times."""
    count = num_layers // placement.num_stages
    if not count or num_layers % placement.num_stages:
        raise PlanError(
            f"--num-layers {num_layers}: {placement.num_stages} stages of equal layers take a multiple of that"
        )
    order = tuple((unit,) for unit in range(count))
    return tuple(
        StageUnits(
            tuple(
                UnitCosts(
                    f"layer {stage * count + unit}",
                    costs.f[stage] / count,
                    costs.b[stage] / count,
                    costs.w[stage] / count,
                    shares=(Share(RankGroup("dp", ways), layer_bytes, layer_bytes),),
                )
                for unit in range(count)
            ),
            order,
            order[::-1],
        )
        for stage in range(placement.num_stages)
    )


# What is said -------------------------------------------------------------------------------------------


def figures(found: Shown) -> dict[str, object]:
    """For JSON; under a limit with all that each rank holds."""
    simulation, limit = found.simulation, found.residency.limit
    return {
        "strategy": found.residency.strategy,
        "policy": found.residency.policy,
        "data_parallel_size": groups_of(found.stages)[0].size,
        "unit": found.unit,
        "layers_per_stage": len(found.stages[0].units),
        "makespan": simulation.makespan,
        "ranks": [
            {
                "gathers": walk.moves.gathers.calls,
                "reductions": walk.moves.reductions.calls,
                "moved": walk.moves.gathers.payload_bytes + walk.moves.reductions.payload_bytes,
                "most_gathered": walk.most.gathered,
                "most_gradients": walk.most.gradients,
                "most_under_way": walk.most.under_way,
                "most_transient": walk.most_transient,
                "lane_share": simulation.lane_share[rank],
                "exposed": simulation.exposed[rank],
                "order": [op_text(op) for op in row if IS_COMPUTE[op[0]] or IS_BESIDE[op[0]]],
            }
            | ({} if limit is None else {"limit": limit[rank], "peak": found.peak(rank)})
            for rank, (row, walk) in enumerate(zip(simulation.plan.rows, found.walks, strict=True))
        ],
    }


def told(found: Shown, *, rows: bool) -> str:
    """Of each rank what it moves and holds, and its row: a computation a line, with what is done before it and what is
    done while it runs."""
    simulation, residency = found.simulation, found.residency
    head = f"{residency.strategy} over {over_ranks(groups_of(found.stages))}, policy {residency.policy}: "
    units = counted(len(found.stages[0].units), "layer" if residency.limit is None else "unit")
    lines = [f"{head}{units} a stage, makespan {plain(simulation.makespan, 5)}"]
    for rank, (row, walk) in enumerate(zip(simulation.plan.rows, found.walks, strict=True)):
        moves, most = walk.moves, walk.most
        sizes: list[float] = [most.gathered, most.gradients, most.under_way, walk.most_transient]
        held = [f"{sizes[0]} {found.unit}", *map(str, sizes[1:])]
        in_all = ""
        if residency.limit is not None:
            held = [size_text(size) for size in sizes]
            in_all = f"holds {size_text(found.peak(rank))} of {size_text(residency.limit[rank])}; "
        lines += [
            f"rank {rank}: {in_all}{counted(moves.gathers.calls, 'gather')}, "
            f"{counted(moves.reductions.calls, 'reduction')}; at most "
            f"{held[0]} gathered, {held[1]} of gradients, {held[2]} under way, {held[3]} together; "
            f"lane busy {share_text(simulation.lane_share[rank], 2)}, exposed {plain(simulation.exposed[rank], 5)}",
            *(_row_lines(row) if rows else ()),
        ]
    return "".join(f"{line}\n" for line in lines)


def _row_lines(row: Row) -> list[str]:
    steps: list[tuple[str, str, str]] = []
    before: list[str] = []
    inside: list[str] = []
    for op in row:
        if IS_BESIDE[op[0]]:
            (inside if op[3] else before).append(op_text(op))
        elif IS_COMPUTE[op[0]]:
            steps.append((" ".join(before), op_text(op), " ".join(inside)))
            before, inside = [], []
    width, middle = (max(len(step[part]) for step in steps) for part in (0, 1))
    lines = [f"  {first:<{width}} | {op:<{middle}} | {last}".rstrip(" |") for first, op, last in steps]
    return [*lines, f"  {' '.join(before)}"] if before else lines
