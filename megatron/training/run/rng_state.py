"""The state of every random generator of a process, as JSON: a resumed run draws the same numbers."""

from __future__ import annotations

import base64
import random
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megatron.core import schema
from megatron.core.device import Device
from megatron.core.dist_checkpointing.files import CheckpointError
from megatron.core.schema import Check, Place, Schema

_WAY_ON = "--no-load-rng goes on without it"
_UNNAMED = Place(Path("the checkpoint"), "rng", CheckpointError)


def _base64(num_bytes: int | None = None) -> Check:
    """Text that holds so many bytes."""

    def run(value: Any, place: Place) -> None:
        try:
            length = len(_decode(value))
        except (TypeError, ValueError):
            length = -1
        if length < 0 or num_bytes not in (None, length):
            place.fail(f"base64 of {num_bytes or 'some'} bytes", value)

    return run


# Of the Mersenne twister, which Python and NumPy share: 624 words, and the place of the next one.
_WORDS = 624
_GAUSS = schema.number(-100.0, 100.0)  # the second of two normal numbers: further out lies none
SCHEMA: Schema = {
    "python": {
        "version": schema.one_of(3),
        "words": _base64(4 * _WORDS + 4),
        "gauss": schema.or_null(_GAUSS),
    },
    "numpy": {
        "bit_generator": schema.one_of("MT19937"),
        "key": _base64(4 * _WORDS),
        "pos": schema.integer(high=_WORDS),
        "has_gauss": schema.one_of(0, 1),
        "gauss": _GAUSS,
    },
    "torch": {"cpu": _base64(), "cuda": schema.optional(_base64())},
}


def rng_state(device: Device) -> dict[str, Any]:
    """Python's, NumPy's, torch's and the device's generators. Long states are base64."""
    version, words, gauss = random.getstate()
    legacy: Any = np.random.get_state(legacy=False)
    packed = struct.pack(f"<{len(words)}I", *words)
    return {
        "python": {"version": version, "words": _encode(packed), "gauss": gauss},
        "numpy": {
            "bit_generator": legacy["bit_generator"],
            "key": _encode(legacy["state"]["key"].astype("<u4").tobytes()),
            "pos": int(legacy["state"]["pos"]),
            "has_gauss": int(legacy["has_gauss"]),
            "gauss": float(legacy["gauss"]),
        },
        "torch": {kind: _encode(state.numpy().tobytes()) for kind, state in device.rng_states().items()},
    }


def check_rng_state(state: Any, place: Place) -> None:
    """Raises CheckpointError naming what of a saved state is none."""
    try:
        schema.check(SCHEMA, state, place)
    except CheckpointError as error:
        raise CheckpointError(f"{error}; {_WAY_ON}") from None


def set_rng_state(state: Mapping[str, Any], device: Device, place: Place = _UNNAMED) -> None:
    """Put `rng_state` back. Raises CheckpointError when it is not one."""
    check_rng_state(state, place)
    python, legacy = state["python"], state["numpy"]
    words = struct.unpack(f"<{_WORDS + 1}I", _decode(python["words"]))
    key = np.frombuffer(_decode(legacy["key"]), dtype="<u4")
    of_torch = {
        kind: torch.frombuffer(bytearray(_decode(text)), dtype=torch.uint8)
        for kind, text in state["torch"].items()
    }
    try:
        random.setstate((python["version"], words, python["gauss"]))
        np.random.set_state(("MT19937", key, legacy["pos"], legacy["has_gauss"], legacy["gauss"]))
        device.set_rng_states(of_torch)
    except (ValueError, RuntimeError) as error:  # words that no generator is ever in
        path, where = place.path, place.where
        raise CheckpointError(f"{path}: field {where!r}: not usable here ({error}); {_WAY_ON}") from error


def _encode(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


def _decode(text: str) -> bytes:
    return base64.b64decode(text, validate=True)
