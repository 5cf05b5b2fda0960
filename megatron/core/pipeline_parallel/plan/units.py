"""What a stage is made of for data parallelism: units, which are gathered and reduced together, and their order.

[Note: accesses] A computation goes through its stage's units access by access. An access names the units that are needed
together from one moment on: mostly one unit; layers that are recomputed together are one access of their backward. It begins
when the first module of one of its units runs, when the first gradient of one arrives, or, in W, with the first weight
gradient of one. A unit is in use from the beginning of each access that names it to the beginning of the next one that does
not, or to the computation's end.
"""

from __future__ import annotations

from dataclasses import dataclass

Access = tuple[int, ...]


@dataclass(frozen=True)
class UnitCosts:
    """One unit of one stage: what one microbatch costs on one rank, and what its weights and gradients take.

    name: unique on a rank; units of two stages of a rank that have one name are one unit (a tied embedding). f, b, w: times
    in the cost model's unit. activation, held_after_b: as in `CostModel`. weight_bytes: its whole weights as UNSHARD makes
    them, padding included. grad_bytes: its whole gradients, held from the first contribution to the end of its REDUCE.
    backward_reads: whether B and BW read its weights.
    """

    name: str
    f: float = 0.0
    b: float = 0.0
    w: float = 0.0
    activation: float = 0.0
    held_after_b: float = 0.0
    weight_bytes: int = 0
    grad_bytes: int = 0
    backward_reads: bool = True


@dataclass(frozen=True)
class StageUnits:
    """The units of one stage. forward: its accesses in F, in order; a unit may come twice (an embedding that is the output
    layer too). backward: those of B, BW and W."""

    units: tuple[UnitCosts, ...]
    forward: tuple[Access, ...]
    backward: tuple[Access, ...]

    def __post_init__(self) -> None:
        known = set(range(len(self.units)))
        for accesses in (self.forward, self.backward):
            named = {unit for access in accesses for unit in access}
            assert named == known, f"accesses of units {sorted(named)}, the stage has {len(self.units)}"
