"""Against printed figures: the slides' table, Llama3-70B's bytes, counted collectives, the paper's volumes."""

import pytest

from megatron.planner.communication import WireBytes
from megatron.planner.quantities import CommunicationError
from megatron.planner.sharding_table import (
    Buckets,
    StateBytes,
    Strategy,
    collectives_in_words,
    persistent_bytes,
    persistent_bytes_per_param,
    step_collectives,
    transient_unit_bytes,
)

NO_SHARD, OPTIM, OPTIM_GRADS, OPTIM_GRADS_PARAMS = Strategy


@pytest.mark.parametrize(
    ("strategy", "exact", "slide", "words"),
    [
        (NO_SHARD, "120.000", "120", "1 AR"),
        (OPTIM, "31.406", "31.4", "1 AR (= RS + AG)"),
        (OPTIM_GRADS, "16.641", "16.6", "1 AG + GA RS"),
        (OPTIM_GRADS_PARAMS, "1.875", "1.9", "2 GA AG + GA RS"),
    ],
)
def test_zero_table_of_the_slides(strategy, exact, slide, words):
    gigabytes = persistent_bytes(7.5e9, strategy, 64, StateBytes(grad_bytes=2)) / 1e9
    assert f"{gigabytes:.3f}" == exact
    assert f"{gigabytes:.{len(slide.partition('.')[2])}f}" == slide
    assert collectives_in_words(strategy) == words


@pytest.mark.parametrize("shard_size", [1, 2, 8, 64])
def test_persistent_bytes_per_param(shard_size):
    n = shard_size
    fp32_grads = [18, 6 + 12 / n, 2 + 16 / n, 18 / n]
    bf16_grads = [16, 4 + 12 / n, 2 + 14 / n, 16 / n]
    assert [persistent_bytes_per_param(one, n) for one in Strategy] == pytest.approx(fp32_grads)
    got = [persistent_bytes_per_param(one, n, StateBytes(grad_bytes=2)) for one in Strategy]
    assert got == pytest.approx(bf16_grads)


def test_persistent_bytes_without_adam_at_dp_2():
    """What was measured at DP 2 in bf16: model, main, gradient bytes a parameter (2, 2, 2; 2, 2, 1; 1, 2, 1)."""
    states = StateBytes(grad_bytes=2, moment_bytes=0)
    got = [persistent_bytes_per_param(one, 2, states) for one in Strategy]
    assert got == [2 + 4 + 2, 2 + 2 + 2, 2 + 2 + 1, 1 + 2 + 1]
    fp32 = StateBytes(4, 4, main_weight_bytes=0)
    assert persistent_bytes_per_param(NO_SHARD, 2, fp32) == 16


def test_llama3_70b():
    hidden, layers, vocab = 8192, 80, 128256
    unit = hidden * (2 * hidden + 2 * 1024) + 3 * hidden * 28672 + 2 * hidden
    others = 2 * vocab * hidden
    params = layers * unit + others + hidden
    assert f"{unit / 1e6:.1f}" == "855.7"
    assert f"{others * 2 / 1e9:.2f}" == "4.20"
    assert f"{params / 1e9:.2f}" == "70.55"
    gigabytes = persistent_bytes(70.56e9, OPTIM_GRADS_PARAMS, 64) / 1e9
    assert f"{gigabytes:.3f}" == "19.845"
    gigabytes = persistent_bytes(70.56e9, OPTIM_GRADS_PARAMS, 64, StateBytes(grad_bytes=2)) / 1e9
    assert f"{gigabytes:.2f}" == "17.64"
    assert f"{transient_unit_bytes(855.7e6) / 1e9:.2f}" == "10.27"
    hfsdp = persistent_bytes(70.56e9, OPTIM_GRADS_PARAMS, 8, outer_size=8, outer_optim=True)
    hsdp = persistent_bytes(70.56e9, OPTIM_GRADS_PARAMS, 8, outer_size=8)
    assert hfsdp / 1e9 == pytest.approx(66.15)  # printed as 66.1
    assert f"{hsdp / 1e9:.1f}" == "158.8"


# 4-layer GPT, fp32, DP 2, 2 microbatches: counted, (n, m) = (4, 1).
COUNTED = Buckets(4, 1, unit_params=3_421_696 * 0.9245, other_params=3_421_696 * 0.0755)


@pytest.mark.parametrize(
    ("strategy", "microbatches", "calls", "bytes_per_param"),
    [
        (NO_SHARD, 2, (0, 0, 5), (0, 0, 4.000)),
        (OPTIM, 2, (5, 5, 0), (4.004, 4.004, 0)),
        (OPTIM_GRADS, 2, (5, 10, 0), (4.004, 8.007, 0)),
        (OPTIM_GRADS_PARAMS, 2, (17, 10, 0), (15.093, 8.007, 0)),
        (OPTIM_GRADS_PARAMS, 1, (9, 5, 0), None),
        (OPTIM_GRADS_PARAMS, 4, (33, 20, 0), None),
    ],
)
def test_collectives_that_were_counted(strategy, microbatches, calls, bytes_per_param):
    step = step_collectives(strategy, COUNTED, microbatches, WireBytes(4, 4))
    assert (step.all_gather_calls, step.reduce_scatter_calls, step.all_reduce_calls) == calls
    if bytes_per_param is not None:
        payloads = (step.all_gather_bytes, step.reduce_scatter_bytes, step.all_reduce_bytes)
        # what was counted has up to 0.1 % of padding
        assert [one / COUNTED.num_params for one in payloads] == pytest.approx(bytes_per_param, rel=1.1e-3)


@pytest.mark.parametrize(
    ("strategy", "gigabytes"),
    [
        (NO_SHARD, ["56.2", "56.2", "56.2"]),
        (OPTIM, ["42.2", "42.2", "42.2"]),
        (OPTIM_GRADS, ["42.2", "126.5", "463.7"]),
        (OPTIM_GRADS_PARAMS, ["56.2", "224.8", "899.4"]),
    ],
)
def test_bytes_sent_by_an_8b_model_over_8_ranks(strategy, gigabytes):
    buckets = Buckets(34, 0, 8.03e9, 0)
    steps = [step_collectives(strategy, buckets, count, shard_size=8) for count in (1, 4, 16)]
    assert [f"{step.sent_bytes_per_rank(8) / 1e9:.1f}" for step in steps] == gigabytes


def test_collectives_of_other_policies():
    kept = step_collectives(OPTIM_GRADS_PARAMS, COUNTED, 3, reshard_after_forward=False)
    assert (kept.all_gather_calls, kept.reduce_scatter_calls) == (3 * 4 + 1, 3 * 5)
    alone = [step_collectives(one, COUNTED, 3, shard_size=1) for one in Strategy]
    assert {step.payload_bytes for step in alone} == {0.0}


def test_volumes_of_the_paper():
    """2, 2, 2 and 3 elements a parameter in a step of one microbatch (ZeRO, section 7)."""
    buckets = Buckets(1, 0, 10, 0)
    elements = [step_collectives(one, buckets, 1, WireBytes(1, 1)).payload_bytes for one in Strategy]
    assert elements == [20, 20, 20, 30]


@pytest.mark.parametrize(
    ("call", "field"),
    [
        (lambda: StateBytes(moment_bytes=-1), "moment_bytes"),
        (lambda: persistent_bytes(1, OPTIM, 2, outer_size=2, outer_optim=True), "outer_optim"),
        (lambda: persistent_bytes(1, OPTIM, 0), "shard_size"),
        (lambda: Buckets(0, 1, 5, 5), "unit_params"),
        (lambda: step_collectives(OPTIM, COUNTED, 0), "num_microbatches"),
    ],
)
def test_impossible_quantities_are_named(call, field):
    with pytest.raises(CommunicationError) as caught:
        call()
    assert caught.value.field == field
    assert str(caught.value).startswith(field)
