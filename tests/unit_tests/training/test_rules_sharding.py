"""Rules on sharding over data parallel ranks: what is refused with which words, what is derived, what runs."""

import itertools

import pytest

from megatron.core.distributed.custom_fsdp.sharding import keeps_nothing
from megatron.core.pipeline_parallel.plan.residency import POLICIES
from megatron.core.sharding_table import STRATEGIES, ShardOver, sharding_of
from megatron.training.config.flag_table import FlagState, spellings
from megatron.training.config.launch_env import LaunchEnv
from megatron.training.run.arguments import ConfigurationError, parse_config
from tests.harness.described import planned_config
from tests.harness.launch_lines import SMALL

TP, PP = "--tensor-model-parallel-size", "--pipeline-model-parallel-size"
FSDP, ZERO1 = "--use-custom-fsdp", "--use-distributed-optimizer"
STRATEGY, INSTANCES = "--data-parallel-sharding-strategy", "--num-distributed-optimizer-instances"
HASH = "--check-weight-hash-across-dp-replicas-interval"
OUTER, FULL = "--outer-dp-sharding-strategy", "--enable-full-sharding-in-hsdp"
MAIN_PARAMS, MAIN_GRADS = "--megatron-fsdp-main-params-dtype", "--megatron-fsdp-main-grads-dtype"
WIRE = "--megatron-fsdp-grad-comm-dtype"


def configure(words, world_size=4):
    env = LaunchEnv(world_size=world_size, local_world_size=world_size)
    return planned_config([*SMALL, *words.split()], env=env)


def problems_of(words, world_size=4):
    try:
        configure(words, world_size)
    except ConfigurationError as error:
        return error.problems
    return ()


# (what is added to the smallest line on 4 ranks, the rule it breaks, its message, a part of its fix)
BAD = [
    (f"{STRATEGY} optim", "sharding-strategy",
     f"{STRATEGY} optim without {FSDP} or {ZERO1}: nothing would be sharded", f"add {FSDP}"),
    (f"{STRATEGY} optim_grads_params", "sharding-strategy",
     f"{STRATEGY} optim_grads_params without {FSDP} or {ZERO1}: nothing would be sharded", f"add {FSDP}"),
    (f"{STRATEGY} optim_grads {ZERO1}", "sharding-strategy",
     f"{STRATEGY} optim_grads needs {FSDP}: {ZERO1} shards the optimizer state only", f"add {FSDP}"),
    (f"{STRATEGY} no_shard {ZERO1}", "sharding-strategy",
     f"{STRATEGY} no_shard contradicts {ZERO1}, which shards the optimizer state", "leave the strategy out"),
    (f"{FSDP} {PP} 2 --fsdp-reshard-policy backward", "reshard-policy-stages",
     f"--fsdp-reshard-policy backward with {PP} 2: several microbatches are between their forward and their "
     "backward at any time, so weights would stay gathered for the whole step", "use --fsdp-reshard-policy budget"),
    (f"{FSDP} {PP} 2 --fsdp-double-buffer", "double-buffer-stages",
     f"--fsdp-double-buffer with {PP} 2: forwards and backwards alternate, so units do not take two slots in turns",
     "use one stage"),
    (f"{FSDP} {STRATEGY} no_shard {INSTANCES} 2", "sharding-instances",
     f"{INSTANCES} 2 with {STRATEGY} no_shard: there is no sharded state to have instances of",
     "leave the instances out"),
    (f"{FSDP} {STRATEGY} optim_grads {INSTANCES} 2 {OUTER} optim", "outer-sharding",
     f"{OUTER} optim with {STRATEGY} optim_grads: the optimizer is cut over instances only with optim_grads_params",
     "optim_grads_params"),
    (f"{FSDP} {STRATEGY} optim {FULL}", "outer-sharding",
     f"{FULL} with {STRATEGY} optim: the optimizer is cut over instances only with optim_grads_params",
     "leave the outer strategy out"),
    (f"{FSDP} {STRATEGY} optim {FULL} {PP} 2 --enable-zero-bubble --enable-optimizer-post-validation",
     "outer-sharding",  # not a ValueError of the rule on what a step leaves until it is decided on
     f"{FULL} with {STRATEGY} optim: the optimizer is cut over instances only with optim_grads_params",
     "leave the outer strategy out"),
    (f"{FSDP} {INSTANCES} 2 {FULL} {OUTER} no_shard", "outer-sharding",
     f"{OUTER} no_shard contradicts {FULL}", "leave the outer strategy out"),
    (f"{FSDP} {INSTANCES} 4 {FULL}", "outer-instances",
     f"{INSTANCES} 4 of one rank each: {OUTER} optim needs shards inside of them", "fewer instances"),
    (f"{FSDP} {STRATEGY} optim_grads --fsdp-reshard-policy backward", "fsdp-reshard-policy",
     f"--fsdp-reshard-policy backward with {STRATEGY} optim_grads: weights are not sharded, so none are gathered",
     "use optim_grads_params"),
    (f"{FSDP} {STRATEGY} optim --fsdp-reshard-policy step", "fsdp-reshard-policy",
     f"--fsdp-reshard-policy step with {STRATEGY} optim: what moves once a step need not be kept",
     "leave the policy out"),
    (f"{FSDP} --fsdp-reshard-policy budget", "fsdp-memory-budget",
     "--fsdp-reshard-policy budget needs --fsdp-memory-budget", "--fsdp-memory-budget BYTES"),
    (f"{FSDP} --fsdp-memory-budget 4096", "fsdp-memory-budget",
     "--fsdp-memory-budget 4096 does nothing under --fsdp-reshard-policy memory", "--fsdp-reshard-policy budget"),
    ("--fsdp-double-buffer", "gathers-without-effect",
     f"--fsdp-double-buffer: without {FSDP} weights and gradients stay whole", f"use {FSDP}"),
    ("--fsdp-reshard-policy step --suggested-communication-unit-size 9", "gathers-without-effect",
     "--fsdp-reshard-policy, --suggested-communication-unit-size: without --use-custom-fsdp weights and gradients stay "
     "whole", "leave them out"),
    (f"{FSDP} --fsdp-reshard-policy step {INSTANCES} 4", "gathers-without-effect",
     "--fsdp-reshard-policy: one data parallel rank has nobody to share states with", "several data parallel ranks"),
    (f"{FSDP} {INSTANCES} 4 --fsdp-reshard-policy budget --fsdp-memory-budget 99", "gathers-without-effect",
     "--fsdp-reshard-policy, --fsdp-memory-budget: one data parallel rank has nobody to share states with",
     "several data parallel ranks"),
    (f"{FSDP} {STRATEGY} optim --suggested-communication-unit-size 9 --fsdp-double-buffer", "gathers-without-effect",
     f"--suggested-communication-unit-size, --fsdp-double-buffer: with {STRATEGY} optim weights and gradients stay "
     "whole",
     "optim_grads_params"),
    (f"{FSDP} --fsdp-debug --fsdp-double-buffer", "fsdp-debug",
     "--fsdp-debug with --fsdp-double-buffer: a slot's memory is never released, so a view that was kept reads another "
     "unit's weights and cannot be told from one that was not", "leave out one of them"),
    (f"{FSDP} {HASH} 2", "weight-hash",
     f"{HASH} 2 with {STRATEGY} optim_grads_params: no two ranks hold the same weights", INSTANCES),
    (f"{FSDP} {MAIN_PARAMS} bf16", "main-params-dtype",
     f"{MAIN_PARAMS} bf16 cannot hold the model's fp32 weights", "give auto"),
    (f"{FSDP} --fp64 {MAIN_PARAMS} fp32", "main-params-dtype",
     f"{MAIN_PARAMS} fp32 cannot hold the model's fp64 weights", "give auto"),
    (f"{FSDP} --bf16 {MAIN_PARAMS} fp16", "main-params-dtype",
     f"{MAIN_PARAMS} fp16 cannot hold the model's bf16 weights", "or fp32 for 16-bit weights"),
    (f"{FSDP} --bf16 --grad-reduce-in-bf16 {MAIN_GRADS} fp32", "main-grads-dtype",
     f"{MAIN_GRADS} fp32 contradicts --grad-reduce-in-bf16", f"{WIRE} bf16"),
    (f"{FSDP} --bf16 --accumulate-allreduce-grads-in-fp32 {MAIN_GRADS} bf16", "main-grads-dtype",
     f"{MAIN_GRADS} bf16 contradicts --accumulate-allreduce-grads-in-fp32", "keep one of them"),
    (f"--bf16 {WIRE} bf16", "grad-comm-dtype",
     f"{WIRE} bf16 with {STRATEGY} no_shard: gradients are summed where they are accumulated, in fp32",
     f"{MAIN_GRADS}"),
    (f"{ZERO1} {WIRE} bf16", "grad-comm-dtype",
     f"{WIRE} bf16 with {STRATEGY} optim: gradients are summed where they are accumulated, in fp32", "give auto"),
    (f"{FSDP} {INSTANCES} 3", "distributed-optimizer-instances",
     f"{INSTANCES} 3 does not divide the data parallel size 4", "choose one of 1, 2, 4"),
    (f"{INSTANCES} 3", "distributed-optimizer-instances",
     f"{INSTANCES} 3 does not divide the data parallel size 4", "choose one of 1, 2, 4"),
    (f"{FSDP} --suggested-communication-unit-size -1", "range-suggested-communication-unit-size",
     "--suggested-communication-unit-size -1: must be at least 0", "give 0 or more"),
    (f"{ZERO1} {HASH} 0", "range-check-weight-hash-across-dp-replicas-interval",
     f"{HASH} 0: must be at least 1", "give 1 or more"),
    (f"{FSDP} --megatron-fsdp-version 2", "not-supported",
     "--megatron-fsdp-version 2 is not supported", "leave it out, or give 1"),
    (f"{FSDP} --fp8-e4m3", "not-supported", "--fp8-e4m3 is not supported", "docs/roadmap.md, 'fp8'"),
    ("--use-torch-fsdp2", "not-supported", "--use-torch-fsdp2 is not supported", "use --use-custom-fsdp"),
]  # fmt: skip


@pytest.mark.parametrize(("words", "rule", "message", "fix"), BAD)
def test_what_makes_no_sense_is_refused_with_flags_and_fix(words, rule, message, fix):
    (problem,) = problems_of(words)
    assert (problem.rule, problem.message) == (rule, message)
    assert fix in problem.fix
    assert problem.flags


def test_all_reasons_are_told_at_once():
    words = f"{STRATEGY} optim_grads {PP} 2 {OUTER} optim --fsdp-memory-budget 1 {MAIN_PARAMS} bf16"
    words += " --fsdp-double-buffer"
    told = [problem.rule for problem in problems_of(words)]
    assert told == [
        "sharding-strategy",
        "double-buffer-stages",
        "outer-sharding",
        "fsdp-memory-budget",
        "main-params-dtype",
    ]


GOOD = [
    f"{FSDP} {STRATEGY} optim_grads_params --no-gradient-accumulation-fusion",
    f"--use-megatron-fsdp {STRATEGY} no_shard {ZERO1}",
    f"{FSDP} {STRATEGY} optim {PP} 2",
    f"{FSDP} {STRATEGY} optim_grads {PP} 2 --fsdp-reshard-policy step",
    f"{FSDP} {PP} 2",
    f"{FSDP} {STRATEGY} no_shard {PP} 2",
    f"{ZERO1} {STRATEGY} optim {PP} 2 {INSTANCES} 2",
    f"{FSDP} {INSTANCES} 2 {OUTER} optim {HASH} 3",
    f"{FSDP} {INSTANCES} 2 {FULL}",
    f"{FSDP} {TP} 2 --bf16 {WIRE} bf16 {MAIN_PARAMS} auto {MAIN_GRADS} bf16",
    f"{FSDP} --fp64 {HASH} 1 {STRATEGY} optim_grads",
    f"{FSDP} --fsdp-reshard-policy budget --fsdp-memory-budget 0 --fsdp-double-buffer --log-fsdp-ledger",
    f"{FSDP} --suggested-communication-unit-size 0 --fsdp-unit-modules Block Embedding --fsdp-debug",
    f"{FSDP} --init-model-with-meta-device --megatron-fsdp-version 1 --strict-fsdp-dtensor-load True",
    f"{STRATEGY} no_shard",
]


@pytest.mark.parametrize("words", GOOD)
def test_what_makes_sense_passes(words):
    assert problems_of(words) == ()


def test_the_strategy_follows_from_the_other_flags():
    def strategy(words):
        config = configure(words)
        name = "data_parallel_sharding_strategy"
        return config.ddp.data_parallel_sharding_strategy, config.origin[name]

    assert strategy("") == ("no_shard", "default")
    assert strategy(ZERO1) == ("optim", "derived")
    assert strategy(FSDP) == ("optim_grads_params", "derived")
    assert strategy(f"{FSDP} {ZERO1}") == ("optim_grads_params", "derived")
    assert strategy(f"{FSDP} {ZERO1} {STRATEGY} optim_grads") == ("optim_grads", "flag")


def test_every_accepted_pair_of_strategies_is_a_row_of_the_table():
    for strategy, outer, instances in itertools.product(STRATEGIES, ("no_shard", "optim"), (1, 2)):
        words = f"{FSDP} {STRATEGY} {strategy} {OUTER} {outer} {INSTANCES} {instances}"
        try:
            sharding_of(strategy, outer)
        except ValueError:
            assert "outer-sharding" in {problem.rule for problem in problems_of(words)}
            continue
        refused = strategy == "no_shard" and instances == 2
        assert [problem.rule for problem in problems_of(words)] == ["sharding-instances"] * refused


def test_cut_gradients_imply_overlap():
    for strategy in ("optim_grads", "optim_grads_params"):
        config = configure(f"{FSDP} {STRATEGY} {strategy}")
        assert (config.ddp.overlap_grad_reduce, config.ddp.overlap_param_gather) == (True, True)
        assert config.origin["overlap_grad_reduce"] == config.origin["overlap_param_gather"] == "derived"
    whole = configure(f"{FSDP} {STRATEGY} optim").ddp
    assert (whole.overlap_grad_reduce, whole.overlap_param_gather) == (False, False)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("policy", POLICIES)
def test_policies_are_refused_where_the_planner_refuses_them(policy, strategy):
    budget = " --fsdp-memory-budget 8" * (policy == "budget")
    row = sharding_of(strategy)
    cut = {
        "weights_sharded": row.weights is not ShardOver.NONE,
        "grads_sharded": row.main_grads is not ShardOver.NONE,
    }
    refused = ["fsdp-reshard-policy"] * keeps_nothing(policy, **cut)
    words = f"{FSDP} {STRATEGY} {strategy} --fsdp-reshard-policy {policy}{budget}"
    assert [problem.rule for problem in problems_of(words)] == refused


def test_fp64_weights_are_their_own_main_weights():
    assert configure(f"{FSDP} --fp64").ddp.megatron_fsdp_main_params_dtype == "auto"
    assert configure(f"{FSDP} --bf16").ddp.megatron_fsdp_main_params_dtype == "fp32"


# (flags, the warning, (field, value afterwards) or None)
NO_EFFECT = [
    (f"{INSTANCES} 2",
     f"{INSTANCES} 2 has no effect without {ZERO1} or {FSDP}: no optimizer state is sharded",
     ("num_distributed_optimizer_instances", 1)),
    (f"{FSDP} {OUTER} optim", f"{OUTER} optim has no effect at {INSTANCES} 1",
     ("outer_dp_sharding_strategy", "no_shard")),
    (f"{FSDP} {FULL}", f"{FULL} has no effect at {INSTANCES} 1", ("outer_dp_sharding_strategy", "no_shard")),
    ("--overlap-param-gather",
     "--overlap-param-gather has no effect without a sharded optimizer: every rank updates all weights",
     ("overlap_param_gather", False)),
    (f"{FSDP} --no-overlap-grad-reduce",
     f"--overlap-grad-reduce is always on with {STRATEGY} optim_grads_params", ("overlap_grad_reduce", True)),
    ("--fsdp-debug", f"--fsdp-debug has no effect without {FSDP}", None),
    (f"{FSDP} --bf16 --megatron-fsdp-grad-comm-dtype bf16 --fsdp-reshard-policy step",
     "--megatron-fsdp-grad-comm-dtype bf16 with --fsdp-reshard-policy step: units that reduce once a step add their "
     "microbatches in bf16, not in fp32", None),
    ("--fsdp-unit-modules Block", f"--fsdp-unit-modules has no effect without {FSDP}", None),
    (f"{FSDP} {STRATEGY} optim --fsdp-debug",
     f"--fsdp-debug has no effect with {STRATEGY} optim: weights and gradients stay whole", None),
    (f"{FSDP} --ddp-bucket-size 99",
     "--ddp-bucket-size has no effect with --use-custom-fsdp: each unit is a bucket", None),
    (f"{FSDP} {STRATEGY} optim_grads --ddp-num-buckets 2",
     "--ddp-num-buckets has no effect with --use-custom-fsdp: each unit is a bucket", None),
    (f"{FSDP} {STRATEGY} optim --ddp-bucket-size 99",
     "--ddp-bucket-size has no effect with --use-custom-fsdp: each unit is a bucket", None),
    (f"{FSDP} {STRATEGY} no_shard --ddp-num-buckets 2",
     "--ddp-num-buckets has no effect with --use-custom-fsdp: each unit is a bucket", None),
]  # fmt: skip


@pytest.mark.parametrize(("words", "warning", "after"), NO_EFFECT)
def test_what_has_no_effect_is_told(words, warning, after):
    config = configure(words)
    assert config.warnings == (warning,)
    if after is not None:
        name, value = after
        assert getattr(config.ddp, name) == value
        assert config.origin[name] == "derived"


@pytest.mark.parametrize(
    "flag",
    [
        "--create-all-gather-group",
        "--no-gradient-reduce-div-fusion",
        "--fsdp-db-use-persist-buf-on-alloc-fail",
        "--no-gradient-accumulation-fusion",
    ],
)
def test_what_is_always_so_is_accepted_and_told(flag):
    assert spellings()[flag].state is FlagState.INERT
    (warning,) = configure(f"{FSDP} {flag}").warnings
    assert warning.startswith(f"{flag} has no effect here: ")


def test_two_spellings_of_the_double_buffer():
    assert configure(f"{FSDP} --megatron-fsdp-max-pool-double-buffer").ddp.fsdp_double_buffer


@pytest.mark.parametrize("words", ["", ZERO1, f"{FSDP} --fp64", f"{FSDP} {INSTANCES} 2 {FULL}", *GOOD[1:5]])
def test_the_yaml_of_a_sharded_run_reads_back(words, tmp_path):
    config = configure(words)
    (tmp_path / "run.yaml").write_text(config.to_yaml())
    env = LaunchEnv(world_size=4, local_world_size=4)
    again = parse_config(["--yaml-cfg", str(tmp_path / "run.yaml")], env=env)
    assert again.ddp == config.ddp


@pytest.mark.parametrize(
    "words",
    [
        f"{FSDP} --bf16 --megatron-fsdp-grad-comm-dtype bf16",
        f"{FSDP} --bf16 --grad-reduce-in-bf16 --megatron-fsdp-grad-comm-dtype bf16 --fsdp-reshard-policy step",
    ],
)
def test_a_wire_that_adds_in_what_gradients_are_kept_in_warns_of_nothing(words):
    assert configure(words).warnings == ()
