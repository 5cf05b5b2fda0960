"""Checkpoints of other formats in and out, compared and shown. One process, no device, one tensor in memory at a time.

    python tools/checkpoint.py import --hf DIR --save DIR          iteration 0 of a Hugging Face model
    python tools/checkpoint.py import --megatron DIR --save DIR    a checkpoint of Megatron-LM's (torch_dist or torch)
    python tools/checkpoint.py export --load DIR --hf DIR          a Hugging Face folder of the newest checkpoint
    python tools/checkpoint.py export --load DIR --megatron DIR    a torch_dist checkpoint of Megatron-LM's of it
    python tools/checkpoint.py compare A B                         tensor by tensor, each of any format
    python tools/checkpoint.py inspect DIR [--verify] [--json]     what a checkpoint of ours holds; is it whole

A call that was killed goes on where it was. Exit status: 0, 1 where compare finds a difference, 2 for a wrong flag, 3
for a checkpoint that cannot be read or written.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # runs from a checkout that is not installed

from megatron.command import program
from megatron.core.dist_checkpointing.files import CheckpointError
from megatron.core.words import counted
from megatron.interchange.foreign_checkpoint import heeded, open_megatron
from megatron.interchange.hf_folder import open_folder
from megatron.interchange.known import ARCHITECTURES
from megatron.training.guard.console import guard_console
from tools.conversion import compare, contents, hugging_face
from tools.conversion.importing import import_folder
from tools.flags import add_flags, script_parser

_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9}


def shard_bytes(word: str) -> int:
    """`5GB`, `200MB`. Raises ArgumentTypeError."""
    number, unit = word[:-2], word[-2:].upper()
    if unit in _UNITS and number.isdigit() and 0 < int(number) < 10**6:
        return int(number) * _UNITS[unit]
    raise argparse.ArgumentTypeError(f"expects a size like 5GB or 200MB, got {word!r}")


def parser() -> argparse.ArgumentParser:
    made = script_parser(__file__, __doc__)
    commands = made.add_subparsers(dest="command", required=True, metavar="import|export|compare|inspect")

    def command(name: str, about: str) -> argparse.ArgumentParser:
        return commands.add_parser(name, help=about, allow_abbrev=False)

    into = command("import", "write a checkpoint of ours")
    source = into.add_mutually_exclusive_group(required=True)
    of_megatron = {"--megatron DIR": "folder of Megatron-LM's checkpoints, or one"}
    add_flags(source, {"--hf DIR": "folder with config.json"} | of_megatron, type=Path)
    add_flags(into, {"--save DIR": "folder of checkpoints"}, required=True, type=Path)
    add_flags(into, {"--max-position-embeddings N": "fewer positions than config.json has"})
    out = command("export", "write a checkpoint for others")
    add_flags(out, {"--load DIR": "folder of checkpoints"}, required=True, type=Path)
    target = out.add_mutually_exclusive_group(required=True)
    of_megatron = {"--megatron DIR": "the same, of Megatron-LM's checkpoints"}
    add_flags(target, {"--hf DIR": "folder to be made, of Hugging Face"} | of_megatron, type=Path)
    kinds = {"--model-type NAME": "default: as imported, else the first that can express the model"}
    add_flags(out, kinds, choices=sorted(ARCHITECTURES), metavar=None)
    add_flags(out, {"--like DIR": "a folder whose tokenizer is copied"}, type=Path)
    dtype = "default: as it is stored; an export in float32 is made of main weights where there are any"
    for one in (into, out):
        add_flags(one, {"--no-load-optim": "of --megatron: leave the optimizer's states out"})
        add_flags(one, {"--dtype NAME": dtype}, choices=("float32", "bfloat16", "float16"), metavar=None)
        add_flags(one, {"--max-shard-size SIZE=5GB": ""}, type=shard_bytes)
    compared = command("compare", "what two checkpoints differ in")
    compared.add_argument("checkpoints", nargs=2, type=Path, metavar="DIR")
    shown = command("inspect", "what a checkpoint of ours holds")
    shown.add_argument("load", type=Path, metavar="DIR", help="folder of checkpoints, as --load")
    verify = "judge it as a load does: every field of the manifest, SHA-256 and header of every file"
    add_flags(shown, {"--verify": verify, "--json": "one JSON object on stdout"})
    for one in (out, shown):
        add_flags(one, {"--ckpt-step N": "this iteration instead of the newest"})
    return made


def foreign_flags(args: argparse.Namespace) -> list[str]:
    """What is given that means nothing for the other format."""
    of_hf, of_megatron = ("max_position_embeddings", "model_type", "like"), ("no_load_optim",)
    of_other = of_hf if getattr(args, "megatron", None) else of_megatron if getattr(args, "hf", None) else ()
    return [
        f"--{name.replace('_', '-')} is for --{'hf' if name in of_hf else 'megatron'}"
        for name in of_other
        if getattr(args, name, None)
    ]


def run(args: argparse.Namespace) -> int:
    """Exit status. Raises CheckpointError."""
    if args.command == "inspect":
        contents.show(args.load, args.ckpt_step, verify=args.verify, as_json=args.json)
        return 0
    if args.command == "compare":
        differing = compare.differences(*map(compare.open_source, args.checkpoints))
        for difference in differing:
            print(f"{difference.name}: {difference.what}")
        same = "every tensor is the same, bit for bit"
        print(f"{counted(len(differing), 'tensor')} not the same" if differing else same)
        return int(bool(differing))

    def say(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    common: dict[str, Any] = {"dtype": args.dtype, "max_shard_bytes": args.max_shard_size, "say": say}
    if args.command == "import":
        if args.megatron is not None:
            foreign = open_megatron(args.megatron, optimizer=not args.no_load_optim)
        else:
            foreign = open_folder(args.hf, heeded(vars(args)))
        made = import_folder(foreign, args.save, **common)
    elif args.megatron is not None:
        from tools.conversion import torch_dist  # it brings torch

        found = contents.newest(args.load, args.ckpt_step)
        made = torch_dist.export_folder(found, args.megatron, optimizer=not args.no_load_optim, **common)
    else:
        found = contents.newest(args.load, args.ckpt_step)
        made = hugging_face.export_folder(
            found, args.hf, model_type=args.model_type, like=args.like, **common
        )
    print(made)
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    commands = parser()
    if words and os.path.isdir(words[0]):  # what this word alone meant before there were others
        commands.error(f"{words[0]!r} is a folder and no command: did you mean  inspect {words[0]}  ?")
    args = commands.parse_args(words)
    if problems := foreign_flags(args):
        commands.error("; ".join(problems))
    guard_console()
    try:
        return run(args)
    except CheckpointError as error:
        print(f"{program(__file__)}: {error}", file=sys.stderr)
        return 3
    except OSError as error:
        print(f"{program(__file__)}: {error.filename or args.command}: {error.strerror}", file=sys.stderr)
        return 3
    except KeyboardInterrupt:
        print(f"{program(__file__)}: interrupted: the same command goes on from here", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
