"""What a checkpoint of any format holds, as tensors."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from megatron.core.dist_checkpointing.pieces import TORCH_DTYPES
from megatron.core.dist_checkpointing.source import TensorSource
from tools.conversion.source_reader import SourceReader


def stored_values(source: TensorSource) -> dict[str, Tensor]:
    """By their names, in the dtypes in which they are stored."""
    with SourceReader(source) as reader:
        return {
            name: torch.from_numpy(np.ascontiguousarray(reader.read(name))).view(TORCH_DTYPES[entry.dtype])
            for name, entry in source.tensors.items()
        }
