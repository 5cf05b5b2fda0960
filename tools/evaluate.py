#!/usr/bin/env python3
"""Say how well a model predicts text, or how it does in the tasks of lm-evaluation-harness.

    python tools/evaluate.py --load runs/quickstart/checkpoints --text held-out.jsonl --json
    torchrun --nproc-per-node 4 tools/evaluate.py --load DIR --data-path my_corpus_text_document --seq-length 1024
        --tensor-model-parallel-size 2 --micro-batch-size 8
    python tools/evaluate.py --load DIR --tasks my_task --include-path my_tasks

Documents are cut into windows of --seq-length inputs and their next tokens, so each token but a document's first is
predicted once. A checkpoint of any layout is read under any other; data parallel ranks share the windows. Progress
goes to standard error. Exit status 3 for a checkpoint that cannot be used, 4 for a corpus, 2 for anything else.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron.core.datasets.errors import DataError
from megatron.core.dist_checkpointing.files import CheckpointError
from megatron.core.optional import MissingPackageError
from megatron.core.rectangles import even_share
from megatron.core.tokenizers.build import build_from_config
from megatron.core.tokenizers.tokenizer import Tokenizer, TokenizerError
from megatron.core.words import counted, decimal, size_text
from megatron.training.config.config import Config
from megatron.training.config.launch_env import LaunchEnv
from tools.flags import add_flags
from tools.inference import (
    bytes_left,
    filled_model,
    join_and_open,
    main_of_ranks,
    model_parser,
    parsed,
    rank_problems,
)
from tools.tokenizer_flags import tokenizer_config

if TYPE_CHECKING:  # torch comes once the line is known to be right
    from megatron.core.transport.parallel_state import ParallelState
    from tools.evaluation.documents import Document
    from tools.evaluation.perplexity import Predicted
    from tools.evaluation.scorer import Scorer


def parse() -> argparse.Namespace:
    parser = model_parser(__file__, __doc__)
    what = parser.add_mutually_exclusive_group(required=True)
    add_flags(
        what,
        {
            "--text FILE...": 'of .jsonl a document a line, field "text"; else a file is a document',
            "--data-path PREFIX...": "tokenized corpora, without .bin and .idx",
            "--tasks NAMES": "of lm-evaluation-harness, separated by commas",
        },
    )
    add_flags(
        parser,
        {
            "--include-path DIR": "folder with further tasks (YAML)",
            "--num-fewshot N": "examples before each question of --tasks; default the task's",
            "--limit N": "only the first N questions of each of --tasks",
            "--seq-length N": "inputs of a window; default the model's",
            "--micro-batch-size N=4": "windows in one forward",
            "--prepend-bos": "the begin of a text before each document of --text",
            "--json": "the last line of standard output is a JSON object",
        },
    )
    return parsed(parser)


def problems_of(args: argparse.Namespace, env: LaunchEnv) -> list[str]:
    """What is wrong with the flags, before anything is read."""
    found = rank_problems(args, env)
    for name in ("seq_length", "micro_batch_size", "limit"):
        if (value := getattr(args, name)) is not None and value < 1:
            found.append(f"--{name.replace('_', '-')} {value}: must be at least 1")
    if args.num_fewshot is not None and args.num_fewshot < 0:
        found.append(f"--num-fewshot {args.num_fewshot}: must be 0 or more")
    if args.prepend_bos and args.text is None:
        found.append("--prepend-bos: goes with --text")
    for name in ("include_path", "num_fewshot", "limit"):
        if args.tasks is None and getattr(args, name) is not None:
            found.append(f"--{name.replace('_', '-')}: goes with --tasks")
    found += [f"--text {file}: no such file" for file in args.text or () if not Path(file).exists()]
    if args.include_path is not None and not Path(args.include_path).is_dir():
        found.append(f"--include-path {args.include_path}: no such folder")
    ranks = args.tensor_model_parallel_size * args.pipeline_model_parallel_size
    if args.tasks is not None and env.world_size > ranks > 0 == env.world_size % ranks:
        found.append(
            f"--tasks: {counted(env.world_size // ranks, 'data parallel rank')} would all do the same: start "
            f"{counted(ranks, 'rank')} (--tensor-model-parallel-size x --pipeline-model-parallel-size)"
        )
    return found


def fitting(args: argparse.Namespace, config: Config) -> Config:
    """The configuration for windows of --seq-length. Raises ValueError where the model has no positions for them."""
    model = config.model
    length = args.seq_length
    if length is None:  # a harness gives a model all that it can take
        length = model.seq_length if args.tasks is None else model.max_position_embeddings or model.seq_length
    learned, limit = model.position_embedding_type == "learned_absolute", model.max_position_embeddings
    if (learned or args.max_position_embeddings is not None) and length > limit:
        kind = "learned positions" if learned else "positions"
        raise ValueError(
            f"--seq-length {length}: the model has {limit} {kind} (--max-position-embeddings): give at most {limit}"
        )
    return config.replace(seq_length=length)


def size_problem(args: argparse.Namespace, config: Config, ps: ParallelState, here: int) -> str | None:
    """Logits that there is no memory for. here: ranks of this machine."""
    model, rows = config.model, args.micro_batch_size
    columns = even_share(model.padded_vocab_size or 0, ps.tp_size if args.tasks is None else 1)
    needed, available = rows * model.seq_length * columns * 8, bytes_left(ps, here)
    if available is None or needed <= available:
        return None
    return (
        f"--seq-length {model.seq_length} with --micro-batch-size {rows}: logits take {size_text(needed)}, "
        f"{size_text(available)} are left: lower either"
    )


def model_tokenizer(args: argparse.Namespace, config: Config) -> Tokenizer | None:
    """None where a corpus is evaluated whose tokenizer is not here. Raises ValueError."""
    try:
        tokenizer = build_from_config(tokenizer_config(args, config.tokenizer))
    except (TokenizerError, MissingPackageError):
        if args.data_path is None:
            raise
        return None
    rows = config.model.padded_vocab_size or 0
    if tokenizer.vocab_size > rows:
        raise ValueError(
            f"the tokenizer has {tokenizer.vocab_size} ids, the model {rows}: give that of the model "
            "(--tokenizer-type, --tokenizer-model, ...)"
        )
    return tokenizer


@contextlib.contextmanager
def alike(ps: ParallelState) -> Iterator[None]:
    """ValueErrors of what each rank does alone are raised by all ranks, with the first one's message."""
    from megatron.core.dist_checkpointing.agree import gather_json

    told = None
    try:
        yield
    except (CheckpointError, DataError):
        raise
    except ValueError as error:
        told = str(error)
    if found := next(filter(None, gather_json(told, ps)), None):
        raise ValueError(found)


def run(args: argparse.Namespace, env: LaunchEnv) -> None:
    """Prints what was found. Raises CheckpointError, ValueError (a problem a line), PeerLostError."""
    if problems := problems_of(args, env):
        raise ValueError("\n".join(problems))
    if args.tasks is not None:
        from tools.evaluation.harness import require_harness

        for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
            os.environ[name] = "1"  # data comes from this machine alone; read when the packages are imported
        require_harness()
    ps, config, load = join_and_open(args, env)

    from megatron.core.transport.parallel_state import destroy_process_group
    from tools.evaluation.scorer import Scorer

    with alike(ps):
        config = fitting(args, config)
        tokenizer = model_tokenizer(args, config)
        if problem := size_problem(args, config, ps, env.local_world_size):
            raise ValueError(problem)
    scorer = Scorer(filled_model(config, load, ps), ps)
    if args.tasks is not None:
        from tools.evaluation.harness import run_tasks

        assert tokenizer is not None, "only corpora go without"
        run_tasks(args, scorer, tokenizer)
    else:
        found = perplexity(args, scorer, tokenizer, config.model.seq_length)
        if ps.is_first_rank:
            show(found, as_json=args.json)
    destroy_process_group(ps)


def perplexity(
    args: argparse.Namespace, scorer: Scorer, tokenizer: Tokenizer | None, length: int
) -> Predicted:
    """Of --text or --data-path. Raises ValueError where nothing is predicted."""
    from tools.evaluation import documents
    from tools.evaluation.perplexity import predict

    every: Iterator[Document]
    if args.text is not None:
        assert tokenizer is not None, "only corpora go without"
        first = [] if not args.prepend_bos else [_bos(tokenizer)]
        every = documents.of_texts(args.text, tokenizer, first)
    else:
        every = documents.of_corpora(args.data_path, tokenizer)
    show_progress = scorer.ps.is_first_rank
    found = predict(scorer, every, length=length, batch_size=args.micro_batch_size, show=show_progress)
    if found.tokens == 0:
        what = "--text" if args.text is not None else "--data-path"
        raise ValueError(
            f"{what}: {counted(found.documents, 'document')}, none of more than one token: nothing is predicted"
        )
    return found


def _bos(tokenizer: Tokenizer) -> int:
    if tokenizer.bos is None:
        raise ValueError(f"--prepend-bos: {type(tokenizer).__name__} has no token that begins a text here")
    return tokenizer.bos


def show(found: Predicted, *, as_json: bool) -> None:
    figures = found.figures()
    rows = {"documents": f"{found.documents:,}", "predicted tokens": f"{found.tokens:,}"}
    for name in ("nats_per_token", "perplexity", "bits_per_byte"):
        value = figures[name]
        rows[name.replace("_", " ")] = "not known" if value is None else decimal(value, 4)
    for name, text in rows.items():
        print(f"{name:<18}{text}")
    if as_json:
        print(json.dumps(figures))


def main() -> None:
    main_of_ranks(__file__, parse, run)


if __name__ == "__main__":
    main()
