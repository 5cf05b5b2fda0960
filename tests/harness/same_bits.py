"""Runs of several ranks as one outcome, and which of its bits another run does not have."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from tests.harness.layouts import CLIP, Trained, assembled


@dataclasses.dataclass
class Outcome:
    """losses, norms: by step. tensors: kind -> name -> global tensor."""

    losses: list[float]
    norms: list[float]
    tensors: dict[str, dict[str, np.ndarray]]


def outcome_of(ranks: Sequence[Trained]) -> Outcome:
    """Of a run in which clipping has acted."""
    for rank in ranks:
        assert rank.losses == ranks[0].losses
        assert rank.norms == ranks[0].norms
    kinds = ("weights", "model", "moments")
    tensors = {kind: assembled([getattr(rank, kind) for rank in ranks]) for kind in kinds}
    assert max(ranks[0].norms) > CLIP
    return Outcome(ranks[0].losses, ranks[0].norms, tensors)


def differing(one: Outcome, other: Outcome) -> str:
    """What has other bits, in words; "" where nothing has. Norms agree to the last bits of fp64."""
    names = [
        f"{kind} of {name}"
        for kind, tensors in one.tensors.items()
        for name, values in tensors.items()
        if not np.array_equal(values, other.tensors[kind][name])
    ]
    if one.losses != other.losses:
        pairs = enumerate(zip(one.losses, other.losses, strict=True), 1)
        names.insert(0, f"losses from step {next(step for step, pair in pairs if pair[0] != pair[1])}")
    if names:
        return f"{len(names)} differ: {', '.join(names[:3])}"
    np.testing.assert_allclose(one.norms, other.norms, rtol=1e-14)
    return ""
