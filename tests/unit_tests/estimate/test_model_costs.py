"""Stages and units as sums over described pieces, against models that are built: names, accesses, bytes, FLOPs."""

import dataclasses
import functools
import itertools
import math

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

from megatron.core.distributed.custom_fsdp.shard_layout import ALIGNMENT, ParamSpec, plan_layouts
from megatron.core.distributed.custom_fsdp.stage_units import find_units_of
from megatron.core.models.gpt.gpt import GPTModel
from megatron.core.models.gpt.stage_layers import StageSpec
from megatron.core.module import ModelChunks
from megatron.core.pipeline_parallel.plan.held.state_bytes import StateBytes
from megatron.core.pipeline_parallel.plan.placement import Placement
from megatron.core.sharding_table import STRATEGIES, ShardOver, ShardPlace
from megatron.estimate.unit_work import CPU, DeviceRates
from tests.harness.described import costs_of_model, whole
from tests.harness.tiny_models import VARIANTS, tiny_config

VOCAB, RANKS = 96, 4
FLOPS_ALONE = DeviceRates(0, 0, 0, 0)
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
    "block": {**FULL, **UNTIED, "recompute_method": "block"},
}
PIPELINES = {
    "one stage": (Placement("linear", 1), (4,)),
    "linear": (Placement("linear", 3), (1, 3, 0)),
    "looped": (Placement("looped", 2, 2), (1, 1, 1, 1)),
    "v": (Placement("v", 2, 2), (1, 2, 1, 0)),
}


def model_of(name):
    return tiny_config(num_layers=4, **MODELS[name])


@functools.cache
def costs_of(name, counts, rates=CPU):
    return costs_of_model(model_of(name), VOCAB, stages_of(counts), rates=rates)


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
    config = model_of(model)
    placement, counts = PIPELINES[pipeline]
    specs = stages_of(counts)
    costs = costs_of(model, counts)
    sharding = STRATEGIES["optim_grads_params" if limit is None else "optim"]
    if limit is None:
        sharding = dataclasses.replace(sharding, optimizer=ShardOver.FULL)
    place = ShardPlace(inner_size=RANKS // 2, outer_size=2)
    sizes = StateBytes(sharding, place, ALIGNMENT * RANKS, 2, 4, 4, 4, 8, bucket_size=limit)
    ours = costs.stage_units(specs, placement, sizes)
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
    """A stage is a piece too: bytes and FLOPs are those of its modules."""
    config = model_of(model)
    placement, counts = PIPELINES[pipeline]
    specs = stages_of(counts)
    costs = costs_of(model, counts, FLOPS_ALONE)
    ours, all_of = costs.stage_units(specs, placement, WHOLE), costs.of_stages(specs)
    for stage, (spec, units) in enumerate(zip(specs, ours, strict=True)):
        for name in ("f", "b", "w", "activation", "held_after_b"):
            total = sum(getattr(unit, name) for unit in units.units)
            assert total == pytest.approx(getattr(all_of, name)[stage], rel=1e-12), (stage, name)
            assert min(getattr(unit, name) for unit in units.units) >= 0
        chunks = config.recompute_chunks(len(spec.layers))
        piece = costs.description.stage(spec.layers, chunks, embeds=spec.embedding, ends=spec.loss)
        assert (all_of.activation[stage], all_of.held_after_b[stage]) == (piece.kept_bytes, piece.filed_bytes)
        for name, seen in (("f", "F"), ("b", "B"), ("w", "W")):
            work = piece.work(seen)
            flops = getattr(all_of, name)[stage] * costs.unit_flops
            assert flops == pytest.approx(work.products + work.attention)


def test_a_recomputed_layers_backward_takes_its_forward_too():
    specs, placement = stages_of((4,)), Placement("linear", 1)
    again, plain = (
        costs_of(model, (4,), FLOPS_ALONE).stage_units(specs, placement, WHOLE)[0].units[1:5]
        for model in ("block", "untied")
    )
    assert [one.b - other.b for one, other in zip(again, plain, strict=True)] == pytest.approx([1, 1, 0, 0])
    assert max(one.activation for one in again[:2]) < plain[1].activation


def test_times_are_the_published_flops():
    """F = sbh(24h + 4s), B = sbh(24h + 8s), W = 24sbh^2 of a layer (arXiv 2401.10241), with half of the scores of a
    causal kernel, which computes them again in the backward."""
    model = tiny_config(
        hidden_size=512,
        num_attention_heads=8,
        ffn_hidden_size=2048,
        seq_length=1024,
        max_position_embeddings=1024,
    )
    work = costs_of_model(model, VOCAB, rates=FLOPS_ALONE).of_units(whole(model))["decoder.layers.0"]
    s, b, h = 1024, 2, 512
    assert work.f == s * b * h * (24 * h + 2 * s)
    assert work.b == s * b * h * (24 * h + 5 * s)
    assert work.w == 24 * s * b * h**2


def test_what_moves_takes_time_and_a_stage_without_anything_hands_on():
    empty, one = StageSpec((), False, False), StageSpec((0,), False, False)
    model = tiny_config(num_layers=4)
    costs = costs_of_model(model, VOCAB, rates=CPU)
    slow = costs.of_stages([empty, one])
    assert 0 < slow.f[0] < slow.f[1]
    assert slow.f[1] == 1
    assert slow.w[0] == 0
    assert slow.activation[0] == model.seq_length * 2 * model.hidden_size * 4
    assert dataclasses.replace(costs, rates=FLOPS_ALONE).unit_flops < costs.unit_flops


def storages(tensors):
    found = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(found.values())


def really_kept(config, spec, dtype):
    """Bytes of (what F keeps for B, what B files for W), weights and ids left out."""
    model = GPTModel(
        config,
        padded_vocab_size=VOCAB,
        seed=7,
        params_dtype=dtype,
        pre_process=spec.embedding,
        post_process=spec.loss,
        layers=spec.layers,
    )
    model.bind_new_grads(torch.float32)
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    tokens = torch.randint(0, VOCAB, (2, config.seq_length), generator=torch.Generator().manual_seed(1))
    model.context.begin_microbatch(1, 0, 0)
    kept = []
    if not spec.embedding:
        leaf = torch.randn(config.seq_length, 2, config.hidden_size).to(dtype).requires_grad_()
        model.set_input_tensor(leaf)
        kept.append(leaf.detach())

    def keep(tensor):
        if tensor.untyped_storage().data_ptr() not in weights and tensor.dtype is not torch.int64:
            kept.append(tensor)
        return tensor

    positions = torch.arange(config.seq_length).expand(2, -1)
    with saved_tensors_hooks(keep, lambda tensor: tensor):
        out = model(tokens, positions, None, labels=tokens if spec.loss else None)
    saved, filed, sink = storages(kept), [], model.context.grads
    put = sink.put

    def see(key, x, dy):
        filed.extend(one for one in (x, dy) if one is not None and one.dtype is not torch.int64)
        put(key, x, dy)

    sink.put = see
    with sink.backward(0, split=True):
        torch.autograd.backward(out, torch.ones_like(out))
    return saved, storages(filed)


REAL = {
    "gpt": {},
    "llama": VARIANTS["llama"],
    "qk_layernorm": VARIANTS["qk_layernorm"],
    "keeps_output": {**VARIANTS["swiglu"], "keep_activation_output": True},
    "dropout": {"attention_dropout": 0.1, "hidden_dropout": 0.1},
    "unfused": {"attention_backend": "unfused"},
    "uniform": MODELS["uniform"],
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("case", REAL)
def test_bytes_are_those_that_autograd_and_the_sink_hold_of_a_real_stage(case, dtype):
    """Within what only one side sees: rotary tables and masks that last, figures of norms in the other width."""
    sizes = {"hidden_size": 64, "ffn_hidden_size": 192, "seq_length": 48, "max_position_embeddings": 48}
    config = tiny_config(**{"num_layers": 3, **sizes, **REAL[case]})
    specs = [
        StageSpec((0,), embedding=True, loss=False),
        StageSpec((0, 1, 2), embedding=False, loss=False),
        StageSpec((0,), embedding=False, loss=True),
    ]
    words = "" if dtype is torch.float32 else "--bf16"
    found = costs_of_model(config, VOCAB, specs, words=words).of_stages(specs)
    for at, spec in enumerate(specs):
        saved, held = really_kept(config, spec, dtype)
        assert found.activation[at] == pytest.approx(saved, rel=0.05), spec
        assert found.held_after_b[at] == pytest.approx(held, rel=0.05), spec


@pytest.mark.parametrize("tp", [1, 4])
@pytest.mark.parametrize("model", ["learned positions", "untied", "llama", "gemma"])
def test_what_each_rank_has_is_counted(model, tp):
    config = model_of(model)
    costs = costs_of_model(config, VOCAB, ranks=tp)
    one = GPTModel(config, padded_vocab_size=VOCAB, seed=1, device="meta")
    everything = sum(math.prod(meta.global_shape) for meta in one.param_meta.values())
    for placement, counts in PIPELINES.values():
        specs = stages_of(counts)
        count = costs.count(specs, placement)
        assert count.total == count.active == everything
        for rank in range(placement.num_ranks) if tp == 1 else ():
            chunks = ModelChunks(tuple(built(config, specs, placement, rank)))
            assert count.per_rank[rank] == sum(weight.numel() for weight in chunks.parameters.values())


def test_tensor_ranks_together_hold_everything_once_and_norms_each():
    model = tiny_config(num_layers=2, hidden_size=64, ffn_hidden_size=256, max_position_embeddings=32)
    alone, split = (
        costs_of_model(model, 128, ranks=tp).count([whole(model)], Placement("linear", 1)) for tp in (1, 4)
    )
    replicated = 2 * (2 * 2 * 64 + 2 * 64) + 2 * 64 + 32 * 64  # norms, output biases, final norm, positions
    assert 4 * split.per_rank[0] == alone.total + 3 * replicated
