"""A checkpoint of another format as one that a run's --load and the tools take (floor 0, pure)."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from megatron.core.dist_checkpointing.catalog import Found
from megatron.core.dist_checkpointing.manifest import Manifest
from megatron.core.dist_checkpointing.source import ArrayTensor

EMBEDDING = "model.embedding.word_embeddings.weight"


def _no_digests(file: str) -> None:
    """Megatron's formats have none."""


@dataclasses.dataclass(frozen=True)
class Foreign(Found):
    """Its manifest has the counters and the configuration, as far as the folder says anything of them. args: a launch's
    settings as Megatron-LM has stored them, JSON values."""

    args: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @staticmethod
    def of(
        described_in: Path,
        tensors: Mapping[str, ArrayTensor],
        common: Mapping[str, Any],
        *,
        directory: Path | None = None,
        files: Collection[str] | None = None,
        verify_file: Callable[[str], None] = _no_digests,
        follows_links: bool = False,
        args: Mapping[str, Any] | None = None,
    ) -> Foreign:
        """common: as a manifest of ours has it. files: those of the tensors if not given."""
        counters = common.get("iteration", 0), common.get("consumed_train_samples", 0)
        manifest = Manifest(*counters, 1, {}, "", "", "", {}, {}, common, ())
        digest = hashlib.sha256(repr((sorted(tensors.items()), sorted(common.items()))).encode()).hexdigest()
        there = sorted({chunk.file for tensor in tensors.values() for chunk in tensor.chunks} - {""})
        where = described_in, tensors, files or there, verify_file, follows_links
        return Foreign(directory or described_in.parent, counters[0], manifest, digest, *where, args or {})
