"""Seeded bad configurations: each refused by the right rule, naming flag and fix, several at once."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.core.optimizer.optimizer_param_scheduler import ScheduleError, build_schedule
from megatron.training.config.launch_env import LaunchEnv
from megatron.training.config.problems import Problem, render_problems
from megatron.training.config.resolve import Machine, resolve
from megatron.training.config.rule_table import RuleContext
from megatron.training.config.rules import RULES, broken_rules
from megatron.training.run.arguments import ConfigurationError, parse_config
from tests.harness.launch_lines import SMALL


def problems_of(words, env=None):
    try:
        parse_config([*SMALL, *words.split()], env=env)
    except ConfigurationError as error:
        return error.problems
    return ()


# (what is added to the smallest line, the rules it breaks)
BAD = [
    ("--tensor-model-parallel-size 3", "world-size heads-tensor-parallel ffn-tensor-parallel"),
    ("--num-attention-heads 5", "heads rotary-or-none"),
    ("--group-query-attention --num-query-groups 3", "query-groups"),
    ("--global-batch-size 3", "batch-divisible"),
    ("--global-batch-size 8 --rampup-batch-size 3 5 100", "batch-divisible"),
    ("--bf16 --fp16", "precision"),
    ("--fp64 --allow-tf32", "tf32"),
    ("--grad-reduce-in-bf16", "grad-reduce"),
    ("--loss-scale -1 --fp16", "range-loss-scale"),
    ("--loss-scale 0 --fp16", "loss-scale"),
    ("--train-samples 100", "iterations-or-samples"),
    ("--lr-warmup-samples 5", "iterations-or-samples"),
    ("--lr-warmup-fraction .1 --lr-warmup-iters 2", "warmup-fraction"),
    ("--lr-warmup-iters 10", "warmup-length"),
    ("--lr-warmup-fraction 1.0", "range-lr-warmup-fraction"),
    ("--train-iters 0", "length"),
    ("--train-iters -1 --lr-decay-iters 5", "range-train-iters"),
    ("--train-iters 0 --train-samples 8", "length"),
    ("--lr-decay-iters 0", "schedule-length"),
    ("--lr-decay-iters 4 --lr-warmup-iters 4", "warmup-length"),
    ("--lr-decay-style constant --lr-warmup-iters 12", "warmup-length"),
    ("--lr-warmup-iters -3", "range-lr-warmup-iters"),
    ("--min-lr 1", "lr-order"),
    ("--lr-decay-style WSD", "wsd-tail"),
    ("--lr-decay-style WSD --lr-wsd-decay-iters 11", "wsd-tail"),
    ("--lr-decay-style WSD --lr-wsd-decay-iters 0", "wsd-tail"),
    ("--lr-decay-style WSD --lr-wsd-decay-iters 11 --lr-warmup-iters 10", "warmup-length wsd-tail"),
    ("--lr-decay-style WSD --lr-wsd-decay-iters 11 --global-batch-size 3", "batch-divisible wsd-tail"),
    ("--start-weight-decay .1 --end-weight-decay .2", "weight-decay-ramp"),
    ("--weight-decay-incr-style linear", "weight-decay-ramp"),
    ("--override-opt_param-scheduler --use-checkpoint-opt-param-scheduler --load x", "scheduler-source"),
    ("--max-position-embeddings 31", "positions"),
    ("--position-embedding-type rope --rotary-percent 1.5", "rotary"),
    ("--position-embedding-type rope --rotary-percent .2", "rotary"),
    ("--position-embedding-type none --use-rotary-position-embeddings", "position-embedding-type"),
    ("--no-position-embedding", "no-position-embedding"),
    ("--swiglu --squared-relu", "activation"),
    ("--use-flash-attn --attention-backend unfused", "attention-backend"),
    ("--transformer-impl inference_optimized", "not-supported"),
    ("--padded-vocab-size 200", "vocabulary"),
    ("--recompute-granularity full", "recompute"),
    ("--recompute-activations --recompute-granularity full", "recompute"),
    ("--recompute-granularity selective --recompute-modules mla_up_proj", "value"),
    (
        "--num-experts 8 --moe-layer-recompute --recompute-granularity full --recompute-method block "
        "--recompute-num-layers 1",
        "recompute",
    ),
    ("--data-path x", "data"),
    ("--split 1,2,3,4", "split"),
    ("--multiple-validation-sets", "validation-sets"),
    ("--reset-attention-mask --no-create-attention-mask-in-dataloader", "attention-mask"),
    ("--tokenizer-type NullTokenizer", "tokenizer-files"),
    ("--tokenizer-type GPT2BPETokenizer", "tokenizer-files"),
    ("--tokenizer-type SentencePieceTokenizer", "tokenizer-files"),
    ("--tokenizer-type HuggingFaceTokenizer --tokenizer-model no/such", "files"),
    ("--save x", "save-interval"),
    ("--ckpt-step 3", "load-folder"),
    ("--use-checkpoint-args", "load-folder"),
    ("--save /dev/null/x --save-interval 1", "save-writable"),
    ("--wandb-project p", "wandb"),
    ("--timing-log-level 3", "limit-timing-log-level"),
    ("--nan-policy skip --no-check-for-nan-in-loss-and-grad", "nan-policy"),
    ("--save-interval 0", "range-save-interval"),
    ("--log-interval 0", "range-log-interval"),
    ("--num-layers 0", "range-num-layers"),
    ("--hidden-dropout 1.0", "range-hidden-dropout"),
    ("--clip-grad -1", "range-clip-grad"),
    ("--iterations-to-skip 3 0", "range-iterations-to-skip"),
    ("--world-size 4", "world-size-flag"),
    ("--json", "json-flag"),
    ("--num-experts 8 --moe-latent-size 2 --moe-use-upcycling", "not-supported not-supported"),
    ("--num-experts 8 --moe-router-topk 9", "expert-topk"),
    ("--num-experts 8 --moe-router-topk 1", "expert-weight"),
    ("--num-experts 8 --moe-layer-freq [0,1,1]", "expert-layers"),
    ("--num-experts 8 --moe-layer-freq [0,0]", "expert-layers"),
    ("--num-experts 8 --moe-router-num-groups 3 --moe-router-group-topk 1", "expert-groups"),
    ("--num-experts 8 --moe-router-num-groups 4", "expert-groups"),
    ("--num-experts 8 --moe-router-num-groups 2 --moe-router-group-topk 3", "expert-groups"),
    (
        "--num-experts 8 --moe-router-num-groups 4 --moe-router-group-topk 1 --moe-router-topk 3",
        "expert-groups",
    ),
    ("--num-experts 8 --moe-aux-loss-coeff 1 2", "expert-balancing"),
    (
        "--num-experts 8 --moe-router-load-balancing-type aux_loss aux_loss --moe-aux-loss-coeff 1 2",
        "expert-balancing",
    ),
    ("--num-experts 8 --moe-router-load-balancing-type none --moe-aux-loss-coeff 1", "expert-balancing"),
    (
        "--num-experts 8 --moe-router-load-balancing-type aux_loss none --moe-aux-loss-coeff 1 0",
        "expert-balancing",
    ),
    ("--num-experts 8 --moe-shared-expert-gate", "expert-shared-gate"),
    ("--use-custom-fsdp --use-nccl-ub --optimizer-cpu-offload", "not-supported"),
    ("--enable-vocab-parallel --fp8-format hybrid", "not-supported not-supported"),
    ("--pipeline-model-parallel-size 2", "world-size"),
    ("--use-precision-aware-optimizer --exp-avg-dtype bf16", "not-supported"),
    ("--sft --trust-remote-code", "not-supported"),
    ("--step-batch-size-schedule 0:768", "not-supported"),
]


@pytest.mark.parametrize(("words", "expected"), BAD)
def test_bad_configurations_are_refused_by_their_rules(words, expected):
    expected = [rule for rule in expected.split() if rule != "rotary-or-none"]
    problems = problems_of(words)
    assert [problem.rule for problem in problems] == expected
    for problem in problems:
        assert problem.flags
        assert problem.message
        said, told = (set(re.findall(r"[\w-]+", text)) for text in (problem.message, problem.fix))
        assert any(word.startswith("--") for word in told | said), "what to change is named"
        assert len(told - said) >= len(told) / 2, f"the fix repeats the message: {problem}"
        assert any(
            flag in f"{problem.message} {problem.fix} {' '.join(problem.flags)}" for flag in words.split()
        )


GOOD = [
    "--num-experts 0 --tensor-model-parallel-size 1 --context-parallel-size 1 --num-seq-splits 1",
    "--data-parallel-sharding-strategy no_shard --num-distributed-optimizer-instances 1",
    "--sequence-parallel --use-mcore-models --no-masked-softmax-fusion --no-gradient-accumulation-fusion",
    "--no-position-embedding --position-embedding-type rope",
    "--window-size -1,-1 --softmax-type vanilla --cp-comm-type p2p",
    "--fp16 --initial-loss-scale 65536 --nan-policy skip",
    "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
    "--recompute-activations",
    "--global-batch-size 5 --decrease-batch-size-if-needed",
    "--global-batch-size 8 --rampup-batch-size 2 2 10",
    "--lr-decay-style WSD --lr-wsd-decay-iters 3 --lr-wsd-decay-style minus_sqrt",
    "--start-weight-decay .1 --end-weight-decay .2 --weight-decay-incr-style cosine",
    "--kv-channels 10 --num-attention-heads 6",
    "--save x --save-interval 2 --save-retain-interval 4 --async-save --log-progress",
    "--tensorboard-dir tb --log-throughput --timing-log-level 2",
    "--lr-warmup-iters 3 --decoupled-lr 1e-2 --min-lr 1e-5",
    "--ckpt-format fsdp_dtensor --distributed-backend nccl",
    "--use-custom-fsdp --data-parallel-sharding-strategy optim_grads_params --no-gradient-accumulation-fusion",
    "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather",
]


@pytest.mark.parametrize("words", GOOD)
def test_good_configurations_pass(words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert problems_of(words) == ()


def test_required_flags_are_told_together():
    with pytest.raises(ConfigurationError) as caught:
        parse_config([])
    flags = {problem.flags[0] for problem in caught.value.problems}
    required = "num-layers hidden-size num-attention-heads seq-length micro-batch-size lr"
    assert {f"--{name}" for name in required.split()} <= flags
    assert {"length", "data", "tokenizer-type"} <= {problem.rule for problem in caught.value.problems}


def test_a_flag_that_could_not_be_read_is_not_also_missing():
    words = [word for word in SMALL if word not in ("--lr", "1e-3")]
    with pytest.raises(ConfigurationError) as caught:
        parse_config([*words, "--lr", "fast"])
    assert [problem.rule for problem in caught.value.problems] == ["value"]


def test_skipping_training_needs_neither_length_nor_learning_rate():
    words = [w for w in SMALL if w not in ("--lr", "1e-3", "--train-iters", "10")]
    assert parse_config([*words, "--skip-train"]).evaluation.skip_train


BY_SAMPLES = [
    ("--train-samples 7 --global-batch-size 8", "length"),
    ("--train-samples 0", "length"),
    ("--train-samples 3 --global-batch-size 8 --rampup-batch-size 4 4 16", "length"),
    ("--train-samples 4 --global-batch-size 8 --rampup-batch-size 4 4 16", ""),
    ("--train-samples 80 --lr-warmup-samples 80", "warmup-length"),
    ("--train-samples 80 --lr-decay-samples 40 --lr-warmup-samples 40", "warmup-length"),
    ("--train-samples 80 --lr-decay-style WSD --lr-wsd-decay-samples 0", "wsd-tail"),
    ("--train-samples 80 --lr-decay-style WSD --lr-wsd-decay-samples 81", "wsd-tail"),
    ("--train-samples 80 --lr-decay-style WSD --lr-wsd-decay-samples 80", ""),
]


@pytest.mark.parametrize(("words", "expected"), BY_SAMPLES)
def test_lengths_in_samples(words, expected):
    base = [word for word in SMALL if word not in ("--train-iters", "10")]
    try:
        parse_config([*base, *words.split()])
        broken = []
    except ConfigurationError as error:
        broken = [problem.rule for problem in error.problems]
    assert broken == expected.split()


@settings(max_examples=150, derandomize=True, deadline=None)
@given(
    unit=st.sampled_from(["iters", "samples"]),
    length=st.integers(0, 9),
    decay=st.none() | st.integers(0, 9),
    warmup=st.integers(0, 9),
    fraction=st.none() | st.sampled_from([0.0, 0.3, 0.99]),
    tail=st.none() | st.integers(0, 9),
    style=st.sampled_from(["constant", "linear", "WSD"]),
)
def test_the_rules_refuse_exactly_what_cannot_be_built(unit, length, decay, warmup, fraction, tail, style):
    given_here = {f"train_{unit}": length, f"lr_warmup_{unit}": warmup, "lr_warmup_fraction": fraction}
    given_here |= {f"lr_decay_{unit}": decay, f"lr_wsd_decay_{unit}": tail, "lr_decay_style": style}
    given_here |= {"micro_batch_size": 2, "global_batch_size": 2, "lr": 1.0}
    config = resolve(given_here, dict.fromkeys(given_here, "flag"), Machine())
    ids = ("length", "schedule-length", "warmup-length", "wsd-tail")
    refused = {problem.rule for problem in broken_rules(RuleContext(config)) if problem.rule in ids}
    if unit == "samples" and length == 1:
        assert "length" in refused  # a schedule, but no step
        return
    try:
        build_schedule(
            config.optimizer,
            train_iters=config.training.train_iters,
            train_samples=config.training.train_samples,
            global_batch_size=2,
        )
        built = length > 0
    except ScheduleError:
        built = False
    assert built == (not refused), refused


def test_skipping_training_asks_nothing_of_the_schedule():
    words = [w for w in SMALL if w not in ("--lr", "1e-3", "--train-iters", "10")]
    left = "--skip-train --lr-decay-style WSD --lr-warmup-samples 5 --lr-decay-iters 3 --min-lr 1e-5"
    config = parse_config([*words, *left.split()])
    assert (config.training.train_iters, config.optimizer.lr) == (0, 0.0)
    assert config.origin["train_iters"] == config.origin["no_load_optim"] == "derived"
    assert parse_config([*SMALL, "--train-iters", "0", "--skip-train"]).training.train_iters == 0


def test_a_users_own_data_needs_no_corpus():
    words = [w for w in SMALL if w not in ("--mock-data", "--tokenizer-type", "ByteTokenizer")]
    assert parse_config(words, needs_data=False).data.data_path is None
    external = [*words, "--dataloader-type", "external", "--tokenizer-type", "ByteTokenizer"]
    assert parse_config(external).data.dataloader_type == "external"


def test_the_launchers_ranks_count():
    four = LaunchEnv(world_size=4, local_world_size=4)
    config = parse_config(SMALL, env=four)
    assert (config.world_size, config.training.global_batch_size) == (4, 8)
    assert [p.rule for p in problems_of("--global-batch-size 4", env=four)] == ["batch-divisible"]


def test_deterministic_mode_on_gpus_names_the_variables():
    config = resolve({"deterministic_mode": True}, {"deterministic_mode": "flag"}, Machine(has_gpu=True))
    wrong = RuleContext(config, env=LaunchEnv(world_size=2), has_gpu=True)
    told = [p.message for p in broken_rules(wrong) if p.rule == "deterministic-mode"]
    assert "CUBLAS_WORKSPACE_CONFIG" in told[0]
    assert "NCCL_ALGO" in told[0]
    right = LaunchEnv(world_size=2, cublas_workspace_config=":4096:8", nccl_algo="Ring")
    assert not [
        p
        for p in broken_rules(RuleContext(config, env=right, has_gpu=True))
        if p.rule == "deterministic-mode"
    ]


def test_every_rule_names_flags_that_exist():
    from megatron.training.config.flag_table import spellings

    for rule in RULES:
        assert rule.flags
        assert rule.fix or rule.id in ("pipeline-layers", "distributed-optimizer-instances"), (
            "conditions say theirs"
        )
        assert set(rule.flags) <= set(spellings()), rule.id


def test_problems_are_printed_numbered_with_their_fix():
    text = render_problems([Problem("a", ("--x",), "x is wrong", "mend x"), Problem("b", (), "y", "mend y")])
    assert text.splitlines() == [
        "configuration: 2 problems",
        "  1. [a] x is wrong",
        "     fix: mend x",
        "  2. [b] y",
        "     fix: mend y",
    ]


@pytest.mark.parametrize(
    ("words", "rule"),
    [
        (("--seed", str(2**32)), "limit-seed"),
        (("--train-iters", str(10**22)), "limit-train-iters"),
        (("--mid-level-dataset-surplus", "2"), "limit-mid-level-dataset-surplus"),
    ],
)
def test_numbers_beyond_any_run(words, rule):
    with pytest.raises(ConfigurationError) as caught:
        parse_config([*SMALL, *words])
    assert rule in {problem.rule for problem in caught.value.problems}


def test_places_of_output_that_hold_something_else(tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "precious.txt").write_text("mine\n")
    (tmp_path / "old.jsonl").write_text('{"iteration": 1}\n')
    words = [*SMALL, "--metrics-file"]
    for name in ("folder", "precious.txt"):
        with pytest.raises(ConfigurationError, match="no file of metrics"):
            parse_config([*words, str(tmp_path / name)])
    with pytest.raises(ConfigurationError, match="no folder"):
        parse_config([*SMALL, "--tensorboard-dir", str(tmp_path / "precious.txt")])
    parse_config([*words, str(tmp_path / "old.jsonl"), "--tensorboard-dir", str(tmp_path / "folder")])


def test_a_misspelt_flag_is_one_problem():
    words = ["--hiden-size" if word == "--hidden-size" else word for word in SMALL]
    with pytest.raises(ConfigurationError) as caught:
        parse_config(words)
    assert [problem.rule for problem in caught.value.problems] == ["unknown-flag"]
