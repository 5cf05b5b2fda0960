"""What a training step moves and holds under each sharding strategy, counted where collectives are called.

Calls and bytes equal those of the plan's row, and stay within the table of what others need; gathered weights and whole
gradients are at most what the row says, to the byte; bytes held between steps are those of the formulas a parameter, to
the padding.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
from unittest import mock

import pytest
import torch

from megatron.core import collectives
from megatron.core.distributed.traffic import Traffic
from megatron.core.pipeline_parallel.plan.residency_walk import walk_row
from megatron.core.pipeline_parallel.plan.spec import Purpose, plan_for
from megatron.core.pipeline_parallel.plan.units import RankUnits
from megatron.core.traffic_counter import Moved
from tests.harness.layouts import NO_DROPOUT, Layout, Run
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
KINDS = {  # what is called, over which ranks -> what the plan calls it
    ("all_gather", "dp_gather"): "all_gather",
    ("reduce_scatter", "dp_reduce"): "reduce_scatter",
    ("sum_gradients", "dp_reduce"): "all_reduce",
    ("all_gather", "dp_outer"): "outer_all_gather",
    ("reduce_scatter", "dp_outer"): "outer_reduce_scatter",
    ("sum_gradients", "dp_outer"): "outer_all_reduce",
}
DATA_PARALLEL = ("dp_gather", "dp_reduce", "dp_outer")


class Watch:
    """Calls of collectives over data parallel ranks, with the bytes of their whole buffers; and how many operations
    were launched for them."""

    def __init__(self):
        self.reset()

    def reset(self):
        self.calls = collections.Counter()
        self.payload = collections.Counter()
        self.launched = collections.Counter()

    @property
    def traffic(self):
        unknown = self.calls.keys() - KINDS.keys() - {SECOND_HALF}
        assert not unknown, unknown
        return Traffic(
            **{kind: Moved(self.calls[called], self.payload[called]) for called, kind in KINDS.items()}
        )

    @contextlib.contextmanager
    def installed(self):
        def counting(op, function, group_at, size):
            def call(*args, **kwargs):
                group = args[group_at]
                if group.purpose in DATA_PARALLEL and group.size > 1:
                    self.calls[op, group.purpose] += 1
                    self.payload[op, group.purpose] += size(args[0])
                return function(*args, **kwargs)

            return call

        def launching(op, group):
            if group.purpose in DATA_PARALLEL:
                self.launched[op, group.purpose] += 1

        patches = {
            "all_gather_units": counting("all_gather", collectives.all_gather_units, 1, whole_outputs),
            "reduce_scatter_units": counting(
                "reduce_scatter", collectives.reduce_scatter_units, 1, whole_inputs
            ),
            "sum_gradients": counting("sum_gradients", collectives.sum_gradients, 1, num_bytes),
            "_observe": launching,
        }
        with mock.patch.multiple(collectives, **patches):
            yield self


SECOND_HALF = ("all_gather", "dp_reduce")  # of a sum in rank order


def num_bytes(tensor):
    return tensor.numel() * tensor.element_size()


def whole_outputs(pairs):
    return sum(num_bytes(output) for output, _ in pairs)


def whole_inputs(items):
    return sum(num_bytes(full) for _, full in items)


@dataclasses.dataclass(frozen=True)
class Case:
    more: tuple[str, ...]
    ga: int = 1
    words: tuple[str, ...] = ()

    def __str__(self):
        return " ".join([*self.more, *self.words, f"GA {self.ga}"])


@dataclasses.dataclass
class Seen:
    """One rank's step: counted by us, by the engine, and as its plan says. bytes_of: unit -> (weights, gradients).
    peaks: the most bytes of gathered weights, and of whole gradients, in a step; planned_peaks: as the plan's row says,
    the latter with those of further uses. bound: of gathers ahead."""

    watched: Traffic
    launched: dict[tuple[str, str], int]
    engine: Traffic
    planned: Traffic
    bytes_of: dict[str, tuple[int, int]]
    peaks: tuple[int, int, int]
    planned_peaks: tuple[int, int]
    bound: int
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
    layout = Layout(dp=ctx.world_size, more=case.more)
    words = ["--num-layers", str(LAYERS), *NO_DROPOUT, *case.words]
    run = Run(ctx, layout, words, global_batch=case.ga * ctx.world_size)
    model, watch, kept = run.engine.model, Watch(), []
    ledger = model.ledger
    assert ledger.transient_bytes == 0, ledger.lines()

    def begin():
        watch.reset()
        ledger.reset_peaks()

    def keep():
        peaks = tuple(ledger.peak(kind) for kind in ("gathered", "grads", "extra"))
        kept.append((watch.traffic, dict(watch.launched), model.traffic, peaks))

    with watch.installed():
        run.step(1)
        run.step(2, look=begin)
        run.step(3, look=keep)
        model.settle_weights()
    buffer = model.buffer
    watched, launched, engine, peaks = kept[0]
    units, residency = run.runner.spec.stages_units, run.runner.spec.residency
    plan = plan_for(run.runner.spec, case.ga, Purpose.TRAIN)
    of_rank = RankUnits(0, plan.placement, units)
    walk = walk_row(plan.rows[0], of_rank, residency, boundaries=True)
    return Seen(
        watched,
        launched,
        engine,
        planned=as_traffic(walk.moves, residency),
        bytes_of={unit.name: (unit.weight_bytes, unit.grad_bytes) for unit in units[0].units},
        peaks=peaks,
        planned_peaks=(
            walk.most.gathered,
            max(one.gradients + one.under_way for one in walk.boundaries),
        ),
        bound=residency.ahead_of(of_rank),
        transient=ledger.transient_bytes,
        live={kind: ledger.live(kind) for kind in LIVE},
        trained_numel=sum(buffer.weight(name).numel() for name in buffer.names),
        padded_numel=sum(bucket.bucket.numel for bucket in buffer.buckets),
        num_buckets=len(buffer.buckets),
        engine_bytes=run.engine.persistent_bytes(),
    )


def as_traffic(moves, residency):
    """What a row moves, by collective."""

    def moved(one):
        return Moved(one.calls, one.payload_bytes)

    scatters = residency.strategy != "no_shard"
    sums = "outer_reduce_scatter" if residency.outer_optimizer else "outer_all_reduce"
    return Traffic(
        all_gather=moved(moves.gathers),
        outer_all_gather=moved(moves.outer_gathers),
        **{"reduce_scatter" if scatters else "all_reduce": moved(moves.reductions)},
        **{sums: moved(moves.outer_sums)},
    )


def check(world, cases, timeout=110):
    """Returns what rank 0 saw, by case."""
    by_rank = run_ranks(watch_cases, world, cases, timeout=timeout)
    failed = []
    for number, case in enumerate(cases):
        for rank in by_rank:
            try:
                compare(case, world, rank[number])
            except AssertionError as error:
                failed.append(f"{case}: {error}")
                break
    assert not failed, "\n".join(failed)
    return by_rank[0]


def compare(case, world, seen):
    assert seen.watched == seen.planned, f"moved {seen.watched}, planned {seen.planned}"
    assert seen.engine == seen.planned
    assert seen.transient == 0
    check_launches(seen)
    check_table(case, seen)
    check_peak(case, seen)
    check_persistent(case, world, seen)


def check_launches(seen):
    """One operation a call; a sum in rank order has a second half."""
    for called, kind in KINDS.items():
        op, purpose = called
        launched = seen.launched.get(called, 0)
        if op == "sum_gradients":
            launched += seen.launched.get(("all_reduce", purpose), 0)
        assert launched == getattr(seen.watched, kind).calls, (called, seen.launched)


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
    # A matrix that begins and ends the model is needed once more than others.
    again, both_ends = 0, seen.bytes_of.get("embedding_and_head", (0, 0))[0]
    if strategy == "optim_grads_params" and both_ends:
        again = 1
    for found, times, once, size in (
        (moved.all_gather, gathers, again, weights),
        (moved.reduce_scatter, scatters, 0, grads),
        (moved.all_reduce, sums, 0, grads),
    ):
        assert found.calls <= times * n + once, (found, times, n)
        assert found.payload_bytes <= times * size + once * both_ends, (found, times, size)
    outer = [moved.outer_all_gather, moved.outer_reduce_scatter, moved.outer_all_reduce]
    calls = {"HSDP": [0, 0, n], "HFSDP": [n, n, 0], "": [0, 0, 0]}
    kind = (
        "" if TWO[0] not in case.more else "HFSDP" if "--outer-dp-sharding-strategy" in case.more else "HSDP"
    )
    assert [one.calls for one in outer] == calls[kind]
    if case.more == ZERO3 and UNTIED[0] in case.words:
        assert moved.all_gather.calls == ga * (2 * n - 2)
        ends = seen.bytes_of["embedding"][0] + seen.bytes_of["head"][0]
        assert moved.all_gather == Moved(ga * (2 * n - 2), ga * (2 * weights - ends))
        assert moved.reduce_scatter == Moved(ga * n, ga * grads)
    elif case.more == ZERO3:
        # The unit of both ends is needed at the beginning, between forward and backward, and at the end, where the
        # next microbatch begins with it.
        ends = seen.bytes_of["embedding_and_head"][0]
        assert moved.all_gather == Moved(2 * ga * n + 1, 2 * ga * weights + ends)


def check_peak(case, seen):
    if "--fsdp-double-buffer" in case.more:
        return  # slots are held for the whole run
    gathered, grads, extra = seen.peaks
    assert gathered == seen.planned_peaks[0]
    assert grads <= seen.planned_peaks[1] <= grads + extra
    if UNTIED[0] in case.words:
        assert extra == 0
        if "--fsdp-reshard-policy" not in case.more and gathered:
            assert gathered <= max(seen.bound, *(weights for weights, _ in seen.bytes_of.values()))


def check_persistent(case, world, seen):
    """Bytes a parameter of facts 4.1; with fp32 weights main weights are these."""
    inner = world // 2 if TWO[0] in case.more else world
    full = world if "--outer-dp-sharding-strategy" in case.more else inner
    weights, grads, optimizer = {
        "no_shard": (1, 1, 1),
        "optim": (1, 1, inner),
        "optim_grads": (1, inner, inner),
        "optim_grads_params": (inner, inner, full),
    }[case.more[2]]
    bf16 = "--bf16" in case.words
    padded = seen.padded_numel
    assert padded - seen.trained_numel < 128 * world * seen.num_buckets
    expected = {
        "weights": padded * (2 if bf16 else 4) // weights,
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
