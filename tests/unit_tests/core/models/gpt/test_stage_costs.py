"""Estimates of a stage's costs against what our layers really keep, and against the published formulas."""

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

from megatron.core.models.gpt.gpt import GPTModel
from megatron.core.models.gpt.stage_costs import ModelCosts
from megatron.core.models.gpt.stage_layers import StageSpec
from tests.harness.tiny_models import VARIANTS, tiny_config

VOCAB, BATCH = 256, 2
DROPOUT = {"attention_dropout": 0.1, "hidden_dropout": 0.1}
UNFUSED = {"attention_backend": "unfused"}
FULL = {"recompute_granularity": "full", "recompute_num_layers": 2}
CASES = {
    **{name: VARIANTS[name] for name in ("gpt", "rope", "gqa", "qk_layernorm", "swiglu", "llama", "gemma")},
    "keeps_output": {**VARIANTS["swiglu"], "keep_activation_output": True},
    "dropout": DROPOUT,
    "unfused": UNFUSED,
    "unfused dropout": {**DROPOUT, **UNFUSED},
    "uniform": {**FULL, "recompute_method": "uniform"},
    "block": {**FULL, "recompute_method": "block"},
    "selective": {"recompute_granularity": "selective", **UNFUSED},
}
STAGES = [
    StageSpec((0,), embedding=True, loss=False),
    StageSpec((0, 1, 2), embedding=False, loss=False),
    StageSpec((0,), embedding=False, loss=True),
    StageSpec((), embedding=False, loss=True),
    StageSpec((0, 1), embedding=True, loss=True),
]


def config_of(**flags):
    sizes = {"hidden_size": 64, "ffn_hidden_size": 192, "seq_length": 48, "max_position_embeddings": 48}
    return tiny_config(**{"num_layers": 3, **sizes, **flags})


def storages(tensors):
    found = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(found.values())


def really_kept(config, spec, dtype):
    """Bytes of (what F keeps for B, what B files for W), weights left out."""
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
    tokens = torch.randint(0, VOCAB, (BATCH, config.seq_length), generator=torch.Generator().manual_seed(1))
    model.context.begin_microbatch(1, 0, 0)
    kept = []
    if not spec.embedding:
        leaf = torch.randn(config.seq_length, BATCH, config.hidden_size).to(dtype).requires_grad_()
        model.set_input_tensor(leaf)
        kept.append(leaf.detach())

    def keep(tensor):
        if tensor.untyped_storage().data_ptr() not in weights:
            kept.append(tensor)
        return tensor

    positions = torch.arange(config.seq_length).expand(BATCH, -1)
    with saved_tensors_hooks(keep, lambda tensor: tensor):
        out = model(tokens, positions, None, labels=tokens if spec.loss else None)
    saved = storages(kept)
    filed = []
    sink = model.context.grads
    put = sink.put

    def see(key, x, dy):
        if x is not None or dy.dim() > 1:
            filed.extend(tensor for tensor in (x, dy) if tensor is not None)
        put(key, x, dy)

    sink.put = see
    with sink.backward(0, split=True):
        torch.autograd.backward(out, torch.ones_like(out))
    return saved, storages(filed)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("case", CASES)
def test_bytes_are_those_of_a_real_stage_within_5_percent(case, dtype):
    config = config_of(**CASES[case])
    costs = ModelCosts(config, VOCAB, BATCH, "fp32" if dtype is torch.float32 else "bf16")
    for spec in STAGES:
        saved, held = really_kept(config, spec, dtype)
        work = costs.stage(spec)
        assert work.saved == pytest.approx(saved, rel=0.05), spec
        assert work.held == pytest.approx(held, rel=0.05), spec


def test_times_are_the_published_flops():
    """F = sbh(24h + 4s), B = sbh(24h + 8s), W = 24sbh^2 of a layer (arXiv 2401.10241), but for elementwise work."""
    config = tiny_config(hidden_size=512, num_attention_heads=8, ffn_hidden_size=2048, seq_length=1024)
    layer = ModelCosts(config, VOCAB, BATCH, "bf16").layer()
    s, b, h = 1024, BATCH, 512
    assert layer.f == pytest.approx(s * b * h * (24 * h + 4 * s), rel=0.01)
    assert layer.b == pytest.approx(s * b * h * (24 * h + 8 * s), rel=0.01)
    assert layer.w == pytest.approx(24 * s * b * h**2, rel=0.01)


def test_costs_of_stages_are_sums_of_their_parts():
    costs = ModelCosts(config_of(**FULL, recompute_method="uniform"), VOCAB, BATCH, "fp32")
    empty, one, two = (StageSpec(tuple(range(count)), False, False) for count in range(3))
    model = costs.of_stages([empty, one, two, STAGES[2]])
    assert 0 < model.f[0] < 0.2  # handing on is no nothing
    assert model.w[0] == 0
    assert model.w[2] == pytest.approx(2 * model.w[1])
    assert model.b[1] > model.b[0] + model.f[1] - model.f[0]  # recompute belongs to B
    assert model.f[3] > model.f[1]
    assert model.activation == tuple(costs.stage(spec).saved for spec in [empty, one, two, STAGES[2]])
    assert model.held_after_b[2] > 3 * model.activation[2]  # recomputed inputs are there from B to W


def test_tensor_and_sequence_parallel_share():
    config = config_of(hidden_size=64, num_attention_heads=4)
    whole = ModelCosts(config, VOCAB, BATCH, "fp32").layer()
    tensor = ModelCosts(config, VOCAB, BATCH, "fp32", tp=2).layer()
    sequence = ModelCosts(config, VOCAB, BATCH, "fp32", tp=2, sequence_parallel=True).layer()
    assert tensor.w == whole.w / 2
    assert whole.saved / 2 < tensor.saved < whole.saved
    assert sequence.saved == pytest.approx(whole.saved / 2)
