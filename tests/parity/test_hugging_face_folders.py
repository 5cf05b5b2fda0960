"""A Hugging Face folder read by ours: the logits of transformers' model, for every architecture."""

import contextlib

import pytest
import torch
from torch.overrides import TorchFunctionMode

from tests.harness.hugging_face import POSITIONS, TOYS, VOCAB, our_model, saved_toy, toy_model


class EverythingInFp64(TorchFunctionMode):
    """transformers computes norms, rotations and scores in fp32, whatever the weights are; not in here."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.Tensor.float:
            return args[0].double()
        args = [torch.float64 if arg is torch.float32 else arg for arg in args]
        kwargs = {
            key: torch.float64 if value is torch.float32 else value for key, value in (kwargs or {}).items()
        }
        return func(*args, **kwargs)


@pytest.mark.parametrize("name", TOYS)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-5)])
def test_logits_are_those_of_transformers(name, dtype, tolerance, tmp_path):
    tokens = torch.randint(VOCAB, (2, POSITIONS), generator=torch.Generator().manual_seed(5))
    positions = torch.arange(POSITIONS).expand_as(tokens)
    theirs = saved_toy(name, tmp_path, dtype)
    if "gpt2" not in name:  # angles and their cosines are of fp32 on both sides
        rotation = theirs.model.rotary_emb
        tables = rotation(torch.zeros(1, dtype=dtype), positions[:1])
        rotation.forward = lambda *_, **more: tables
    if name == "gemma" and dtype == torch.float64:  # made in fp32
        theirs.model.embed_tokens.embed_scale.fill_(48**0.5)
    with torch.no_grad():
        with EverythingInFp64() if dtype == torch.float64 else contextlib.nullcontext():
            expected = theirs(tokens).logits
        found = our_model(tmp_path, dtype, padding=3)(tokens, positions)
    assert found.dtype == expected.dtype == dtype
    assert (found[..., :VOCAB] - expected).abs().max() <= tolerance * expected.abs().max()
    assert (found[..., VOCAB:] == 0).all()


def test_gemmas_words_are_scaled_by_a_root_of_their_dtype(tmp_path):
    """And its logits in bf16 are as near as rounding lets them be."""
    theirs = saved_toy("gemma", tmp_path, torch.bfloat16)
    ours = our_model(tmp_path, torch.bfloat16)
    tokens = torch.randint(VOCAB, (2, POSITIONS), generator=torch.Generator().manual_seed(5))
    positions = torch.arange(POSITIONS).expand_as(tokens)
    with torch.no_grad():
        words = ours.embedding(tokens, positions).transpose(0, 1)
        rows = theirs.model.embed_tokens.weight[tokens]
        assert torch.equal(words, rows * torch.tensor(48**0.5, dtype=torch.bfloat16))
        expected = theirs(tokens).logits
        assert (ours(tokens, positions) - expected).abs().max() < 0.1 * expected.abs().max()


def test_shards_and_an_index_are_read(tmp_path):
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    saved_toy("llama3.2", whole)
    toy_model("llama3.2").save_pretrained(cut, max_shard_size="20KB")
    assert len(list(cut.glob("*.safetensors"))) > 2
    for (name, one), (_, other) in zip(
        our_model(whole).named_parameters(), our_model(cut).named_parameters(), strict=True
    ):
        assert torch.equal(one, other), name
