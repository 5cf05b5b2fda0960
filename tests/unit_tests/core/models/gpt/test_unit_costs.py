"""Units of GPT stages by formula against those of models that are built: names, accesses, bytes; and the sums
of costs."""

import dataclasses
import itertools

import pytest
import torch

from megatron.core.distributed.custom_fsdp.shard_layout import ALIGNMENT, ParamSpec, plan_layouts
from megatron.core.distributed.custom_fsdp.stage_units import find_units_of
from megatron.core.models.gpt.gpt import GPTModel
from megatron.core.models.gpt.stage_costs import ModelCosts
from megatron.core.models.gpt.stage_layers import StageSpec
from megatron.core.models.gpt.unit_costs import stage_units
from megatron.core.module import ModelChunks
from megatron.core.pipeline_parallel.plan.held.units import StateBytes
from megatron.core.pipeline_parallel.plan.placement import Placement
from megatron.core.sharding_table import STRATEGIES, ShardOver, ShardPlace
from tests.harness.tiny_models import VARIANTS, tiny_config

VOCAB, RANKS = 96, 4
WHOLE = StateBytes(STRATEGIES["no_shard"], ShardPlace(), 1, 1, 1, 1)
UNTIED = {"untie_embeddings_and_output_weights": True}
FULL = {"recompute_granularity": "full", "recompute_num_layers": 2}
MODELS = {
    "learned positions": {},
    "untied": UNTIED,
    "rope": VARIANTS["rope"],
    "llama": VARIANTS["llama"],
    "gemma": VARIANTS["gemma"],
    "uniform": {**FULL, "recompute_method": "uniform"},
    "block": {**FULL, "recompute_method": "block"},
}
PIPELINES = {
    "one stage": (Placement("linear", 1), (4,)),
    "linear": (Placement("linear", 3), (1, 3, 0)),
    "looped": (Placement("looped", 2, 2), (1, 1, 1, 1)),
    "v": (Placement("v", 2, 2), (1, 2, 1, 0)),
}


def stages_of(counts):
    firsts = [0, *itertools.accumulate(counts)]
    last = len(counts) - 1
    return [
        StageSpec(tuple(range(firsts[at], firsts[at] + count)), embedding=at == 0, loss=at == last)
        for at, count in enumerate(counts)
    ]


def built(config, specs, placement, rank):
    """The chunks of a rank, joined as `build_engine` joins them."""
    mine = [specs[stage] for stage, one in enumerate(placement.ranks()) if one == rank]
    both = len(mine) > 1 and mine[0].embedding and mine[-1].loss
    chunks = [
        GPTModel(
            config,
            padded_vocab_size=VOCAB,
            seed=1,
            device="meta",
            pre_process=spec.embedding,
            post_process=spec.loss,
            layers=spec.layers,
            other_end_here=both and (spec.embedding or spec.loss),
        )
        for spec in mine
    ]
    if both and chunks[0].tied:
        chunks[-1].embedding.word_embeddings.weight = chunks[0].embedding.word_embeddings.weight
    return chunks


def laid_out(chunks, found):
    """Elements of each unit's buckets, by the engine's own layout."""
    meta = {name: one for chunk in chunks for name, one in chunk.param_meta.items()}
    unit_of = {name: unit.name for unit in found.units for name in unit.names}
    parameters = ModelChunks(tuple(chunks)).parameters
    specs = [
        ParamSpec(name, p.numel(), str(p.dtype), unit=unit_of[name], shared=meta[name].shared)
        for name, p in parameters.items()
    ]
    sizes = dict.fromkeys((unit.name for unit in found.units), 0)
    for layout in plan_layouts(specs, RANKS):
        for bucket in layout.buckets:
            sizes[bucket.unit] += bucket.numel
    return sizes


@pytest.mark.parametrize("limit", [None, 30_000, 10**9])
@pytest.mark.parametrize("pipeline", PIPELINES)
@pytest.mark.parametrize("model", MODELS)
def test_units_are_those_of_the_engine(model, pipeline, limit):
    config = tiny_config(num_layers=4, **MODELS[model])
    placement, counts = PIPELINES[pipeline]
    specs = stages_of(counts)
    costs = ModelCosts(config, VOCAB, micro_batch_size=2, params_dtype="fp32")
    sharding = STRATEGIES["optim_grads_params" if limit is None else "optim"]
    if limit is None:
        sharding = dataclasses.replace(sharding, optimizer=ShardOver.FULL)
    place = ShardPlace(inner_size=RANKS // 2, outer_size=2)
    sizes = StateBytes(sharding, place, ALIGNMENT * RANKS, 2, 4, 4, 4, 8, bucket_size=limit)
    ours = stage_units(costs, specs, placement, sizes)
    for rank in range(placement.num_ranks):
        chunks = built(config, specs, placement, rank)
        found = find_units_of(ModelChunks(tuple(chunks)), None, ())
        if limit is not None:
            parameters = ModelChunks(tuple(chunks)).parameters
            numel = [sum(parameters[name].numel() for name in unit.names) for unit in found.units]
            found = found.merged(numel, limit)
        elements = laid_out(chunks, found)
        mine = [stage for stage, one in enumerate(placement.ranks()) if one == rank]
        for stage, chunk in zip(mine, found.chunks, strict=True):
            units = ours[stage].units
            assert [unit.name for unit in units] == [found.units[number].name for number in chunk.units]
            places = {number: place for place, number in enumerate(chunk.units)}
            theirs = chunk.renamed(places)
            assert (ours[stage].forward, ours[stage].backward) == (theirs.forward, theirs.backward)
            for unit in units:
                numel = elements[unit.name]
                assert (unit.weight_bytes, unit.grad_bytes) == (2 * numel, 4 * numel)
                (outer,) = unit.repeated
                if limit is None:  # weights and gradients over 2 ranks, what the optimizer has over all 4
                    assert unit.bytes_at_rest == numel // 2 * 6 + numel // 4 * 12
                    assert (outer.reduced, outer.gathered) == (numel // 2 * 4, numel // 2 * 2)
                else:
                    assert unit.bytes_at_rest == numel * 6 + numel // 2 * 12
                    assert (outer.reduced, outer.gathered) == (numel // 2 * 4, 0)
        meta = {name: one for chunk in chunks for name, one in chunk.param_meta.items()}
        parameters = ModelChunks(tuple(chunks)).parameters
        extra = {
            unit.name: sum(
                4 * parameters[name].numel() * (len(meta[name].grad_keys) - 1) for name in unit.names
            )
            for unit in found.units
        }
        told = {}
        for unit in itertools.chain(*(ours[stage].units for stage in mine)):
            told[unit.name] = told.get(unit.name, 0) + unit.extra_grad_bytes
        assert told == extra


@pytest.mark.parametrize("pipeline", PIPELINES)
@pytest.mark.parametrize("model", MODELS)
def test_costs_of_units_are_those_of_their_stage(model, pipeline):
    config = tiny_config(num_layers=4, **MODELS[model])
    placement, counts = PIPELINES[pipeline]
    specs = stages_of(counts)
    costs = ModelCosts(config, VOCAB, micro_batch_size=2, params_dtype="fp32")
    ours = stage_units(costs, specs, placement, WHOLE)
    whole = costs.of_stages(specs)
    for stage, units in enumerate(ours):
        if not units.units:
            continue
        for name in ("f", "b", "w", "activation", "held_after_b"):
            total = sum(getattr(unit, name) for unit in units.units)
            assert total == pytest.approx(getattr(whole, name)[stage], rel=1e-12), (stage, name)
            assert min(getattr(unit, name) for unit in units.units) >= 0


def test_a_recomputed_layers_backward_takes_its_forward_too():
    config = tiny_config(num_layers=4, **MODELS["block"], **UNTIED)
    costs = ModelCosts(config, VOCAB, micro_batch_size=2, params_dtype="fp32")
    plain = dataclasses.replace(costs, config=dataclasses.replace(config, recompute_granularity=None))
    placement = Placement("linear", 1)
    ours, theirs = (
        stage_units(
            one, stages_of((4,)), placement, StateBytes(STRATEGIES["no_shard"], ShardPlace(), 1, 1, 1, 1)
        )[0].units[1:5]
        for one in (costs, plain)
    )
    assert [one.b - other.b for one, other in zip(ours, theirs, strict=True)] == pytest.approx([1, 1, 0, 0])
    assert torch.tensor([one.activation for one in ours[:2]]).max() < theirs[1].activation
