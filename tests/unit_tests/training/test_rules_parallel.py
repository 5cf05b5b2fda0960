"""Rules on tensor parallel, stages, schedules: what is refused, by which rule, and what runs."""

import pytest

from megatron.training.config.launch_env import LaunchEnv
from megatron.training.run.arguments import ConfigurationError, parse_config
from tests.harness.launch_lines import SMALL

TP, PP = "--tensor-model-parallel-size", "--pipeline-model-parallel-size"
VPP, PER_CHUNK = "--num-virtual-stages-per-pipeline-rank", "--num-layers-per-virtual-pipeline-stage"
GROUP, LAYOUT = "--microbatch-group-size-per-vp-stage", "--pipeline-model-parallel-layout"


def configure(words, world_size):
    env = LaunchEnv(world_size=world_size, local_world_size=world_size)
    return parse_config([*SMALL, *words.split()], env=env)


def problems_of(words, world_size):
    try:
        configure(words, world_size)
    except ConfigurationError as error:
        return error.problems
    return ()


# (ranks, what is added to the smallest line of 2 layers, the rules it breaks)
BAD = [
    (3, f"{TP} 3", "heads-tensor-parallel ffn-tensor-parallel"),
    (8, f"{TP} 8", "heads-tensor-parallel"),
    (4, f"{TP} 4 --group-query-attention --num-query-groups 2 --ffn-hidden-size 90", "ffn-tensor-parallel"),
    (6, f"{TP} 6 --num-attention-heads 12 --kv-channels 8 --num-query-groups 4 --group-query-attention "
     "--ffn-hidden-size 96", "heads-tensor-parallel"),
    (4, f"{TP} 4 --padded-vocab-size 2", "vocabulary"),
    (4, f"{TP} 4 --sequence-parallel --seq-length 30", "sequence-tensor-parallel"),
    (3, f"{TP} 2", "world-size"),
    (4, f"{PP} 4", "pipeline-layers"),
    (2, f"{PP} 2 --num-layers 3", "pipeline-layers"),
    (2, f"{PP} 2 --decoder-first-pipeline-num-layers 2", "pipeline-layers"),
    (2, f"{PP} 2 --decoder-first-pipeline-num-layers 0", "range-decoder-first-pipeline-num-layers"),
    (2, f"{PP} 2 {LAYOUT} Et|tmL", "pipeline-layers"),
    (2, f"{PP} 2 {LAYOUT} Et|t|L", "pipeline-layers"),
    (1, f"--num-layers 4 {VPP} 2", "pipeline-layers"),
    (2, f"{PP} 0", "range-pipeline-model-parallel-size"),
    (1, f"{TP} 0", "range-tensor-model-parallel-size"),
    (1, "--num-layers 2000000", "limit-num-layers"),
    # schedules
    (2, f"{PP} 2 --pipeline-schedule interleaved", "interleaving-chunks"),
    (1, "--pipeline-schedule interleaved", "schedule-ranks"),
    (2, f"{PP} 2 --num-layers 4 {VPP} 2 --pipeline-schedule gpipe --global-batch-size 8", "pipeline-schedule"),
    (2, f"{PP} 2 --num-layers 4 {PER_CHUNK} 1 --pipeline-schedule 1f1b --global-batch-size 8", "pipeline-schedule"),
    (2, f"{PP} 2 --pipeline-schedule fast", "value"),
    # groups of microbatches
    (2, f"{PP} 2 {GROUP} 0", "range-microbatch-group-size-per-vp-stage"),
    (4, f"{PP} 4 --num-layers 8 {VPP} 2 --global-batch-size 16 {GROUP} 3", "microbatch-group"),
    (2, f"{PP} 2 --num-layers 4 {VPP} 2 --global-batch-size 2", "interleaving-microbatches"),
    (2, f"{PP} 2 --num-layers 4 {VPP} 2 --global-batch-size 8 {GROUP} 5", "interleaving-microbatches"),
    (4, f"{PP} 2 --num-layers 4 {VPP} 2 --global-batch-size 4", "interleaving-microbatches"),
    (2, f"{PP} 2 {LAYOUT} Et|||tL --global-batch-size 2", "interleaving-microbatches"),
    # a ramp that starts below
    (2, f"{PP} 2 --num-layers 4 {VPP} 2 --global-batch-size 8 --rampup-batch-size 2 2 100",
     "interleaving-microbatches"),
    (2, f"{PP} 2 --num-layers 4 {VPP} 2 --global-batch-size 9 --rampup-batch-size 3 2 100 "
     "--decrease-batch-size-if-needed", "interleaving-microbatches"),
    # not built
    (2, f"{PP} 2 --enable-vocab-parallel", "not-supported"),
    (2, f"{TP} 2 --distribute-saved-activations", "not-supported"),
    (2, f"{PP} 2 --standalone-embedding-stage", "not-supported"),
    # threads
    (2, "--threads-per-rank 0", "range-threads-per-rank"),
    (2, "--threads-per-rank 1025", "limit-threads-per-rank"),
    (2, "--context-parallel-size 2", "not-supported"),
]  # fmt: skip


@pytest.mark.parametrize(("world_size", "words", "expected"), BAD)
def test_bad_cuts_are_refused_by_their_rules_with_flags_and_fix(world_size, words, expected):
    problems = problems_of(words, world_size)
    assert [problem.rule for problem in problems] == expected.split()
    for problem in problems:
        assert problem.flags
        assert problem.message
        assert problem.fix


GOOD = [
    (2, f"{TP} 2"),
    (4, f"{TP} 4 --sequence-parallel"),
    (4, f"{TP} 4 --group-query-attention --num-query-groups 2"),
    (4, f"{TP} 2 {PP} 2"),
    (8, f"{TP} 2 {PP} 2 --use-tp-pp-dp-mapping"),
    (2, f"{PP} 2 --global-batch-size 2"),  # fewer microbatches than stages is fine without interleaving
    (2, f"{PP} 2 --pipeline-schedule gpipe"),
    (2, f"{PP} 2 --num-layers 3 --allow-padding-num-layers"),
    (4, f"{PP} 4 --allow-padding-num-layers"),
    (2, f"{PP} 2 --num-layers 3 --decoder-last-pipeline-num-layers 1"),
    (2, f"{PP} 2 --num-layers 4 {VPP} 2 --global-batch-size 4"),
    (2, f"{PP} 2 --num-layers 4 {VPP} 2 --global-batch-size 10 {GROUP} 3"),
    (2, f"{PP} 2 --num-layers 4 {VPP} 2 --global-batch-size 8 --rampup-batch-size 4 2 100"),
    (2, f"{PP} 2 {LAYOUT} E|t|t|L --global-batch-size 4"),
    (2, f"{PP} 2 --overlap-p2p-communication-warmup-flush --no-async-tensor-model-parallel-allreduce"),
    (2, f"{PP} 2 --wgrad-deferral-limit 0 --tensor-parallel-num-weight-shards 1"),
    (2, f"{PP} 2 --log-pipeline-timeline timeline"),
    (2, "--threads-per-rank 7"),
]


@pytest.mark.parametrize(("world_size", "words"), GOOD)
def test_good_cuts_pass(world_size, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert problems_of(words, world_size) == ()


def test_the_ramp_is_named_where_it_is_at_fault():
    words = f"{PP} 2 --num-layers 4 {VPP} 2 --global-batch-size 8 --rampup-batch-size 2 2 100"
    (problem,) = problems_of(words, 2)
    assert "--rampup-batch-size has 1 microbatch a rank, fewer than the 2" in problem.message
    (problem,) = problems_of(f"{PP} 2 --num-layers 4 {VPP} 2 --global-batch-size 8 {GROUP} 9", 2)
    assert "--global-batch-size 8 has 4 microbatches a rank, fewer than the 9" in problem.message


def test_what_follows_from_the_chunks_is_filled_in():
    plain = configure(f"{PP} 2", 2)
    assert plain.parallel.pipeline_schedule == "1f1b"
    assert plain.parallel.microbatch_group_size_per_vp_stage is None
    interleaved = configure(f"{PP} 2 --num-layers 4 {VPP} 2 --global-batch-size 8", 2)
    assert interleaved.parallel.pipeline_schedule == "interleaved"
    assert interleaved.parallel.microbatch_group_size_per_vp_stage == 2
    assert interleaved.origin["pipeline_schedule"] == "derived"
    given_group = configure(f"{PP} 2 --num-layers 4 {VPP} 2 --global-batch-size 8 {GROUP} 4", 2)
    assert given_group.parallel.microbatch_group_size_per_vp_stage == 4


def test_the_other_spelling_of_the_group_is_the_same_flag():
    words = f"{PP} 2 --num-layers 4 {VPP} 2 --global-batch-size 8 --microbatch-group-size-per-virtual-pipeline-stage 3"
    assert configure(words, 2).parallel.microbatch_group_size_per_vp_stage == 3


def test_sequence_parallel_without_tensor_parallel_is_a_warning():
    config = configure("--sequence-parallel", 1)
    assert not config.parallel.sequence_parallel
    assert any("--sequence-parallel has no effect" in warning for warning in config.warnings)


def test_a_timeline_goes_into_a_folder(tmp_path):
    (tmp_path / "file").write_text("x")
    (problem,) = problems_of(f"--log-pipeline-timeline {tmp_path / 'file'}", 1)
    assert (problem.rule, "--log-pipeline-timeline" in problem.message) == ("outputs", True)


@pytest.mark.parametrize(
    "words",
    [
        f"{TP} 2 {PP} 2 --num-layers 4 {VPP} 2 --global-batch-size 8 --sequence-parallel",
        f"{TP} 2 {PP} 2 --num-layers 3 --allow-padding-num-layers --pipeline-schedule gpipe",
        f"{PP} 4 {LAYOUT} E|t|t|L --use-tp-pp-dp-mapping --log-pipeline-timeline t",
    ],
)
def test_the_yaml_of_a_cut_reads_back(words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = configure(words, 4)
    (tmp_path / "run.yaml").write_text(config.to_yaml())
    env = LaunchEnv(world_size=4, local_world_size=4)
    assert parse_config(["--yaml-cfg", "run.yaml"], env=env).parallel == config.parallel


EXPERTS = "--num-experts 8 --moe-ffn-hidden-size 64 --sequence-parallel"


def test_experts_follow_the_tensor_parallel_size_or_have_a_grid_of_their_own():
    assert configure(f"{TP} 2 {EXPERTS}", 2).parallel.expert_tensor_parallel_size == 2
    assert configure(f"{TP} 2 {EXPERTS}", 4).world_part().experts is None
    apart = configure(f"{TP} 2 {EXPERTS} --expert-tensor-parallel-size 1 --expert-model-parallel-size 4", 8)
    grid = apart.world_part().experts
    assert (grid.tp, grid.ep, grid.dp) == (1, 4, 2)
    assert (
        configure(f"{TP} 4 --expert-tensor-parallel-size 2", 4).world_part().experts is None
    )  # of no experts


@pytest.mark.parametrize(
    ("words", "ranks", "rule", "said"),
    [
        (
            "--expert-model-parallel-size 2",
            2,
            "expert-parallel",
            "--expert-model-parallel-size 2 without experts",
        ),
        (
            f"{EXPERTS} --expert-model-parallel-size 3",
            3,
            "expert-parallel",
            "--num-experts 8 is not divisible by",
        ),
        (
            f"{EXPERTS} --expert-tensor-parallel-size 3",
            3,
            "expert-tensor-parallel",
            "--moe-ffn-hidden-size 64 is not divisible by",
        ),
        (
            f"{TP} 2 {EXPERTS} --expert-model-parallel-size 2",
            2,
            "expert-grid",
            "2 ranks cannot be divided into expert tensor 2 x expert 2 x pipeline 1 = 4",
        ),
        (
            f"{TP} 2 {PP} 2 --num-layers 2 {EXPERTS} --use-tp-pp-dp-mapping --expert-tensor-parallel-size 1 "
            "--expert-model-parallel-size 4",
            8,
            "expert-grid",
            "--use-tp-pp-dp-mapping with expert tensor 1 x expert 4 = 4 ranks beside tensor 2 x context 1 = 2",
        ),
        (
            f"{EXPERTS} --expert-model-parallel-size 4 --use-custom-fsdp --data-parallel-sharding-strategy "
            "optim_grads_params --num-distributed-optimizer-instances 2",
            4,
            "expert-grid",
            "does not divide the number of ranks that hold the same experts, 1",
        ),
    ],
)
def test_a_grid_of_experts_that_does_not_fit_is_refused(words, ranks, rule, said):
    found = {problem.rule: problem.message for problem in problems_of(words, ranks)}
    assert rule in found, found
    assert said in found[rule]
