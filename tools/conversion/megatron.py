"""A checkpoint of Megatron-LM as one of ours."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

from megatron.core.dist_checkpointing.loading import check_pieces
from megatron.core.dist_checkpointing.pieces import TORCH_DTYPES
from megatron.core.dist_checkpointing.state import LocalPiece, pieces_of
from megatron.core.models.gpt.gpt import GPTModel
from megatron.interchange.architecture import InterchangeError
from megatron.interchange.foreign_checkpoint import Foreign, open_megatron
from megatron.training.config.config import Config
from megatron.training.config.saved_config import MODEL_PREFIX, OPTIMIZER_PREFIX, whole_config
from megatron.training.run.run_checkpoints import check_state
from tools.conversion.incoming import write_checkpoint
from tools.conversion.progress import Say


def import_folder(
    folder: Path, save: Path, *, optimizer: bool, dtype: str | None, max_shard_bytes: int, say: Say
) -> Path:
    """Write a checkpoint of Megatron-LM into `save`, at its iteration; its directory. optimizer: with its states, where
    there are any.

    dtype: of weights, a key of DTYPES; as stored if not given. Raises CheckpointError, before anything is written where
    it does not fit the model of its args. A killed call goes on where it was.
    """
    found = open_megatron(folder, optimizer=optimizer)
    has_optimizer = any(name.startswith(OPTIMIZER_PREFIX) for name in found.tensors)
    if has_optimizer and dtype is not None:
        raise InterchangeError(f"--dtype {dtype} is for weights alone: add --no-load-optim")
    config = Config.from_flat(whole_config(found))
    rows = config.model.padded_vocab_size
    assert rows is not None, "whole_config has it"
    check_pieces(found, list(_expected(found, config, rows)))
    check_state(found, has_optimizer)
    state = dict(found.manifest.common)
    settings = state.pop("config")
    facts = [found.manifest_sha256]
    return write_checkpoint(found, save, lambda: settings, rows, facts, dtype, max_shard_bytes, say, state)


def _expected(found: Foreign, config: Config, rows: int) -> Iterator[LocalPiece]:
    """What a model of these settings has, and an optimizer of what the checkpoint keeps of any weight; no values."""
    kinds = {name.split(".")[1] for name in found.tensors if name.startswith(OPTIMIZER_PREFIX)}
    prefixes = [MODEL_PREFIX, *(f"{OPTIMIZER_PREFIX}{kind}." for kind in sorted(kinds))]
    model = GPTModel(config.model, padded_vocab_size=rows, seed=0, device="meta")
    for name, weight in model.named_parameters():
        for prefix in prefixes:
            [piece] = pieces_of(prefix.removesuffix("."), model.param_meta[name], weight)
            stored = found.tensors.get(piece.name)
            dtype = TORCH_DTYPES[stored.dtype] if stored else weight.dtype
            yield dataclasses.replace(piece, tensor=piece.tensor.to(dtype))
