"""Gradients of layouts compared without a dump of gradients: after one step with both of Adam's betas 0 the first
moment in a checkpoint is the gradient.

The measure and its bound are Megatron-LM's: the relative Frobenius norm of the difference, against
4 * 1.03^(layers + 1 - layer) * eps, eps of the precision in which layers compute.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from megatron.core.words import plain
from megatron.training.config.config import Config
from tools.cases.judge import Judgement
from tools.conversion.contents import config_in, newest
from tools.conversion.source_reader import SourceReader
from tools.conversion.values import numbers

_EPS = {"fp64": 2.0**-52, "bf16": 2.0**-7, "fp16": 2.0**-10}
_MOMENT = re.compile(r"exp_avg(?!_sq)")
_LAYER = re.compile(r"layers\.(\d+)\.")


def compare(folders: Sequence[Path]) -> list[Judgement]:
    """Of the first moments of the first checkpoint beside those of each other one. Raises CheckpointError."""
    first, *others = (newest(folder) for folder in folders)
    config = config_in(first)
    names = sorted(name for name in first.tensors if _MOMENT.search(name))
    assert names, f"{folders[0]}: no first moments in {sorted(first.tensors)[:4]}"
    made = []
    for number, other in enumerate(others, start=2):
        with SourceReader(first) as reader, SourceReader(other) as beside:
            rows = [(_share(name, reader, beside) / _bound(name, config), name) for name in names]
        worst, name = max(rows)
        text = f"at most {plain(worst, 3)} of the bound, {name}"
        made.append(Judgement(f"gradients of run {number} beside run 1", worst <= 1, text))
    return made


def _share(name: str, first: SourceReader, second: SourceReader) -> float:
    a, b = (
        numbers(reader.read(name), reader.source.tensors[name].dtype).astype("f8")
        for reader in (first, second)
    )
    rows = min(len(a), len(b))  # of a vocabulary that is padded for tensor parallel ranks
    a, b = a[:rows], b[:rows]
    return float(np.linalg.norm(a - b) / max(np.linalg.norm(a), np.finfo("f8").tiny))


def _bound(name: str, config: Config) -> float:
    layers = config.model.num_layers
    found = _LAYER.search(name)
    layer = int(found[1]) + 1 if found else 0
    eps = next((eps for kind, eps in _EPS.items() if getattr(config.optimizer, kind)), 2.0**-23)
    return float(4 * 1.03 ** (layers + 1 - layer) * eps)
