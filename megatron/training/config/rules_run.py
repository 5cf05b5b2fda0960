"""Rules on data, tokenizer, checkpoints, logs and reliability (floor 0)."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

from megatron.core.list_expression import ListExpressionError, parse_split
from megatron.core.optional import available
from megatron.core.safe_files import open_regular, read_json
from megatron.training.config.config import Config
from megatron.training.config.resolve import CORPORA
from megatron.training.config.rule_table import RuleContext, RuleTable, spelled
from megatron.training.config.values import shortened

_MAX_RECORD_BYTES = 1 << 16
MAX_VOCABULARY_BYTES = 1 << 23  # of GPT-2's kind: 8 times GPT-2's
_OUTPUTS = "save load tensorboard_dir log_pipeline_timeline data_cache_path wandb_save_dir metrics_file"
_PER_SPLIT = ("train_data_path", "valid_data_path", "test_data_path")
RULES = RuleTable()
rule = RULES.rule


# Data and tokenizer


@rule(
    "data",
    "--data-path --mock-data --train-data-path --data-args-path --per-split-data-args-path",
    "give --data-path PREFIX (made by tools/preprocess_data.py), or --mock-data for a trial",
)
def _data(s: RuleContext) -> str | None:
    if not s.needs_data or s.value("dataloader_type") == "external":
        return None
    whole = [n for n in ("data_path", "data_args_path", "mock_data") if s.value(n)]
    per_split = any(s.value(name) for name in _PER_SPLIT)
    sources = whole + (["train_data_path"] if per_split else [])
    sources += ["per_split_data_args_path"] if s.value("per_split_data_args_path") else []
    if not sources:
        return "no training data is named"
    return f"{' and '.join(map(spelled, sources))} exclude each other" if len(sources) > 1 else None


@rule("verify-data", "--verify-data", "name corpora with --data-path, or leave --verify-data out")
def _verify_data(s: RuleContext) -> str | None:
    if s.value("verify_data") and not any(s.value(name) for name in CORPORA):
        return "--verify-data: no flag names a corpus whose checksums could be compared"
    return None


@rule("split", "--split --data-path", "give one to three weights such as 969,30,1, with --data-path only")
def _split(s: RuleContext) -> str | None:
    split = s.value("split")
    if split is None:
        return None
    try:
        parse_split(split)
    except ListExpressionError as error:
        return f"--split {error}"
    if any(s.value(name) for name in (*_PER_SPLIT, "per_split_data_args_path")):
        return "--split cuts --data-path; corpora given for each split are used whole"
    return None


@rule(
    "validation-sets",
    "--multiple-validation-sets --valid-data-path --per-split-data-args-path",
    "name the sets with --valid-data-path or --per-split-data-args-path",
)
def _validation_sets(s: RuleContext) -> str | None:
    named = s.value("valid_data_path") or s.value("per_split_data_args_path")
    return (
        "--multiple-validation-sets needs corpora of their own for validation"
        if s.value("multiple_validation_sets") and not named
        else None
    )


@rule(
    "attention-mask",
    "--reset-attention-mask --no-create-attention-mask-in-dataloader",
    "leave --no-create-attention-mask-in-dataloader out",
)
def _attention_mask(s: RuleContext) -> str | None:
    if s.value("reset_attention_mask") and not s.value("create_attention_mask_in_dataloader"):
        return "--reset-attention-mask needs masks from the loader"
    return None


@rule(
    "tokenizer-type",
    "--tokenizer-type",
    "pass --tokenizer-type; ByteTokenizer needs no files, NullTokenizer --vocab-size alone",
)
def _tokenizer_type(s: RuleContext) -> str | None:
    missing = s.value("tokenizer_type") is None and s.needs_tokenizer
    return "no tokenizer is named" if missing else None


@rule(
    "tokenizer-files",
    "--tokenizer-type --tokenizer-model --vocab-file --merge-file --vocab-size",
    "give what this tokenizer is made of",
)
def _tokenizer_files(s: RuleContext) -> str | None:
    kind = s.value("tokenizer_type")
    needs = {
        None: (),
        "ByteTokenizer": (),
        "NullTokenizer": ("vocab_size",),
        "GPT2BPETokenizer": ("vocab_file", "merge_file"),
    }.get(kind, ("tokenizer_model",))
    missing = [spelled(name) for name in needs if s.value(name) is None]
    return f"{kind} needs {' and '.join(missing)}" if missing else None


# Checkpoints, logs, reliability


@rule("save-interval", "--save --save-interval", "give --save-interval N")
def _save_interval(s: RuleContext) -> str | None:
    return "--save needs --save-interval" if s.value("save") and s.value("save_interval") is None else None


@rule(
    "load-folder",
    "--load --ckpt-step --use-checkpoint-args --exit-on-missing-checkpoint",
    "give --load DIR",
)
def _load_folder(s: RuleContext) -> str | None:
    if s.value("load") is not None:
        return None
    names = ("use_checkpoint_args", "exit_on_missing_checkpoint")
    alone = [spelled(name) for name in names if s.value(name)]
    alone += ["--ckpt-step"] if s.value("ckpt_step") is not None else []
    return f"{' and '.join(alone)} without --load" if alone else None


@rule(
    "path-names",
    "--save --metrics-file --tensorboard-dir --log-pipeline-timeline --data-cache-path --wandb-save-dir --load",
    "choose shorter names",
)
def _path_names(s: RuleContext) -> str | None:
    told = []
    for name in _OUTPUTS.split():
        try:
            os.lstat(s.value(name) or ".")
        except OSError as error:
            if error.errno == errno.ENAMETOOLONG:
                told.append(f"{spelled(name)} {shortened(s.value(name))}: {error.strerror}")
    return told[0] if told else None


@rule("save-writable", "--save", "name a folder that this user may write to")
def _save_writable(s: RuleContext) -> str | None:
    if s.check_only or s.value("save") is None:
        return None
    folder = Path(s.value("save")).absolute()
    standing = next(path for path in (folder, *folder.parents) if os.path.exists(path))
    if not standing.is_dir():
        return f"--save {s.value('save')}: {standing} is no folder"
    return (
        None
        if os.access(standing, os.W_OK | os.X_OK)
        else f"--save {s.value('save')}: {standing} is not writable"
    )


@rule(
    "outputs",
    "--metrics-file --tensorboard-dir --log-pipeline-timeline",
    "name a file of metrics (or a new one), and folders",
)
def _outputs(s: RuleContext) -> str | None:
    if s.check_only:
        return None
    problems = []
    file = s.value("metrics_file")
    for name in ("tensorboard_dir", "log_pipeline_timeline"):
        folder = s.value(name)
        if folder is not None and os.path.exists(folder) and not os.path.isdir(folder):
            problems.append(f"{spelled(name)} {folder} is no folder")
    if file is not None and os.path.exists(file) and not _is_metrics_file(file):
        what = "--metrics-file" if s.config.given("metrics_file") else "in --save,"
        problems.append(f"{what} {file} is there and is no file of metrics")
    return "; ".join(problems) or None


def _is_metrics_file(path: str) -> bool:
    """Empty, or its first line is a record: a file that this program may move aside and write again."""
    try:
        with open_regular(path, follow=True) as fd:
            first = os.read(fd, _MAX_RECORD_BYTES).partition(b"\n")[0]
        record = json.loads(first) if first else {"iteration": 0}
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(record, dict) and "iteration" in record


@rule(
    "files",
    "--vocab-file --merge-file --data-args-path --per-split-data-args-path --tokenizer-model",
    "name existing files",
)
def _files(s: RuleContext) -> str | None:
    missing, unfit = unusable_files(s.config)
    told = [f"not found: {', '.join(missing)}"] if missing and not s.check_only else []
    if s.check_only and not missing and not unfit and s.value("tokenizer_type") == "GPT2BPETokenizer":
        told += _damaged_vocabulary(s.value("vocab_file"))
    return "; ".join(told + unfit) or None


def _damaged_vocabulary(path: str) -> list[str]:
    """What a launch would end with (status 4), once it builds the tokenizer."""
    try:
        read_json(path, max_bytes=MAX_VOCABULARY_BYTES, follow=True)
    except (OSError, ValueError) as error:
        return [f"--vocab-file {error}"]
    return []


def unusable_files(config: Config) -> tuple[list[str], list[str]]:
    """Files that must exist at the start (the corpus is checked later): those missing, as "--flag PATH", and those that
    are there and cannot be read, with why."""
    missing, unfit = [], []
    for name in named_files(config):
        path = config.flat()[name]
        told = f"{spelled(name)} {path}"
        if name == "tokenizer_model" and os.path.isdir(path):
            continue
        try:
            with open_regular(path, follow=True):
                pass
        except (FileNotFoundError, NotADirectoryError):
            missing.append(told)
        except OSError as error:
            unfit.append(f"{shortened(told)}: {error.strerror}")
    return missing, unfit


def named_files(config: Config) -> list[str]:
    """Destination names of settings that name such a file."""
    names = ["vocab_file", "merge_file", "data_args_path", "per_split_data_args_path", "tokenizer_model"]
    kind = config.tokenizer.tokenizer_type
    unused = {"vocab_file", "merge_file"} if kind != "GPT2BPETokenizer" else {"tokenizer_model"}
    values = config.flat()
    return [name for name in names if values[name] is not None and name not in unused]


@rule(
    "wandb", "--wandb-project --wandb-exp-name", "give --wandb-exp-name NAME, and install: pip install wandb"
)
def _wandb(s: RuleContext) -> str | None:
    if not s.value("wandb_project"):
        return None
    if not s.value("wandb_exp_name"):
        return "--wandb-project needs --wandb-exp-name"
    return None if s.check_only or available("wandb") else "--wandb-project: wandb is not installed here"


@rule("mlflow", "--mlflow-experiment", "install it: pip install mlflow")
def _mlflow(s: RuleContext) -> str | None:
    if not s.value("mlflow_experiment") or s.check_only or available("mlflow"):
        return None
    return "--mlflow-experiment: mlflow is not installed here"


@rule("nan-policy", "--nan-policy --no-check-for-nan-in-loss-and-grad", "keep one of them")
def _nan_policy(s: RuleContext) -> str | None:
    policy = s.value("nan_policy")
    if s.given("nan_policy") and policy != "abort" and s.given("check_for_nan_in_loss_and_grad"):
        if not s.value("check_for_nan_in_loss_and_grad"):
            return f"--nan-policy {policy} needs the check that --no-check-for-nan-in-loss-and-grad turns off"
    return None


@rule(
    "deterministic-mode",
    "--deterministic-mode",
    "export CUBLAS_WORKSPACE_CONFIG=:4096:8 and NCCL_ALGO=Ring (or Tree-free values) before the launcher",
)
def _deterministic_mode(s: RuleContext) -> str | None:
    if not s.value("deterministic_mode") or not s.has_gpu or s.check_only:
        return None
    wrong = []
    if s.env.cublas_workspace_config not in (":4096:8", ":16:8"):
        wrong.append(f"CUBLAS_WORKSPACE_CONFIG is {s.env.cublas_workspace_config}")
    algorithm = s.env.nccl_algo or ""
    if s.env.world_size > 1 and not algorithm.startswith(("Ring", "Collnet", "^NVLS")):
        wrong.append(f"NCCL_ALGO is {s.env.nccl_algo}")
    return f"--deterministic-mode on GPUs: {', '.join(wrong)}" if wrong else None
