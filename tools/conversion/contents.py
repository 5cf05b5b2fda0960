"""What a checkpoint of ours holds, and whether it is whole; without torch unless files are verified."""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from pathlib import Path
from typing import Any

from megatron.core.dist_checkpointing.catalog import Found, OpenOther, choose, config_of, open_no_other
from megatron.core.dist_checkpointing.files import CheckpointError
from megatron.core.dist_checkpointing.safetensors_format import ITEM_BYTES
from megatron.core.words import counted, printable
from megatron.training.config.config import Config
from megatron.training.config.saved_config import check_config
from tools.conversion.summary import folded, summary, summary_lines


def newest(folder: Path, ckpt_step: int | None = None, open_other: OpenOther = open_no_other) -> Found:
    """The checkpoint that --load would take, or the one of `ckpt_step`. open_other: as `choose` has it, for other
    formats. Raises CheckpointError where there is none."""
    choice = choose(folder, ckpt_step, open_other)
    if choice.found is None:
        raise CheckpointError("; ".join(choice.notes))
    for note in choice.notes:
        print(note, file=sys.stderr)
    return choice.found


def config_in(found: Found) -> Config:
    """The checked configuration of the run that has saved a checkpoint. Raises CheckpointError."""
    saved = config_of(found, check_config)
    try:
        return Config.from_flat(saved)
    except ValueError as error:
        raise CheckpointError(f"{found.described_in}: {error}") from None


def show(folder: Path, ckpt_step: int | None, *, verify: bool, as_json: bool) -> None:
    """Print it. verify: judge it as a load does, digests and configuration included. Raises CheckpointError."""
    found = newest(folder, ckpt_step)
    facts = describe(found)
    if verify:
        # They bring torch; listing does without.
        from megatron.core.dist_checkpointing.loading import verify as verify_files
        from megatron.training.run.run_checkpoints import check_manifest

        check_manifest(found)
        verify_files(found)
        facts["verified"] = True
    if as_json:
        print(json.dumps(facts))
        return
    print_table(facts)
    if verify:
        print(f"  verified: {counted(len(facts['files']), 'file')}")


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
