"""Several chunks of one rank: one set of names."""

from __future__ import annotations

import pytest
from torch import nn

from megatron.core.module import ModelChunks, ModelError


def linear(name: str) -> nn.Module:
    return nn.ModuleDict({name: nn.Linear(2, 2)})


def test_chunks_keep_their_order_and_stages():
    chunks = ModelChunks((linear("b"), linear("a")), (1, 5))
    assert list(chunks.parameters) == ["b.weight", "b.bias", "a.weight", "a.bias"]
    assert chunks.names_of == [["b.weight", "b.bias"], ["a.weight", "a.bias"]]
    assert chunks.stage_of == {"b.weight": 1, "b.bias": 1, "a.weight": 5, "a.bias": 5}
    assert chunks.holders["a.bias"] == [1]
    assert ModelChunks((linear("x"), linear("y"))).stages == (0, 1)


def test_one_tensor_in_two_chunks_is_one_parameter():
    first, last = linear("tied"), linear("tied")
    last["tied"].weight = first["tied"].weight
    last["tied"].bias = None
    chunks = ModelChunks((first, last), (0, 3))
    assert chunks.holders == {"tied.weight": [0, 1], "tied.bias": [0]}
    assert chunks.stage_of["tied.weight"] == 0


def test_names_that_are_not_the_models_are_refused():
    with pytest.raises(ModelError, match=r"chunks 0 and 1 both have a parameter 'a.weight'"):
        ModelChunks((linear("a"), linear("a")))
    first, last = linear("a"), linear("b")
    last["b"].weight = first["a"].weight
    with pytest.raises(ModelError, match=r"one tensor has two names, 'a.weight' and 'b.weight'"):
        ModelChunks((first, last))
    for stages in ((3, 1), (2, 2), (0,)):
        with pytest.raises(AssertionError, match="stages"):
            ModelChunks((linear("a"), linear("b")), stages)
