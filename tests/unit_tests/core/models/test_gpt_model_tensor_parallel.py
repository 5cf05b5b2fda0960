"""The model cut over 2 and 4 tensor parallel ranks, with and without sequence parallel, against the reference in fp64.

Losses, logits and all gradients to 1e-10; the same initial weights whatever the cut; weight gradients computed at once
or later have the same bits.
"""

import dataclasses
import functools

import pytest
import torch

from megatron.core.models.gpt.generate import Sampling, generate
from megatron.core.models.gpt.gpt import GPTModel
from megatron.core.tensor_parallel.mappings import SequenceShard, TensorParallel
from tests.harness.ranks import RankContext, run_ranks
from tests.harness.tiny_models import (
    VARIANTS,
    Parts,
    backward_microbatch,
    join_parts,
    parts_of,
    reference_of,
    tiny_batch,
    tiny_config,
    tiny_model,
    tiny_stage,
)

FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
DROPOUT = {"hidden_dropout": 0.2, "attention_dropout": 0.2}
MODELS = {
    "gpt": {},
    "llama": VARIANTS["llama"],
    "mqa_rope": VARIANTS["mqa_rope"],
    "gqa_qkv_bias": {**VARIANTS["gqa"], "add_bias_linear": False, "add_qkv_bias": True},
    "qk_layernorm": {**VARIANTS["qk_layernorm"], **VARIANTS["gqa"]},
    "quick_geglu_kv_channels": {"quick_geglu": True, "kv_channels": 12, "attention_backend": "unfused"},
    "gemma": {**VARIANTS["gemma"], "add_attention_output_bias": True},
    "layernorm_1p_untied": {"apply_layernorm_1p": True, "untie_embeddings_and_output_weights": True},
    "recompute_full": {**VARIANTS["llama"], **FULL},
    "recompute_selective": {"recompute_granularity": "selective"},
}
# Over four ranks by default: those whose heads are fewer than ranks, or differ from each other.
OVER_FOUR = ("llama", "mqa_rope", "gqa_qkv_bias", "qk_layernorm")


@dataclasses.dataclass
class Outcome:
    loss: torch.Tensor
    logits: torch.Tensor
    weights: Parts
    grads: Parts
    deferred_equal: bool


def outcome(tp: TensorParallel, flags: dict) -> Outcome:
    config = tiny_config(**flags)
    model = tiny_stage(config, tp=tp)
    loss = backward_microbatch(model, tiny_batch())
    later = tiny_stage(config, tp=tp)
    backward_split(later)
    grads = model.summed_grads()
    with torch.no_grad():
        logits = model.eval()(tiny_batch()[0], tiny_batch()[2])
    return Outcome(
        loss,
        logits,
        parts_of(model, dict(model.named_parameters())),
        parts_of(model, grads),
        all(torch.equal(grad, grads[name]) for name, grad in later.summed_grads().items()),
    )


def backward_split(model: GPTModel) -> None:
    """The batch's backward as a pipeline splits it: nothing that waits for W is gathered or computed in B."""
    sink = model.context.grads
    with sink.backward(0, split=True):
        backward_microbatch(model, tiny_batch())
    matrices = [key for key, x, *_ in sink._filed[0] if x is not None]
    assert (
        len(matrices)
        == len(set(matrices))
        == sum(len(meta.grad_keys) for meta in model.param_meta.values() if len(meta.global_shape) > 1)
    ), matrices
    assert not any(sink.main_grads[key].any() for key in matrices), "computed in B already"
    shards = [x for _, x, *_ in sink._filed[0] if isinstance(x, SequenceShard)]
    assert bool(shards) is model.tp.sequence_parallel
    assert all(shard._gather is None for shard in shards), "gathered in B already"
    sink.flush(0)


def all_outcomes(ctx: RankContext, names: tuple[str, ...]) -> dict[tuple[str, bool], Outcome]:
    group = ctx.make_ps(tp=ctx.world_size).group("tp")
    return {
        (name, sp): outcome(TensorParallel(group, sp), MODELS[name]) for name in names for sp in (False, True)
    }


@functools.cache
def ranks_of(size: int, names: tuple[str, ...]) -> list[dict[tuple[str, bool], Outcome]]:
    return run_ranks(all_outcomes, size, names, timeout=120)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("sp", [False, True], ids=["tp", "sp"])
def test_two_ranks_against_the_reference(sp, name):
    equal_the_reference([rank[name, sp] for rank in ranks_of(2, tuple(MODELS))], name)


@pytest.mark.grid
@pytest.mark.parametrize("name", OVER_FOUR)
@pytest.mark.parametrize("sp", [False, True], ids=["tp", "sp"])
def test_four_ranks_against_the_reference(sp, name):
    equal_the_reference([rank[name, sp] for rank in ranks_of(4, OVER_FOUR)], name)


@pytest.mark.full
@pytest.mark.parametrize("name", [name for name in MODELS if name not in OVER_FOUR])
@pytest.mark.parametrize("sp", [False, True], ids=["tp", "sp"])
def test_four_ranks_against_the_reference_in_further_models(sp, name):
    equal_the_reference([rank[name, sp] for rank in ranks_of(4, tuple(MODELS))], name)


def equal_the_reference(ranks: list[Outcome], name: str) -> None:
    model = tiny_model(**MODELS[name])
    reference = reference_of(model)
    tokens, labels, _ = tiny_batch()
    expected = reference(tokens, labels).mean()
    expected.backward()
    for rank in ranks:
        assert torch.equal(rank.loss, ranks[0].loss)
        assert abs(rank.loss.item() - expected.item()) < 1e-10
        assert (rank.logits - reference(tokens)).abs().max() < 1e-10
        assert rank.deferred_equal
    weights = join_parts([rank.weights for rank in ranks], gradients=False)
    grads = join_parts([rank.grads for rank in ranks], gradients=True)
    assert set(grads) == {name for name, _ in reference.named_parameters()}
    for parameter_name, parameter in reference.named_parameters():
        assert torch.equal(weights[parameter_name], parameter), parameter_name
        assert (grads[parameter_name] - parameter.grad).abs().max() < 1e-10, parameter_name
        assert parameter.grad.abs().max() > 1e-6 or "k_layernorm.bias" in parameter_name, parameter_name


@pytest.mark.grid
def test_what_is_partial():
    """Norms' gradients are whole on every rank until the sequence is split; those of heads never are."""
    names = {
        "residual": "decoder.layers.0.input_layernorm.weight",
        "head": "decoder.layers.0.self_attention.q_layernorm.weight",
        "positions": "embedding.position_embeddings.weight",
        "row_bias": "decoder.layers.0.mlp.linear_fc2.bias",
        "qkv_bias": "decoder.layers.0.self_attention.linear_qkv.bias",
    }
    for sp in (False, True):
        parts = ranks_of(4, OVER_FOUR)[3]["qk_layernorm", sp].grads
        facts = {
            what: [(part.copies, part.partial) for part in parts[name][0].parts]
            for what, name in names.items()
        }
        assert facts == {
            "residual": [(4, sp)],
            "head": [(4, True)],
            "positions": [(4, sp)],
            "row_bias": [(4, False)],
            "qkv_bias": [(1, False), (2, True)],  # its query head; key and value shared by two ranks
        }


def train(tp, *, steps=2, **flags):
    """Losses and gradients (own buffers) of microbatches with dropout."""
    dtype = flags.pop("dtype", torch.float64)
    model = tiny_stage(tiny_config(**flags), tp=tp, params_dtype=dtype)
    model.bind_new_grads(torch.promote_types(dtype, torch.float32))
    losses = [backward_microbatch(model, tiny_batch(i), iteration=3, index=i) for i in range(steps)]
    return torch.stack(losses), {name: grad.clone() for name, grad in model.summed_grads().items()}


def same(a, b) -> bool:
    return torch.equal(a[0], b[0]) and all(torch.equal(a[1][name], b[1][name]) for name in a[1])


def dropout_checks(ctx: RankContext):
    group = ctx.make_ps(tp=ctx.world_size).group("tp")
    found = {}
    for sp in (False, True):
        tp = TensorParallel(group, sp)
        plain = train(tp, **DROPOUT)
        found[sp] = {
            "hidden_only": train(tp, hidden_dropout=0.2)[0],
            "recompute_same_bits": same(plain, train(tp, **DROPOUT, **FULL)),
            "selective_same_bits": same(plain, train(tp, **DROPOUT, recompute_granularity="selective")),
            "repeated_same_bits": all(
                same(train(tp, **DROPOUT, **flags), train(tp, **DROPOUT, **flags))
                for flags in ({"dtype": torch.float32}, {"dtype": torch.bfloat16})
            ),
            "bf16": train(tp, dtype=torch.bfloat16, fp32_residual_connection=True)[0],
        }
        model = tiny_stage(tiny_config(**DROPOUT), tp=tp)
        layer = model.decoder.layers["1"]
        sites = (
            model.embedding.site,
            layer.attention_site,
            layer.mlp_site,
            layer.self_attention.core_attention.site,
        )
        found[sp]["seeds"] = [site.seed() for site in sites]
    return found


@pytest.mark.grid
def test_dropout_recompute_and_precision():
    ranks = run_ranks(dropout_checks, 4)
    one = train(None, hidden_dropout=0.2)[0]
    exact = train(None)[0]
    for found in ranks:
        # Masks of the whole residual stream are those of one process, so losses are too.
        assert (found[False]["hidden_only"] - one).abs().max() < 1e-10
        assert (found[True]["hidden_only"] - one).abs().max() > 1e-4
        for sp in (False, True):
            for bits in ("recompute_same_bits", "selective_same_bits", "repeated_same_bits"):
                assert found[sp][bits], (sp, bits)
            assert (found[sp]["bf16"] - exact).abs().max() < 0.02
    for sp in (False, True):
        seeds = zip(*(found[sp]["seeds"] for found in ranks), strict=True)
        assert [len(set(of_site)) for of_site in seeds] == [4 if sp else 1] * 3 + [4]


PROMPTS = tiny_batch()[0][:, :5].tolist()


def generated(ctx: RankContext):
    tp = TensorParallel(ctx.make_ps(tp=4).group("tp"))
    model = tiny_stage(tiny_config(**VARIANTS["llama"]), tp=tp)
    return list(generate(model, PROMPTS, 6, sampling=Sampling(temperature=1.0)))


def test_generation_over_tensor_ranks():
    """With a cache of this rank's keys and values; the draws are those of one process."""
    model = tiny_model(**VARIANTS["llama"])
    one = list(generate(model, PROMPTS, 6, sampling=Sampling(temperature=1.0)))
    assert all(rank == one for rank in run_ranks(generated, 4))


def stages(ctx: RankContext):
    """Two stages in one process a rank, the boundary being what one hands the other."""
    tp = TensorParallel(ctx.make_ps(tp=2).group("tp"), sequence_parallel=True)
    config = tiny_config(position_embedding_type="rope")
    first = tiny_stage(config, tp=tp, layers=[0], post_process=False)
    last = tiny_stage(config, tp=tp, layers=[1], pre_process=False)
    whole = tiny_stage(config, tp=tp)
    expected = backward_microbatch(whole, tiny_batch())
    tokens, labels, positions = tiny_batch()
    boundary = first(tokens, positions)
    received = boundary.detach().requires_grad_()
    last.set_input_tensor(received)
    loss = last(None, None, None, labels=labels).mean()
    loss.backward()
    boundary.backward(received.grad)
    split = {**last.summed_grads()}
    for name, grad in first.summed_grads().items():
        split[name] = split[name] + grad if name in split else grad
    equal = [torch.equal(split[name], grad) for name, grad in whole.summed_grads().items()]
    return tuple(boundary.shape), torch.equal(loss, expected), all(equal)


def test_stages_meet_at_sequence_shards():
    assert run_ranks(stages, 2) == [((8, 3, 32), True, True)] * 2
