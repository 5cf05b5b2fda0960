"""What a training step moves and holds under each sharding strategy and in pipelines, counted at the collectives.

Calls and bytes equal the plan's walk and the engine's own counters on every rank, and stay within the table of what
others need; gathered bytes stay within the bound; bytes held between steps are those of the formulas a parameter, to
the padding. At every boundary of a row the engine holds what the plan says, to the byte.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch

from megatron.core.pipeline_parallel.plan.schedules import SCHEDULES
from megatron.core.transport.traffic import Moved, Traffic
from tests.harness.collective_watch import Watch
from tests.harness.layouts import NO_DROPOUT, Layout, Run
from tests.harness.planned_steps import Boundary, BoundaryLog, traffic_of_plan, units_of, walk_of
from tests.harness.ranks import run_ranks

LAYERS = 2
UNTIED = ("--untie-embeddings-and-output-weights",)
RECOMPUTE = tuple("--recompute-granularity full --recompute-method uniform --recompute-num-layers 1".split())
STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")
TWO = ("--num-distributed-optimizer-instances", "2")
SHARDED = {name: ("--use-custom-fsdp", "--data-parallel-sharding-strategy", name) for name in STRATEGIES}
ZERO3 = SHARDED["optim_grads_params"]
WITH_INSTANCES = {
    **{f"HSDP {name}": (*SHARDED[name], *TWO) for name in STRATEGIES[1:]},
    "HFSDP": (*ZERO3, *TWO, "--outer-dp-sharding-strategy", "optim"),
}
POLICIES = {
    policy: (*ZERO3, "--fsdp-reshard-policy", *policy.split())
    for policy in ("backward", "step", "budget --fsdp-memory-budget 60000")
}
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


LIVE = ("weights", "main_weights", "main_grads", "moments", "extra_grads", "slots")


def watch_cases(ctx, cases):
    torch.set_num_threads(1)
    return [watch_case(ctx, case) for case in cases]


def watch_case(ctx, case):
    dp = ctx.world_size // (case.layout.tp * case.layout.pp)
    layout = dataclasses.replace(case.layout, dp=dp, more=case.more)
    layers = max(LAYERS, 2 * layout.pp)
    words = ["--num-layers", str(layers), *NO_DROPOUT, *case.words]
    run = Run(ctx, layout, words, global_batch=case.ga * dp)
    model, tracker = run.engine.model, run.engine.model.memory_tracker
    watch, log = Watch(), BoundaryLog(model.memory_tracker)
    assert tracker.transient_bytes == 0, tracker.lines()
    kept = []
    with watch.installed():
        run.step(1)
        run.step(2, look=watch.reset)
        tracker.reset_peaks()
        with log.installed():
            run.step(3, look=lambda: kept.append((watch.traffic, model.traffic, tracker.peak("gathered"))))
        model.settle_weights()
    (watched, engine, peak), buffer = kept[0], model.buffer
    units, walk, residency = units_of(run), walk_of(run), run.runner.spec.residency
    return Seen(
        watched,
        engine,
        traffic_of_plan(run),
        bytes_of={
            units.units[one].name: (units.weight_bytes[one], units.grad_bytes[one])
            for one in range(len(units))
        },
        bound=residency.ahead_of(units.weight_bytes),
        peak=peak,
        planned_peak=walk.most.gathered,
        held=log.found,
        planned_held=[(one.gathered, one.gradients + one.under_way) for one in walk.boundaries],
        at_rest=sum(tracker.live(kind) for kind in ("weights", "main_weights", "main_grads")),
        planned_at_rest=sum(share.at_rest for one in range(len(units)) for share in units.units[one].shares),
        transient=tracker.transient_bytes,
        live={kind: tracker.live(kind) for kind in LIVE},
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
    if "--fsdp-double-buffer" not in case.more:
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
    strategy = case.more[2]
    gathers, scatters, sums = {
        "no_shard": (0, 0, 1),
        "optim": (1, 1, 0),
        "optim_grads": (1, ga, 0),
        "optim_grads_params": (2 * ga, ga, 0),
    }[strategy]
    if case.more == POLICIES["step"]:
        gathers = scatters = 1
    if case.layout.pp > 1 and UNTIED[0] not in case.words:
        return  # both ends have stages of their own, which read one matrix, or sum up two
    for found, times, size in (
        (moved.all_gather, gathers, weights),
        (moved.reduce_scatter, scatters, grads),
        (moved.all_reduce, sums, grads),
    ):
        assert found.calls <= times * n, (found, times, n)
        assert found.payload_bytes <= times * size, (found, times, size)
    outer = [moved.outer_all_gather, moved.outer_reduce_scatter, moved.outer_all_reduce]
    calls = {"HSDP": [0, 0, n], "HFSDP": [n, n, 0], "": [0, 0, 0]}
    kind = (
        "" if TWO[0] not in case.more else "HFSDP" if "--outer-dp-sharding-strategy" in case.more else "HSDP"
    )
    assert [one.calls for one in outer] == calls[kind]
    if case.layout.pp > 1:
        return
    if case.more == ZERO3 and UNTIED[0] in case.words:
        assert moved.all_gather.calls == ga * (2 * n - 2)
        ends = seen.bytes_of["embedding"][0] + seen.bytes_of["head"][0]
        assert moved.all_gather == Moved(ga * (2 * n - 2), ga * (2 * weights - ends))
        assert moved.reduce_scatter == Moved(ga * n, ga * grads)
    elif case.more == ZERO3:
        # both ends, for the lookup and for the head with its backward; the lookup's backward reads nothing
        assert moved.all_gather == Moved(ga * 2 * n, ga * 2 * weights)


def check_peak(case, seen):
    assert seen.peak == seen.planned_peak, (seen.peak, seen.planned_peak)
    if UNTIED[0] in case.words and "--fsdp-reshard-policy" not in case.more and seen.peak:
        assert seen.peak <= max(seen.bound, *(weights for weights, _ in seen.bytes_of.values()))


def check_persistent(case, dp, seen):
    """Bytes a parameter by strategy; with fp32 weights main weights are these."""
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
        "weights": 0 if bf16 and 1 < weights == optimizer else padded * (2 if bf16 else 4) // weights,
        "main_weights": padded * (4 if bf16 else 0) // optimizer,
        "main_grads": padded * 4 // grads,
        "moments": padded * 8 // optimizer,
    }
    assert {kind: seen.live[kind] for kind in expected} == expected
    if UNTIED[0] in case.words:
        assert seen.live["extra_grads"] == 0
    if "--fsdp-double-buffer" not in case.more:
        assert seen.live["slots"] == 0
        assert sum(seen.live.values()) == seen.engine_bytes


def test_steps_move_and_hold_what_is_planned_over_two_ranks():
    cases = [
        Case(SHARDED["no_shard"], 2),
        Case(SHARDED["optim"], 2, UNTIED),
        Case(SHARDED["optim_grads"], 2, ("--bf16", *UNTIED)),
        Case(ZERO3, 1, ("--bf16",)),
        Case((*ZERO3, "--suggested-communication-unit-size", "0"), 2, (*UNTIED, *RECOMPUTE)),
        *[Case((*ZERO3, "--suggested-communication-unit-size", str(size)), 2, UNTIED) for size in (0, 20000)],
        *[Case(policy, 2, (*UNTIED, *RECOMPUTE)) for policy in POLICIES.values()],
    ]
    bf16 = check(2, cases)[2]
    # ZeRO-3 in bf16 (Rajbhandari et al., section 5): 2 + 16/N bytes a parameter, to the padding
    assert bf16.engine_bytes == (2 + 16 // 2) * bf16.padded_numel


@pytest.mark.grid
def test_pipelines_move_and_hold_what_is_planned():
    check(
        4,
        [
            Case(ZERO3, 3, UNTIED, ZBV),
            Case(SHARDED["optim"], 2, (), ZBV),
            Case(SHARDED["optim_grads"], 2, ("--bf16", *UNTIED), PP2),
            Case(POLICIES["step"], 2, (), ZBV),
            Case(POLICIES["budget --fsdp-memory-budget 60000"], 4, RECOMPUTE, ZBV),
            Case(ZERO3, 2, RECOMPUTE, Layout(pp=2, schedule="interleaved", chunks=2)),
            Case((*ZERO3, "--suggested-communication-unit-size", "0"), 2, UNTIED, PP2),
        ],
    )


@pytest.mark.grid
def test_instances_move_and_hold_what_is_planned():
    check(
        4,
        [
            Case(WITH_INSTANCES["HSDP optim_grads_params"], 2),
            Case(WITH_INSTANCES["HFSDP"], 1, ("--bf16", *UNTIED)),
        ],
    )


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize("words", [(), UNTIED, RECOMPUTE, ("--bf16",), ("--bf16", *UNTIED)], ids=" ".join)
@pytest.mark.parametrize("world", [2, 4])
def test_all_steps_move_and_hold_what_is_planned(world, words):
    flags = {**SHARDED, **POLICIES, **(WITH_INSTANCES if world == 4 else {})}
    flags["double buffer"] = (*ZERO3, "--fsdp-double-buffer")
    flags["ZeRO-2 late"] = (*SHARDED["optim_grads"], "--fsdp-reshard-policy", "step")
    for size in (0, 1, 9000, 20000, 30000, 60000, 10**9):
        flags[f"bound {size}"] = (*ZERO3, "--suggested-communication-unit-size", str(size))
    check(world, [Case(more, ga, words) for more in flags.values() for ga in (1, 2, 4)], timeout=850)


PIPELINES = [
    Layout(pp=pp, schedule=name, chunks=2 if one.placement == "looped" else 1)
    for name, one in SCHEDULES.items()
    for pp in (2, 4)
]


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize("words", [(), UNTIED, RECOMPUTE, ("--bf16",), ("--bf16", *UNTIED)], ids=" ".join)
@pytest.mark.parametrize("layout", PIPELINES, ids=str)
def test_all_pipelines_move_and_hold_what_is_planned(layout, words):
    policies = {name: more for name, more in POLICIES.items() if name != "backward"}
    flags = {**SHARDED, **policies, **(WITH_INSTANCES if layout.pp == 2 else {})}
    flags["no prefetch"] = (*ZERO3, "--suggested-communication-unit-size", "0")
    check(8, [Case(more, 2 * layout.pp, words, layout) for more in flags.values()], timeout=850)
