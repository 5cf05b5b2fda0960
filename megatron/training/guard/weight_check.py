"""Whether the weights that a step has made are finite on all ranks: asked of every step, before it counts.

Finite gradients may make weights that are not: 0 / 0 in the update, a learning rate too large, an fp32 weight that fp16
cannot hold. The weights before are gone then, so the run ends, whatever `--nan-policy` says.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from megatron.core.dist_checkpointing.agree import gather_json
from megatron.core.dist_checkpointing.state import LocalPiece
from megatron.core.finite import all_finite
from megatron.core.transport import collectives
from megatron.core.transport.parallel_state import ParallelState
from megatron.training.engine import Engine


class NonFiniteWeightsError(ArithmeticError):
    """What a checkpoint would hold is NaN or infinite. Raised on every rank alike."""


class WeightCheck:
    """The question about weights as they are now; its answer is on its way while ranks go on. All ranks ask alike.
    Communicates over world."""

    def __init__(self, engine: Engine, ps: ParallelState) -> None:
        self._engine, self._ps = engine, ps
        finite = engine.optimizer.weights_finite()
        self._finite = finite.to(device=ps.device.torch_device).float()
        self._pending = collectives.all_reduce(self._finite, ps.world_group, "min", async_op=True)

    def passed(self, iteration: int) -> None:
        """Return once all ranks have said yes. iteration: of the step that made the weights. Raises
        NonFiniteWeightsError."""
        self._pending.wait()
        if self._finite.item():  # sync: whether the step counts
            return
        where = _find_weight(self._engine, self._ps)
        raise NonFiniteWeightsError(
            f"iteration {iteration}: {where} after the optimizer's update. The weights before it are overwritten, so "
            "no --nan-policy can go on from here; the iteration does not count, and nothing of it is saved. Lower "
            "--lr, give --adam-eps more than 0 (or with --fp16 use --bf16, whose range is larger), and start again "
            "from the last checkpoint"
        )


def _find_weight(engine: Engine, ps: ParallelState) -> str:
    """The first parameter of the first rank that has one that is not finite. Communicates over control."""
    buffer, mine = engine.model.buffer, None
    for name in buffer.names:
        main, dtype = buffer.main_weight_part(name), buffer.weight(name).dtype
        if not all_finite([main.to(dtype)]):  # sync: a failed step
            mine = f"the weight of {name} is {_what_is_wrong(main) or f'larger than {dtype} can hold'}"
            break
    return _first_told(mine, ps) or "some weight was not finite"


def first_nonfinite(pieces: Sequence[LocalPiece], ps: ParallelState | None) -> str | None:
    """Of what is about to be saved, or was loaded, the first tensor that is not finite, what is wrong with it, and on
    which rank: the same on all ranks. Communicates over control."""
    mine = None
    if not all_finite(piece.tensor for piece in pieces):  # sync: before a save, after a load
        mine = next(f"{one.name} is {wrong}" for one in pieces if (wrong := _what_is_wrong(one.tensor)))
    return _first_told(mine, ps)


def _first_told(mine: str | None, ps: ParallelState | None) -> str | None:
    told = gather_json(mine, ps)
    return next((f"{one} on rank {rank}" for rank, one in enumerate(told) if one is not None), None)


def _what_is_wrong(tensor: Tensor) -> str | None:
    """NaN, infinite, or None where all is finite."""
    if all_finite([tensor]):  # sync: before a save, after a load, or a failed step
        return None
    return "NaN" if bool(tensor.isnan().any()) else "infinite"  # sync: as above
