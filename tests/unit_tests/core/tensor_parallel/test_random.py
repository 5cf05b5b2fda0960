"""Masks are a function of (seed, iteration, microbatch, layer, site, tp_rank) and of nothing else."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.core.module import ModelContext
from megatron.core.tensor_parallel.random import DropoutSite, dropout, seeded_default_generator, stable_seed
from megatron.core.transformer.recompute import recomputed

FACTS = st.tuples(st.integers(0, 2**62), st.integers(0, 10**7), st.integers(0, 10**7), st.integers(-1, 500))


def test_stable_seed_is_pinned():
    """Checkpoints resume bit for bit across versions only if this never changes."""
    assert stable_seed(1234, 0, 0, -1, "embedding", -1) == 7043583173285707015
    assert 0 <= stable_seed("x") < 2**63


@settings(max_examples=50, derandomize=True, deadline=None)
@given(FACTS, FACTS)
def test_seeds_differ_where_facts_differ(a, b):
    assert (stable_seed(*a, "s") == stable_seed(*b, "s")) == (a == b)


def test_types_and_boundaries_matter():
    assert len({stable_seed(1, 23), stable_seed(12, 3), stable_seed("1", 23), stable_seed(123)}) == 4


def mask(**changes):
    facts = {"seed": 1, "iteration": 2, "microbatch": 3, "layer": 4, "site": "a", "tp_rank": None} | changes
    context = ModelContext(seed=facts["seed"], iteration=facts["iteration"], microbatch=facts["microbatch"])
    site = DropoutSite(context, facts["layer"], facts["site"], facts["tp_rank"])
    return dropout(torch.ones(64, 64), 0.3, site, training=True)


def test_every_fact_changes_the_mask():
    base = mask()
    assert torch.equal(base, mask())
    for change in (
        {"seed": 9},
        {"iteration": 9},
        {"microbatch": 9},
        {"layer": 9},
        {"site": "b"},
        {"tp_rank": 0},
        {"tp_rank": 1},
    ):
        assert not torch.equal(base, mask(**change)), change


def test_values_share_and_gradient():
    x = torch.randn(100, 100, requires_grad=True)
    out = dropout(x, 0.25, DropoutSite(ModelContext(seed=1), 0, "a"), training=True)
    kept = out != 0
    assert abs(kept.float().mean().item() - 0.75) < 0.02
    torch.testing.assert_close(out[kept], x[kept] / 0.75)
    out.sum().backward()
    torch.testing.assert_close(x.grad, kept / 0.75)
    assert torch.equal(dropout(x, 1.0, DropoutSite(ModelContext(seed=1), 0, "a"), True), torch.zeros_like(x))


def test_mask_does_not_depend_on_dtype_or_global_state():
    site = DropoutSite(ModelContext(seed=1), 0, "a")
    wide = dropout(torch.ones(50, 50, dtype=torch.float64), 0.5, site, True) != 0
    torch.manual_seed(99)
    state = torch.get_rng_state()
    assert torch.equal(wide, dropout(torch.ones(50, 50, dtype=torch.bfloat16), 0.5, site, True) != 0)
    assert torch.equal(state, torch.get_rng_state())


def test_seeded_default_generator_puts_the_state_back():
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    with seeded_default_generator(torch.device("cpu"), 77):
        inside = torch.rand(3)
    assert torch.equal(torch.rand(3), expected)
    with seeded_default_generator(torch.device("cpu"), 77):
        assert torch.equal(torch.rand(3), inside)


def test_recomputing_restores_the_clock_and_leaves_the_sink_alone():
    context, seen = ModelContext(seed=1), []

    def segment(x):
        seen.append((context.iteration, context.microbatch, context.grads.microbatch))
        return x * 2.0

    context.begin_microbatch(4, 1, 9)
    out = recomputed(segment, context, torch.ones(1, requires_grad=True))
    context.begin_microbatch(5, 2, 10)
    out.backward()
    assert seen == [(4, 9, 1), (4, 9, 2)]
    assert (context.iteration, context.microbatch, context.grads.microbatch) == (5, 10, 2)
