"""The state of every random generator of a process, as JSON: a resumed run draws the same numbers."""

from __future__ import annotations

import base64
import random
import struct
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from megatron.core.device import Device
from megatron.core.dist_checkpointing.errors import CheckpointError


def rng_state(device: Device) -> dict[str, Any]:
    """Python's, NumPy's, torch's and the device's generators. Long states are base64."""
    version, words, gauss = random.getstate()
    legacy: Any = np.random.get_state(legacy=False)
    return {
        "python": {
            "version": version,
            "words": _encode(struct.pack(f"<{len(words)}I", *words)),
            "gauss": gauss,
        },
        "numpy": {
            "bit_generator": legacy["bit_generator"],
            "key": _encode(legacy["state"]["key"].astype("<u4").tobytes()),
            "pos": int(legacy["state"]["pos"]),
            "has_gauss": int(legacy["has_gauss"]),
            "gauss": float(legacy["gauss"]),
        },
        "torch": {kind: _encode(state.numpy().tobytes()) for kind, state in device.rng_states().items()},
    }


def set_rng_state(state: Mapping[str, Any], device: Device) -> None:
    """Put `rng_state` back. Raises CheckpointError when it is not one."""
    try:
        python, numpy_state = state["python"], state["numpy"]
        packed = _decode(python["words"])
        words = struct.unpack(f"<{len(packed) // 4}I", packed)
        torch_states = {
            kind: torch.frombuffer(bytearray(_decode(text)), dtype=torch.uint8)
            for kind, text in state["torch"].items()
        }
        random.setstate((python["version"], words, python["gauss"]))
        np.random.set_state(
            (
                numpy_state["bit_generator"],
                np.frombuffer(_decode(numpy_state["key"]), dtype="<u4"),
                numpy_state["pos"],
                numpy_state["has_gauss"],
                numpy_state["gauss"],
            )
        )
        device.set_rng_states(torch_states)
    except (KeyError, TypeError, ValueError, RuntimeError, AttributeError, struct.error) as error:
        raise CheckpointError(
            f"the checkpoint's random generator state is not usable here ({type(error).__name__}: {error}); "
            f"--no-load-rng goes on without it"
        ) from error


def _encode(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


def _decode(text: str) -> bytes:
    return base64.b64decode(text, validate=True)
