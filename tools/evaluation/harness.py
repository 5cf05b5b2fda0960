"""Tasks of lm-evaluation-harness (extra `eval`), without a network."""

from __future__ import annotations

import argparse
import difflib
import json
import sys
from typing import Any

from megatron.core.optional import require
from megatron.core.tokenizers.tokenizer import Tokenizer
from megatron.core.words import counted
from tools.evaluation.scorer import Scorer


def run_tasks(args: argparse.Namespace, scorer: Scorer, tokenizer: Tokenizer) -> None:
    """Prints the harness's table of `--tasks`, and with `--json` its results. Every rank asks the same questions.

    Raises ValueError for a task that is not there, or whose data sets are not on this machine.
    """
    evaluator = require("lm_eval.evaluator", "eval")
    from tools.evaluation.harness_model import HarnessModel

    names = [name for name in args.tasks.split(",") if name]
    manager = _task_manager(names, args.include_path)
    model = HarnessModel(scorer, tokenizer, args.micro_batch_size)
    try:
        found = evaluator.simple_evaluate(
            model=model,
            tasks=names,
            task_manager=manager,
            num_fewshot=args.num_fewshot,
            limit=args.limit,
            log_samples=False,
            bootstrap_iters=0 if args.json else 100,
        )
    except (ConnectionError, FileNotFoundError) as error:  # the hub is not asked
        raise ValueError(
            f"--tasks {args.tasks}: its data is not on this machine: {error}: name local files in the task "
            "(dataset_path: json, dataset_kwargs: data_files)"
        ) from error
    if not scorer.ps.is_first_rank:
        return
    print(require("lm_eval.utils", "eval").make_table(found))
    if args.json:
        print(json.dumps({"results": _plain(found["results"])}))


def _task_manager(names: list[str], include_path: str | None) -> Any:
    """Knows the tasks of the folder, and the package's own where these are not all. Raises ValueError."""
    make = require("lm_eval.tasks", "eval").TaskManager
    manager = make(include_path=include_path, include_defaults=False)
    if not set(names) <= set(manager.all_tasks):
        manager = make(include_path=include_path)
    known = manager.all_tasks
    unknown = [name for name in names if name not in known]
    if not names:
        raise ValueError("--tasks: names no task")
    if unknown:
        near = [difflib.get_close_matches(name, known, n=1) for name in unknown]
        told = [
            repr(name) + "".join(f" (nearest: {one})" for one in found)
            for name, found in zip(unknown, near, strict=True)
        ]
        where = f" and of {include_path}" if include_path else ""
        raise ValueError(
            f"--tasks: {', '.join(told)}: not among the {counted(len(known), 'task')} of lm-evaluation-harness{where}"
            + ("" if include_path else "; --include-path names a folder with tasks of your own")
        )
    return manager


def _plain(value: Any) -> Any:
    """As JSON has it: figures of numpy as numbers, what is not finite as null."""
    if isinstance(value, dict):
        return {str(key): _plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    if isinstance(value, str | bool | None):
        return value
    try:
        number = float(value)
    except (TypeError, ValueError):
        return str(value)
    if isinstance(value, int):
        return value
    return number if abs(number) <= sys.float_info.max else None
