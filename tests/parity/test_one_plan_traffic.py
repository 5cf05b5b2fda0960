"""What a step of a pipeline moves and holds under each sharding strategy, by plan, by count and by engine.

Counted where collectives are called: calls and bytes equal the walk over the plan's row, and the engine's own counters,
on every rank, and stay within the table of what anything else needs. At every boundary of the row the engine holds the
walk's gathered weights and whole gradients to the byte, and at rest what units and formulas say. Without stages:
test_sharding_traffic.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch

from megatron.core.pipeline_parallel.plan.schedules import SCHEDULES
from megatron.core.traffic import Traffic
from tests.harness.collective_watch import Watch
from tests.harness.layouts import NO_DROPOUT, Layout, Run
from tests.harness.planned_steps import Boundary, BoundaryLog, traffic_of_plan, units_of, walk_of
from tests.harness.ranks import run_ranks

LAYERS = 2
UNTIED = ("--untie-embeddings-and-output-weights",)
RECOMPUTE = tuple("--recompute-granularity full --recompute-method uniform --recompute-num-layers 1".split())
STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")
SHARDED = {name: ("--use-custom-fsdp", "--data-parallel-sharding-strategy", name) for name in STRATEGIES}
ZERO3 = SHARDED["optim_grads_params"]
TWO = ("--num-distributed-optimizer-instances", "2")
HSDP = (*ZERO3, *TWO)
HFSDP = (*HSDP, "--outer-dp-sharding-strategy", "optim")
STEP = (*ZERO3, "--fsdp-reshard-policy", "step")
BUDGET = (*ZERO3, "--fsdp-reshard-policy", "budget", "--fsdp-memory-budget", "60000")
EAGER = (*ZERO3, "--suggested-communication-unit-size", "0")
ONE = Layout()
PP2 = Layout(pp=2)
ZBV = Layout(pp=2, schedule="zbv")


@dataclasses.dataclass(frozen=True)
class Case:
    """more: flags of sharding. ga: microbatches. layout: all but the data parallel ranks, which are as many as there
    are ranks left."""

    more: tuple[str, ...]
    ga: int = 1
    words: tuple[str, ...] = ()
    layout: Layout = dataclasses.field(default_factory=Layout)

    def __str__(self):
        return " ".join([str(self.layout), *self.more, *self.words, f"GA {self.ga}"])


@dataclasses.dataclass
class Seen:
    """One rank's step: counted by us, by the engine, and as its plan says. bytes_of: unit -> (weights, gradients), of
    whole ones. held: at boundaries, what it was and what it was to be. at_rest: without moments, likewise."""

    watched: Traffic
    engine: Traffic
    planned: Traffic
    bytes_of: dict[str, tuple[int, int]]
    bound: int
    peak: int
    planned_peak: int
    held: list[Boundary]
    planned_held: list[tuple[int, int]]
    at_rest: int
    planned_at_rest: int
    transient: int
    live: dict[str, int]
    trained_numel: int
    padded_numel: int
    num_buckets: int
    engine_bytes: int


LIVE = ("weights", "main_weights", "main_grads", "moments", "extra_grads")


def watch_cases(ctx, cases):
    torch.set_num_threads(1)
    return [watch_case(ctx, case) for case in cases]


def watch_case(ctx, case):
    dp = ctx.world_size // (case.layout.tp * case.layout.pp)
    layout = dataclasses.replace(case.layout, dp=dp, more=case.more)
    layers = max(LAYERS, 2 * layout.pp)
    words = ["--num-layers", str(layers), *NO_DROPOUT, *case.words]
    run = Run(ctx, layout, words, global_batch=case.ga * dp)
    model, ledger = run.engine.model, run.engine.model.ledger
    watch, log = Watch(), BoundaryLog(model.ledger)
    assert ledger.transient_bytes == 0, ledger.lines()
    kept = []
    with watch.installed():
        run.step(1)
        run.step(2, look=watch.reset)
        ledger.reset_peaks()
        with log.installed():
            run.step(3, look=lambda: kept.append((watch.traffic, model.traffic, ledger.peak("gathered"))))
        model.settle_weights()
    (watched, engine, peak), buffer = kept[0], model.buffer
    units, walk, residency = units_of(run), walk_of(run), run.runner.spec.residency
    return Seen(
        watched,
        engine,
        traffic_of_plan(run),
        bytes_of={
            units.unit(one).name: (units.weight_bytes[one], units.grad_bytes[one])
            for one in range(len(units))
        },
        bound=residency.ahead_of(units),
        peak=peak,
        planned_peak=walk.most.gathered,
        held=log.found,
        planned_held=[(one.gathered, one.gradients + one.under_way) for one in walk.boundaries],
        at_rest=sum(ledger.live(kind) for kind in ("weights", "main_weights", "main_grads")),
        planned_at_rest=units.shard_bytes,
        transient=ledger.transient_bytes,
        live={kind: ledger.live(kind) for kind in LIVE},
        trained_numel=sum(buffer.weight(name).numel() for name in buffer.names),
        padded_numel=sum(bucket.bucket.numel for bucket in buffer.buckets),
        num_buckets=len(buffer.buckets),
        engine_bytes=run.engine.persistent_bytes(),
    )


def check(world, cases, timeout=110):
    """Returns what rank 0 saw, by case."""
    by_rank = run_ranks(watch_cases, world, cases, timeout=timeout)
    failed = []
    for number, case in enumerate(cases):
        for place, rank in enumerate(by_rank):
            try:
                compare(case, world // case.layout.pp // case.layout.tp, rank[number])
            except AssertionError as error:
                failed.append(f"{case}, rank {place}: {error}")
                break
    assert not failed, "\n".join(failed)
    return by_rank[0]


def compare(case, dp, seen):
    assert seen.watched == seen.planned, f"moved {seen.watched}, planned {seen.planned}"
    assert seen.engine == seen.planned
    assert seen.transient == 0
    check_table(case, seen)
    check_boundaries(seen)
    check_peak(case, seen)
    assert seen.at_rest == seen.planned_at_rest
    check_persistent(case, dp, seen)


def check_boundaries(seen):
    """To the byte."""
    *planned, last = seen.planned_held
    assert last == (0, 0)
    assert len(seen.held) == len(planned), [one.what for one in seen.held]
    for number, (found, said) in enumerate(zip(seen.held, planned, strict=True)):
        assert (found.gathered, found.grads) == said, (number, seen.held[: number + 3], planned[: number + 3])


def check_table(case, seen):
    """All units count as such here, the embedding and the head among them."""
    n, ga, moved = len(seen.bytes_of), case.ga, seen.watched
    weights = sum(weights for weights, _ in seen.bytes_of.values())
    grads = sum(grads for _, grads in seen.bytes_of.values())
    gathers, scatters, sums = {
        "no_shard": (0, 0, 1),
        "optim": (1, 1, 0),
        "optim_grads": (1, ga, 0),
        "optim_grads_params": (2 * ga, ga, 0),
    }[case.more[2]]
    if case.more == STEP:
        gathers = scatters = 1
    both_ends = seen.bytes_of.get("embedding_and_head", seen.bytes_of.get("embedding", (0, 0)))[0]
    more = (
        0 if UNTIED[0] in case.words else ga * both_ends * bool(gathers)
    )  # is needed at both ends of the model
    for found, times, size in (
        (moved.all_gather, gathers, weights),
        (moved.reduce_scatter, scatters, grads),
        (moved.all_reduce, sums, grads),
    ):
        assert found.calls <= times * n + ga * bool(more), (found, times, n)
        assert found.payload_bytes <= times * size + more, (found, times, size)
    outer = (moved.outer_all_gather, moved.outer_reduce_scatter, moved.outer_all_reduce)
    calls = {HSDP: (0, 0, n), HFSDP: (n, n, 0)}.get(case.more, (0, 0, 0))
    assert tuple(one.calls for one in outer) == calls


def check_peak(case, seen):
    assert seen.peak == seen.planned_peak, (seen.peak, seen.planned_peak)
    if UNTIED[0] in case.words and case.more == ZERO3:
        assert seen.peak <= max(seen.bound, *(weights for weights, _ in seen.bytes_of.values()))


def check_persistent(case, dp, seen):
    """Bytes a parameter of facts 4.1; with fp32 weights main weights are these."""
    inner = dp // 2 if TWO[0] in case.more else dp
    full = dp if "--outer-dp-sharding-strategy" in case.more else inner
    weights, grads, optimizer = {
        "no_shard": (1, 1, 1),
        "optim": (1, 1, inner),
        "optim_grads": (1, inner, inner),
        "optim_grads_params": (inner, inner, full),
    }[case.more[2]]
    bf16 = "--bf16" in case.words
    padded = seen.padded_numel
    assert padded - seen.trained_numel < 128 * dp * seen.num_buckets
    expected = {
        "weights": padded * (2 if bf16 else 4) // weights,
        "main_weights": padded * (4 if bf16 else 0) // optimizer,
        "main_grads": padded * 4 // grads,
        "moments": padded * 8 // optimizer,
    }
    assert {kind: seen.live[kind] for kind in expected} == expected
    if UNTIED[0] in case.words:
        assert seen.live["extra_grads"] == 0
    assert sum(seen.live.values()) == seen.engine_bytes


def test_a_sample_moves_and_holds_what_is_planned():
    check(
        4,
        [
            Case(ZERO3, 3, UNTIED, ZBV),
            Case(SHARDED["optim"], 2, (), ZBV),
            Case(SHARDED["optim_grads"], 2, ("--bf16", *UNTIED), PP2),
            Case(STEP, 2, (), ZBV),
            Case(BUDGET, 4, RECOMPUTE, ZBV),
            Case(ZERO3, 2, RECOMPUTE, Layout(pp=2, schedule="interleaved", chunks=2)),
            Case(EAGER, 2, UNTIED, PP2),
            Case(HSDP, 2, ("--bf16",), ONE),
            Case(HFSDP, 2, UNTIED, ONE),
        ],
    )


PIPELINES = [
    Layout(pp=pp, schedule=name, chunks=2 if one.placement == "looped" else 1)
    for name, one in SCHEDULES.items()
    for pp in (2, 4)
]


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize("words", [(), UNTIED, RECOMPUTE, ("--bf16", *UNTIED)], ids=" ".join)
@pytest.mark.parametrize("layout", [ONE, *PIPELINES], ids=str)
def test_all_pipelines_move_and_hold_what_is_planned(layout, words):
    flags = [*SHARDED.values(), STEP, BUDGET, EAGER, *((HSDP, HFSDP) if layout.pp < 4 else ())]
    check(8, [Case(more, 2 * layout.pp, words, layout) for more in flags], timeout=850)
