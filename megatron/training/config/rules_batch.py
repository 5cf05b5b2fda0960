"""Rules on ranks, batch, length and precision (floor 0)."""

from __future__ import annotations

from collections.abc import Callable

from megatron.core.datasets.requested_sizes import (
    BYTES_PER_SAMPLE,
    MAX_SAMPLES,
    MOCK_LONGEST_DOCUMENT,
    S_PER_SAMPLE,
    requested_sizes,
)
from megatron.core.transport.rank_grid import RankGridError
from megatron.training.config.microbatches import BatchScheduleError
from megatron.training.config.rule_table import RuleContext, RuleTable, spelled

RULES = RuleTable()
rule = RULES.rule


# Ranks


@rule(
    "world-size",
    "--tensor-model-parallel-size --pipeline-model-parallel-size --context-parallel-size --world-size",
    "start a number of ranks that tensor x pipeline x context parallel sizes divide, or change these sizes",
)
def _world_size(s: RuleContext) -> str | None:
    return _grid_error(s.config.grid)


@rule(
    "expert-grid",
    "--expert-model-parallel-size --expert-tensor-parallel-size --pipeline-model-parallel-size",
    "choose expert sizes that divide the number of ranks",
)
def _expert_grid(s: RuleContext) -> str | None:
    if s.value("expert_model_parallel_size") == 1 and not s.given("expert_tensor_parallel_size"):
        return None
    return _grid_error(s.config.expert_grid)


def _grid_error(make: Callable[[], object]) -> str | None:
    try:
        make()
    except RankGridError as error:
        return str(error)
    return None


@rule(
    "world-size-flag", "--world-size", "leave it out: the launcher (torchrun) says how many ranks there are"
)
def _world_size_flag(s: RuleContext) -> str | None:
    if s.given("world_size") and not s.check_only and s.value("world_size") != s.env.world_size:
        given = s.value("world_size")
        return f"--world-size {given} without --check-config: this run has {s.env.world_size} ranks"
    return None


@rule("json-flag", "--json", "add --check-config")
def _json_flag(s: RuleContext) -> str | None:
    return "--json belongs to --check-config" if s.value("json") and not s.check_only else None


# Batch and length


@rule(
    "batch-divisible",
    "--global-batch-size --micro-batch-size --rampup-batch-size",
    "make every global batch a multiple of micro batch size x data parallel size, or pass "
    "--decrease-batch-size-if-needed",
)
def _batch_divisible(s: RuleContext) -> str | None:
    micro, whole = s.value("micro_batch_size"), s.value("global_batch_size")
    if not micro or micro < 1 or not whole or whole < 1:
        return None
    try:
        s.config.batch_schedule()
    except RankGridError:
        return None  # has a rule of its own
    except BatchScheduleError as error:
        return str(error)
    return None


@rule(
    "length",
    "--train-iters --train-samples --global-batch-size --rampup-batch-size",
    "give --train-iters N or --train-samples N, one iteration at least; --skip-train evaluates only",
)
def _length(s: RuleContext) -> str | None:
    iterations, samples = s.value("train_iters"), s.value("train_samples")
    if s.value("skip_train"):
        return None
    if iterations is None and samples is None:
        return "the length of the run is not given"
    if iterations == 0:
        return "--train-iters 0: there is nothing to train"
    if samples is None or samples < 0:
        return None
    schedule = s.config.batch_schedule_or_none()
    batch = 1 if schedule is None else schedule.global_batch_size(0)
    return (
        f"--train-samples {samples}: less than the first global batch of {batch}" if samples < batch else None
    )


@rule(
    "iterations-or-samples",
    "--train-iters --train-samples --lr-decay-iters --lr-decay-samples --lr-warmup-iters --lr-warmup-samples",
    "count everything in iterations or everything in samples",
)
def _iterations_or_samples(s: RuleContext) -> str | None:
    iterations = ["train_iters", "lr_decay_iters", "lr_warmup_iters", "lr_wsd_decay_iters"]
    samples = ["train_samples", "lr_decay_samples", "lr_warmup_samples", "lr_wsd_decay_samples"]
    if s.value("train_iters"):
        wrong = [name for name in samples if s.value(name)]
        kind = "iteration-based (--train-iters)"
    elif s.value("train_samples") is not None:
        wrong = [name for name in iterations if s.value(name)]
        kind = "sample-based (--train-samples)"
    else:
        return None
    return f"{', '.join(map(spelled, wrong))} given in a run that is {kind}" if wrong else None


@rule(
    "index-size",
    "--train-iters --train-samples --global-batch-size --eval-iters --eval-interval --seq-length",
    "ask for fewer samples, or bring a loader of your own: --dataloader-type external",
)
def _index_size(s: RuleContext) -> str | None:
    batches, t, evaluation = s.config.batch_schedule_or_none(), s.config.training, s.config.evaluation
    length = s.value("seq_length")
    if not s.needs_data or s.value("dataloader_type") == "external" or batches is None or length is None:
        return None
    sizes = requested_sizes(
        train_samples=0 if evaluation.skip_train else t.train_samples,
        train_iters=s.config.total_iterations,
        eval_interval=evaluation.eval_interval,
        eval_iters=evaluation.eval_iters,
        global_batch_size=t.global_batch_size,
    )
    samples = sizes.train + sizes.test + (0 if s.value("full_validation") else sizes.valid)
    places = samples + (2 * samples * length // MOCK_LONGEST_DOCUMENT if s.value("mock_data") else 0)
    size, here = BYTES_PER_SAMPLE * places, s.env.local_world_size
    if places <= MAX_SAMPLES and (s.check_only or here * size <= s.memory_bytes):
        return None
    took = (
        f"their index takes {size / 2**30:.1f} GiB on every rank and {S_PER_SAMPLE * places / 60:.0f} minutes"
    )
    limit = f"at most {BYTES_PER_SAMPLE * MAX_SAMPLES / 2**30:.0f} GiB are made"
    if places <= MAX_SAMPLES:
        limit = f"this machine has {s.memory_bytes / 2**30:.1f} GiB for {here} ranks"
    return f"the run asks for {samples} samples, training, validation and test together: {took}; {limit}"


# Precision


@rule("precision", "--bf16 --fp16 --fp64", "keep one of them")
def _precision(s: RuleContext) -> str | None:
    chosen = [f"--{name}" for name in ("fp16", "bf16", "fp64") if s.value(name)]
    return f"{' and '.join(chosen)} exclude each other" if len(chosen) > 1 else None


@rule(
    "grad-reduce",
    "--grad-reduce-in-bf16 --bf16 --accumulate-allreduce-grads-in-fp32",
    "use it with --bf16 alone",
)
def _grad_reduce(s: RuleContext) -> str | None:
    if not s.value("grad_reduce_in_bf16"):
        return None
    if not s.value("bf16"):
        return "--grad-reduce-in-bf16 needs --bf16"
    if s.value("accumulate_allreduce_grads_in_fp32"):
        return "--grad-reduce-in-bf16 contradicts --accumulate-allreduce-grads-in-fp32"
    return None


@rule(
    "loss-scale",
    "--loss-scale --initial-loss-scale --min-loss-scale",
    "give positive scales, the minimum lowest",
)
def _loss_scale(s: RuleContext) -> str | None:
    constant, start, least = s.value("loss_scale"), s.value("initial_loss_scale"), s.value("min_loss_scale")
    if (constant is not None and constant <= 0) or start <= 0 or least <= 0:
        return "a loss scale must be positive"
    return f"--initial-loss-scale {start} is below --min-loss-scale {least}" if start < least else None


@rule("tf32", "--allow-tf32 --fp64", "leave --allow-tf32 out")
def _tf32(s: RuleContext) -> str | None:
    return "--allow-tf32 contradicts --fp64" if s.value("allow_tf32") and s.value("fp64") else None
