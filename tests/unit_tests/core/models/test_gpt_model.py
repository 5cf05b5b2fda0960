"""The model as a whole: names, facts, stages, precision."""

import pytest
import torch

from megatron.core.device import current_device
from megatron.core.models.gpt.gpt import GPTModel
from megatron.core.models.gpt.loss import gpt_loss
from megatron.core.param_meta import GradRoute, InitKind
from megatron.core.tensor_parallel.mappings import TensorParallel
from megatron.core.transport.parallel_state import DEFAULT_TIMEOUT, Group
from tests.harness.tiny_models import (
    GQA,
    ROPE,
    SEQ,
    SWIGLU,
    VOCAB,
    backward_microbatch,
    tiny_batch,
    tiny_config,
    tiny_model,
)


def layer_names(n, norm_bias=True, bias=True):
    at = f"decoder.layers.{n}."
    for module in ("input_layernorm", "pre_mlp_layernorm"):
        yield from (f"{at}{module}.weight", *([f"{at}{module}.bias"] if norm_bias else []))
    for module in (
        "self_attention.linear_qkv",
        "self_attention.linear_proj",
        "mlp.linear_fc1",
        "mlp.linear_fc2",
    ):
        yield from (f"{at}{module}.weight", *([f"{at}{module}.bias"] if bias else []))


def test_names_are_megatrons():
    top = ["embedding.word_embeddings.weight", "decoder.final_layernorm.weight"]
    gpt = set(tiny_model().state_dict())
    assert gpt == {
        *top,
        "embedding.position_embeddings.weight",
        "decoder.final_layernorm.bias",
        *layer_names(0),
        *layer_names(1),
    }
    llama = set(
        tiny_model(**SWIGLU, **ROPE, qk_layernorm=True, untie_embeddings_and_output_weights=True).state_dict()
    )
    norms = {f"decoder.layers.{n}.self_attention.{s}_layernorm.weight" for n in (0, 1) for s in "qk"}
    assert llama == {
        *top,
        "output_layer.weight",
        *norms,
        *layer_names(0, False, False),
        *layer_names(1, False, False),
    }


def test_shapes_and_facts():
    model = tiny_model(**GQA, swiglu=True)
    meta = model.param_meta
    assert list(meta) == [name for name, _ in model.named_parameters()]
    for name, parameter in model.named_parameters():
        assert meta[name].name == name
        assert meta[name].global_shape == tuple(parameter.shape)
        assert meta[name].decay == (parameter.dim() > 1)
        assert meta[name].embedding_or_output == (name == "embedding.word_embeddings.weight")
        assert meta[name].route is GradRoute.SINK
        assert (meta[name].init is InitKind.NORMAL) == (parameter.dim() > 1)
    assert meta["decoder.layers.0.self_attention.linear_qkv.weight"].global_shape == (4 * 8 + 2 * 2 * 8, 32)
    assert meta["decoder.layers.0.mlp.linear_fc1.weight"].global_shape == (128, 32)


def test_untied_output_is_decoupled():
    meta = tiny_model(untie_embeddings_and_output_weights=True).param_meta
    assert meta["output_layer.weight"].embedding_or_output
    assert meta["embedding.word_embeddings.weight"].grad_keys == ("embedding.word_embeddings.weight",)


@pytest.mark.parametrize("tied", [True, False])
def test_stages_compose_to_the_whole(tied):
    """Two stages hold the same initial weights under the same names, and give the same losses and gradients."""
    flags = {"num_layers": 3, "untie_embeddings_and_output_weights": not tied}
    build = {"padded_vocab_size": VOCAB, "seed": 3, "params_dtype": torch.float64}
    config = tiny_config(**flags)
    whole = GPTModel(config, **build)
    first = GPTModel(config, **build, post_process=False, layers=[0, 1])
    last = GPTModel(config, **build, pre_process=False, layers=[2])
    for stage in (whole, first, last):
        stage.bind_new_grads()
    for name, parameter in (*first.named_parameters(), *last.named_parameters()):
        assert torch.equal(parameter, whole.get_parameter(name)), name
    expected = backward_microbatch(whole, tiny_batch())
    tokens, labels, positions = tiny_batch()
    middle = first(tokens, positions)
    assert middle.shape == (SEQ, 3, 32)
    received = middle.detach().requires_grad_()
    last.set_input_tensor(received)
    loss = last(labels=labels).mean()
    loss.backward()
    middle.backward(received.grad)
    assert torch.equal(loss, expected)
    split = {**last.summed_grads()}
    for name, grad in first.summed_grads().items():
        split[name] = split[name] + grad if name in split else grad
    assert set(split) == set(whole.summed_grads())
    for name, grad in whole.summed_grads().items():
        assert torch.equal(grad, split[name]), name
    words = "embedding.word_embeddings.weight"
    assert [words in stage.param_meta for stage in (first, last)] == [True, tied]
    for stage in (whole, first, last):
        for name, meta in stage.param_meta.items():
            assert meta.shared == (tied and stage is not whole and name == words)
            assert (len(meta.grad_keys) == 2) == (tied and stage is whole and name == words)


def test_an_empty_stage_is_the_identity():
    config = tiny_config(recompute_granularity="full", recompute_method="block", recompute_num_layers=1)
    stage = GPTModel(
        config, padded_vocab_size=VOCAB, seed=3, layers=[], pre_process=False, post_process=False
    )
    assert stage.bind_new_grads() == {}
    hidden = torch.randn(SEQ, 3, 32)
    stage.set_input_tensor(hidden)
    assert stage() is hidden
    with pytest.raises(AssertionError, match="set_input_tensor before each forward"):
        stage()


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"num_attention_heads": 6, "hidden_size": 36}, "--num-attention-heads 6 must be a multiple"),
        ({"ffn_hidden_size": 66}, "--ffn-hidden-size 66 must be a multiple"),
        ({"seq_length": 14}, "--seq-length 14 with --sequence-parallel must be a multiple"),
        (
            {
                "num_attention_heads": 12,
                "hidden_size": 48,
                "group_query_attention": True,
                "num_query_groups": 6,
            },
            "--num-query-groups 6 must be a multiple or a divisor of --tensor-model-parallel-size 4",
        ),
    ],
)
def test_what_does_not_divide_over_tensor_ranks_is_refused(flags, words):
    with pytest.raises(ValueError, match=words):
        GPTModel(tiny_config(**flags), padded_vocab_size=VOCAB, seed=3, tp=four_ranks())
    with pytest.raises(
        ValueError, match=r"padded vocabulary 6 .*leaves the last of .* 4 ranks without a row"
    ):
        GPTModel(tiny_config(), padded_vocab_size=6, seed=3, tp=four_ranks())


def four_ranks(rank=0):
    """A tensor parallel group that nobody talks over."""
    group = Group("tp", (0, 1, 2, 3), rank, "gloo", None, current_device(kind="cpu"), DEFAULT_TIMEOUT)
    return TensorParallel(group, sequence_parallel=True)


def test_gradients_add_up_over_microbatches():
    model = tiny_model()
    backward_microbatch(model, tiny_batch(0))
    one = {k: v.clone() for k, v in model.summed_grads().items()}
    other = tiny_model()
    backward_microbatch(other, tiny_batch(1))
    two = other.summed_grads()
    backward_microbatch(model, tiny_batch(1))
    for name, grad in model.summed_grads().items():
        torch.testing.assert_close(grad, one[name] + two[name], rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("fp32_residual", [False, True])
def test_reduced_precision_is_close(dtype, fp32_residual):
    exact = backward_microbatch(tiny_model(), tiny_batch())
    model = tiny_model(params_dtype=dtype, fp32_residual_connection=fp32_residual)
    model.bind_new_grads(torch.float32)
    inputs = []
    model.decoder.layers["1"].register_forward_pre_hook(lambda _m, args: inputs.append(args[0].dtype))
    loss = backward_microbatch(model, tiny_batch())
    assert inputs == [torch.float32 if fp32_residual else dtype]
    assert loss.dtype == torch.float32
    assert abs(loss.item() - exact.item()) < 0.01


def test_positions_restart_in_the_table():
    model = tiny_model().eval()
    tokens, _, positions = tiny_batch(batch=1)
    restarted = positions.clone()
    restarted[:, 8:] -= 8
    with torch.no_grad():
        a, b = model(tokens, positions), model(tokens, restarted)
    assert torch.equal(a[:, :8], b[:, :8])
    assert not torch.equal(a[:, 8:], b[:, 8:])


def test_positions_must_cover_the_sequence():
    with pytest.raises(ValueError, match="--seq-length 16 exceeds --max-position-embeddings 8"):
        tiny_model(max_position_embeddings=8)
    tiny_model(max_position_embeddings=8, position_embedding_type="rope")


def test_gpt_loss_parts():
    losses = torch.tensor([[1.0, 2.0], [3.0, 4.0]], requires_grad=True)
    mask = torch.tensor([[1, 0], [1, 1]])
    loss_sum, tokens, log = gpt_loss(mask, losses)
    assert (loss_sum.item(), tokens.item()) == (8.0, 3.0)
    assert (log["lm loss"][0].item(), log["lm loss"][1].item()) == (8.0, 3.0)
    assert not log["lm loss"][0].requires_grad
    loss_sum.backward()
    assert losses.grad.tolist() == [[1.0, 0.0], [1.0, 1.0]]
