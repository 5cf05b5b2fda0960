"""A model of a user's own is described for every placement that its provider has stages for, and what is planned from
that is what engines build and ranks hold."""

import json

import pytest

import pretrain_gpt
from megatron.core.models.gpt.stage_layers import StageLayersError
from megatron.core.module import ModelError
from megatron.core.pipeline_parallel.plan.build import plan_for
from megatron.core.pipeline_parallel.plan.held.units import rank_units
from megatron.core.pipeline_parallel.plan.ir import W
from megatron.core.pipeline_parallel.plan.placement import LINEAR, LOOPED, V_SHAPED, Placement
from megatron.core.pipeline_parallel.plan.planned_residency import peak_bytes
from megatron.core.pipeline_parallel.plan.spec import PlanPurpose
from megatron.estimate.description import ModelDescription
from megatron.estimate.own_description import OwnDescription, description_as_json, description_from_json
from megatron.training.global_vars import get_parallel_state
from megatron.training.planner import possible_specs
from megatron.training.run.describe import described
from megatron.training.run.rehearse.own_model import Provided, described_run
from megatron.training.run.rehearse.rehearsal import compared, rehearsed
from tests.parity.test_own_models import GPTS, NETS, Block, Net, net_step, own_gpt
from tests.parity.test_rehearsal import PP, config_of

AUTO = "--use-custom-fsdp --data-parallel-sharding-strategy auto --fsdp-unit-modules Block"
PLACES = {name: Placement(kind, 2, chunks) for name, kind, chunks in (
    ("linear", LINEAR, 1), ("looped", LOOPED, 2), ("v", V_SHAPED, 2))}  # fmt: skip


def frozen(*args, **ends):
    model = own_gpt(*args, **ends)
    for layer in model.decoder.layers.values():
        layer.mlp.requires_grad_(False)
    return model


FROZEN = (frozen, pretrain_gpt.forward_step)
UNITS = "--pipeline-schedule zb-h1 --dp-bandwidth-gb-per-s 0.02"  # whose last W's come unit by unit
LIMITED = (
    (2, NETS, AUTO, 600_000),
    (4, NETS, f"{PP} {AUTO}", 400_000),
    (4, GPTS, f"{PP} {AUTO}", 3_000_000),
    (4, GPTS, f"{PP} {AUTO} {UNITS}", 3_100_000),
    (4, FROZEN, f"{PP} {AUTO}", 2_500_000),
    (4, FROZEN, f"{PP} --use-distributed-optimizer", 3_500_000),
)


def looked_at(words, ranks, providers):
    config, why = described_run(config_of(words, ranks), Provided(*providers))
    assert why == ""
    return config


@pytest.mark.grid
@pytest.mark.parametrize(("ranks", "providers", "words", "limit"), LIMITED)
def test_what_is_planned_under_a_limit_is_built_and_held(ranks, providers, words, limit):
    config = looked_at(f"{words} --rank-memory-limit {limit}", ranks, providers)
    assert isinstance(config.description, OwnDescription)
    spec = config.planner().spec
    plan = plan_for(spec, config.last_num_microbatches, PlanPurpose.TRAIN)
    assert max(peak_bytes(spec, plan)) <= limit
    assert UNITS not in words or any(op[0] == W and op[4] >= 0 for row in plan.rows for op in row)
    together = rehearsed(config, *providers)
    assert compared(config, together, providers) == []
    for one in together:
        assert one.plan.rows == plan.rows
        planned = rank_units(spec.placement, spec.stages_units)[one.pp_rank].bytes_at_rest
        extra = one.engine.model.buffer.persistent_bytes()["extra_grads"]
        assert planned == one.engine.persistent_bytes() - extra


@pytest.mark.grid
def test_a_gpt_of_ones_own_costs_what_it_costs_by_its_pieces():
    words = f"{PP} {AUTO} --rank-memory-limit 3M"
    config = looked_at(words, 4, GPTS)
    assert config.description.placements.keys() == set(PLACES.values())
    read = description_from_json(json.loads(json.dumps(description_as_json(config.description))))
    assert read == config.description
    by_pieces = described(config_of(words, 4))
    specs = possible_specs(config.staged_model, config.rank_budget)
    for placement in PLACES.values():
        spec = next(one for one in specs if one.placement == placement)
        mine, pieces = (one.model_costs.of_placement(spec.stages, placement) for one in (config, by_pieces))
        assert (mine.activation, mine.held_after_b) == (pieces.activation, pieces.held_after_b)
        unit = config.model_costs.unit_flops / by_pieces.model_costs.unit_flops
        for name in "fbw":
            assert [unit * one for one in getattr(mine, name)] == pytest.approx(getattr(pieces, name))
        sizes = config.rank_budget.rows[-1][1]
        both = [one.model_costs.stage_units(spec.stages, placement, sizes) for one in (config, by_pieces)]
        for own, ours in zip(*both, strict=True):
            assert (own.forward, own.backward) == (ours.forward, ours.backward)
            for one, other in zip(own.units, ours.units, strict=True):
                assert (one.name, one.shares, one.optimizer_bytes) == (
                    other.name,
                    other.shares,
                    other.optimizer_bytes,
                )
                if one.name.startswith("decoder.layers"):
                    assert unit * one.f == pytest.approx(other.f)
        counted = [one.model_costs.count(spec.stages, placement) for one in (config, by_pieces)]
        assert counted[0].total == counted[1].total
        assert counted[0].per_rank == counted[1].per_rank


@pytest.mark.grid
def test_the_gpt_of_the_flags_is_described_by_its_pieces():
    providers = pretrain_gpt.model_provider, pretrain_gpt.forward_step
    config = looked_at(f"{PP} {AUTO} --rank-memory-limit 3M", 4, providers)
    assert isinstance(config.description, ModelDescription)
    nobody_asks = looked_at(f"{PP} --use-distributed-optimizer", 4, NETS)
    assert isinstance(nobody_asks.description, ModelDescription)


def ignores_chunks(pre_process=True, post_process=True, vp_stage=None):
    return Net(f"{get_parallel_state().pp_rank}_{vp_stage}", pre_process, post_process)


def knows_no_v(pre_process=True, post_process=True, vp_stage=None):
    """Layers by the way chunks lie without a V, as Megatron counts them."""
    ps = get_parallel_state()
    net = Net(ps.pp_rank + ps.pp_size * (vp_stage or 0), pre_process, post_process)
    if vp_stage is not None:
        del net.layers[next(iter(net.layers))]
    return net


@pytest.mark.parametrize(
    ("provider", "impossible"),
    [
        (NETS[0], dict.fromkeys(("looped", "v"), "give the model provider a third argument vp_stage")),
        (ignores_chunks, dict.fromkeys(("looped", "v"), r"a model of [\d,]+ parameters, else one of [\d,]+")),
        (knows_no_v, {"v": "makes others than where chunks lie in another order"}),
    ],
)
def test_what_a_provider_has_no_stages_for_is_not_chosen(provider, impossible):
    config = looked_at(f"{PP} {AUTO} --rank-memory-limit 1M", 4, (provider, net_step))
    seen = config.description
    assert seen.impossible.keys() == {PLACES[name] for name in impossible}
    assert seen.placements.keys() == set(PLACES.values()) - seen.impossible.keys()
    for name, why in impossible.items():
        with pytest.raises(StageLayersError, match=why):
            config.model_costs.check(PLACES[name], splits=False)
    with pytest.raises(StageLayersError, match="accumulated by autograd"):
        config.model_costs.check(PLACES["linear"], splits=True)
    spec = config.planner().spec
    assert spec.placement in seen.placements
    assert not spec.row.splits
    assert any("not possible" in one for one in spec.reasons)


def wider(*args, **ends):
    net = NETS[0](*args, **ends)
    net.layers[f"more_{get_parallel_state().pp_rank}"] = Block()
    return net


def test_a_provider_that_makes_another_model_than_before_is_told():
    config = looked_at(f"{PP} {AUTO} --rank-memory-limit 1M", 4, NETS)
    with pytest.raises(
        ModelError, match=r"is not what its plan was made from: unit .*the same model whenever"
    ):
        rehearsed(config, wider, net_step)
