"""What one microbatch of a part of a model takes, by unit, out of what was seen of its modules (floor 0, pure)."""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from megatron.core.models.gpt.unit_order import EXPERTS
from megatron.estimate.description import EXCHANGE, OUTSIDE, ComputationFigures, ModelPiece

# F, B and W of a piece by what was seen of it, and by how much of that: who backwards are whole of are halves of these.
_SPLIT, _WHOLE = (("F", 1.0), ("B", 1.0), ("W", 1.0)), (("F", 1.0), ("BW", 0.5), ("BW", 0.5))


class DeviceRates(NamedTuple):
    """FLOPs that a device computes while a byte goes to its own memory, to its tensor parallel peers, to the next
    stage, and to ranks with other experts."""

    moved: float
    gathered: float
    sent: float
    exchanged: float


# A100: 312 TFLOP/s beside 2 TB/s of memory, 300 GB/s to peers and 25 GB/s of a network; H100: 990 beside 3.35 TB/s, 450
# GB/s and 50 GB/s. A CPU core: 50 GFLOP/s beside 10 GB/s of memory, and 1 GB/s of copies between processes.
GPU, CPU = DeviceRates(200, 1000, 15_000, 1000), DeviceRates(5, 50, 50, 50)


class UnitWork(NamedTuple):
    """One microbatch of a part of the model. f, b, w: FLOPs. saved: bytes from F to B. held: bytes from B to W."""

    f: float = 0.0
    b: float = 0.0
    w: float = 0.0
    saved: float = 0.0
    held: float = 0.0

    def plus(self, other: UnitWork) -> UnitWork:
        return UnitWork(*map(operator.add, self, other))


def sum_of(works: Iterable[UnitWork]) -> UnitWork:
    return functools.reduce(UnitWork.plus, works, UnitWork())


def work_by_unit(piece: ModelPiece, names: Sequence[str], rates: DeviceRates) -> dict[str, UnitWork]:
    """What its modules take, by unit, the first with those that are in none, and with what is waited for."""
    found = {name: UnitWork() for name in names}
    seen = _SPLIT if "B" in piece.most_bytes else _WHOLE
    experts = [name for name in names if name.endswith(EXPERTS)] or names[:1]
    for group, rate, units in (("tp", rates.gathered, names[:1]), (EXCHANGE, rates.exchanged, experts)):
        waited = [
            share
            * rate
            * sum(size for key, size in piece.collectives.items() if key[:2] == (computation, group))
            for computation, share in seen
        ]
        for name in units:
            found[name] = found[name].plus(UnitWork(*(time / len(units) for time in waited)))
    for path, figures in piece.modules.items():
        done = [(figures.work.get(computation, ComputationFigures()), share) for computation, share in seen]
        f, b, w = (
            share * (one.products + one.attention + rates.moved * one.moved_bytes) for one, share in done
        )
        filed = figures.filed_bytes * (path != OUTSIDE)
        unit = unit_of(path, names)
        found[unit] = found[unit].plus(UnitWork(f, b, w, figures.kept_bytes, filed))
    return found


def unit_of(path: str, names: Sequence[str]) -> str:
    """The innermost unit around a module or a parameter; the first for what is in none."""
    around = [name for name in names if path == name or path.startswith(f"{name}.")]
    return max(around, key=len, default=names[0])
