"""A checkpoint of Megatron-LM as one of ours."""

from __future__ import annotations

from pathlib import Path

from megatron.interchange.foreign_checkpoint import megatron_settings, open_megatron
from tools.conversion.incoming import write_checkpoint
from tools.conversion.progress import Say


def import_folder(folder: Path, save: Path, *, dtype: str | None, max_shard_bytes: int, say: Say) -> Path:
    """Write iteration 0 of the model into `save`; its directory. The optimizer is left. Raises CheckpointError."""
    source = open_megatron(folder)
    flags = megatron_settings(source)
    rows = flags["padded_vocab_size"]
    tensors = {name: [entry.dtype, *entry.shape] for name, entry in source.tensors.items()}
    facts = [str(source.directory), source.iteration, tensors]
    return write_checkpoint(source, save, lambda: flags, rows, facts, dtype, max_shard_bytes, say)
