"""When units run: the events of forwards, backwards, recomputations, several calls and inputs of every kind."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megatron.core.distributed.custom_fsdp.hooks import UnitHooks, in_backward
from megatron.core.distributed.unit_events import tensors_in
from megatron.core.module import ModelError
from megatron.core.units import find_units


class Events:
    """A driver that notes what it is told."""

    def __init__(self) -> None:
        self.log: list[str] = []

    def begin_forward(self, *, training: bool) -> None:
        self.log.append(f"begin {training}")

    def end_forward(self, *, training: bool) -> None:
        self.log.append(f"end {training}")

    def enter_forward(self, unit: int, *, recomputing: bool) -> None:
        self.log.append(f"{'again' if recomputing else 'enter'} {unit}")

    def leave_forward(self, unit: int, *, recomputing: bool) -> None:
        self.log.append(f"{'left again' if recomputing else 'leave'} {unit}")

    def enter_backward(self, unit: int, *, differentiable: bool) -> None:
        self.log.append(f"{'first back' if differentiable else 'back'} {unit}")

    def passed(self, unit: int, *, last: bool) -> None:
        self.log.append(f"{'passed' if last else 'one of'} {unit}")

    def since(self) -> str:
        log, self.log = self.log, []
        return ", ".join(log)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.w).tanh()


def hooked(model: nn.Module, *unit_modules, backward: bool = True) -> Events:
    events = Events()
    units = find_units([model], dict(model.named_parameters()), None, unit_modules or (Layer,))
    UnitHooks([model], units, events, backward=backward)
    return events


def test_a_forward_and_its_backward():
    model = nn.Sequential(Layer(), Layer())
    events = hooked(model)
    out = model(torch.ones(3))
    assert events.since() == "begin True, enter 0, leave 0, enter 1, leave 1, end True"
    out.sum().backward()
    # 1 is passed before the maker of its input is come to; the input of 0 has no gradient: its last one completes it
    assert events.since() == "back 1, passed 1, back 0"
    with torch.no_grad():
        model(torch.ones(3))
    assert events.since() == "begin False, enter 0, leave 0, enter 1, leave 1, end False"
    plain = nn.Sequential(Layer(), Layer())
    events = hooked(plain, backward=False)
    plain(torch.ones(3)).sum().backward()
    assert events.since() == "begin True, enter 0, leave 0, enter 1, leave 1, end True"


def test_a_differentiable_input_that_is_a_leaf_passes_nothing():
    model = nn.Sequential(Layer(), Layer())
    events = hooked(model)
    out = model(torch.ones(3, requires_grad=True))
    events.since()
    out.sum().backward()
    assert events.since() == "back 1, passed 1, back 0"
    model(torch.ones(3, requires_grad=True) * 1).sum().backward()
    assert events.since().endswith("back 0, one of 0"), "the graph of the other call still lives"
    del out
    model(torch.ones(3, requires_grad=True) * 1).sum().backward()
    assert events.since().endswith("back 0, passed 0"), "no source any more"


def test_a_call_without_differentiable_input_counts_while_its_graph_lives():
    """Its last gradient may still be to come where backward is through the unit's other calls."""

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.layer = Layer(), Layer()

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(self.first(x)) + self.layer(x)

    model = Both()
    events = hooked(model)
    for _ in range(2):
        model(torch.ones(3)).sum().backward()
        log = events.since().split(", ")
        assert ("one of 1" in log, "passed 1" in log) == (True, False), log
    model(torch.ones(3, requires_grad=True) * 1).sum().backward()
    assert "passed 1" in events.since(), (
        "both calls have an input to be watched, and nothing of before is left"
    )


def test_every_call_of_a_module_that_runs_several_times():
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.layer = Layer(), Layer()

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(self.layer(self.first(x)))

    model = Twice()
    events = hooked(model)
    out = model(torch.ones(3))
    assert events.since() == "begin True, enter 0, leave 0, enter 1, leave 1, enter 1, leave 1, end True"
    out.sum().backward()
    assert events.since() == "back 1, one of 1, back 1, passed 1, back 0"


def test_a_graph_that_is_thrown_away_is_waited_for_by_nobody():
    model = nn.Sequential(Layer(), Layer())
    events = hooked(model)
    thrown = model(torch.ones(3))
    del thrown
    out = model(torch.ones(3))
    events.since()
    out.sum().backward()
    assert "passed 1" in events.since()


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputation(reentrant):
    class Recomputed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = Layer(), Layer()

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.second, self.first(x), use_reentrant=reentrant)

    model = Recomputed()
    events = hooked(model)
    out = model(torch.ones(3))
    assert events.since().startswith("begin True, enter 0, leave 0, enter 1, leave 1")
    out.sum().backward()
    log = events.since().split(", ")
    assert log.index("again 1") < log.index("back 0")
    assert not any(event.startswith(("enter", "leave", "begin")) for event in log)


def test_a_unit_of_several_modules_is_left_after_the_last_of_them():
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = Layer(), Layer(), Layer()

        def forward(self, x: Tensor) -> Tensor:
            return self.c(self.b(self.a(x)))

    model = Tied()
    events = hooked(model, ("a", "c"), Layer)
    model(torch.ones(3))
    assert events.since() == "begin True, enter 0, enter 1, leave 1, enter 0, leave 0, end True"


def test_a_forward_that_ended_with_an_error_leaves_nothing_behind():
    class Fails(Layer):
        fails = True

        def forward(self, x: Tensor) -> Tensor:
            if self.fails:
                raise RuntimeError("on purpose")
            return super().forward(x)

    model = nn.Sequential(Layer(), Fails())
    events = hooked(model)
    with pytest.raises(RuntimeError, match="on purpose"):
        model(torch.ones(3))
    model[1].fails = False
    events.since()
    model(torch.ones(3)).sum().backward()
    assert events.since() == (
        "begin True, enter 0, leave 0, enter 1, leave 1, end True, back 1, passed 1, back 0"
    )


def test_an_input_changed_in_place_is_refused():
    class InPlace(Layer):
        def forward(self, x: dict[str, Tensor]) -> Tensor:
            x["x"] += 1
            return super().forward(x["x"])

    model = nn.Sequential(InPlace())
    hooked(model)
    with pytest.raises(ModelError, match=r"unit '0': InPlace changes one of its inputs in place"):
        model({"x": torch.ones(3)})


def test_several_outputs_and_inputs():
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

    model = Net()
    events = hooked(model, Splits, Joins)
    model(torch.ones(3)).sum().backward()
    log = events.since().split(", ")
    assert log[-3:] in (["back 1", "passed 1", "back 0"], ["back 1", "back 0", "passed 1"]), log


def test_each_backward_of_one_graph():
    model = nn.Sequential(Layer(), Layer())
    events = hooked(model)
    out = model(torch.ones(3)).sum()
    events.since()
    out.backward(retain_graph=True)
    out.backward()
    assert [event for event in events.since().split(", ") if "back" in event] == ["back 1", "back 0"] * 2


def test_an_output_that_is_a_leaf():
    class Hands(Layer):
        def forward(self, x: Tensor) -> Tensor:
            return self.w

    model = nn.Sequential(Hands())
    events = hooked(model, Hands)
    model(torch.ones(3)).sum().backward()
    assert events.since() == "begin True, enter 0, leave 0, end True, back 0"


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
    events = hooked(model)
    for _ in range(2):
        out = model(torch.ones(3))
        assert events.since() == "begin True, enter 1, leave 1, enter 0, end True", (
            "once a forward, and not left"
        )
        out.sum().backward()
        assert events.since() == "back 0, back 1", "from the output on"
    with torch.no_grad():
        model(torch.ones(3))
    assert events.since() == "begin False, enter 1, leave 1, enter 0, end False"


def test_nobody_hears_of_reads_outside_of_forwards_or_of_what_is_called():
    model = Reader()
    events = hooked(model)
    assert model.layer.w.shape == model.called.w.shape == (3,)
    assert len(list(model.parameters())) == len(model.state_dict()) == 2
    model.fails = True
    with pytest.raises(RuntimeError, match="on purpose"):
        model(torch.ones(3))
    events.since()
    assert model.layer.w.shape == (3,)
    assert events.since() == "", "the forward is over, though with an error"


def test_reads_in_a_recomputation():
    class Recomputed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.reader = Layer(), Reader()

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.reader, self.first(x), use_reentrant=False)

    model = Recomputed()
    events = hooked(model)
    out = model(torch.ones(3))
    assert "enter 2, leave 2, enter 1, end" in events.since(), "0: first, 1: reader.layer, 2: reader.called"
    out.sum().backward()
    log = events.since().split(", ")
    assert log[0] == "back 1"
    assert log.index("again 2") < log.index("again 1") < log.index("back 2")


def test_only_the_last_gradient_completes_a_unit_of_which_a_module_is_only_read():
    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.layer, self.called = Layer(), Layer(), Layer()

        def forward(self, x: Tensor) -> Tensor:
            return self.called(self.first(x) * self.layer.w)

    model = Half()
    events = hooked(model, ("layer", "called"), Layer)
    for _ in range(2):
        model(torch.ones(3)).sum().backward()
        log = events.since()
        assert "passed 1" not in log, log
        assert "leave 1" not in log, "one of its modules never runs"


def test_a_unit_called_without_the_whole_reads_too():
    class Scaled(Reader):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(3))

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * self.scale

    model = nn.Sequential(Layer(), Scaled())
    events = hooked(model, Scaled, Layer)
    out = model[1](torch.ones(3))
    assert events.since() == "enter 1, enter 3, leave 3, enter 2, leave 1", "2: what is only read"
    out.sum().backward()
    assert events.since() == "back 1, back 2, back 3"


def test_a_backward_that_another_one_goes_through():
    """It passes nothing: all calls are gone through again."""
    model = nn.Sequential(Layer(), Layer())
    events = hooked(model)
    x = torch.ones(3, requires_grad=True) * 1
    (grad,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    assert events.since().endswith("end True, first back 1, first back 0")
    grad.square().sum().backward()
    log = events.since().split(", ")
    assert [event for event in log if event.startswith("passed")] == ["passed 1", "passed 0"], log


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
