"""Two checkpoints of any format, tensor by tensor, under our names."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np

from megatron.core.dist_checkpointing.source import TensorSource
from megatron.core.rectangles import Rectangle
from megatron.core.words import plain
from megatron.interchange.foreign_checkpoint import opener
from tools.conversion import contents
from tools.conversion.source_reader import SourceReader
from tools.conversion.values import numbers

PREFIX = "model."
VOCABULARY = ("model.embedding.word_embeddings.weight", "model.output_layer.weight")


@dataclasses.dataclass(frozen=True)
class Difference:
    """What is not the same of a tensor. largest: of the absolute differences of values; None where they cannot be
    compared."""

    name: str
    what: str
    largest: float | None = None


def open_source(path: Path) -> TensorSource:
    """A Hugging Face folder, or the newest checkpoint of ours or Megatron-LM's in a folder. Raises CheckpointError."""
    return contents.newest(path, open_other=opener({"finetune": True}))


def differences(first: TensorSource, second: TensorSource) -> list[Difference]:
    """Of the model's tensors, in the order of names; [] where every bit is the same. Rows of a padded vocabulary that
    only one of them has are compared with zero; values of different dtypes are compared as fp64."""
    names = [{name for name in source.tensors if name.startswith(PREFIX)} for source in (first, second)]
    differing = [Difference(name, "only in the first") for name in sorted(names[0] - names[1])]
    differing += [Difference(name, "only in the second") for name in sorted(names[1] - names[0])]
    with SourceReader(first) as reader, SourceReader(second) as other:
        for name in sorted(names[0] & names[1]):
            difference = _difference(name, reader, other)
            if difference is not None:
                differing.append(difference)
    return differing


def _difference(name: str, first: SourceReader, second: SourceReader) -> Difference | None:
    shapes = [tuple(reader.source.tensors[name].shape) for reader in (first, second)]
    rows = [shape[0] if shape else 1 for shape in shapes]
    padded = name in VOCABULARY and shapes[0][1:] == shapes[1][1:]
    if shapes[0] != shapes[1] and not padded:
        return Difference(name, f"shapes {shapes[0]} and {shapes[1]}")
    dtypes = [reader.source.tensors[name].dtype for reader in (first, second)]
    box = None
    if shapes[0] != shapes[1]:
        box = Rectangle((0,) * len(shapes[0]), (min(rows), *shapes[0][1:]))
        longer = first if rows[0] > rows[1] else second
        count = max(rows) - min(rows)
        rest = Rectangle((min(rows), *(0 for _ in shapes[0][1:])), (count, *shapes[0][1:]))
        if np.count_nonzero(numbers(longer.read(name, rest), longer.source.tensors[name].dtype)):
            return Difference(name, f"{count} more rows in one of them, which are not zero")
    a, b = first.read(name, box), second.read(name, box)
    if dtypes[0] == dtypes[1] and np.array_equal(a, b):
        return None
    values = (numbers(bits, dtype).astype("f8") for bits, dtype in zip((a, b), dtypes, strict=True))
    largest = float(np.abs(np.subtract(*values)).max()) if a.size else 0.0
    dtype_text = f"{dtypes[0]} and {dtypes[1]}, " if dtypes[0] != dtypes[1] else ""
    return Difference(name, f"{dtype_text}largest difference {plain(largest)}", largest)
