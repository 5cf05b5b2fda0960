"""Reads of parameters: who is told, until when, and what is no read."""

from __future__ import annotations

import copy
import pickle

import torch
from torch import nn

from megatron.core.distributed.sharded_module.parameter_reads import ParameterReads
from megatron.core.units import Unit, find_units


class Layer(nn.Linear):
    """A unit with another module in it."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.inner = nn.Linear(2, 2)


def heard(*units: object) -> tuple[nn.Module, list[str], ParameterReads]:
    model = nn.Sequential(Layer(), Layer())
    log: list[str] = []

    def read(unit: Unit) -> None:
        log.append(unit.name)

    found = find_units([model], dict(model.named_parameters()), None, units or (Layer,))
    return model, log, ParameterReads(found, read)


def test_a_unit_is_told_of_reads_until_it_is_called():
    model, log, reads = heard()
    assert model[0].weight is next(model.parameters())
    assert log == ["0"]
    assert model[1].inner.bias.shape == (2,)
    assert log == ["0", "1"]
    reads.called(model[0])
    assert model[0].weight.shape == model[0].inner.weight.shape
    assert log == ["0", "1"]
    assert {type(module._parameters) for module in model[0].modules()} == {dict}
    assert model[1].weight.shape == (2, 2)
    assert log == ["0", "1", "1"]
    reads.called(model[0])  # again


def test_of_units_inside_others_the_one_that_owns_is_told():
    model, log, reads = heard(Layer, "Linear")
    assert model[0].inner.weight.shape == model[0].weight.shape
    assert log == ["0.inner", "0"]
    reads.called(model[0])
    assert model[0].inner.weight.shape == model[0].weight.shape
    assert log == ["0.inner", "0", "0.inner"]


def test_walking_over_parameters_is_no_read():
    model, log, _ = heard()
    names = [name for name, _ in model.named_parameters()]
    assert list(model.state_dict()) == names
    model.load_state_dict(model.state_dict())
    model.double().requires_grad_(False)
    assert log == []
    assert all(parameter.dtype == torch.float64 for parameter in model.parameters())
    model[0].weight = nn.Parameter(torch.ones(2, 2))
    log.clear()
    assert model[0].weight.sum() == 4
    assert log == ["0"]


def test_copies_tell_nobody():
    model, log, _ = heard()
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(twin[0].weight, dict(model.named_parameters())["0.weight"])
        assert {type(module._parameters) for module in twin.modules()} == {dict}
    assert log == []
