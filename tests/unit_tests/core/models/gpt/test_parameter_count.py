"""The formula against the model itself."""

import datetime
import math

import pytest

from megatron.core.device import current_device
from megatron.core.models.gpt.gpt import GPTModel
from megatron.core.models.gpt.parameter_count import count_parameters, layer_parameters, padded_vocabulary
from megatron.core.models.gpt.stage_layers import split_stages
from megatron.core.parallelism_config import ModelParallelConfig
from megatron.core.pipeline_parallel.plan.placement import LINEAR, LOOPED, V_SHAPED, Placement
from megatron.core.tensor_parallel.mappings import TensorParallel
from megatron.core.transformer.model_config import TransformerConfig
from megatron.core.transport.parallel_state import Group

VARIANTS = [
    {},
    {"untie_embeddings_and_output_weights": True},
    {"position_embedding_type": "rope", "normalization": "RMSNorm", "swiglu": True, "add_bias_linear": False},
    {"add_bias_linear": False, "add_qkv_bias": True, "qk_layernorm": True},
    {"group_query_attention": True, "num_query_groups": 2, "kv_channels": 24, "quick_geglu": True},
    {"add_bias_linear": False, "add_attention_output_bias": True, "geglu_tanh": True},
    {
        "position_embedding_type": "none",
        "squared_relu": True,
        "qk_layernorm": True,
        "normalization": "RMSNorm",
    },
]


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_formula_counts_what_the_model_has(variant):
    shape = {
        "num_layers": 3,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "seq_length": 16,
        "max_position_embeddings": 24,
    }
    config = TransformerConfig(**(shape | variant)).resolved()
    model = GPTModel(config, padded_vocab_size=96, seed=1)
    held = {name: math.prod(meta.global_shape) for name, meta in model.param_meta.items()}
    assert count_parameters(config, 96).total == sum(held.values())
    assert count_parameters(config, 96).per_rank == (sum(held.values()),)


def test_tensor_ranks_together_hold_everything_once_and_norms_each():
    config = TransformerConfig(
        num_layers=2, hidden_size=64, num_attention_heads=4, max_position_embeddings=32, seq_length=32
    ).resolved()
    whole, split = count_parameters(config, 128), count_parameters(config, 128, tp=4)
    replicated = 2 * (2 * 2 * 64 + 2 * 64) + 2 * 64 + 32 * 64  # norms, output biases, final norm, positions
    assert 4 * split.per_rank[0] == whole.total + 3 * replicated


def test_a_key_and_value_head_is_on_one_rank_at_least():
    config = TransformerConfig(
        num_layers=1,
        hidden_size=64,
        num_attention_heads=8,
        group_query_attention=True,
        num_query_groups=2,
        max_position_embeddings=32,
        seq_length=32,
    ).resolved()
    head, h = 8, 64
    mlp_and_norms = 2 * h * 4 * h // 8 + 4 * h // 8 + h + 4 * h
    attention = (
        h * 3 * head + 3 * head + head * h + h
    )  # one query head, one key, one value, their biases, output
    assert layer_parameters(config, 8) == attention + mlp_and_norms
    halves = layer_parameters(config, 2)  # each with one of the two groups: nothing twice
    assert 2 * halves == layer_parameters(config) + 2 * h + 4 * h  # output biases and norms


TIED = [(False, LINEAR), (True, LINEAR), (False, LOOPED), (True, LOOPED)]


@pytest.mark.parametrize(("untied", "kind"), TIED)
def test_stages_hold_their_layers_and_the_ends(untied, kind):
    config = TransformerConfig(
        num_layers=6,
        hidden_size=64,
        num_attention_heads=4,
        max_position_embeddings=32,
        seq_length=32,
        untie_embeddings_and_output_weights=untied,
    ).resolved()
    layout = "Et|tt|t|ttL" if kind == LOOPED else "E|ttttttL"
    parallel = ModelParallelConfig(pipeline_model_parallel_size=2, pipeline_model_parallel_layout=layout)
    stages = split_stages(parallel, 6)
    placement = Placement(kind, 2, len(stages) // 2)
    count = count_parameters(config, 128, stages=stages, placement=placement)
    layer, vocabulary, positions, norm = layer_parameters(config), 128 * 64, 32 * 64, 2 * 64
    first, last = (2, 4) if kind == LOOPED else (0, 6)
    assert count.per_rank == (
        first * layer + vocabulary + positions,
        last * layer + vocabulary + norm,
    )
    assert count.total == sum(count.per_rank) - (0 if untied else vocabulary)
    assert count.total == count_parameters(config, 128).total


def test_tied_embeddings_on_one_rank_need_no_copy():
    """A V brings the last stage back to the first rank."""
    config = TransformerConfig(
        num_layers=4, hidden_size=64, num_attention_heads=4, max_position_embeddings=32, seq_length=32
    ).resolved()
    parallel = ModelParallelConfig(pipeline_model_parallel_size=2, num_virtual_stages_per_pipeline_rank=2)
    stages = split_stages(parallel, 4)
    count = count_parameters(config, 128, stages=stages, placement=Placement(V_SHAPED, 2, 2))
    assert sum(count.per_rank) == count.total
    assert count.per_rank[1] == 2 * layer_parameters(config)


CUTS = [
    {"pipeline_model_parallel_size": 2},
    {"pipeline_model_parallel_size": 2, "num_virtual_stages_per_pipeline_rank": 2},
    {"pipeline_model_parallel_size": 2, "pipeline_model_parallel_layout": "E|tt|t|tL"},
    {"pipeline_model_parallel_size": 3, "allow_padding_num_layers": True},
]


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("variant", VARIANTS)
def test_the_formula_counts_what_each_rank_has(variant, tp, cut):
    shape = {
        "num_layers": 4,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "seq_length": 16,
        "max_position_embeddings": 24,
    }
    config = TransformerConfig(**(shape | variant)).resolved()
    stages = split_stages(ModelParallelConfig(**cut), 4)
    num_ranks = cut["pipeline_model_parallel_size"]
    chunks = len(stages) // num_ranks
    placement = Placement(LOOPED if chunks > 1 else LINEAR, num_ranks, chunks)
    # One rank of a group that never talks: only shapes are asked for.
    here = current_device(0, kind="cpu")
    group = Group("tp", tuple(range(tp)), tp - 1, "gloo", None, here, datetime.timedelta(seconds=1))
    held = [0] * num_ranks
    for stage, spec in enumerate(stages):
        model = GPTModel(
            config,
            padded_vocab_size=96,
            seed=1,
            device="meta",
            pre_process=spec.embedding,
            post_process=spec.loss,
            layers=spec.layers,
            tp=TensorParallel(group),
        )
        held[placement.rank_of(stage)] += sum(weight.numel() for weight in model.parameters())
    count = count_parameters(config, 96, tp=tp, stages=stages, placement=placement)
    assert list(count.per_rank) == held


def test_padding():
    assert padded_vocabulary(50257, 128, 1) == 50304
    assert padded_vocabulary(50257, 128, 8) == 51200
    assert padded_vocabulary(1024, 128, 8) == 1024
    assert padded_vocabulary(257, 128, 1) == 384
