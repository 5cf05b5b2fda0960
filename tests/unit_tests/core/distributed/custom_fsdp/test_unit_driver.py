"""What hooks make of forwards, backwards, recomputations, several calls and reads: gathers, frees, reductions."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megatron.core.distributed.custom_fsdp.all_gather_pipeline import UnitState
from megatron.core.distributed.custom_fsdp.data_parallel_config import DistributedDataParallelConfig
from megatron.core.distributed.custom_fsdp.unit_events import tensors_in
from megatron.core.distributed.sharded_module.parameter_reads import in_backward
from megatron.core.distributed.sharded_module.unit_driver import UnitDriver
from megatron.core.module import ModelError
from megatron.core.sharding_table import sharding_of
from megatron.core.units import find_units


class Log:
    """Pipelines that note what they are told."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.whole: set[int] = set()

    def state(self, unit: int) -> UnitState:
        return UnitState.UNSHARDED if unit in self.whole else UnitState.SHARDED

    def start(self, unit: int) -> None:
        assert unit not in self.whole
        self.whole.add(unit)
        self.lines.append(f"gather {unit}")

    def wait(self, unit: int) -> None:
        assert unit in self.whole
        self.lines.append(f"use {unit}")

    def free(self, unit: int) -> None:
        self.whole.remove(unit)
        self.lines.append(f"free {unit}")

    def settle(self) -> None:
        pass

    def since(self) -> str:
        lines, self.lines = self.lines, []
        return ", ".join(lines)


class Reductions:
    def __init__(self, log: Log, units) -> None:
        self.units = [SimpleNamespace(keys=frozenset(unit.names)) for unit in units]
        self._log = log

    def start(self, unit: int) -> None:
        self._log.lines.append(f"reduce {unit}")

    def grad_begins(self, key: str) -> bool:
        return True


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.w).tanh()


def driven(
    model: nn.Module, *unit_modules, ahead: bool = False, policy: str = "memory"
) -> tuple[Log, UnitDriver]:
    """Weights and gradients are cut; each parameter's gradient is told, as an engine's hooks tell it."""
    log, driver = Log(), UnitDriver()
    units = find_units([model], dict(model.named_parameters()), None, unit_modules or (Layer,))
    engine = SimpleNamespace(
        config=DistributedDataParallelConfig(
            data_parallel_sharding_strategy="optim_grads_params",
            fsdp_reshard_policy=policy,
            suggested_communication_unit_size=100 if ahead else 0,
        ),
        sharding=sharding_of("optim_grads_params"),
        units=units,
        chunks=(model,),
        gathers=log,
        reductions=Reductions(log, units),
        buffer=SimpleNamespace(
            frozen=(), buckets_of_unit=lambda name: [SimpleNamespace(bucket=SimpleNamespace(numel=3))]
        ),
        hooks=[],
    )
    for name, parameter in model.named_parameters():

        def told(_: Tensor, name: str = name) -> None:
            driver.grad_begins(name)
            driver.grad_ready(name, 0)

        parameter.register_post_accumulate_grad_hook(told)
    driver.attach(engine)
    driver.begin_step(None)
    driver.begin_backward(is_last=True)
    return log, driver


FORWARD = "gather 0, use 0, free 0, gather 1, use 1"


def test_a_forward_and_its_backward():
    model = nn.Sequential(Layer(), Layer())
    log, driver = driven(model)
    out = model(torch.ones(3))
    assert log.since() == FORWARD, "the last one is there when its backward comes"
    out.sum().backward()
    assert log.since() == "use 1, reduce 1, free 1, gather 0, use 0, reduce 0"
    driver.end_microbatch()
    assert log.since() == "free 0"
    with torch.no_grad():
        model(torch.ones(3))
    assert log.since() == FORWARD + ", free 1", "nothing comes back to it"


def test_what_comes_next_is_gathered_ahead_within_the_bound():
    model = nn.Sequential(Layer(), Layer(), Layer())
    log, _ = driven(model, ahead=True)
    model(torch.ones(3)).sum().backward()
    assert log.since().startswith("gather 0, gather 1, gather 2, use 0, free 0, use 1, free 1, use 2")


def test_the_policy_step_keeps_what_it_has_gathered_and_reduces_once():
    model = nn.Sequential(Layer(), Layer())
    log, driver = driven(model, policy="step")
    driver.begin_step(2)
    for _ in range(2):
        model(torch.ones(3)).sum().backward()
        driver.end_microbatch()
    assert log.since() == (
        "gather 0, use 0, gather 1, use 1, use 1, use 0, use 0, use 1, use 1, reduce 1, use 0, reduce 0, free 0, free 1"
    )


class Partly(Layer):
    """One of its parameters has no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Parameter(torch.ones(3))


def test_a_unit_is_over_when_the_backward_comes_to_an_earlier_one():
    model = nn.Sequential(Partly(), Partly())
    log, driver = driven(model, Partly)
    model(torch.ones(3)).sum().backward()
    assert log.since() == FORWARD + ", use 1, reduce 1, free 1, gather 0, use 0"
    driver.end_microbatch()
    assert log.since() == "reduce 0, free 0"


def test_every_call_of_a_module_that_runs_several_times():
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.layer = Layer(), Layer()

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(self.first(self.layer(x)))

    model = Twice()
    log, driver = driven(model)
    out = model(torch.ones(3))
    log.since()
    out.sum().backward()
    line = log.since()
    assert line.index("use 0") < line.index("reduce 1") < line.index("reduce 0"), (
        "behind the first call's backward"
    )
    driver.end_microbatch()
    assert log.whole == set()


def test_units_inside_others_and_what_hands_on_what_one_inside_returns():
    class Outer(Layer):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Layer()

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(super().forward(x))

    model = nn.Sequential(Layer(), Outer())
    log, driver = driven(model, Outer, Layer)
    model(torch.ones(3)).sum().backward()
    line = log.since()
    assert line.startswith("gather 0, use 0, free 0, gather 1, use 1, gather 2, use 2")
    assert line.rindex("free 1") > line.rindex("use 1"), "it stays while the one inside runs"
    assert line.index("reduce 2") < line.index("reduce 1") < line.index("reduce 0")
    driver.end_microbatch()
    assert log.whole == set()


def test_a_graph_that_is_thrown_away_is_waited_for_by_nobody():
    model = nn.Sequential(Partly(), Partly())
    log, _ = driven(model, Partly)
    thrown = model(torch.ones(3))
    del thrown
    out = model(torch.ones(3))
    log.since()
    out.sum().backward()
    assert "reduce 1, free 1" in log.since()


def test_a_graph_that_waits_for_its_backward_is_waited_for():
    model = nn.Sequential(Partly(), Partly())
    log, driver = driven(model, Partly)
    waits, out = model(torch.ones(3)), model(torch.ones(3))
    log.since()
    out.sum().backward()
    assert "reduce" not in log.since()
    driver.end_microbatch()
    assert "reduce 1, reduce 0" in log.since()
    driver.begin_backward(is_last=True)
    waits.sum().backward()
    assert "reduce 1, free 1" in log.since(), "the other one is over"


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputation(reentrant):
    class Recomputed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.last = Layer(), Layer(), Layer()

        def forward(self, x: Tensor) -> Tensor:
            return self.last(checkpoint(self.second, self.first(x), use_reentrant=reentrant))

    model = Recomputed()
    log, driver = driven(model)
    out = model(torch.ones(3))
    log.since()
    out.sum().backward()
    line = log.since()
    assert line.count("gather 1") == 1, "one gather for what is run again and its backward"
    assert line.index("reduce 2") < line.index("reduce 1") < line.index("reduce 0"), line
    assert line.index("free 1") < line.index("gather 0")
    driver.end_microbatch()
    assert log.whole == set()


def test_a_forward_that_ended_with_an_error_leaves_nothing_behind():
    class Fails(Layer):
        fails = True

        def forward(self, x: Tensor) -> Tensor:
            if self.fails:
                raise RuntimeError("on purpose")
            return super().forward(x)

    model = nn.Sequential(Layer(), Fails())
    log, _ = driven(model)
    with pytest.raises(RuntimeError, match="on purpose"):
        model(torch.ones(3))
    model[1].fails = False
    log.since()
    model(torch.ones(3)).sum().backward()
    assert (
        log.since()
        == "free 1, gather 0, use 0, free 0, gather 1, use 1, use 1, reduce 1, free 1, gather 0, use 0, reduce 0"
    )


def test_several_outputs_and_an_output_that_is_a_leaf():
    class Splits(Layer):
        def forward(self, x: Tensor) -> dict[str, object]:
            return {"pair": (super().forward(x), x * self.w), "label": "x"}

    class Joins(Layer):
        def forward(self, *, pair: tuple[Tensor, Tensor], label: str) -> Tensor:
            return super().forward(pair[0] + pair[1])

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.splits, self.joins = Splits(), Joins()

        def forward(self, x: Tensor) -> Tensor:
            return self.joins(**self.splits(x))

    log, _ = driven(model := Net(), Splits, Joins)
    model(torch.ones(3)).sum().backward()
    assert log.since() == FORWARD + ", use 1, reduce 1, free 1, gather 0, use 0, reduce 0"

    class Hands(Layer):
        def forward(self, x: Tensor) -> Tensor:
            return self.w

    log, _ = driven(model := nn.Sequential(Hands()), Hands)
    model(torch.ones(3)).sum().backward()
    assert log.since() == "gather 0, use 0, use 0, reduce 0"


class Reader(nn.Module):
    """Reads the weights of a layer that it does not call, and calls another."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.called, self.fails = Layer(), Layer(), False

    def forward(self, x: Tensor) -> Tensor:
        y = self.called(x)
        if self.fails:
            raise RuntimeError("on purpose")
        return y * self.layer.w * self.layer.w


def test_reads_of_a_module_that_is_not_called():
    model = Reader()
    log, driver = driven(model)
    for _ in range(2):
        out = model(torch.ones(3))
        assert log.since() == "gather 1, use 1, free 1, gather 0, use 0", "once a forward"
        out.sum().backward()
        assert log.since().startswith("use 0"), "needed from the output on"
        driver.end_microbatch()
        assert log.since().endswith("free 0, free 1"), "it stays to the end"
        driver.begin_backward(is_last=True)
    with torch.no_grad():
        model(torch.ones(3))
    assert log.since() == "gather 1, use 1, free 1, gather 0, use 0, free 0"


def test_nobody_hears_of_reads_outside_of_forwards_or_of_what_is_called():
    model = Reader()
    log, _ = driven(model)
    assert model.layer.w.shape == model.called.w.shape == (3,)
    assert len(list(model.parameters())) == len(model.state_dict()) == 2
    model.fails = True
    with pytest.raises(RuntimeError, match="on purpose"):
        model(torch.ones(3))
    log.since()
    assert model.layer.w.shape == (3,)
    assert log.since() == "", "the forward is over, though with an error"


def test_reads_in_a_recomputation():
    class Recomputed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.reader = Layer(), Reader()

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.reader, self.first(x), use_reentrant=False)

    model = Recomputed()
    log, driver = driven(model)
    model(torch.ones(3)).sum().backward()
    driver.end_microbatch()
    assert log.whole == set()
    assert log.since().count("gather 1") == 1, "what is only read stays from the forward on"


def test_a_unit_called_without_the_whole_reads_too():
    class Scaled(Reader):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(3))

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * self.scale

    model = nn.Sequential(Layer(), Scaled())
    log, driver = driven(model, Scaled, Layer)
    out = model[1](torch.ones(3))
    assert log.since() == "gather 1, use 1, gather 3, use 3, free 3, gather 2, use 2", "2: what is only read"
    out.sum().backward()
    driver.end_microbatch()
    assert log.whole == set()


def test_a_backward_that_another_one_goes_through_is_refused():
    model = nn.Sequential(Layer(), Layer())
    driven(model)
    x = torch.ones(3, requires_grad=True) * 1
    with pytest.raises(ModelError, match=r"unit '1': create_graph=True .*optim_grads_params"):
        torch.autograd.grad(model(x).sum(), x, create_graph=True)


def test_more_microbatches_than_the_step_has():
    _, driver = driven(nn.Sequential(Layer()))
    driver.begin_step(1)
    driver.end_microbatch()
    with pytest.raises(AssertionError, match="more microbatches"):
        driver.end_microbatch()


def test_tensors_in_nested_values():
    @dataclasses.dataclass
    class Batch:
        x: Tensor
        more: dict[str, list[Tensor]]
        label: str = "no tensor"

    one, two, three = torch.ones(1), torch.ones(2), torch.ones(3)
    found = list(tensors_in((Batch(one, {"a": [two]}), {"b": (three, None)}, 5, Batch)))
    assert [tensor.numel() for tensor in found] == [1, 2, 3]


def test_in_backward():
    seen = []
    x = torch.ones(2, requires_grad=True)
    y = x * 2
    y.register_hook(lambda grad: seen.append(in_backward()))
    y.sum().backward()
    assert (seen, in_backward()) == ([True], False)
