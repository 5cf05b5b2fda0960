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
import contextlib
import io
import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron.command import program
from megatron.core.dist_checkpointing.files import CheckpointError
from megatron.core.words import counted
from megatron.training.config.launch_env import LaunchEnv
from megatron.training.guard.console import guard_console
from megatron.training.guard.exit_status import ExitStatus, hard_exit
from tools.commands import as_called
from tools.tokenizer_flags import add_tokenizer_flags, check_tokenizer_flags

INTERRUPTED = 128 + signal.SIGINT


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
    parser.add_argument("--device", help="default: cuda where there is a GPU, else cpu")
    for axis in ("tensor", "pipeline"):
        parser.add_argument(
            f"--{axis}-model-parallel-size", type=int, default=1, metavar="N", help="under torchrun"
        )
    add_tokenizer_flags(parser, "in the place of what the checkpoint says")
    args = parser.parse_args()
    check_tokenizer_flags(parser, args)
    return args


def problems_of(args: argparse.Namespace, env: LaunchEnv) -> list[str]:
    """What is wrong with the flags, before anything is read."""
    tp, pp, found = args.tensor_model_parallel_size, args.pipeline_model_parallel_size, []
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
    if tp < 1 or pp < 1 or env.world_size % (tp * pp):
        found.append(
            f"--tensor-model-parallel-size {tp} x --pipeline-model-parallel-size {pp} do not divide "
            f"{counted(env.world_size, 'rank')}: start a multiple of that many with torchrun --nproc-per-node N"
        )
    return found


def main() -> None:
    guard_console()
    env, told = LaunchEnv(), ""
    try:
        env = LaunchEnv.read()
        if env.rank:  # rank 0 says what has happened; Ctrl-C may find this one waiting for others
            signal.signal(signal.SIGINT, signal.SIG_DFL)
        with contextlib.redirect_stderr(io.StringIO()) if env.rank else contextlib.nullcontext():
            args = parse()
        from tools.generation.run import run  # with torch

        run(args, env, problems_of(args, env))
        return
    except CheckpointError as error:
        status, told = int(ExitStatus.CHECKPOINT), str(error)
    except ValueError as error:
        status, told = int(ExitStatus.CONFIGURATION), str(error)
    except KeyboardInterrupt:
        status, told = INTERRUPTED, "interrupted"
    except RuntimeError as error:  # a lost peer
        if getattr(error, "status", None) != ExitStatus.PEER_LOST:
            raise
        status, told = int(ExitStatus.PEER_LOST), str(error)
    if not env.rank:
        for line in told.splitlines():
            print(f"{program(__file__)}: {line}", file=sys.stderr)
    if env.world_size > 1:
        hard_exit(status)  # the others may be gone
    sys.exit(status)


if __name__ == "__main__":
    main()
