"""Checkpoints of other formats in and out, compared and shown. One process, no device, one tensor in memory at a time.

    python tools/checkpoint.py import --hf DIR --save DIR          iteration 0 of a Hugging Face model
    python tools/checkpoint.py import --megatron DIR --save DIR    the same of Megatron-LM's torch_dist or torch
    python tools/checkpoint.py export --load DIR --hf DIR          a Hugging Face folder of the newest checkpoint
    python tools/checkpoint.py compare A B                         tensor by tensor, each of any format

A call that was killed goes on where it was. Exit status: 0, 1 where compare finds a difference, 2 for a wrong flag, 3
for a checkpoint that cannot be read or written.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # runs from a checkout that is not installed

from megatron.command import program
from megatron.core.dist_checkpointing.catalog import choose
from megatron.core.dist_checkpointing.files import CheckpointError
from megatron.core.words import counted
from megatron.interchange.known import ARCHITECTURES
from megatron.training.guard.console import guard_console
from tools.commands import as_called

SHARD_BYTES = 5 * 10**9
_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9}


def shard_bytes(word: str) -> int:
    """`5GB`, `200MB`. Raises ArgumentTypeError."""
    number, unit = word[:-2], word[-2:].upper()
    if unit in _UNITS and number.isdigit() and 0 < int(number) < 10**6:
        return int(number) * _UNITS[unit]
    raise argparse.ArgumentTypeError(f"expects a size like 5GB or 200MB, got {word!r}")


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog=program(__file__),
        description=as_called(__doc__ or ""),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    commands = made.add_subparsers(dest="command", required=True, metavar="import|export|compare")
    into = commands.add_parser("import", help="write a checkpoint of ours", allow_abbrev=False)
    source = into.add_mutually_exclusive_group(required=True)
    source.add_argument("--hf", type=Path, metavar="DIR", help="folder with config.json")
    source.add_argument(
        "--megatron", type=Path, metavar="DIR", help="folder of Megatron-LM's checkpoints, or one"
    )
    into.add_argument("--save", required=True, type=Path, metavar="DIR", help="folder of checkpoints")
    into.add_argument(
        "--max-position-embeddings", type=int, metavar="N", help="fewer positions than config.json has"
    )
    out = commands.add_parser("export", help="write a Hugging Face folder", allow_abbrev=False)
    out.add_argument("--load", required=True, type=Path, metavar="DIR", help="folder of checkpoints")
    out.add_argument("--ckpt-step", type=int, metavar="N", help="this iteration instead of the newest")
    out.add_argument("--hf", required=True, type=Path, metavar="DIR", help="folder to be made")
    out.add_argument(
        "--model-type",
        choices=sorted(ARCHITECTURES),
        help="default: as imported, else the first that can express the model",
    )
    out.add_argument("--like", type=Path, metavar="DIR", help="a folder whose tokenizer is copied")
    for one in (into, out):
        one.add_argument(
            "--dtype", choices=("float32", "bfloat16", "float16"), help="default: as it is stored"
        )
        one.add_argument("--max-shard-size", type=shard_bytes, default=SHARD_BYTES, help="default 5GB")
    compare = commands.add_parser("compare", help="what two checkpoints differ in", allow_abbrev=False)
    compare.add_argument("checkpoints", nargs=2, type=Path, metavar="DIR")
    return made


def run(args: argparse.Namespace) -> int:
    """Exit status. Raises CheckpointError."""
    from tools.conversion import compare, hugging_face, megatron  # these bring torch

    def say(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    if args.command == "compare":
        told = compare.differences(*map(compare.open_source, args.checkpoints))
        for one in told:
            print(f"{one.name}: {one.what}")
        print(
            f"{counted(len(told), 'tensor')} not the same"
            if told
            else "every tensor is the same, bit for bit"
        )
        return int(bool(told))
    common: dict[str, Any] = {"dtype": args.dtype, "max_shard_bytes": args.max_shard_size, "say": say}
    if args.command == "import" and args.megatron is not None:
        made = megatron.import_folder(args.megatron, args.save, **common)
    elif args.command == "import":
        given = {"max_position_embeddings": args.max_position_embeddings}
        given = {key: value for key, value in given.items() if value is not None}
        made = hugging_face.import_folder(args.hf, args.save, given=given, **common)
    else:
        choice = choose(args.load, args.ckpt_step)
        if choice.found is None:
            raise CheckpointError("; ".join(choice.notes))
        made = hugging_face.export_folder(
            choice.found, args.hf, model_type=args.model_type, like=args.like, **common
        )
    print(made)
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    guard_console()
    try:
        return run(args)
    except CheckpointError as error:
        print(f"{program(__file__)}: {error}", file=sys.stderr)
        return 3


if __name__ == "__main__":
    sys.exit(main())
