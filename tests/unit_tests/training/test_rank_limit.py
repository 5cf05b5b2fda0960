"""--rank-memory-limit: what is chosen under it, what is refused beside it, how large states are by flags."""

import dataclasses

import pytest

from megatron.core.parallelism_config import bytes_of
from megatron.core.pipeline_parallel.plan.budget_search import judge
from megatron.core.sharding_table import ShardPlace, sharding_of
from megatron.training.config.state_bytes import state_bytes
from tests.unit_tests.training.test_rules_sharding import FSDP, PP, STRATEGY, configure, problems_of

LIMIT = "--rank-memory-limit"
AUTO = f"{FSDP} {STRATEGY} auto"
# States are larger than activations, and the wire is slow.
SHAPE = (
    "--num-layers 8 --num-attention-heads 2 --seq-length 16 --max-position-embeddings 16 --padded-vocab-size 512 "
    f"--global-batch-size 32 {PP} 2 --dp-bandwidth-gb-per-s 0.05"
)


@pytest.mark.parametrize(
    ("words", "rule", "message"),
    [
        (f"{AUTO} {PP} 2", "sharding-auto", f"{STRATEGY} auto without a limit that it is chosen by"),
        (f"{STRATEGY} auto {LIMIT} 1G", "sharding-strategy", f"{STRATEGY} auto without {FSDP}"),
        (f"{FSDP} {LIMIT} 1G --pipeline-memory-limit 1M", "rank-memory-limit", "--pipeline-memory-limit 1048576: one"),
        (f"{FSDP} {LIMIT} 1G --fsdp-reshard-policy budget --fsdp-memory-budget 9", "rank-memory-limit",
         "--fsdp-memory-budget 9, --fsdp-reshard-policy budget: one limit of all"),
        (f"{FSDP} {LIMIT} 1G {PP} 2 --enable-zero-bubble --zero-bubble-max-pending-backward 2", "rank-memory-limit",
         "--zero-bubble-max-pending-backward 2: one limit"),
        (f"{FSDP} {LIMIT} 1G {PP} 2 --enable-zero-bubble --zero-bubble-adaptive-memory-limit-percentile 50",
         "rank-memory-limit", "--zero-bubble-adaptive-memory-limit-percentile 50: one limit"),
        (f"{FSDP} {LIMIT} 0", "range-rank-memory-limit", "must be at least 1"),
    ],
)  # fmt: skip
def test_what_is_refused_beside_it(words, rule, message):
    told = {problem.rule: problem for problem in problems_of(words)}
    assert message in told[rule].message
    assert told[rule].fix


def test_a_limit_below_everything_says_the_least_and_who_has_it():
    (problem,) = problems_of(f"{AUTO} {SHAPE} {LIMIT} 100K", 8)
    assert problem.rule == "pipeline-plan"
    assert "nothing fits; the least is that of " in problem.message
    assert "optim_grads_params: rank " in problem.message
    assert "at rest" in problem.message
    assert "of a microbatch's activations" in problem.message


@pytest.mark.grid
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "limits",
    [
        (9_000_000, 2_500_000),
        pytest.param((9_000_000, 4_000_000, 3_000_000, 2_500_000), marks=pytest.mark.full),
    ],
)
def test_less_memory_shards_more_and_takes_longer(limits):
    """From room for everything down to almost none: never over the limit, never faster with less."""
    times, strategies = [], []
    for limit in limits:
        config = configure(f"{AUTO} {SHAPE} {LIMIT} {limit}", 8)
        spec = config.planner().spec
        judged = judge(spec, config.last_num_microbatches)
        assert max(judged.peaks) <= limit
        chosen = config.planner().sharded(config.ddp)
        assert chosen.data_parallel_sharding_strategy == spec.residency.strategy
        times.append(judged.simulation.cost)
        strategies.append(spec.residency.strategy)
    assert times == sorted(times)
    assert strategies[0] != "optim_grads_params"
    assert strategies[-1] == "optim_grads_params"


def test_what_flags_name_is_kept():
    spec = configure(f"{FSDP} {SHAPE} {LIMIT} 4M --zero-bubble-v-schedule", 8).planner().spec
    assert (spec.schedule, spec.residency.strategy) == ("zbv", "optim_grads_params")
    assert {line.partition(",")[0] for line in spec.reasons} == {"zbv"}
    alone = configure(f"{FSDP} {LIMIT} 4M {PP} 1").planner().spec
    assert (alone.schedule, alone.placement.num_stages) == ("1f1b", 1)


def test_one_data_parallel_rank_shares_nothing_and_is_bounded_all_the_same():
    words = f"--num-layers 4 --global-batch-size 8 {PP} 2"
    config = configure(f"{words} {LIMIT} 4M", world_size=2)
    assert max(judge(config.planner().spec, 8).peaks) <= 4 << 20
    (problem,) = problems_of(f"{words} {LIMIT} 50K", world_size=2)
    assert "nothing fits" in problem.message


def test_speeds_have_defaults_by_backend_and_do_nothing_alone():
    config = configure(f"{FSDP} {LIMIT} 1G")
    assert (config.parallel.achieved_tflops, config.origin["achieved_tflops"]) == (0.05, "derived")
    (warning,) = configure("--achieved-tflops 3").warnings
    assert warning == f"--achieved-tflops 3.0 has no effect without {LIMIT}"
    assert configure(f"{FSDP} {LIMIT} auto").parallel.rank_memory_limit > 1 << 20
    sizes = {"3K": 3 << 10, "3m": 3 << 20, "75G": 75 << 30, "2T": 2 << 40}
    assert {
        word: configure(f"{FSDP} {LIMIT} {word}").parallel.rank_memory_limit for word in ("75G", "2T")
    } == {word: sizes[word] for word in ("75G", "2T")}
    assert {word: bytes_of(word) for word in sizes} == sizes


@pytest.mark.parametrize(
    ("dtype", "strategy", "bytes_of_a_weight"),
    [("bf16", "optim", 2 + 4 + 12 / 4), ("bf16", "optim_grads_params", 16 / 4), ("fp32", "optim_grads", 4 + 12 / 4)],
)  # fmt: skip
def test_states_at_rest_by_flags(dtype, strategy, bytes_of_a_weight):
    """18 bytes a parameter in bf16 (weights, fp32 gradients, main weights, moments), 16 where weights are cut: gathers
    round main weights; 16 in fp32."""
    ddp = dataclasses.replace(configure(FSDP).ddp, accumulate_allreduce_grads_in_fp32=True)
    place = ShardPlace(inner_size=4, outer_size=1)
    found = state_bytes(ddp, sharding_of(strategy), place, dtype)
    assert found.of_parameter == bytes_of_a_weight
    copies = state_bytes(ddp, sharding_of(strategy), place, dtype, copies=True)
    assert copies.of_parameter == bytes_of_a_weight + 12 / 4
