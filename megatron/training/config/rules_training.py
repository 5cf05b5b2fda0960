"""Rules on ranks, batch, length, precision, schedules of rates, data, tokenizer, checkpoints and logs (floor 0)."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

from megatron.core.datasets import gpt_dataset_config as sizes
from megatron.core.list_expression import ListExpressionError, parse_split
from megatron.core.optimizer.schedule_lengths import ScheduleLengths, schedule_faults, schedule_lengths
from megatron.core.optional import available
from megatron.core.safe_files import open_regular, read_json
from megatron.core.transport.rank_grid import RankGridError
from megatron.training.config.config import Config
from megatron.training.config.microbatches import BatchScheduleError
from megatron.training.config.resolve import CORPORA
from megatron.training.config.rule_table import Predicate, RuleContext, exclusive, refusal, spelled
from megatron.training.config.values import shortened

MAX_VOCABULARY_BYTES = 1 << 23  # of GPT-2's kind: 8 times GPT-2's
_MAX_RECORD_BYTES = 1 << 16
_OUTPUTS = "save load tensorboard_dir log_pipeline_timeline data_cache_path wandb_save_dir metrics_file"
_PER_SPLIT = ("train_data_path", "valid_data_path", "test_data_path")
_NEEDED_BY_TOKENIZER = {
    None: (),
    "ByteTokenizer": (),
    "NullTokenizer": ("vocab_size",),
    "GPT2BPETokenizer": ("vocab_file", "merge_file"),
}  # all others: a model


def _world_size_flag(c: RuleContext) -> str | None:
    if c.check_only or not c.given("world_size") or c.world_size == c.env.world_size:
        return None
    return f"{c.told('world_size')} without --check-config: this run has {c.env.world_size} ranks"


def _expert_grid(c: RuleContext) -> str | None:
    asked = c.expert_model_parallel_size != 1 or c.given("expert_tensor_parallel_size")
    return refusal(c.config.expert_grid, RankGridError) if asked else None


def _batch_divisible(c: RuleContext) -> str | None:
    if min(c.micro_batch_size or 0, c.global_batch_size or 0) < 1 or refusal(c.config.grid, RankGridError):
        return None  # has a rule of its own
    return refusal(c.config.batch_schedule, BatchScheduleError)


def _length(c: RuleContext) -> str | None:
    iterations, samples = c.train_iters, c.train_samples
    if c.skip_train:
        return None
    if iterations is None and samples is None:
        return "the length of the run is not given"
    if iterations == 0:
        return "--train-iters 0: there is nothing to train"
    schedule = c.config.batch_schedule_or_none()
    batch = 1 if schedule is None else schedule.global_batch_size(0)
    few = samples is not None and 0 <= samples < batch
    return f"--train-samples {samples}: less than the first global batch of {batch}" if few else None


def _iterations_or_samples(c: RuleContext) -> str | None:
    if c.train_iters:
        other, kind = "samples", "iteration-based (--train-iters)"
    elif c.train_samples is not None:
        other, kind = "iters", "sample-based (--train-samples)"
    else:
        return None
    lengths = (f"{name}_{other}" for name in ("train", "lr_decay", "lr_warmup", "lr_wsd_decay"))
    wrong = [spelled(name) for name in lengths if getattr(c, name)]
    return f"{', '.join(wrong)} given in a run that is {kind}" if wrong else None


def _index_size(c: RuleContext) -> str | None:
    batches, training, evaluation = c.config.batch_schedule_or_none(), c.config.training, c.config.evaluation
    if not c.needs_data or c.dataloader_type == "external" or batches is None or c.seq_length is None:
        return None
    asked = sizes.requested_sizes(
        train_samples=0 if evaluation.skip_train else training.train_samples,
        train_iters=c.config.total_iterations,
        eval_interval=evaluation.eval_interval,
        eval_iters=evaluation.eval_iters,
        global_batch_size=training.global_batch_size,
    )
    samples = asked.train + asked.test + (0 if c.full_validation else asked.valid)
    places = samples + (2 * samples * c.seq_length // sizes.MOCK_LONGEST_DOCUMENT if c.mock_data else 0)
    size, here = sizes.BYTES_PER_SAMPLE * places, c.env.local_world_size
    if places > sizes.MAX_SAMPLES:
        limit = f"at most {sizes.BYTES_PER_SAMPLE * sizes.MAX_SAMPLES / 2**30:.0f} GiB are made"
    elif not c.check_only and here * size > c.memory_bytes:
        limit = f"this machine has {c.memory_bytes / 2**30:.1f} GiB for {here} ranks"
    else:
        return None
    return (
        f"the run asks for {samples} samples, training, validation and test together: their index takes "
        f"{size / 2**30:.1f} GiB on every rank and {sizes.S_PER_SAMPLE * places / 60:.0f} minutes; {limit}"
    )


def _grad_reduce(c: RuleContext) -> str | None:
    if not c.grad_reduce_in_bf16 or (c.bf16 and not c.accumulate_allreduce_grads_in_fp32):
        return None
    why = "contradicts --accumulate-allreduce-grads-in-fp32" if c.bf16 else "needs --bf16"
    return f"--grad-reduce-in-bf16 {why}"


def _loss_scale(c: RuleContext) -> str | None:
    start, least = c.initial_loss_scale, c.min_loss_scale
    if (c.loss_scale is not None and c.loss_scale <= 0) or start <= 0 or least <= 0:
        return "a loss scale must be positive"
    return f"--initial-loss-scale {start} is below --min-loss-scale {least}" if start < least else None


def _schedule_lengths(c: RuleContext) -> ScheduleLengths | None:
    """None where nothing is trained, and where another rule tells that the lengths make no sense."""
    iterations, samples, o = c.train_iters, c.train_samples, c.config.optimizer
    if c.skip_train or (iterations is None) == (samples is None) or not (iterations or samples):
        return None
    warmups, tails = (o.lr_warmup_iters, o.lr_warmup_samples), (o.lr_wsd_decay_iters, o.lr_wsd_decay_samples)
    lengths = (iterations, samples, *warmups, o.lr_decay_iters, o.lr_decay_samples, *tails)
    fraction = o.lr_warmup_fraction or 0
    if any(length is not None and length < 0 for length in lengths) or not 0 <= fraction < 1:
        return None
    # Where the batch is at fault itself, any will do: lengths in iterations are compared with each other.
    batch = max(1, c.global_batch_size or 1)
    return schedule_lengths(o, train_iters=iterations, train_samples=samples, global_batch_size=batch)


def _schedule_fault(c: RuleContext, which: str) -> str | None:
    """What the schedule itself would object to in one of its lengths."""
    lengths = _schedule_lengths(c)
    if lengths is None:
        return None
    faults = schedule_faults(
        c.lr_decay_style,
        warmup_samples=lengths.warmup_samples,
        decay_samples=lengths.decay_samples,
        wsd_samples=lengths.wsd_samples,
    )
    message = next((fault.message for fault in faults if fault.which == which), None)
    if message is None or lengths.samples_per_step is None:
        return message
    return f"{message} (iterations of {lengths.samples_per_step})"


def _lr_order(c: RuleContext) -> str | None:
    for peak, floor in (("lr", "min_lr"), ("decoupled_lr", "decoupled_min_lr"), ("lr", "lr_warmup_init")):
        if not c.skip_train and c.known(peak, floor) and getattr(c, floor) > getattr(c, peak):
            return f"{c.told(floor)} is above {c.told(peak)}"
    return None


def _wsd_tail(c: RuleContext) -> str | None:
    unit = "samples" if c.train_samples is not None else "iters"
    if c.lr_decay_style != "WSD" or c.skip_train:
        return None
    if not c.known(f"lr_wsd_decay_{unit}"):
        return f"--lr-decay-style WSD needs --lr-wsd-decay-{unit}"
    return _schedule_fault(c, "tail")


def _weight_decay_ramp(c: RuleContext) -> str | None:
    start, end, style = c.start_weight_decay, c.end_weight_decay, c.weight_decay_incr_style
    if style == "constant":
        return f"a constant weight decay cannot go from {start} to {end}" if start != end else None
    if not (c.given("start_weight_decay") and c.given("end_weight_decay")):
        return f"--weight-decay-incr-style {style} needs --start-weight-decay and --end-weight-decay"
    wrong = start < 0 or end < start
    return (
        f"weight decay must rise from a start that is not negative, not from {start} to {end}"
        if wrong
        else None
    )


def _data(c: RuleContext) -> str | None:
    if not c.needs_data or c.dataloader_type == "external":
        return None
    names = [name for name in ("data_path", "data_args_path", "mock_data") if getattr(c, name)]
    names += ["train_data_path"] if any(getattr(c, name) for name in _PER_SPLIT) else []
    names += ["per_split_data_args_path"] if c.per_split_data_args_path else []
    return exclusive(map(spelled, names)) if names else "no training data is named"


def _split(c: RuleContext) -> str | None:
    if c.split is None:
        return None
    if told := refusal(lambda: parse_split(c.split), ListExpressionError):
        return f"--split {told}"
    own = any(getattr(c, name) for name in (*_PER_SPLIT, "per_split_data_args_path"))
    return "--split cuts --data-path; corpora given for each split are used whole" if own else None


def _tokenizer_files(c: RuleContext) -> str | None:
    needed = _NEEDED_BY_TOKENIZER.get(c.tokenizer_type, ("tokenizer_model",))
    missing = [spelled(name) for name in needed if not c.known(name)]
    return f"{c.tokenizer_type} needs {' and '.join(missing)}" if missing else None


def _load_folder(c: RuleContext) -> str | None:
    alone = [spelled(n) for n in ("use_checkpoint_args", "exit_on_missing_checkpoint") if getattr(c, n)]
    alone += ["--ckpt-step"] if c.ckpt_step is not None else []
    return f"{' and '.join(alone)} without --load" if alone and c.load is None else None


def _path_names(c: RuleContext) -> str | None:
    for name in _OUTPUTS.split():
        try:
            os.lstat(getattr(c, name) or ".")
        except OSError as error:
            if error.errno == errno.ENAMETOOLONG:
                return f"{spelled(name)} {shortened(getattr(c, name))}: {error.strerror}"
    return None


def _save_writable(c: RuleContext) -> str | None:
    if c.check_only or c.save is None:
        return None
    folder = Path(c.save).absolute()
    standing = next(path for path in (folder, *folder.parents) if os.path.exists(path))
    if not standing.is_dir():
        return f"--save {c.save}: {standing} is no folder"
    return None if os.access(standing, os.W_OK | os.X_OK) else f"--save {c.save}: {standing} is not writable"


def _outputs(c: RuleContext) -> str | None:
    if c.check_only:
        return None
    folders, file = {n: getattr(c, n) for n in ("tensorboard_dir", "log_pipeline_timeline")}, c.metrics_file
    told = [
        f"{c.told(name)} is no folder"
        for name, folder in folders.items()
        if folder is not None and os.path.exists(folder) and not os.path.isdir(folder)
    ]
    if file is not None and os.path.exists(file) and not _is_metrics_file(file):
        what = "--metrics-file" if c.given("metrics_file") else "in --save,"
        told.append(f"{what} {file} is there and is no file of metrics")
    return "; ".join(told)


def _is_metrics_file(path: str) -> bool:
    """Empty, or its first line is a record: a file that this program may move aside and write again."""
    try:
        with open_regular(path, follow=True) as fd:
            first = os.read(fd, _MAX_RECORD_BYTES).partition(b"\n")[0]
        record = json.loads(first) if first else {"iteration": 0}
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(record, dict) and "iteration" in record


def _files(c: RuleContext) -> str | None:
    missing, told = unusable_files(c.config)
    if c.check_only and not missing and not told and c.tokenizer_type == "GPT2BPETokenizer" and c.vocab_file:
        # A launch would end with status 4, once it builds the tokenizer.
        read = lambda: read_json(c.vocab_file, max_bytes=MAX_VOCABULARY_BYTES, follow=True)  # noqa: E731
        damage = refusal(read, OSError, ValueError)
        return damage and f"--vocab-file {damage}"
    return "; ".join(([f"not found: {', '.join(missing)}"] if missing and not c.check_only else []) + told)


def unusable_files(config: Config) -> tuple[list[str], list[str]]:
    """Files that must exist at the start (the corpus is checked later): those missing, as "--flag PATH", and those that
    are there and cannot be read, with why."""
    missing, unfit, values = [], [], config.flat()
    gpt2 = config.tokenizer.tokenizer_type == "GPT2BPETokenizer"
    of_tokenizer = ("vocab_file", "merge_file") if gpt2 else ()
    for name in (
        *of_tokenizer,
        "data_args_path",
        "per_split_data_args_path",
        *(() if gpt2 else ("tokenizer_model",)),
    ):
        path = values[name]
        if path is None or (name == "tokenizer_model" and os.path.isdir(path)):
            continue
        told = f"{spelled(name)} {path}"
        try:
            with open_regular(path, follow=True):
                pass
        except (FileNotFoundError, NotADirectoryError):
            missing.append(told)
        except OSError as error:
            unfit.append(f"{shortened(told)}: {error.strerror}")
    return missing, unfit


def _wandb(c: RuleContext) -> str | None:
    if not c.wandb_project:
        return None
    if not c.wandb_exp_name:
        return "--wandb-project needs --wandb-exp-name"
    return None if c.check_only or available("wandb") else "--wandb-project: wandb is not installed here"


def _deterministic_mode(c: RuleContext) -> str | None:
    if not c.deterministic_mode or not c.has_gpu or c.check_only:
        return None
    wrong = []
    if c.env.cublas_workspace_config not in (":4096:8", ":16:8"):
        wrong.append(f"CUBLAS_WORKSPACE_CONFIG is {c.env.cublas_workspace_config}")
    if c.env.world_size > 1 and not (c.env.nccl_algo or "").startswith(("Ring", "Collnet", "^NVLS")):
        wrong.append(f"NCCL_ALGO is {c.env.nccl_algo}")
    return f"--deterministic-mode on GPUs: {', '.join(wrong)}" if wrong else None


BROKEN: dict[str, Predicate] = {
    "world-size": lambda c: refusal(c.config.grid, RankGridError),
    "expert-grid": _expert_grid,
    "world-size-flag": _world_size_flag,
    "json-flag": lambda c: c.json and not c.check_only,
    "batch-divisible": _batch_divisible,
    "length": _length,
    "iterations-or-samples": _iterations_or_samples,
    "index-size": _index_size,
    "precision": lambda c: exclusive(f"--{name}" for name in ("fp16", "bf16", "fp64") if getattr(c, name)),
    "grad-reduce": _grad_reduce,
    "loss-scale": _loss_scale,
    "tf32": lambda c: c.allow_tf32 and c.fp64,
    "warmup-fraction": lambda c: (
        c.known("lr_warmup_fraction") and bool(c.lr_warmup_iters or c.lr_warmup_samples)
    ),
    "schedule-length": lambda c: _schedule_fault(c, "decay"),
    "warmup-length": lambda c: _schedule_fault(c, "warmup"),
    "lr-order": _lr_order,
    "wsd-tail": _wsd_tail,
    "weight-decay-ramp": _weight_decay_ramp,
    "scheduler-source": lambda c: c.override_opt_param_scheduler and c.use_checkpoint_opt_param_scheduler,
    "data": _data,
    "verify-data": lambda c: c.verify_data and not any(getattr(c, name) for name in CORPORA),
    "split": _split,
    "validation-sets": lambda c: (
        c.multiple_validation_sets and not (c.valid_data_path or c.per_split_data_args_path)
    ),
    "attention-mask": lambda c: c.reset_attention_mask and not c.create_attention_mask_in_dataloader,
    "tokenizer-type": lambda c: c.tokenizer_type is None and c.needs_tokenizer,
    "tokenizer-files": _tokenizer_files,
    "save-interval": lambda c: bool(c.save) and c.save_interval is None,
    "load-folder": _load_folder,
    "path-names": _path_names,
    "save-writable": _save_writable,
    "outputs": _outputs,
    "files": _files,
    "wandb": _wandb,
    "mlflow": lambda c: bool(c.mlflow_experiment) and not c.check_only and not available("mlflow"),
    "nan-policy": lambda c: (
        (c.given("nan_policy") and c.nan_policy != "abort")
        and (c.given("check_for_nan_in_loss_and_grad") and not c.check_for_nan_in_loss_and_grad)
    ),
    "deterministic-mode": _deterministic_mode,
}
