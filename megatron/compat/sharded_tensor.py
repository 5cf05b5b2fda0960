"""What Megatron's `sharded_state_dict` is made of, and its `dist_checkpointing.save` and `load`."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from megatron.compat import parallel_state
from megatron.core.dist_checkpointing.errors import CheckpointError
from megatron.core.dist_checkpointing.load import find, load_pieces
from megatron.core.dist_checkpointing.save import save as save_pieces
from megatron.core.dist_checkpointing.state import LocalPiece, pieces_of
from megatron.core.param_meta import ParamMeta

__all__ = ["ShardedTensor", "load", "save"]


@dataclasses.dataclass(frozen=True)
class ShardedTensor:
    """This rank's part of one parameter, with what part that is."""

    meta: ParamMeta
    data: Tensor

    @property
    def key(self) -> str:
        """Its name in the whole model."""
        return self.meta.name


def _walk(tree: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Leaves of nested dicts, each by the path to it."""
    if isinstance(tree, Mapping):
        for name, value in tree.items():
            yield from _walk(value, f"{path}.{name}" if path else str(name))
    else:
        yield path, tree


def _pieces(tree: Mapping[str, Any]) -> list[LocalPiece]:
    return [
        piece for path, one in _walk(tree) if isinstance(one, ShardedTensor) for piece in _named(path, one)
    ]


def _named(path: str, one: ShardedTensor) -> list[LocalPiece]:
    prefix = path.removesuffix(one.key).rstrip(".") or "model"
    return pieces_of(prefix, one.meta, one.data)


def save(
    sharded_state_dict: Mapping[str, Any], checkpoint_dir: str | Path, *args: Any, **kwargs: Any
) -> None:
    """Write a folder that `load` reads under any layout, in this framework's format (docs/checkpoints.md).

    Values that are no tensors have to be JSON. Communicates over the world. Raises CheckpointError.
    """
    common = {path: one for path, one in _walk(sharded_state_dict) if not isinstance(one, ShardedTensor)}
    save_pieces(
        checkpoint_dir, 0, _pieces(sharded_state_dict), {"values": common}, {}, parallel_state.current()
    )


def load(
    sharded_state_dict: Mapping[str, Any], checkpoint_dir: str | Path, *args: Any, **kwargs: Any
) -> dict[str, Any]:
    """The same tree with what was saved: tensors are filled in place. Communicates over the world.

    Raises CheckpointError where the folder has no checkpoint, or one of another model.
    """
    ps = parallel_state.current()
    found = find(checkpoint_dir, ps).found
    if found is None:
        raise CheckpointError(f"{checkpoint_dir}: no checkpoint that dist_checkpointing.save has written")
    load_pieces(found, _pieces(sharded_state_dict), ps)
    saved = found.manifest.common["values"]

    def filled(tree: Mapping[str, Any], path: str = "") -> dict[str, Any]:
        out: dict[str, Any] = {}
        for name, value in tree.items():
            here = f"{path}.{name}" if path else str(name)
            if isinstance(value, Mapping):
                out[name] = filled(value, here)
            else:
                out[name] = value.data if isinstance(value, ShardedTensor) else saved.get(here, value)
        return out

    return filled(sharded_state_dict)
