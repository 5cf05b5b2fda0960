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
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron.core.optional import MissingPackageError, require
from megatron.core.rectangles import even_share
from megatron.core.tokenizers.tokenizer import Tokenizer, TokenizerError
from megatron.core.words import counted, decimal
from megatron.training.config.config import Config
from megatron.training.config.launch_env import LaunchEnv
from tools.flags import add_flags, too_small
from tools.inference import (
    alike,
    check_memory,
    filled_model,
    join_and_open,
    main_of_ranks,
    model_parser,
    model_tokenizer,
    parsed,
    rank_problems,
)

if TYPE_CHECKING:  # torch comes once the line is known to be right
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
    found += too_small(args, {"seq_length": 1, "micro_batch_size": 1, "limit": 1, "num_fewshot": 0})
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


def tokenizer_if_here(args: argparse.Namespace, config: Config) -> Tokenizer | None:
    """None where a corpus is evaluated whose tokenizer is not here. Raises ValueError."""
    try:
        return model_tokenizer(args, config)
    except (TokenizerError, MissingPackageError):
        if args.data_path is None:
            raise
        return None


def run(args: argparse.Namespace, env: LaunchEnv) -> None:
    """Prints what was found. Raises CheckpointError, ValueError (a problem a line), PeerLostError."""
    if problems := problems_of(args, env):
        raise ValueError("\n".join(problems))
    if args.tasks is not None:
        for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
            os.environ[name] = "1"  # data comes from this machine alone; read when the packages are imported
        require("lm_eval", "eval")
    ps, config, load = join_and_open(args, env)

    from megatron.core.transport.parallel_state import destroy_process_group
    from tools.evaluation.scorer import Scorer

    with alike(ps):
        config = fitting(args, config)
        tokenizer = tokenizer_if_here(args, config)
        length, rows = config.model.seq_length, args.micro_batch_size
        columns = even_share(config.model.padded_vocab_size or 0, ps.tp_size if args.tasks is None else 1)
        what = f"--seq-length {length} with --micro-batch-size {rows}: logits"
        check_memory(rows * length * columns * 8, what, "lower either", ps, env)
    scorer = Scorer(filled_model(config, load, ps), ps)
    if args.tasks is not None:
        from tools.evaluation.harness import run_tasks

        assert tokenizer is not None, "only corpora go without"
        run_tasks(args, scorer, tokenizer)
    else:
        found = perplexity(args, scorer, tokenizer, length)
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
    what = "--text" if args.text is not None else "--data-path"
    if args.text is not None:
        assert tokenizer is not None, "only corpora go without"
        first = [_bos(tokenizer)] if args.prepend_bos else []
        every = documents.of_texts(args.text, tokenizer, first)
    else:
        every = documents.of_corpora(args.data_path, tokenizer)
    show_progress = scorer.ps.is_first_rank
    found = predict(scorer, every, length=length, batch_size=args.micro_batch_size, show=show_progress)
    if found.tokens == 0:
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
