"""What Megatron and its zero-bubble fork take, and what of it has no effect, which one line says."""

from __future__ import annotations

import itertools
import shlex
import subprocess

import pytest

from megatron.core.pipeline_parallel.plan.placement import LINEAR, LOOPED
from megatron.core.pipeline_parallel.plan.schedules import SCHEDULES as TABLE
from megatron.training.config.launch_env import LaunchEnv
from megatron.training.run.arguments import ConfigurationError, launch_config
from tests.harness import launch
from tests.harness.described import planned_config
from tests.harness.launch_lines import SMALL

OWN_DATA = "tests/functional_tests/trainers/own_data.py"
# TINY of a trainer that brings its data: no corpus, no mock data, no tokenizer but a number of ids.
NO_DATA = [
    word
    for word in launch.TINY_DATA
    if word not in ("--tokenizer-type", "NullTokenizer", "--no-create-attention-mask-in-dataloader")
]
PP2 = "--pipeline-model-parallel-size 2 --num-layers 4"
V, PENDING = "--zero-bubble-v-schedule", "--zero-bubble-max-pending-backward"
SETUP, PERCENTILE = "--zero-bubble-v-schedule-mem-setup", "--zero-bubble-adaptive-memory-limit-percentile"
GROUP = "--microbatch-group-size-per-virtual-pipeline-stage"


def configure(words, ranks=1):
    env = LaunchEnv(world_size=ranks, local_world_size=ranks)
    return planned_config([*SMALL, "--global-batch-size", "8", *words.split()], env=env)


# --- data sets of the trainer's own


def test_a_trainer_with_its_own_provider_needs_no_mock_data_and_no_corpus():
    run = launch.ok(launch.run_forked([*NO_DATA, "--train-iters", "3"], script=OWN_DATA))
    assert list(run.losses()) == [1, 2, 3]
    assert "WARNING" not in run.output


def test_its_configuration_can_be_checked_without_data(capsys):
    words = ["--check-config", *NO_DATA, "--train-iters", "3"]
    with pytest.raises(SystemExit) as ended:
        launch_config(words, needs_data=False)
    assert ended.value.code == 0
    with pytest.raises(SystemExit) as ended:
        launch_config(words)  # as pretrain_gpt.py: its provider reads what the flags name
    assert ended.value.code == 2
    assert "no training data is named" in capsys.readouterr().err


def test_a_provider_that_asks_the_flags_after_all_is_told_so_without_a_traceback():
    words = [*NO_DATA, "--train-iters", "3", "--stock-builder"]
    run = launch.ended(launch.run_forked(words, script=OWN_DATA), 4)
    assert "build_gpt_datasets reads what the flags name: give --data-path PREFIX" in run.output
    assert "Traceback" not in run.output


def test_a_trainer_needs_a_vocabulary_as_upstream_does(capsys):
    at = NO_DATA.index("--vocab-size")
    with pytest.raises(SystemExit) as ended:
        launch_config([*NO_DATA[:at], *NO_DATA[at + 2 :], "--train-iters", "3"], needs_data=False)
    assert ended.value.code == 2
    assert "no tokenizer is named" in capsys.readouterr().err


# --- what has no effect

# (ranks, words, what one line says)
ACCEPTED = [
    (1, "--recompute-num-layers 1", "--recompute-num-layers 1 has no effect without --recompute-granularity full"),
    (1, "--recompute-method uniform", "--recompute-method uniform has no effect without --recompute-granularity full"),
    (1, "--recompute-granularity selective --recompute-num-layers 1", "--recompute-num-layers 1 has no effect without"),
    (1, "--recompute-activations --recompute-method block", "--recompute-method block has no effect without"),
    (1, "--recompute-modules mlp", "--recompute-modules mlp has no effect without --recompute-granularity selective"),
    (1, "--recompute-granularity full --recompute-method block --recompute-num-layers 3",
     "--recompute-num-layers 3 is above --num-layers 2: all layers are recomputed"),
    (1, "--test-mode", "--test-mode has no effect here"),
    (1, "--no-pre-communication-optimization", "--no-pre-communication-optimization has no effect here"),
    (1, "--save x --save-interval 10 --save-retain-interval 5",
     "--save-retain-interval 5 has no effect on the checkpoints of --save-interval 10: all of them stay"),
    (1, "--save x --save-interval 4 --save-retain-interval 6", "multiples of both stay, every 12 iterations"),
    (1, "--save x --save-interval 4 --save-retain-interval 3", "every 12 iterations, and the newest two"),
    (1, "--save-retain-interval 5", "--save-retain-interval 5 has no effect without --save"),
    (2, f"{PP2} {V} {PENDING} 2", f"{PENDING} 2 has no effect with {V}"),
    (2, f"{PP2} {V} {SETUP} half {PENDING} 2", f"{PENDING} 2 has no effect with {V}"),
    (2, f"{PP2} {V} {SETUP} min --enable-zero-bubble {PENDING} 4", f"{PENDING} 4 has no effect with {V}"),
    # of the same kind
    (2, f"{PP2} --enable-1f1b-v {PENDING} 2", f"{PENDING} 2 has no effect with the schedule 1f1b-v"),
    (2, f"{PP2} --pipeline-schedule dualpipe-v {PENDING} 2", f"{PENDING} 2 has no effect with the schedule dualpipe-v"),
    (2, f"{PP2} {PENDING} 2", f"{PENDING} 2 has no effect with the schedule 1f1b"),
    (2, f"{PP2} {SETUP} half", f"{SETUP} half has no effect without {V}"),
    (2, f"{PP2} {PERCENTILE} 50", f"{PERCENTILE} 50 has no effect with the schedule 1f1b"),
    (2, f"{PP2} --pipeline-schedule zbv {PERCENTILE} 50", f"{PERCENTILE} 50 has no effect without --enable-zero-bu"),
    (2, f"{PP2} {V} {PERCENTILE} 50", f"{PERCENTILE} 50 has no effect with {V}, whose limit"),
    (2, f"{PP2} --enable-zero-bubble {PENDING} 3 {PERCENTILE} 50", f"{PERCENTILE} 50 has no effect with {PENDING}"),
    (2, f"{PP2} --enable-zero-bubble --pipeline-memory-limit 1G {PERCENTILE} 50", "with --pipeline-memory-limit, w"),
    (2, f"{PP2} --enable-zero-bubble --pipeline-schedule zb-h2 {PERCENTILE} 50", "with the schedule zb-h2"),
    (2, f"{PP2} {GROUP} 2", f"{GROUP} 2 has no effect with the schedule 1f1b"),
    (2, f"{PP2} {V} {GROUP} 2", f"{GROUP} 2 has no effect with the schedule zbv"),
    (1, "--enable-optimizer-post-validation", "--enable-optimizer-post-validation has no effect with one pipeline"),
    (1, "--decoupled-min-lr 1e-5", "--decoupled-min-lr 1e-05 has no effect without --decoupled-lr"),
    (1, "--use-rope-scaling", "--use-rope-scaling has no effect with --position-embedding-type learned_absolute"),
    (1, "--async-save", "--async-save has no effect without --save"),
    (1, "--log-progress", "--log-progress has no effect without --save"),
    (1, "--use-checkpoint-opt_param-scheduler", "--use-checkpoint-opt_param-scheduler has no effect without --load"),
    (1, "--finetune", "--finetune has no effect without --load"),
    (1, "--moe-router-topk 4", "--moe-router-topk 4 has no effect without --num-experts"),
    (1, "--moe-latent-size 2", "--moe-latent-size has no effect here: it is a setting of --num-experts, which is not"),
    (1, "--num-experts 0 --moe-grouped-gemm", "--moe-grouped-gemm has no effect without"),
    (1, "--fp8-amax-history-len 1024", "it is a setting of --fp8-format or --fp8-e4m3 or --fp4-format"),
    (1, "--optimizer-offload-fraction .5", "a setting of --optimizer-cpu-offload, which is not given"),
]  # fmt: skip


@pytest.mark.parametrize(("ranks", "words", "told"), ACCEPTED)
def test_it_is_accepted_with_one_line_that_says_what_has_no_effect(ranks, words, told, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = configure(words, ranks)
    (line,) = config.warnings
    assert told in line


def test_a_setting_beside_its_feature_is_refused_with_it():
    for words in ("--multi-latent-attention --kv-lora-rank 8", "--fp8-format hybrid --fp8-margin 1"):
        with pytest.raises(ConfigurationError) as refused:
            configure(words)
        assert [problem.rule for problem in refused.value.problems] == ["not-supported"] * 2


def test_values_that_have_no_effect_may_not_be_nonsense_either():
    for words, rule in (
        (f"{PERCENTILE} 101", "limit-zero-bubble-adaptive-memory-limit-percentile"),
        ("--recompute-num-layers 0", "range-recompute-num-layers"),
        ("--save-retain-interval 0", "range-save-retain-interval"),
    ):
        with pytest.raises(ConfigurationError) as refused:
            configure(words)
        assert [problem.rule for problem in refused.value.problems] == [rule]


def test_v_schedules_plan_as_if_the_number_had_not_been_given():
    for setup in ("zb", "half", "min"):
        plain, limited = (
            configure(f"{PP2} {V} {SETUP} {setup} {more}", 2).planner().spec for more in ("", f"{PENDING} 1")
        )
        assert plain.limits is limited.limits is None
        assert plain.schedule == limited.schedule


def test_nothing_is_told_where_everything_acts(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for ranks, words in (
        (1, "--recompute-granularity full --recompute-method uniform --recompute-num-layers 2"),
        (1, "--save x --save-interval 4 --save-retain-interval 8 --async-save --log-progress"),
        (2, f"{PP2} --enable-zero-bubble {PENDING} 4 --enable-optimizer-post-validation"),
        (2, f"{PP2} {V} {SETUP} half"),
        (2, f"{PP2} --num-virtual-stages-per-pipeline-rank 2 {GROUP} 3"),
    ):
        assert configure(words, ranks).warnings == ()


@pytest.mark.grid
def test_what_a_retain_interval_beside_the_save_interval_keeps(tmp_path):
    words = [
        *launch.TINY,
        "--save",
        str(tmp_path),
        "--save-interval",
        "2",
        "--train-iters",
        "10",
        "--log-interval",
        "10",
    ]
    run = launch.ok(launch.run_forked([*words, "--save-retain-interval", "3"]))
    assert sorted(path.name for path in tmp_path.glob("iter_*")) == [f"iter_{n:07d}" for n in (6, 8, 10)]
    line = "WARNING: --save-retain-interval 3 is no multiple of --save-interval 2: multiples of both stay, every 6"
    assert run.output.count(line) == 1


# --- stages that hold the embedding or the loss alone

EMBEDDING, LOSS = "--account-for-embedding-in-pipeline-split", "--account-for-loss-in-pipeline-split"


def of_schedule(name):
    """Layers, and the flags of two ranks with stages of one slot each, the first or the last without a layer."""
    if TABLE[name].placement == LINEAR:
        return "1", [EMBEDDING if name in ("1f1b", "zb-1p", "zb-h1") else LOSS]
    chunks = ["--num-virtual-stages-per-pipeline-rank", "2"] if TABLE[name].placement == LOOPED else []
    return "2", [EMBEDDING, LOSS, *chunks]


DEFAULT_ONES = ("1f1b", "zbv")


@pytest.mark.grid
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in DEFAULT_ONES else pytest.mark.full) for name in TABLE],
)
def test_a_stage_without_layers_trains_with_the_bits_of_one_rank(name):
    """A tied matrix on both ends, dropout."""
    layers, flags = of_schedule(name)
    words = [*launch.TINY, "--train-iters", "2", "--num-layers", layers]
    alone = launch.ok(launch.run_forked(words))
    split = ["--pipeline-model-parallel-size", "2", "--pipeline-schedule", name, *flags]
    run = launch.ok(launch.run_forked([*words, *split], ranks=2))
    assert "no layers" in run.output
    assert run.losses() == alone.losses()
    assert len(run.losses()) == 2


# --- the example of zero-bubble pipelines

SCRIPT = launch.ROOT / "examples" / "pretrain_zero_bubble.sh"
SCHEDULES = [
    {},
    {"ZERO_BUBBLE_V_SCHEDULE": "1"},
    {"ZERO_BUBBLE_V_SCHEDULE": "1", "ZERO_BUBBLE_MEM_SETUP": "half"},
    {"ZERO_BUBBLE_V_SCHEDULE": "1", "ZERO_BUBBLE_MEM_SETUP": "min", "ENABLE_ZERO_BUBBLE": "1"},
    {"ENABLE_ZERO_BUBBLE": "1"},
    {"ENABLE_1F1B_V": "1"},
    {"INTERLEAVED_1F1B": "1"},
    {"INTERLEAVED_1F1B": "1", "PIPELINE_SCHEDULE": "gis"},
    {"PIPELINE_SCHEDULE": "auto"},
    *({"PIPELINE_SCHEDULE": name} for name in TABLE if TABLE[name].placement != LOOPED),
]
OTHERS = [
    {"ZERO_BUBBLE_MEM_LIMIT": "4"},
    {"ZERO_BUBBLE_MEM_SETUP": "half"},
    {"ZERO_BUBBLE_TIMER_START": "5"},
    {"ZERO_BUBBLE_TIMER_START": "5", "ZERO_BUBBLE_TIMER_END": "9"},
    {"SYNC_OPTIMIZER": "1"},
    {"PROFILED": "1"},
    {"TP_SIZE": "2"},
    {"FP32": "1"},
    {"BF16": "1"},
    {"ENABLE_EXACTLY_NUMERIC_MATCH": "1"},
    {"TRAIN_ITERS": "7", "EXIT_INTERVAL": "3", "EVAL_INTERVAL": "2", "RUN_DIR": "r"},
    {"PIPELINE_SIZE": "4", "LAYERS": "8", "HIDDEN_SIZE": "32", "ATTENTION_HEADS": "2", "SEQ_LENGTH": "16"},
    {"MICRO_BATCH_SIZE": "2", "GLOBAL_BATCH_SIZE": "16"},
    {"GPUS_PER_NODE": "4"},
    {"DATASET": "c4", "TOKENIZER_MODEL": "t.model"},
    {"WORLD_SIZE": "2", "RANK": "1", "MASTER_ADDR": "first", "MASTER_PORT": "99", "GPUS_PER_NODE": "2"},
]


def words_of(variables):
    """The trainer's words and how many ranks there are."""
    done = subprocess.run(
        ["bash", str(SCRIPT)], capture_output=True, text=True, timeout=30,
        env={"PATH": "/usr/bin:/bin", "DRY_RUN": "1", "CPU": "1", **variables},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    words = shlex.split(done.stdout)
    ranks = int(words[words.index("--nproc-per-node") + 1]) * int(variables.get("WORLD_SIZE", 1))
    return words[words.index("pretrain_gpt.py") + 1 :], ranks


def check(variables):
    words, ranks = words_of(variables)
    with pytest.raises(SystemExit) as ended:
        launch_config(["--check-config", "--world-size", str(ranks), *words])
    assert ended.value.code == 0, variables


@pytest.mark.parametrize("schedule", SCHEDULES[:8], ids=str)
def test_every_schedule_of_the_example_is_accepted_with_the_fork_s_other_variables(schedule):
    """All of the fork's own at once: memory limit, memory setup, timers, a trace."""
    more = {"ZERO_BUBBLE_MEM_LIMIT": "4", "ZERO_BUBBLE_TIMER_START": "5", "PROFILED": "1"}
    check({"ZERO_BUBBLE_MEM_SETUP": "half", **more, **schedule})


@pytest.mark.parametrize("others", OTHERS, ids=str)
def test_every_other_variable_of_the_example_is_accepted(others):
    check({"ZERO_BUBBLE_V_SCHEDULE": "1", **others})


@pytest.mark.full
@pytest.mark.parametrize(("schedule", "others"), [*itertools.product(SCHEDULES, OTHERS)], ids=str)
def test_every_pair_of_variables_of_the_example_is_accepted(schedule, others):
    check({**others, **schedule})


@pytest.mark.grid
def test_profiled_runs_and_leaves_a_trace(tmp_path):
    small = {
        "TRAIN_ITERS": "2",
        "HIDDEN_SIZE": "32",
        "SEQ_LENGTH": "32",
        "LAYERS": "4",
        "RUN_DIR": str(tmp_path),
    }
    words, ranks = words_of({"ZERO_BUBBLE_V_SCHEDULE": "1", "PROFILED": "1", **small})
    launch.ok(launch.run_forked([*words, "--data-cache-path", launch.TINY[-1]], ranks=ranks))
    assert len(list((tmp_path / "timeline").glob("*.jsonl"))) == 2
