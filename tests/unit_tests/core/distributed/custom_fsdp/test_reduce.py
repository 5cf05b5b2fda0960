"""Gradients into shards: overwritten first, reduced in one order, within a bound, late where a policy says so."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import nn

from megatron.core import collectives
from megatron.core.distributed.custom_fsdp.memory import AllocatedMemory
from megatron.core.distributed.custom_fsdp.reduce import MicrobatchReduction
from megatron.core.distributed.distributed_data_parallel_config import DistributedDataParallelConfig
from megatron.core.distributed.flat_buffer import FlatBuffer
from megatron.core.distributed.ledger import Ledger
from megatron.core.distributed.sharding import ShardPlace, sharding_of
from megatron.core.distributed.traffic_counter import TrafficCounter
from megatron.core.distributed.units import Unit
from megatron.core.module import ModelError
from megatron.core.param_meta import LOOKUP, ParamMeta
from tests.harness.ranks import share_ranks
from tests.harness.sharded_training import WIDTH, Block, check_parity, square_loss

UNITS = 4
NUMEL = 256  # of each unit's bucket on two ranks
TIED = f"w0{LOOKUP}"  # a further use of unit 0's parameter


class Nothing:
    """Sums that other ranks would have."""

    def __init__(self) -> None:
        self.calls = 0

    def add(self) -> None:
        self.calls += 1


class InFlight:
    holds_temporary, temporary_bytes = True, NUMEL * 2

    def __init__(self, log: list[str], unit: int) -> None:
        self._log, self._unit = log, unit

    def wait(self) -> None:
        self._log.append(f"wait {self._unit}")


class Reduced:
    """A reduction over four units of one size, as rank 0 of two whose other one has the same gradients."""

    def __init__(self, monkeypatch, *, bound: int = 10**6, forward: Sequence[int] | None = None) -> None:
        self.ledger, self.traffic, self.log = Ledger(), TrafficCounter(), []
        memory = AllocatedMemory(self.ledger)
        self.buffer = toy_buffer(ShardPlace(0, 2), memory)
        self.outer, self.partial = Nothing(), Nothing()

        class Two:
            size = 2

        def scatter(items, group, *, accumulate):
            unit = next(
                i for i in range(UNITS) if self.buffer.buckets_of_unit(f"u{i}")[0].full_grads is items[0][1]
            )
            self.log.append(f"{'add' if accumulate else 'set'} {unit}")
            for shard, full in items:
                if not accumulate:
                    shard.zero_()  # what was there may be anything
                shard.add_(2 * full[: shard.numel()])
            return InFlight(self.log, unit)

        monkeypatch.setattr(collectives, "reduce_scatter_units", scatter)
        self.complete: list[int] = []
        self.reduction = MicrobatchReduction(
            toy_units(),
            self.buffer,
            Two(),
            self.outer,
            self.partial,
            memory,
            self.ledger,
            self.traffic,
            bound=bound,
            on_complete=self.complete.append,
            forward=forward,
        )
        self.reduction.bind({f"w{i}": 1 for i in range(UNITS)} | {TIED: 1})

    def since(self) -> str:
        log, self.log[:] = list(self.log), []
        return ", ".join(log)

    def give(self, key: str, value: float) -> bool:
        fresh = self.reduction.grad_begins(key)
        grad = self.buffer.main_grad(key)
        if fresh:
            grad.fill_(value)
        else:
            grad.add_(value)
        self.reduction.grad_ready(key)
        return fresh

    def microbatch(self, value: float, *, left: int, skip: Sequence[int] = (), order=range(UNITS)) -> str:
        for unit in order:
            self.reduction.forward_reached(unit)
        for unit in reversed(order):
            if unit not in skip:
                self.give(f"w{unit}", value)
                if unit == 0:
                    self.give(TIED, value)
        self.reduction.microbatch_done((), left=left)
        return self.since()

    def begin(self, *, reduce_gradients: bool = True) -> None:
        """A step of one microbatch, whose forward has been."""
        self.reduction.begin_step(1, reduce_gradients=reduce_gradients, accumulate=False)
        for unit in range(UNITS):
            self.reduction.forward_reached(unit)

    def shard(self, unit: int) -> set[float]:
        """Values of what is not padding in this rank's half."""
        return set(self.buffer.main_grad_part(f"w{unit}").tolist())


def toy_units() -> list[Unit]:
    return [Unit(i, f"u{i}", (), (f"w{i}",), True, False, False) for i in range(UNITS)]


def toy_buffer(place: ShardPlace, memory: AllocatedMemory) -> FlatBuffer:
    names = [f"w{i}" for i in range(UNITS)]
    meta = {name: ParamMeta(name, (200,)) for name in names}
    meta["w0"] = ParamMeta("w0", (200,), uses=("w0", TIED))
    return FlatBuffer(
        {name: nn.Parameter(torch.zeros(200)) for name in names},
        meta,
        DistributedDataParallelConfig(),
        sharding=sharding_of("optim_grads"),
        place=place,
        device=torch.device("cpu"),
        units={f"w{i}": f"u{i}" for i in range(UNITS)},
        new_full=memory.new,
    )


@pytest.fixture
def made(monkeypatch):
    return lambda **how: Reduced(monkeypatch, **how)


def test_the_first_contribution_overwrites_in_gradients_and_shards(made):
    run = made()
    for step in range(2):
        run.reduction.begin_step(2, reduce_gradients=True, accumulate=False)
        assert run.microbatch(1.0, left=1).startswith("set 3, set 2, set 1, set 0")
        assert run.microbatch(10.0, left=0).replace("wait", "").count("add") == UNITS
        run.reduction.finish()
        run.since()
        assert [run.shard(unit) for unit in range(UNITS)] == [{44.0}, {22.0}, {22.0}, {22.0}], step
    assert run.complete == [3, 2, 1, 0] * 4
    assert run.ledger.transient_bytes == 0
    assert (run.outer.calls, run.partial.calls) == (2, 2)
    assert run.traffic.as_dict() == {"reduce_scatter": (16, 16 * NUMEL * 4)}
    run.reduction.begin_step(1, reduce_gradients=True, accumulate=True)
    assert run.microbatch(1.0, left=0).count("add") == UNITS
    run.reduction.finish()
    assert run.shard(3) == {24.0}, "added to what was there"


def test_whole_gradients_have_memory_from_the_first_contribution_to_the_end_of_the_reduction(made):
    run = made()
    run.begin()
    assert (run.ledger.live("grads"), run.ledger.live("main_grads")) == (0, 0)
    run.reduction.grad_begins("w3")
    assert (run.ledger.live("grads", "u3"), run.ledger.live("main_grads")) == (NUMEL * 4, 0)
    run.reduction.grad_ready("w3")
    assert run.ledger.live("grads", "u3") == NUMEL * 4, "a collective reads them"
    assert run.ledger.live("main_grads", "u3") == NUMEL * 2
    assert run.ledger.live("exchange", "u3") == NUMEL * 2, "what the other rank has sent"
    run.reduction.wait()
    assert (run.ledger.live("grads"), run.ledger.live("exchange")) == (0, 0)


def test_no_more_than_the_bound_is_under_way(made):
    run = made(bound=2 * NUMEL)
    run.reduction.begin_step(1, reduce_gradients=True, accumulate=False)
    assert run.microbatch(1.0, left=0) == "set 3, set 2, wait 3, set 1, wait 2, set 0"
    assert run.ledger.peak("grads") == 2 * NUMEL * 4
    one = made(bound=1)
    one.reduction.begin_step(1, reduce_gradients=True, accumulate=False)
    assert one.microbatch(1.0, left=0) == "set 3, wait 3, set 2, wait 2, set 1, wait 1, set 0, wait 0"
    assert one.ledger.peak("grads") == NUMEL * 4, "one unit in any case"


def test_make_room_waits_for_the_oldest(made):
    run = made(bound=2 * NUMEL)
    run.reduction.begin_step(1, reduce_gradients=True, accumulate=False)
    for unit in range(UNITS):
        run.reduction.forward_reached(unit)
    run.give("w3", 1.0)
    run.reduction.make_room(2)
    assert run.since() == "set 3"
    run.give("w2", 1.0)
    run.reduction.make_room(1)
    assert run.since() == "set 2, wait 3"


def test_a_unit_waits_for_those_before_it_in_the_order_of_the_run(made):
    run = made()
    run.reduction.begin_step(1, reduce_gradients=True, accumulate=False)
    for unit in (0, 2, 1, 3):
        run.reduction.forward_reached(unit)
    for unit in (2, 1):
        run.give(f"w{unit}", 1.0)
    assert run.since() == "", "3 is to come first"
    run.give("w3", 1.0)
    assert run.since() == "set 3, set 1, set 2"
    run.reduction.microbatch_done((), left=0)
    assert run.since() == "set 0"


def test_one_order_whatever_runs_where_weights_are_whole(made):
    """A rank that skips a unit, or runs in another order, issues the same reductions in the same order."""
    for skip, order in (((), range(UNITS)), ((1,), (0, 2, 3)), ((), (3, 1, 0, 2)), ((3, 0), (1, 2))):
        run = made(forward=(0, 1, 2, 3, 0))
        run.reduction.begin_step(1, reduce_gradients=True, accumulate=False)
        log = run.microbatch(1.0, left=0, skip=skip, order=order)
        assert [word for word in log.split(", ") if "set" in word] == ["set 3", "set 2", "set 1", "set 0"]
        run.reduction.finish()
        for unit in range(UNITS):
            expected = 0.0 if unit in skip else (4.0 if unit == 0 else 2.0)
            assert run.shard(unit) == {expected}, (skip, order, unit)


def test_what_no_contribution_came_to_is_zero(made):
    run = made()
    for value, skip in ((1.0, ()), (5.0, (1, 2))):
        run.reduction.begin_step(1, reduce_gradients=True, accumulate=False)
        run.microbatch(value, left=0, skip=skip)
        run.reduction.finish()
    assert [run.shard(unit) for unit in range(UNITS)] == [{20.0}, {0.0}, {0.0}, {10.0}]


def test_a_further_use_that_did_not_run_adds_nothing(made):
    run = made()
    for tied in (True, False):
        run.reduction.begin_step(1, reduce_gradients=True, accumulate=False)
        run.give("w0", 1.0)
        if tied:
            run.give(TIED, 1.0)
        run.reduction.microbatch_done((), left=0)
        run.reduction.finish()
        assert run.shard(0) == {4.0 if tied else 2.0}
        assert run.ledger.live("extra") == 0


def test_late_units_reduce_once_a_step_and_keep_their_gradients(made):
    run = made()
    run.reduction.set_late([False, True, False, True])
    run.reduction.begin_step(2, reduce_gradients=True, accumulate=False)
    assert [w for w in run.microbatch(1.0, left=1).split(", ") if "wait" not in w] == ["set 2", "set 0"]
    run.reduction.wait()
    assert (run.ledger.live("grads", "u3"), run.ledger.live("grads", "u2")) == (NUMEL * 4, 0)
    log = [w for w in run.microbatch(10.0, left=0).split(", ") if "wait" not in w]
    assert log == ["set 3", "add 2", "set 1", "add 0"]
    run.reduction.finish()
    assert [run.shard(unit) for unit in range(UNITS)] == [{44.0}, {22.0}, {22.0}, {22.0}]


def test_held_back_nothing_reduces_before_the_last_microbatch(made):
    run = made()
    run.reduction.begin_step(None, reduce_gradients=True, accumulate=False)
    run.reduction.hold_back(True)
    assert run.microbatch(1.0, left=2) == ""
    assert run.microbatch(2.0, left=2) == ""
    run.reduction.hold_back(False)
    run.reduction.expect(1)
    assert run.microbatch(3.0, left=0).count("set") == UNITS
    run.reduction.finish()
    assert run.shard(2) == {12.0}


def test_without_reduction_gradients_are_looked_at_and_dropped(made):
    run = made()
    run.begin(reduce_gradients=False)
    for unit in (3, 2, 1):
        run.give(f"w{unit}", float("nan") if unit == 2 else 1.0)
    run.give("w0", 1.0)
    run.give(TIED, float("inf"))
    run.reduction.microbatch_done((), left=0)
    assert run.since() == ""
    assert run.reduction.nonfinite_keys() == ("w2", TIED)
    assert (run.ledger.transient_bytes, run.traffic.as_dict()) == (0, {})
    run.reduction.begin_step(1, reduce_gradients=True, accumulate=False)
    assert run.reduction.nonfinite_keys() == ()


def test_calls_out_of_order_are_programming_errors(made):
    run = made()
    run.begin()
    run.give("w3", 1.0)
    with pytest.raises(AssertionError, match="still being reduced: call finish"):
        run.reduction.begin_step(1, reduce_gradients=True, accumulate=False)


def test_gradients_after_the_last_one_are_told_with_the_fix(made):
    """Of a module that runs several times under reentrant checkpointing."""
    run = made()
    run.begin()
    run.give("w3", 1.0)
    for late in (run.reduction.grad_begins, run.reduction.grad_ready):
        with pytest.raises(
            ModelError,
            match=r"'w3' arrived after its unit 'u3' .*reentrant activation checkp.*use_reentrant=False",
        ):
            late("w3")


class Skips(nn.Module):
    """On some samples its middle block does not run."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.skip = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index, block in enumerate(self.blocks):
            if index != 1 or not self.skip:
                x = block(x)
        return x


def skipping_loss(model: nn.Module, sample: int) -> torch.Tensor:
    getattr(model, "module", model).skip = sample % 2 == 1  # on rank 1 only
    return square_loss(WIDTH)(model, sample)


def a_unit_that_one_rank_skips(ctx) -> None:
    for microbatches in (1, 2):
        check_parity(
            ctx,
            lambda: Skips().double(),
            skipping_loss,
            ga=microbatches,
            steps=3,
            optimizer=sgd,
            data_parallel_sharding_strategy="optim_grads",
        )


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1)


def real_sums(ctx) -> list[list[float]]:
    """With real collectives: the sum over ranks and microbatches."""
    ledger = Ledger()
    memory = AllocatedMemory(ledger)
    buffer = toy_buffer(ShardPlace(ctx.rank, 2), memory)
    reduction = MicrobatchReduction(
        toy_units(),
        buffer,
        ctx.ps.dp_reduce_group,
        Nothing(),
        Nothing(),
        memory,
        ledger,
        TrafficCounter(),
        bound=1,
        on_complete=lambda unit: None,
    )
    reduction.bind({f"w{i}": 1 for i in range(UNITS)} | {TIED: 1})
    reduction.begin_step(2, reduce_gradients=True, accumulate=False)
    for left in (1, 0):
        for unit in reversed(range(UNITS)):
            key = f"w{unit}"
            assert reduction.grad_begins(key)
            buffer.main_grad(key).fill_(unit + 10.0**ctx.rank)
            reduction.grad_ready(key)
        reduction.microbatch_done((), left=left)
    reduction.finish()
    return [sorted(set(buffer.main_grad_part(f"w{unit}").tolist())) for unit in range(UNITS)]


def test_two_ranks():
    found = share_ranks(2, {"sums": real_sums, "skipped": a_unit_that_one_rank_skips})
    assert found["sums"] == [[[2 * (2 * unit + 11.0)] for unit in range(UNITS)]] * 2
