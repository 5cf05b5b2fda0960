"""Rehearsed ranks, ranks of a run and the account of a rank hold the same behind every operation, to the byte."""

import pytest

import pretrain_gpt
from megatron.core.memory_tracker import PERSISTENT
from megatron.core.pipeline_parallel.plan.ir import op_text
from megatron.estimate.peak import peak_lines
from megatron.estimate.rank_parts import SUMS
from megatron.training.config.launch_env import LaunchEnv
from megatron.training.run.arguments import parse_config
from megatron.training.run.build import imagined_world
from megatron.training.run.describe import described, described_model
from megatron.training.run.rehearse.comparison import (
    account_of,
    differences,
    evaluation_account,
    parts_of,
    step_bytes,
    step_differences,
)
from megatron.training.run.rehearse.estimated import estimated
from megatron.training.run.rehearse.rehearsal import compared, rehearsed, steps_of
from tests.harness.launch_lines import SMALL
from tests.harness.ranks import run_ranks

ZERO_3 = "--use-custom-fsdp --data-parallel-sharding-strategy optim_grads_params"
PP, TP = "--pipeline-model-parallel-size 2", "--tensor-model-parallel-size 2"
LLAMA = "--position-embedding-type rope --swiglu --disable-bias-linear --normalization RMSNorm"
LAYOUTS = (
    ({"dp": 2, "pp": 2}, f"{PP} {ZERO_3} --zero-bubble-v-schedule --bf16 {LLAMA}"),
    ({"tp": 2, "pp": 2}, f"{PP} {TP} --sequence-parallel --enable-zero-bubble {LLAMA}"),
)

EXPERTS = f"--num-experts 4 --moe-ffn-hidden-size 32 --expert-model-parallel-size 2 {LLAMA}"
ROUTED = "--moe-router-enable-expert-bias --moe-router-score-function sigmoid"  # with biases to be taken back
VALIDATED = "--enable-optimizer-post-validation --post-validation-after 0"
INSTANCES = "--num-distributed-optimizer-instances 2"
WHOLE = "--expert-tensor-parallel-size 1"
SENT = f"{EXPERTS} --moe-token-dispatcher-type alltoall"
# Both grids: whole and cut experts, beside whole and cut dense layers.
FOLDED = (
    (2, SENT),
    (4, f"{SENT} {ZERO_3} --bf16 --moe-shared-expert-intermediate-size 32"),
    (4, f"{SENT} --use-distributed-optimizer --bf16"),
    (4, f"{SENT} {ZERO_3} {TP[:-1]}4 --sequence-parallel {WHOLE}"),
    (4, f"{SENT} {PP} {ZERO_3} --zero-bubble-v-schedule"),
    (8, f"{EXPERTS} {PP} {TP} --sequence-parallel {ZERO_3} --enable-zero-bubble --bf16"),
    (
        8,
        f"{SENT} {ZERO_3} {INSTANCES} --micro-batch-size 1 --outer-dp-sharding-strategy optim",
    ),
)


def config_of(words, ranks):
    flags = "--num-layers 4 --global-batch-size 8 --padded-vocab-size 386"
    return parse_config([*SMALL, *flags.split(), *words.split()], env=LaunchEnv(world_size=ranks))


def description_of(config, spec, ps=None):
    ps = ps or imagined_world(config).state(0)
    return described_model(config, ps, spec.stages, keeps_gathered=spec.keeps_gathered)


def accounts_of(config, ranks):
    spec = ranks[0].runner.spec
    description = description_of(config, spec)
    for one in ranks:
        yield one, account_of_steps(config, description, one)


def account_of_steps(config, description, one):
    spec, step = one.runner.spec, step_bytes(config, one.engine)
    return account_of(
        one.plan, spec, one.pp_rank, parts_of(config, spec, description, one.engine.model, step)
    )


def evaluation_differences(config, description, one):
    spec = one.runner.spec
    parts = parts_of(config, spec, description, one.engine.model)
    account = evaluation_account(config, one.evaluation, spec, one.pp_rank, parts)
    return differences(account, one.evaluated)


@pytest.mark.grid
@pytest.mark.parametrize(("ranks", "words"), LAYOUTS)
def test_account_and_rehearsal_and_run_agree_behind_every_operation(ranks, words):
    config = config_of(words, 4)
    together = rehearsed(config, pretrain_gpt.model_provider, pretrain_gpt.forward_step)
    assert [one.pp_rank for one in together] == [0, 1]
    for one, account in accounts_of(config, together):
        assert len(one.seen) == len(account.row) + 1
        assert differences(account, one.seen) == []
    assert compared(config, together) == []
    assert all(one.parts["grad-norm"]["figures"] > 0 for one in together)
    description = description_of(config, together[0].runner.spec)

    def body(ctx):
        ps = ctx.make_ps(**ranks)
        mine = steps_of(config, ps, pretrain_gpt.model_provider, pretrain_gpt.forward_step)
        account = account_of_steps(config, description, mine)
        step = step_bytes(config, mine.engine)
        found = differences(account, mine.seen) + step_differences(mine.pp_rank, step, mine.parts)
        return len(mine.seen), found + evaluation_differences(config, description, mine)

    for operations, found in run_ranks(body, 4, timeout=240.0):
        assert operations > 16
        assert found == []


SUMS_AT_THE_END = (
    (
        8,
        f"{PP} --use-custom-fsdp --data-parallel-sharding-strategy optim",
        "exchange",
    ),  # tied ends wait for each other
    (8, f"{PP} {ZERO_3} --bf16 --grad-reduce-in-bf16", "exchange"),
    (8, f"{PP} {TP} --sequence-parallel {ZERO_3} --bf16", "packed"),
    (
        4,
        f"{PP} --use-distributed-optimizer --enable-zero-bubble {VALIDATED} --bf16 --grad-reduce-in-bf16",
        "exchange",
    ),
)


@pytest.mark.parametrize(("ranks", "words", "kind"), SUMS_AT_THE_END)
def test_what_waits_for_the_end_of_a_step_is_in_the_account(ranks, words, kind):
    config = config_of(words, ranks)
    together = rehearsed(config, pretrain_gpt.model_provider, pretrain_gpt.forward_step)
    assert compared(config, together) == []
    for one, account in accounts_of(config, together):
        assert account.step[SUMS][kind] >= one.parts[SUMS][kind] > 0


@pytest.mark.grid
@pytest.mark.parametrize(("ranks", "words"), FOLDED)
def test_accounts_know_the_grid_of_experts(ranks, words):
    config = config_of(words, ranks)
    assert config.world_part().experts is not None
    together = rehearsed(config, pretrain_gpt.model_provider, pretrain_gpt.forward_step)
    for one, account in accounts_of(config, together):
        assert one.engine.is_described
        assert len(one.seen) == len(account.row) + 1
        assert differences(account, one.seen) == []


@pytest.mark.parametrize("words", [PP, "--reset-attention-mask"])
def test_what_a_gpu_keeps_of_a_batch_is_in_the_account(words):
    config = config_of(f"--rehearse --device-profile h100-80gb --distributed-backend nccl {words}", 2)
    together = rehearsed(config, pretrain_gpt.model_provider, pretrain_gpt.forward_step)
    for one, account in accounts_of(config, together):
        assert differences(account, one.seen) == []
    last = together[-1]
    spec = last.runner.spec
    pieces = parts_of(config, spec, description_of(config, spec), last.engine.model).stages
    mask_bytes = config.training.micro_batch_size * config.model.seq_length * 4
    assert pieces[max(pieces)][-1].modules[""].kept_bytes >= mask_bytes
    assert all("batches" not in seen.held for seen in last.seen)


@pytest.mark.parametrize("words", [f"{PP} {ZERO_3} --bf16", f"{TP} --log-num-zeros-in-grad"])
def test_the_estimate_has_the_step_of_the_optimizer_as_the_rehearsal_has_it(words):
    config = described(config_of(words, 4))
    together = rehearsed(config, pretrain_gpt.model_provider, pretrain_gpt.forward_step)
    assert compared(config, together) == []
    peaks = [one.peak for one in estimated(config, config.planner()).ranks]
    assert [(peak.operation, peak.total) for peak in peaks] == [
        ("grad-norm", one.peak.total) for one in together
    ]


@pytest.mark.parametrize(
    "words",
    [f"{ZERO_3} --bf16", "--enable-zero-bubble --post-validation-rollback inverse", f"{SENT} {ROUTED}"],
)
def test_steps_that_are_validated_hold_what_was_planned(words):
    config = described(config_of(f"{PP} {VALIDATED} {words}", 4))
    together = rehearsed(config, pretrain_gpt.model_provider, pretrain_gpt.forward_step)
    assert compared(config, together) == []
    peaks = [one.peak.total for one in estimated(config, config.planner()).ranks]
    assert peaks == [account.peak.total for _, account in accounts_of(config, together)]
    for one, account in accounts_of(config, together):
        behind = {op_text(account.row[place]): held for place, held in account.behind().items()}
        decided, taken = behind[f"{one.pp_rank}VALIDATE"], behind[f"{one.pp_rank}STEP"]
        copies = one.engine.optimizer.snapshot_bytes()
        assert bool(copies) == config.parallel.keeps_copies
        assert (decided.get("snapshot", 0), taken.get("snapshot", 0)) == (0, copies)
        assert account.at_rest.get("snapshot", 0) == copies


def test_a_step_that_is_taken_back_takes_what_was_planned():
    """The first rank's gradients have a norm of 16.08, all together one of 19.57: the first rank steps on its own, and
    is taken back in the second step. The last rank knows better, and has copies of the second step alone."""
    words = f"{VALIDATED} --clip-grad 17 --bf16 --normalization RMSNorm"
    config = config_of(f"{PP} --use-custom-fsdp --megatron-fsdp-main-grads-dtype bf16 {words}", 2)
    description = description_of(config, config.planner().spec)

    def body(ctx):
        mine = steps_of(config, ctx.make_ps(pp=2), pretrain_gpt.model_provider, pretrain_gpt.forward_step)
        found = differences(account_of_steps(config, description, mine), mine.seen)
        step = step_bytes(config, mine.engine)
        assert evaluation_differences(config, description, mine) == []
        return mine.parts, found + step_differences(mine.pp_rank, step, mine.parts)

    (first, found), (last, without_copies) = run_ranks(body, 2, timeout=120.0)
    assert first["rollback"]["casts"] > 0
    assert last["rollback"]["casts"] > 0
    assert found == []
    assert len(without_copies) == 3
    assert all(" snapshot: planned " in line and "seen 0 bytes" in line for line in without_copies)


def test_an_account_that_is_wrong_is_told_by_operation_and_kind():
    config = config_of(f"{PP} --use-distributed-optimizer", 4)
    one, account = next(
        accounts_of(config, rehearsed(config, pretrain_gpt.model_provider, pretrain_gpt.forward_step))
    )
    assert differences(account, one.seen) == []
    at = next(at for at, seen in enumerate(one.seen) if seen.operation == "0F1")
    held = one.seen[at].held
    more = one.seen[at]._replace(held=held | {"batches": held["batches"] + 8})
    wrong = (*one.seen[:at], more, *one.seen[at + 1 :])
    assert differences(account, wrong) == [
        "pipeline rank 0, behind 0F1: batches: planned 3,584 bytes (3.5 KiB), seen 3,592 bytes (3.508 KiB)"
    ]
    without = (*one.seen[:at], *one.seen[at + 1 :])
    assert differences(account, without) == ["pipeline rank 0, 0F1: planned 1 time, seen 0"]


def test_the_peak_names_operation_unit_and_who_has_most():
    config = config_of(f"{PP} {ZERO_3} --enable-zero-bubble", 4)
    ranks = rehearsed(config, pretrain_gpt.model_provider, pretrain_gpt.forward_step)
    one, spec = ranks[1], ranks[1].runner.spec
    row = parts_of(config, spec, description_of(config, spec), one.engine.model)
    account = account_of(one.plan, spec, 1, row)
    peak = account.peak
    assert peak.total == max(moment.total for moment in account.moments)
    assert peak.operation.startswith("1B")
    assert peak.unit == "decoder.layers.3"
    assert set(peak.held) - set(PERSISTENT) >= {
        "activations",
        "messages",
        "batches",
        "gathered",
        "temporaries",
    }
    sizes = [holder.num_bytes for holder in peak.holders]
    assert len(sizes) == 10
    assert sizes == sorted(sizes, reverse=True)
    assert ("gathered", "decoder.layers.3") in {holder[:2] for holder in peak.holders}
    first, *rest = peak_lines(peak)
    assert first.startswith(f"pipeline rank 1 holds the most in {peak.operation}, decoder.layers.3: ")
    assert len(rest) == 10
    rehearsed_most = max(seen.total for seen in one.seen)
    assert rehearsed_most <= peak.total
