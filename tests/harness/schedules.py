"""What tests of all schedules share: grids of sizes, costs in a chunk's time, torch's validator."""

import dataclasses
import types

from torch.distributed.pipelining import schedules as torch_schedules

from megatron.core.pipeline_parallel.plan.costs import CostModel, peak_activation
from megatron.core.pipeline_parallel.plan.passes.lower import lower
from megatron.core.pipeline_parallel.plan.text import to_torch_csv
from megatron.core.pipeline_parallel.plan.verify import verify


def microbatches(p):
    """Fewer than stages, as many, and many."""
    return sorted({1, max(1, p // 2), max(1, p - 1), p, 2 * p, 3 * p, 8 * p})


# The longest plans of large pipelines only at some sizes: verify takes 5 us an operation.
GRID = [
    (p, m) for p in range(2, 34) for m in microbatches(p) if m <= 2 * p or p <= 8 or p in (13, 16, 24, 33)
]


def verified_peaks(plan, costs=None) -> tuple[float, ...]:
    """Activations by rank, in the cost model's unit, of a plan that is verified."""
    verify(plan, costs)
    costs = costs or CostModel.of_ranks(plan.placement)
    return tuple(
        peak_activation(rank, row, costs, forward_only=plan.forward_only)
        for rank, row in enumerate(plan.rows)
    )


def chunk_costs(placement, f=1.0, b=1.0, w=1.0, comm=0.0, memory_after_b=1.0):
    """Every chunk takes these, and holds 1."""
    chunks = placement.num_chunks
    return CostModel.of_ranks(
        placement,
        time_f=[f * chunks],
        time_b=[b * chunks],
        time_w=[w * chunks],
        comm=comm,
        activation=[chunks],
        memory_after_b=memory_after_b,
    )


def torch_runtime(p, num_stages, m):
    """Torch's runtime over stages that only tell their place, enough to load and validate a CSV."""
    stage = types.SimpleNamespace(
        num_stages=num_stages, group_size=p, group_rank=0, stage_index=0, has_backward=True
    )
    runtime = torch_schedules._PipelineScheduleRuntime.__new__(torch_schedules._PipelineScheduleRuntime)
    runtime._stages, runtime._num_stages, runtime.pp_group_size, runtime.rank = [stage], num_stages, p, 0
    runtime._n_microbatches, runtime._defer_pp_recv, runtime.pipeline_order = m, False, {}
    return runtime


def check_torch_accepts(plan, file):
    """Torch reads a plan without transfers and validates it, adds its own transfers, and comes to our placement."""
    runtime = torch_runtime(plan.placement.num_ranks, plan.placement.num_stages, plan.num_microbatches)
    file.write_text(to_torch_csv(plan))
    runtime._load_csv(str(file), format="compute_only")
    assert runtime.stage_index_to_group_rank == dict(enumerate(plan.placement.ranks()))
    assert set(runtime.pipeline_order_with_comms) == set(range(plan.placement.num_ranks))


def check_torch_runs_our_transfers(plan, costs, file):
    """In torch's simulator every receive blocks: the strictest order there is. It knows no overlapped pairs."""
    rows = tuple(tuple((*op[:7], -1) for op in row) for row in plan.rows)
    lowered = lower(dataclasses.replace(plan, rows=rows), costs)
    runtime = torch_runtime(plan.placement.num_ranks, plan.placement.num_stages, plan.num_microbatches)
    file.write_text(to_torch_csv(lowered, transfers=True))
    runtime._load_csv(str(file), format="compute_comms")
    ranks = plan.placement.ranks()
    done = torch_schedules._simulate_comms_compute(
        runtime.pipeline_order_with_comms, lambda stage: ranks[stage], len(ranks)
    )
    assert sum(action is not None for row in done.values() for action in row) == lowered.num_ops
