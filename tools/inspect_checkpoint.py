"""What a checkpoint holds, and whether it is whole. Needs one process and no device; changes nothing.

    python tools/inspect_checkpoint.py checkpoints/                    the one that --load would take
    python tools/inspect_checkpoint.py checkpoints/ --ckpt-step 100 --verify        as a load would
    python tools/inspect_checkpoint.py checkpoints/ --json

Exit status: 0, or 3 when there is no valid checkpoint (with --verify: digests, configuration and counters included).
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # runs from a checkout that is not installed

from megatron.command import program
from megatron.core.dist_checkpointing.catalog import Found, choose
from megatron.core.dist_checkpointing.files import CheckpointError
from megatron.core.dist_checkpointing.safetensors_format import ITEM_BYTES
from megatron.core.words import counted, printable
from megatron.training.guard.console import guard_console
from tools.checkpoint_summary import folded, summary, summary_lines
from tools.commands import as_called


def describe(found: Found) -> dict[str, Any]:
    """Everything the manifest says, without values."""
    manifest = found.manifest
    return {
        "directory": str(found.directory),
        "iteration": manifest.iteration,
        "consumed_train_samples": manifest.consumed_train_samples,
        "world_size": manifest.world_size,
        "topology": dict(manifest.topology),
        "code_version": manifest.code_version,
        "torch_version": manifest.torch_version,
        "config_hash": manifest.config_hash,
        "common": sorted(manifest.common),
        "files": {name: dataclasses.asdict(entry) for name, entry in manifest.files.items()},
        "tensors": {
            name: {"dtype": entry.dtype, "shape": list(entry.shape), "chunks": len(entry.chunks)}
            for name, entry in sorted(manifest.tensors.items())
        },
        "summary": summary(found),
        "total_bytes": sum(math.prod(t.shape) * ITEM_BYTES[t.dtype] for t in manifest.tensors.values()),
    }


def print_table(facts: dict[str, Any]) -> None:
    """For people: the summary, files, and tensors, those of layers that are alike in one line."""
    seen = f"iteration {facts['iteration']:,}, {counted(facts['consumed_train_samples'], 'sample')}"
    print(f"{printable(facts['directory'])}: {seen}")
    for line in summary_lines(facts):
        print(f"  {line}")
    print(f"\n  {counted(len(facts['files']), 'file')}")
    for name, file in facts["files"].items():
        print(f"  {name}  {file['bytes']:>14,} bytes  sha256 {file['sha256'][:16]}...")
    print(
        f"\n  {counted(len(facts['tensors']), 'tensor')}, {facts['total_bytes']:,} bytes; layers that are alike in one "
        "line"
    )
    lines = folded(facts["tensors"])
    width = max((len(name) for name in lines), default=0)
    for name, tensor in lines.items():
        shape = " x ".join(map(str, tensor["shape"])) or "scalar"
        chunks = f"in {counted(tensor['chunks'], 'piece')}" if tensor["chunks"] > 1 else ""
        print(f"  {name:<{width}}  {tensor['dtype']:>4}  {shape:<14}  {chunks}".rstrip())


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog=program(__file__),
        description=as_called(__doc__),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("load", metavar="DIR", type=Path, help="folder of checkpoints, as --load")
    parser.add_argument("--ckpt-step", type=int, metavar="N", help="this iteration instead of the newest")
    parser.add_argument(
        "--verify",
        action="store_true",
        help="judge it as a load does: every field of the manifest, SHA-256 and header of every file",
    )
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    args = parser.parse_args(argv)
    guard_console()
    try:
        choice = choose(args.load, args.ckpt_step)
        if choice.found is None:
            raise CheckpointError("; ".join(choice.notes))
        facts = describe(choice.found)
        if args.verify:
            # They bring torch; listing does without.
            from megatron.core.dist_checkpointing.loading import verify
            from megatron.training.run.run_checkpoints import check_manifest

            check_manifest(choice.found)
            verify(choice.found)
            facts["verified"] = True
    except CheckpointError as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 3
    for note in choice.notes:
        print(note, file=sys.stderr)
    if args.json:
        print(json.dumps(facts))
    else:
        print_table(facts)
        if args.verify:
            print(f"  verified: {counted(len(facts['files']), 'file')}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
