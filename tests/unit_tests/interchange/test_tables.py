"""Each architecture's table at published sizes: every element once, names and shapes those of both models."""

import dataclasses
import math
import random

import pytest
import torch

from megatron.core.models.gpt.gpt import GPTModel
from megatron.core.pipeline_parallel.plan.placement import LINEAR, Placement
from megatron.core.rectangles import Rectangle
from megatron.interchange.known import ARCHITECTURES, expressing, read_config
from tests.harness.described import costs_of_model, whole
from tests.harness.hugging_face import stored_shapes
from tests.unit_tests.interchange.published import PUBLISHED

transformers = pytest.importorskip("transformers")


def catalogue_of(name, tp=1):
    model = read_config(PUBLISHED[name])
    padded = -(-model.vocab_size // tp) * tp
    return model, model.architecture.catalogue(model.config(), model.vocab_size, padded)


def small(name, layers=2):
    """The same model with few layers: the oracle's modules are slow to make."""
    key = "n_layer" if "n_layer" in PUBLISHED[name] else "num_hidden_layers"
    return {**PUBLISHED[name], key: layers}


@pytest.mark.parametrize("name", PUBLISHED)
@pytest.mark.parametrize("tp", [1, 8])
def test_every_element_has_one_partner(name, tp):
    _, catalogue = catalogue_of(name, tp)
    assert catalogue.problems() == []


def test_each_architecture_has_published_models():
    assert {json["model_type"] for json in PUBLISHED.values()} == ARCHITECTURES.keys()


@pytest.mark.parametrize("name", PUBLISHED)
def test_names_and_shapes_are_those_of_both_models(name):
    json = small(name)
    model = read_config(json)
    config = model.config()
    catalogue = model.architecture.catalogue(config, model.vocab_size, model.vocab_size)
    ours = GPTModel(config, padded_vocab_size=model.vocab_size, seed=1, device="meta")
    assert catalogue.ours == {key: meta.global_shape for key, meta in ours.param_meta.items()}
    made = transformers.AutoConfig.for_model(**json)
    with torch.device("meta"):
        theirs = transformers.AutoModelForCausalLM.from_config(made)
    assert catalogue.theirs == stored_shapes(theirs)
    assert type(theirs).__name__ == model.architecture.class_name


@pytest.mark.parametrize("name", PUBLISHED)
def test_config_json_comes_back(name):
    model = read_config(PUBLISHED[name])
    json = model.architecture.write(model.config(), model.vocab_size)
    again = read_config(json)
    assert (again.flags, again.vocab_size) == (model.flags, model.vocab_size)
    assert expressing(model.config(), model.vocab_size).write(model.config(), model.vocab_size)
    made = transformers.AutoConfig.for_model(**json)  # transformers reads the same out of it
    theirs = transformers.AutoConfig.for_model(**PUBLISHED[name])
    ignored = {"architectures", "transformers_version"}
    of_made, of_theirs = made.to_dict(), theirs.to_dict()
    differing = {key for key in of_made.keys() | of_theirs.keys() if of_made.get(key) != of_theirs.get(key)}
    spelled_otherwise = {"sliding_window", "max_window_layers", "hidden_act", "hidden_activation", "n_inner",
                         "rope_theta", "rope_scaling", "n_ctx", "head_dim", "layer_types",
                         "router_aux_loss_coef"}  # fmt: skip
    assert differing <= ignored | spelled_otherwise, differing
    for key in differing & {"head_dim"}:
        assert of_made[key] == model.config().kv_channels


@pytest.mark.grid
@pytest.mark.parametrize(
    ("name", "total", "experts", "active"),
    [
        ("mixtral-8x7b", 46_702_792_704, 45_097_156_608, 12_879_925_248),
        ("mixtral-8x22b", 140_620_634_112, 135_291_469_824, 39_152_031_744),
        ("qwen3-30b-a3b", 30_532_122_624, 28_991_029_248, 3_353_032_704),
        ("qwen3-235b-a22b", 235_093_634_560, 227_096_395_776, 22_190_763_520),
    ],
)
def test_published_totals(name, total, experts, active):
    """All, those in experts, and all but those in experts that a token does not meet: of the tables, and as built."""
    model, catalogue = catalogue_of(name)
    numel = {key: math.prod(shape) for key, shape in catalogue.ours.items()}
    in_experts = sum(count for key, count in numel.items() if ".mlp.experts." in key)
    assert (sum(numel.values()), in_experts) == (total, experts)
    assert (
        total - in_experts + in_experts * model.config().moe_router_topk // model.config().num_experts
        == active
    )
    config = model.config().resolved()
    counted = costs_of_model(config, model.vocab_size).count([whole(config)], Placement(LINEAR, 1))
    assert (counted.total, counted.experts, counted.active) == (total, experts, active)


def test_both_ways_compose_to_the_identity():
    """On tensors whose elements are their own numbers, import and export are each other's inverse."""
    for name in PUBLISHED:
        json = {**small(name), **_tiny(PUBLISHED[name])}
        model = read_config(json)
        catalogue = model.architecture.catalogue(model.config(), model.vocab_size, model.vocab_size + 3)
        theirs = _numbered(catalogue.theirs)
        ours = _moved(catalogue, theirs, "theirs", "ours")
        back = _moved(catalogue, ours, "ours", "theirs")
        again = _moved(catalogue, back, "theirs", "ours")
        assert all(torch.equal(back[key], theirs[key]) for key in theirs), name
        assert all(torch.equal(again[key], ours[key]) for key in ours), name
        assert sum(tensor.numel() for tensor in ours.values()) > sum(map(torch.numel, theirs.values())), name
        for part in catalogue.padding:
            assert (_view(ours, part) == -1).all()


def _moved(catalogue, tensors, side, other):
    """Those of one side as the other has them; -1 where nothing comes."""
    made = {key: torch.full(shape, -1) for key, shape in getattr(catalogue, other).items()}
    for move in catalogue.moves:
        part, into = (_view(there, getattr(move, of)) for there, of in ((tensors, side), (made, other)))
        into.copy_(part.t() if move.transposed else part.reshape(into.shape))
    return made


def _tiny(json):
    if "n_embd" in json:
        return {"n_embd": 16, "n_head": 4, "n_positions": 8, "vocab_size": 13}
    sizes = {"hidden_size": 16, "num_attention_heads": 4, "intermediate_size": 24, "vocab_size": 13}
    groups = {32: 4, 16: 4, 1: 1}.get(json["num_key_value_heads"], 2)
    head = 4 if json["model_type"] in ("phi3", "qwen2", "qwen2_moe") else 6
    few = {
        "num_local_experts": 3,
        "num_experts": 3,
        "moe_intermediate_size": 5,
        "shared_expert_intermediate_size": 7,
    }
    experts = {key: value for key, value in few.items() if key in json}
    return {**sizes, "num_key_value_heads": groups, "head_dim": head, **experts}


def _numbered(shapes):
    made, first = {}, 0
    for key, shape in shapes.items():
        numel = torch.Size(shape).numel()
        made[key] = torch.arange(first, first + numel).view(shape)
        first += numel
    return made


def _view(tensors, part):
    tensor = tensors[part.name]
    for dim, (start, count) in enumerate(zip(part.box.offset, part.box.shape, strict=True)):
        tensor = tensor.narrow(dim, start, count)
    return tensor


def test_a_hundred_mutated_tables_are_refused():
    draws = random.Random(7)
    for _ in range(100):
        name = draws.choice(list(PUBLISHED))
        model = read_config(small(name))
        catalogue = model.architecture.catalogue(model.config(), model.vocab_size, model.vocab_size)
        moves = list(catalogue.moves)
        at = draws.randrange(len(moves))
        kind = draws.choice(["drop", "double", "shift", "shrink", "rename", "reshape"])
        moves[at : at + 1] = _mutated(moves[at], kind, draws)
        mutated = dataclasses.replace(catalogue, moves=tuple(moves))
        assert mutated.problems(catalogue.ours, catalogue.theirs), (name, kind, at)


def _mutated(move, kind, draws):
    side = draws.choice(["ours", "theirs"])
    part = getattr(move, side)
    offset, shape = part.box.offset, part.box.shape
    changed = {
        "drop": [],
        "double": [move, move],
        "shift": [part._replace(box=Rectangle((offset[0] + 1, *offset[1:]), shape))],
        "shrink": [part._replace(box=Rectangle(offset, (shape[0] - 1, *shape[1:])))],
        "rename": [part._replace(name=part.name + ".other", shape=(part.shape[0] + 1, *part.shape[1:]))],
        "reshape": [part._replace(shape=(part.shape[0] + 1, *part.shape[1:]))],
    }[kind]
    return [one if one is move else move._replace(**{side: one}) for one in changed]


def test_every_second_layer_is_a_list():
    json = {**small("qwen3-30b-a3b", 4), "decoder_sparse_step": 2, "mlp_only_layers": [3]}
    model = read_config(json)
    assert model.flags["moe_layer_freq"] == "[0,1,0,0]"
    written = model.architecture.write(model.config(), model.vocab_size)
    assert (written["decoder_sparse_step"], written["mlp_only_layers"]) == (1, [0, 2, 3])
