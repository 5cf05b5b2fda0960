"""Units: what is declared, what is derived from classes and names, what they own, in which order they run."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from megatron.core.module import ModelError, ModelUnit
from megatron.core.units import Unit, derive_units, find_units


def linear() -> nn.Linear:
    return nn.Linear(2, 2, bias=False)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.expert = linear(), Expert()


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = linear()


class Special(Expert):
    pass


class Model(nn.Module):
    """embed, position | layers.0, layers.1 | norm, head"""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.position = nn.Embedding(4, 2), nn.Embedding(4, 2)
        self.layers = nn.ModuleList([Layer(), Layer()])
        self.norm, self.head = nn.LayerNorm(2), linear()


def units_of(model: nn.Module, *unit_modules, declared=None) -> tuple[Unit, ...]:
    return find_units([model], dict(model.named_parameters()), declared, unit_modules)


def names(units) -> list[str]:
    return [unit.name for unit in units]


def test_the_rest_is_a_unit_per_run_of_neighbours():
    for word in (Layer, "Layer"):
        units = units_of(Model(), word)
        assert names(units) == ["embed+position", "layers.0", "layers.1", "norm+head"]
        assert [unit.index for unit in units] == [0, 1, 2, 3]
        assert units[0].names == ("embed.weight", "position.weight")
        assert units[1].names == ("layers.0.inner.weight", "layers.0.expert.up.weight")
        assert units[3].names == ("norm.weight", "norm.bias", "head.weight")
        assert [unit.backward_reads for unit in units] == [False, True, True, True], "lookups read no weights"
        assert not any(unit.spans or unit.lasts for unit in units)


def test_subclasses_match_and_the_innermost_unit_owns():
    model = Model()
    model.layers[1].expert = Special()
    units = units_of(model, Layer, Special)
    assert names(units) == ["embed+position", "layers.0", "layers.1", "layers.1.expert", "norm+head"]
    assert units[2].names == ("layers.1.inner.weight",)
    assert units[3].names == ("layers.1.expert.up.weight",)
    assert names(units_of(model, Expert)).count("layers.1.expert") == 1, "a subclass of the class named"
    assert [u.names for u in units_of(model, Layer, Expert)][1:3] == [
        ("layers.0.inner.weight",),
        ("layers.0.expert.up.weight",),
    ]


def test_no_unit_modules_make_one_unit_of_leaves():
    units = units_of(nn.Sequential(linear(), nn.ReLU(), linear()))
    assert [(unit.name, unit.names) for unit in units] == [("0+2", ("0.weight", "2.weight"))]


def test_a_tuple_of_names_is_one_unit_that_lasts():
    model = Model()
    model.head.weight = model.embed.weight
    units = units_of(model, Layer, ("embed", "head"))
    assert names(units) == ["embed+head", "position", "layers.0", "layers.1", "norm"]
    tied = units[0]
    assert tied.names == ("embed.weight",)
    assert tied.modules == (model.embed, model.head)
    assert (tied.spans, tied.lasts, tied.backward_reads) == (False, True, True)
    assert [unit.lasts for unit in units[1:]] == [False] * 4
    neighbours = units_of(Model(), Layer, ("embed", "position"))
    assert not neighbours[0].lasts, "nothing runs in between"
    assert not neighbours[0].backward_reads


def test_what_a_container_owns_itself_spans_the_model():
    model = Model()
    model.layers.scale = nn.Parameter(nn.Linear(1, 1).weight.detach())
    units = units_of(model, Layer)
    assert names(units) == ["Model", "embed+position", "layers.0", "layers.1", "norm+head"]
    assert units[0].names == ("layers.scale",)
    assert (units[0].spans, units[0].lasts) == (True, True)
    assert units[0].modules == (model,)
    assert units_of(Model(), Model)[0].spans, "a model that is one unit"


def test_declared_units_are_taken_as_they_are():
    model = Model()
    declared = [
        ModelUnit("first", (model.embed, model.position), backward_reads=False),
        ModelUnit("layers", (model.layers,)),
        ModelUnit("nothing", (nn.ReLU(),)),
        ModelUnit("last", (model.norm, model.head)),
    ]
    units = units_of(model, declared=declared)
    assert [(unit.index, unit.name, len(unit.names)) for unit in units] == [
        (0, "first", 2),
        (1, "layers", 4),
        (2, "last", 3),
    ], "what owns no parameter is no unit"
    assert [unit.backward_reads for unit in units] == [False, True, True]
    with pytest.raises(AssertionError, match=r"parameters in no unit: \['norm.weight', .*'head.weight'\]"):
        units_of(model, declared=declared[:2])


def test_nested_declared_units_run_around_their_inner_ones():
    model = Model()
    inner = ModelUnit("expert", (model.layers[0].expert,))
    declared = [
        ModelUnit("first", (model.embed, model.position)),
        *(ModelUnit(f"layer {i}", (layer,)) for i, layer in enumerate(model.layers)),
        ModelUnit("last", (model.norm, model.head)),
        inner,
    ]
    units = {unit.name: unit for unit in units_of(model, declared=declared)}
    assert units["layer 0"].names == ("layers.0.inner.weight",)
    assert units["expert"].names == ("layers.0.expert.up.weight",)


def test_several_chunks():
    chunks = nn.ModuleDict({"a": Layer()}), nn.ModuleDict({"b": Layer()})
    parameters = {name: p for chunk in chunks for name, p in chunk.named_parameters()}
    units = find_units(chunks, parameters, None, [Layer])
    assert [(unit.name, unit.names) for unit in units] == [
        ("a", ("a.inner.weight", "a.expert.up.weight")),
        ("b", ("b.inner.weight", "b.expert.up.weight")),
    ]


def test_errors_name_what_is_wrong():
    with pytest.raises(ModelError, match=r"--fsdp-unit-modules .*\['Lair', 'LSTM'\].*classes are .*'Layer'"):
        units_of(Model(), Layer, "Lair", nn.LSTM)
    with pytest.raises(ModelError, match=r"\('embed', 'heads'\): the model has no modules \['heads'\]"):
        units_of(Model(), ("embed", "heads"))
    tied = Model()
    tied.head.weight = tied.embed.weight
    declared = [ModelUnit("in", (tied.embed,)), ModelUnit("rest", (tied,))]
    with pytest.raises(
        ModelError, match=r"'embed.weight' is shared by the units .*declare them as one, in units"
    ):
        find_units([tied], dict(tied.named_parameters()), declared, None)


def test_derived_units_that_share_a_parameter_are_one():
    tied = Model()
    tied.head.weight = tied.embed.weight
    first, *rest = units_of(tied, Layer)
    assert first.name == "embed+position+norm+head"
    assert first.lasts, "it stays while the layers come and go"
    assert first.modules == (tied.embed, tied.position, tied.norm, tied.head)
    assert "embed+position+norm+head" not in names(rest)
    inner = Model()
    inner.layers[0].inner.weight = inner.layers[1].inner.weight
    assert any(len(unit.modules) == 2 for unit in units_of(inner, Layer))
    whole = Model()
    whole.scale = whole.layers[0].inner.weight  # in use at any time: the layer is part of the whole's unit
    spanning = next(unit for unit in units_of(whole, Layer) if unit.spans)
    assert spanning.modules == (whole,)
    assert any(name.startswith("layers.0.inner") or name == "scale" for name in spanning.names)


def test_containers_are_no_units():
    model = nn.Sequential(linear(), nn.ModuleList([linear(), linear()]), nn.ParameterList([torch.ones(2)]))
    with pytest.raises(
        ModelError, match=r"'1' is a ModuleList, which has no forward, .*\('1.0.weight'\).*inside"
    ):
        units_of(model, nn.ModuleList)
    with pytest.raises(ModelError, match=r"'2' is a ParameterList.*\('2.0'\)"):
        units_of(model, ("0", "2"))
    # Not where it would hold nothing, and not where nobody asked for it.
    assert names(units_of(model, nn.ModuleList, nn.Linear)) == ["0", "1.0", "1.1", "2"]


def test_derived_units_of_a_matched_chunk_have_no_rest():
    model = Layer()
    assert [(unit.name, unit.modules) for unit in derive_units([model], [Layer])] == [("Layer", (model,))]


def test_units_of_one_name_are_kept_apart():
    model = nn.Sequential(linear(), linear(), linear())
    declared = [
        ModelUnit("same", (model[0],)),
        ModelUnit("same", (model[1],)),
        ModelUnit("other", (model[2],)),
    ]
    units = units_of(model, declared=declared)
    assert names(units) == ["same", "same#2", "other"]
    assert [unit.names for unit in units] == [("0.weight",), ("1.weight",), ("2.weight",)]
    declared = [
        ModelUnit("same", (model[0],)),
        ModelUnit("other", (model[1],)),
        ModelUnit("same", (model[2],)),
    ]
    assert not any(unit.lasts for unit in units_of(model, declared=declared)), "nothing encloses by its name"


def test_units_inside_others():
    units = units_of(Model(), Layer, Expert)
    assert names(units)[1:3] == ["layers.0", "layers.0.expert"]
    assert [unit.nests for unit in units] == [False, True, False, True, False, False]
    assert [unit.nested for unit in units] == [False, False, True, False, True, False]
    model = nn.Sequential(linear(), linear())
    model.direct = nn.Parameter(linear().weight)
    units = units_of(model, nn.Linear)
    assert [(unit.lasts, unit.nests, unit.nested) for unit in units] == [
        (True, True, False),
        (False, False, False),
        (False, False, False),
    ], "inside a unit that lasts they follow one another as if it were not there"
