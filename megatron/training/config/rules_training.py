"""What rules ask of ranks, batch, length, schedules of rates, data, tokenizer, checkpoints and logs (floor 0)."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

from megatron.core.datasets import gpt_dataset_config as sizes
from megatron.core.list_expression import ListExpressionError, parse_split
from megatron.core.optimizer.schedule_lengths import schedule_faults, schedule_lengths
from megatron.core.safe_files import open_regular, read_json
from megatron.core.transport.rank_grid import RankGridError
from megatron.core.words import counted, duration, size_text
from megatron.training.config.config import Config
from megatron.training.config.microbatches import BatchScheduleError
from megatron.training.config.resolve import grid_fault
from megatron.training.config.rule_table import RuleContext, refusal, spelled
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


def expert_grid_fault(c: RuleContext) -> str | None:
    return None if grid_fault(c) else refusal(lambda: c.config.world_part().check(), RankGridError)


def batch_fault(c: RuleContext) -> str | None:
    if min(c.micro_batch_size or 0, c.global_batch_size or 0) < 1 or grid_fault(c):
        return None  # has a rule of its own
    return refusal(c.config.batch_schedule, BatchScheduleError)


def first_batch(c: RuleContext) -> int:
    """Samples of the first step; 1 where the flags make no batch."""
    schedule = c.config.batch_schedule_or_none()
    return 1 if schedule is None else schedule.global_batch_size(0)


def index_fault(c: RuleContext) -> str | None:
    """That the index of all samples, of which each machine makes one, takes more memory or time than there is. Mock
    samples need none."""
    batches, training, evaluation = c.config.batch_schedule_or_none(), c.config.training, c.config.evaluation
    if not reads_data(c) or c.mock_data or batches is None:
        return None
    asked = sizes.requested_sizes(
        train_samples=0 if evaluation.skip_train else training.train_samples,
        train_iters=c.config.total_iterations,
        eval_interval=evaluation.eval_interval,
        eval_iters=evaluation.eval_iters,
        global_batch_size=training.global_batch_size,
    )
    samples = asked.train + asked.test + (0 if c.full_validation else asked.valid)
    size, making = sizes.BYTES_PER_SAMPLE * samples, sizes.MAKING_BYTES_PER_SAMPLE * samples
    if samples > sizes.MAX_SAMPLES:
        limit = f"at most {size_text(sizes.BYTES_PER_SAMPLE * sizes.MAX_SAMPLES)} are made"
    elif not c.check_only and making > c.memory_bytes:
        limit = f"making it takes {size_text(making)} of memory, this machine has {size_text(c.memory_bytes)}"
    else:
        return None
    return (
        f"the run asks for {counted(samples, 'sample')}, training, validation and test together: their index takes "
        f"{size_text(size)} on the disk of --data-cache-path, once a machine, and "
        f"{duration(sizes.S_PER_SAMPLE * samples)} to make; {limit}"
    )


def schedule_fault(c: RuleContext, which: str) -> str | None:
    """What the schedule itself would object to in one of its lengths: warmup, decay or tail. None where nothing is
    trained, and where another rule tells that the lengths make no sense."""
    iterations, samples, o = c.train_iters, c.train_samples, c.config.optimizer
    if c.skip_train or (iterations is None) == (samples is None) or not (iterations or samples):
        return None
    warmups, tails = (o.lr_warmup_iters, o.lr_warmup_samples), (o.lr_wsd_decay_iters, o.lr_wsd_decay_samples)
    given = (iterations, samples, *warmups, o.lr_decay_iters, o.lr_decay_samples, *tails)
    if any(length is not None and length < 0 for length in given) or not 0 <= (o.lr_warmup_fraction or 0) < 1:
        return None
    # Where the batch is at fault itself, any will do: lengths in iterations are compared with each other.
    batch = max(1, c.global_batch_size or 1)
    lengths = schedule_lengths(o, train_iters=iterations, train_samples=samples, global_batch_size=batch)
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


def reads_data(c: RuleContext) -> bool:
    return c.needs_data and c.dataloader_type != "external" and c.ckpt_convert_format is None


def data_fault(c: RuleContext) -> str | None:
    names = [name for name in ("data_path", "data_args_path", "mock_data") if getattr(c, name)]
    names += ["train_data_path"] if per_split_corpora(c) else []
    names += ["per_split_data_args_path"] if c.per_split_data_args_path else []
    if not names:
        return "no training data is named"
    return f"{' and '.join(map(spelled, names))} exclude each other" if len(names) > 1 else None


def per_split_corpora(c: RuleContext) -> bool:
    return any(getattr(c, name) for name in _PER_SPLIT)


def split_fault(c: RuleContext) -> str | None:
    told = None if c.split is None else refusal(lambda: parse_split(c.split), ListExpressionError)
    return told and f"--split {told}"


def missing_files_of_tokenizer(c: RuleContext) -> str:
    needed = _NEEDED_BY_TOKENIZER.get(c.tokenizer_type, ("tokenizer_model",))
    return " and ".join(spelled(name) for name in needed if getattr(c, name) is None)


def flags_that_load(c: RuleContext) -> str:
    names = ("use_checkpoint_args", "exit_on_missing_checkpoint", "ckpt_convert_format")
    asked = [spelled(n) for n in names if getattr(c, n)]
    return " and ".join(asked + (["--ckpt-step"] if c.ckpt_step is not None else []))


def long_name(c: RuleContext) -> str | None:
    """A path whose name no file system takes."""
    for name in _OUTPUTS.split():
        try:
            os.lstat(getattr(c, name) or ".")
        except OSError as error:
            if error.errno == errno.ENAMETOOLONG:
                return f"{spelled(name)} {shortened(getattr(c, name))}: {error.strerror}"
    return None


def unwritable(c: RuleContext) -> str | None:
    folder = Path(c.save).absolute()
    standing = next(path for path in (folder, *folder.parents) if os.path.exists(path))
    if not standing.is_dir():
        return f"--save {c.save}: {standing} is no folder"
    return None if os.access(standing, os.W_OK | os.X_OK) else f"--save {c.save}: {standing} is not writable"


def outputs_fault(c: RuleContext) -> str:
    """Places of output that hold something else."""
    folders = {name: getattr(c, name) for name in ("tensorboard_dir", "log_pipeline_timeline")}
    standing = (name for name, at in folders.items() if at is not None and os.path.exists(at))
    told = [f"{c.told(name)} is no folder" for name in standing if not os.path.isdir(folders[name])]
    file = c.metrics_file
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


def files_fault(c: RuleContext) -> str | None:
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
    lists = ["data_args_path", "per_split_data_args_path"]
    for name in ["vocab_file", "merge_file", *lists] if gpt2 else [*lists, "tokenizer_model"]:
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


def unset_variables(c: RuleContext) -> str:
    """Of the environment, without which kernels on GPUs are not deterministic."""
    wrong = []
    if c.env.cublas_workspace_config not in (":4096:8", ":16:8"):
        wrong.append(f"CUBLAS_WORKSPACE_CONFIG is {c.env.cublas_workspace_config}")
    if c.env.world_size > 1 and not (c.env.nccl_algo or "").startswith(("Ring", "Collnet", "^NVLS")):
        wrong.append(f"NCCL_ALGO is {c.env.nccl_algo}")
    return ", ".join(wrong)
