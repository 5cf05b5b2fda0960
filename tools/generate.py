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
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron.training.config.launch_env import LaunchEnv
from tools.flags import add_flags, too_small
from tools.inference import main_of_ranks, model_parser, parsed, rank_problems


def parse() -> argparse.Namespace:
    parser = model_parser(__file__, __doc__)
    repeated: dict[str, Any] = {"action": "append", "default": [], "type": None}
    add_flags(parser, {"--prompt TEXT": "text to continue; may be repeated"}, **repeated)
    prompts = 'a prompt a line; of .jsonl the field "prompt" or "text"; -: lines of standard input'
    add_flags(parser, {"--prompts FILE": prompts}, **repeated)
    add_flags(parser, {"--stop TEXT": "end before this text; may be repeated"}, **repeated)
    add_flags(
        parser,
        {
            "--batch-size N=8": "prompts in one forward",
            "--max-new-tokens N=100": "",
            "--json-lines": "write a JSON object a prompt, instead of text",
            "--stream": "write text as it is made; on a terminal, of one prompt: default",
            "--greedy": "always the likeliest token",
            "--temperature X=1.0": "below 1 safer, above wilder, 0 greedy",
            "--top-k N=0": "draw from so many of the likeliest tokens; 0: from all",
            "--top-p X=1.0": "draw from the likeliest with this share",
            "--seed N=1234": "of the draws; prompt number i has this seed + i",
            "--fp32": "compute a 16-bit checkpoint in fp32: then batches and ranks change no rounding that decides",
        },
    )
    return parsed(parser)


def problems_of(args: argparse.Namespace, env: LaunchEnv) -> list[str]:
    """What is wrong with the flags, before anything is read."""
    found = too_small(args, {"batch_size": 1, "max_new_tokens": 0})
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
