"""Megatron's FLOP count against one written out GEMM by GEMM."""

import pytest

from megatron.training.config.config import train_step_flops
from megatron.training.run.arguments import parse_config
from tests.harness.launch_lines import SMALL


def gemm(m, k, n):
    return 2 * m * k * n


@pytest.mark.parametrize(
    ("words", "groups", "head", "gated"),
    [
        ("", 4, 16, False),
        ("--swiglu", 4, 16, True),
        ("--group-query-attention --num-query-groups 2 --kv-channels 24", 2, 24, False),
    ],
)
def test_forward_gemms_times_three(words, groups, head, gated):
    config = parse_config([*SMALL, *words.split()])
    s, h, heads, ffn, vocab = 32, 64, 4, config.model.ffn_hidden_size, 384
    layer = (
        gemm(s, h, heads * head + 2 * groups * head)
        + gemm(s, heads * head, h)
        + gemm(s, h, ffn * (2 if gated else 1))
        + gemm(s, ffn, h)
        + (heads * gemm(s, head, s) + heads * gemm(s, s, head)) / 2  # half of the square is masked
    )
    assert train_step_flops(config, 5) == pytest.approx(5 * 3 * (2 * layer + gemm(s, h, vocab)), rel=1e-12)


def test_recompute_is_not_counted():
    plain, again = parse_config(SMALL), parse_config([*SMALL, "--recompute-activations"])
    assert train_step_flops(plain, 1) == train_step_flops(again, 1)


def test_an_unknown_vocabulary_is_a_programmers_error():
    with pytest.raises(AssertionError, match="padded_vocab_size"):
        train_step_flops(parse_config(SMALL).replace(padded_vocab_size=None), 1)
