"""A Hugging Face folder read by ours: the logits of transformers' model, for every architecture."""

import pytest
import torch

from tests.harness.hugging_face import POSITIONS, TOYS, VOCAB, our_model, saved_toy, toy_model


@pytest.mark.parametrize("name", TOYS)
def test_logits_are_those_of_transformers(name, tmp_path):
    theirs = saved_toy(name, tmp_path)
    ours = our_model(tmp_path, padding=3)
    tokens = torch.randint(VOCAB, (2, POSITIONS), generator=torch.Generator().manual_seed(5))
    positions = torch.arange(POSITIONS).expand_as(tokens)
    with torch.no_grad():
        expected, found = theirs(tokens).logits, ours(tokens, positions)
    assert (found[..., :VOCAB] - expected).abs().max() <= 1e-5 * expected.abs().max()
    assert (found[..., VOCAB:] == 0).all()


def test_shards_and_an_index_are_read(tmp_path):
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    saved_toy("llama3.2", whole)
    toy_model("llama3.2").save_pretrained(cut, max_shard_size="20KB")
    assert len(list(cut.glob("*.safetensors"))) > 2
    for (name, one), (_, other) in zip(
        our_model(whole).named_parameters(), our_model(cut).named_parameters(), strict=True
    ):
        assert torch.equal(one, other), name
