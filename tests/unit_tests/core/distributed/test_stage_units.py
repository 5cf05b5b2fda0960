"""Units and accesses of a rank's chunks: GPT's, those of other models, and units merged to the size of a bucket."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from megatron.core.distributed.custom_fsdp.stage_units import find_units_of
from megatron.core.module import ModelChunks, ModelError
from megatron.core.pipeline_parallel.plan.held.units import UnitCosts
from megatron.core.unit_accesses import Accesses, merged_groups
from tests.harness.tiny_models import tiny_config, tiny_stage
from tests.harness.unit_stages import shares

UNTIED = {"untie_embeddings_and_output_weights": True}


def found_in(modules, unit_modules=(), **options):
    return find_units_of(ModelChunks(tuple(modules)), None, unit_modules, **options)


def rows(found):
    """By chunk: accesses by name of the forward and the backward."""
    called = [unit.name.removeprefix("decoder.layers.") for unit in found.units]
    return [
        tuple(
            ["+".join(called[unit] for unit in access) for access in row]
            for row in (chunk.forward, chunk.backward)
        )
        for chunk in found.chunks
    ]


def gpt(*stages, **flags):
    """A chunk a stage, of layers by their numbers; E and L where it embeds and ends the model."""
    config = tiny_config(num_layers=4, **flags)
    both = len(stages) > 1 and "E" in stages[0] and "L" in stages[-1]
    chunks = [
        tiny_stage(
            config,
            layers=[int(one) for one in stage if one.isdigit()],
            pre_process="E" in stage,
            post_process="L" in stage,
            other_end_here=both and ("E" in stage or "L" in stage),
        )
        for stage in stages
    ]
    if both and chunks[0].tied:  # as `build_engine` joins them
        chunks[-1].embedding.word_embeddings.weight = chunks[0].embedding.word_embeddings.weight
    return chunks


def test_a_whole_gpt_needs_its_tied_matrix_at_both_ends():
    (row,) = rows(found_in(gpt("E01L")))
    assert row[0] == ["embedding_and_head", "0", "1", "embedding_and_head"]
    assert row[1] == ["embedding_and_head", "1", "0", "embedding_and_head"]
    (row,) = rows(found_in(gpt("E01L", **UNTIED)))
    assert row == (["embedding", "0", "1", "head"], ["head", "1", "0", "embedding"])


def test_stages_of_a_pipeline():
    assert rows(found_in(gpt("E0"))) == [(["embedding", "0"], ["0", "embedding"])]
    assert rows(found_in(gpt("3L"))) == [(["3", "head"], ["head", "3"])]
    assert rows(found_in(gpt("12"))) == [(["1", "2"], ["2", "1"])]
    assert rows(found_in(gpt(""))) == [([], [])]
    assert rows(found_in(gpt("12"), ["Nothing"])) == [(["1", "2"], ["2", "1"])], (
        "the model names its units itself"
    )


def test_the_ends_of_a_v_are_one_unit_that_only_the_head_reads_in_its_backward():
    found = found_in(gpt("E0", "3L"))
    first, last = rows(found)
    assert first == (["embedding", "0"], ["0", "embedding"])
    assert last == (["3", "head+embedding"], ["head+embedding", "3"])
    assert found.chunks[0].units[0] == found.chunks[1].units[2], "one unit of two chunks"
    costs = [
        UnitCosts(
            unit.name,
            shares=shares(10 + number, 0),
            extra_grad_bytes=7,
            backward_reads=unit.backward_reads,
        )
        for number, unit in enumerate(found.units)
    ]
    first, last = found.stages(costs)
    assert [stage.units[place].extra_grad_bytes for stage, place in ((first, 0), (last, 2))] == [7, 0]
    assert [(unit.name, unit.weight_bytes, unit.backward_reads) for unit in first.units] == [
        ("embedding", 10, False),
        ("decoder.layers.0", 11, True),
    ]
    assert [(unit.name, unit.weight_bytes, unit.backward_reads) for unit in last.units] == [
        ("decoder.layers.3", 12, True),
        ("head", 13, True),
        ("embedding", 10, True),
    ]
    assert last.forward == ((0,), (1, 2))
    assert last.backward == ((1, 2), (0,))
    assert [found.units[unit].name for unit in found.backward_order] == [
        "head",
        "decoder.layers.3",
        "decoder.layers.0",
        "embedding",
    ]
    # The ends of an untied model are units of their own.
    assert rows(found_in(gpt("E0", "3L", **UNTIED)))[1] == (["3", "head"], ["head", "3"])


@pytest.mark.parametrize(
    ("method", "number", "backward"),
    [
        ("uniform", 1, ["3", "2", "1", "0"]),
        ("uniform", 3, ["3", "0+1+2"]),
        ("block", 2, ["3", "2", "1", "0"]),
    ],
)
def test_layers_that_are_recomputed_together_are_needed_together_in_the_backward(method, number, backward):
    recompute = {"recompute_granularity": "full", "recompute_method": method, "recompute_num_layers": number}
    (row,) = rows(found_in(gpt("0123", **recompute)))
    assert row == (["0", "1", "2", "3"], backward)


class Block(nn.Module):
    def __init__(self, inner: nn.Module | None = None) -> None:
        super().__init__()
        self.fc = nn.Linear(2, 2)
        self.inner = inner


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(3, 2)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(2, 3)


def test_what_other_models_do_not_name_is_always_in_use():
    assert rows(found_in([Net()])) == [(["Net"], ["Net"])]
    found = found_in([Net()], ["Block"])
    forward = ["embed+head+blocks.0", "embed+head+blocks.1"]
    assert rows(found) == [(forward, forward[::-1])]
    assert [one.names for one in found.units][::3] == [("embed.weight",), ("head.weight", "head.bias")]
    assert found.lasting == {0, 1, 2, 3}
    found = found_in([Net()], ["Embedding", "Block", "Linear"])
    assert rows(found)[0][0] == ["embed", "blocks.0.fc", "blocks.1.fc", "head"], "no unit without parameters"
    with pytest.raises(ModelError, match=r"\['Blok'\]: no module of the model matches"):
        found_in([Net()], ["Blok"])


def test_units_inside_units_are_in_use_with_those_around_them():
    net = nn.Sequential(Block(Block()), Block())
    net[0].inner.fc.requires_grad_(False)
    found = found_in([net], ["Block"])
    assert rows(found)[0][0] == ["0", "0+0.inner", "1"]
    assert rows(found)[0][1] == ["1", "0+0.inner", "0"]
    assert found.lasting == {0, 1}
    without = found_in([net], ["Block"], without=["0.inner.fc.weight", "0.inner.fc.bias"])
    assert rows(without)[0][0] == ["0", "1"], "what is neither gathered nor reduced is no unit"


def test_what_a_chunk_shares_with_an_earlier_one_is_in_use_all_the_time():
    first, second = nn.ModuleDict({"tied": Block()}), nn.ModuleDict({"tied": Block(), "own": Block()})
    second["tied"].fc.weight, second["tied"].fc.bias = first["tied"].fc.weight, first["tied"].fc.bias
    found = found_in([first, second], ["Block"])
    assert rows(found) == [(["tied"], ["tied"]), (["tied+own"], ["tied+own"])]


def test_neighbours_in_the_backward_are_merged_to_the_size_of_a_bucket():
    found = found_in(gpt("E0123L", **UNTIED))
    names = [unit.name for unit in found.units]
    assert names == ["embedding", *(f"decoder.layers.{n}" for n in range(4)), "head"]
    one = found.merged([1] * 6, 2)
    assert [unit.name for unit in one.units] == [
        "embedding..decoder.layers.0",
        "decoder.layers.1..decoder.layers.2",
        "decoder.layers.3..head",
    ]
    assert one.chunks[0].forward == ((0,), (1,), (2,))
    assert one.units[0].modules == (*found.units[0].modules, *found.units[1].modules)
    assert set(one.units[2].names) == {*found.units[4].names, *found.units[5].names}
    assert one.units[0].backward_reads, "one of its units does"
    assert len(found.merged([1] * 6, 100).units) == 1
    assert found.merged([1] * 6, 1) == found
    # What is needed at both ends of the model has its gradients last.
    tied = found_in(gpt("E012L")).merged([1] * 4, 2)
    assert [unit.name for unit in tied.units] == [
        "embedding_and_head..decoder.layers.0",
        "decoder.layers.1..decoder.layers.2",
    ]
    assert tied.chunks[0].forward == ((0,), (1,), (0,))
    assert tied.backward_order == (1, 0)


def test_units_of_two_chunks_are_not_merged():
    found = found_in(gpt("E01", "23L")).merged([1] * 6, 100)
    assert [unit.name for unit in found.units] == [
        "embedding",
        "decoder.layers.0..decoder.layers.1",
        "decoder.layers.2..head",
    ]


@settings(derandomize=True, max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 50), min_size=1, max_size=12), st.integers(1, 100))
def test_merged_units_are_no_larger_than_it_takes_to_reach_the_size(numel, limit):
    forward = tuple((unit,) for unit in range(len(numel)))
    groups = merged_groups([Accesses(forward, forward[::-1])], numel, limit)
    assert sorted(unit for group in groups for unit in group) == list(range(len(numel)))
    for group in groups:  # gradients come in the reverse order
        assert sum(numel[unit] for unit in group[1:]) < limit
        assert group[0] == 0 or sum(numel[unit] for unit in group) >= limit
