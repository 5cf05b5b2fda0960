#!/usr/bin/env python3
"""Write text with a trained checkpoint.

    python tools/generate.py --load runs/quickstart/checkpoints --prompt "def main(" --max-new-tokens 200
    python tools/generate.py --load DIR --prompts questions.jsonl --json-lines --batch-size 16 --stop "###" --greedy
    torchrun --nproc-per-node 4 tools/generate.py --load DIR --prompts lines.txt --tensor-model-parallel-size 2
        --pipeline-model-parallel-size 2

Model and tokenizer are those that the checkpoint was trained with; flags of the tokenizer say where its files are now,
or what the checkpoint does not say. A checkpoint of any layout is read under any other. Exit status 3 for a checkpoint
that cannot be used, 2 for wrong flags or prompts, all of which are named, 130 after Ctrl-C; what was written is kept.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron.training.config.launch_env import LaunchEnv
from tools.commands import as_called
from tools.inference import add_rank_flags, main_of_ranks, rank_problems
from tools.tokenizer_flags import add_tokenizer_flags, check_tokenizer_flags


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=as_called(__doc__),
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--load", required=True, metavar="DIR", help="folder given to --save when training")
    parser.add_argument("--ckpt-step", type=int, metavar="N", help="iteration to load; default the newest")
    parser.add_argument(
        "--prompt", action="append", default=[], metavar="TEXT", help="text to continue; may be repeated"
    )
    parser.add_argument(
        "--prompts",
        action="append",
        default=[],
        metavar="FILE",
        help='a prompt a line; of .jsonl the field "prompt" or "text"; -: lines of standard input',
    )
    parser.add_argument(
        "--batch-size", type=int, default=8, metavar="N", help="prompts in one forward; default 8"
    )
    parser.add_argument("--max-new-tokens", type=int, default=100, metavar="N", help="default 100")
    parser.add_argument(
        "--stop", action="append", default=[], metavar="TEXT", help="end before this text; may be repeated"
    )
    parser.add_argument(
        "--json-lines", action="store_true", help="write a JSON object a prompt, instead of text"
    )
    parser.add_argument(
        "--stream",
        action="store_true",
        help="write text as it is made; on a terminal, of one prompt: default",
    )
    parser.add_argument("--greedy", action="store_true", help="always the likeliest token")
    parser.add_argument(
        "--temperature", type=float, default=1.0, metavar="T", help="below 1 safer, above wilder, 0 greedy"
    )
    parser.add_argument(
        "--top-k", type=int, default=0, metavar="K", help="draw from the k likeliest tokens; 0: from all"
    )
    parser.add_argument(
        "--top-p", type=float, default=1.0, metavar="P", help="draw from the likeliest with this share"
    )
    parser.add_argument(
        "--seed", type=int, default=1234, metavar="S", help="of the draws; prompt number i has S + i"
    )
    parser.add_argument(
        "--fp32",
        action="store_true",
        help="compute a 16-bit checkpoint in fp32: then batches and ranks change no rounding that decides",
    )
    parser.add_argument("--device", help="default: cuda where there is a GPU, else cpu")
    add_rank_flags(parser)
    add_tokenizer_flags(parser, "in the place of what the checkpoint says")
    args = parser.parse_args()
    check_tokenizer_flags(parser, args)
    return args


def problems_of(args: argparse.Namespace, env: LaunchEnv) -> list[str]:
    """What is wrong with the flags, before anything is read."""
    found = []
    if args.batch_size < 1:
        found.append(f"--batch-size {args.batch_size}: must be at least 1")
    if args.max_new_tokens < 0:
        found.append(f"--max-new-tokens {args.max_new_tokens}: must be 0 or more")
    if "" in args.stop:
        found.append("--stop '': every text has it: give some text, or leave the flag out")
    if args.json_lines and args.stream:
        found.append(
            "--stream with --json-lines: a JSON line is written once its text is whole; leave one out"
        )
    return found + rank_problems(args, env)


def run(args: argparse.Namespace, env: LaunchEnv) -> None:
    """See `tools.generation.run`, which comes with torch."""
    from tools.generation.run import run as generate

    generate(args, env, problems_of(args, env))


def main() -> None:
    main_of_ranks(__file__, parse, run)


if __name__ == "__main__":
    main()
