"""Where a step's numbers went wrong, and the bits by which two runs of it are compared."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from megatron.core.transport import host_data
from megatron.core.transport.parallel_state import ParallelState
from megatron.training.engine import Engine
from megatron.training.guard.nan_policy import NonFiniteSite, first_site
from megatron.training.report.step_metrics import StepMetrics, Totals


def digest(totals: Totals, engine: Engine) -> bytes:
    """Bits of the losses and of this rank's part of every reduced gradient."""
    found = hashlib.blake2b(repr(sorted(totals.losses.items())).encode())
    buffer = engine.model.buffer
    for grad in map(buffer.main_grad_part, buffer.names):  # not the buckets: their padding means nothing
        # A copy: numpy pins what it is given, and memory of cut gradients comes and goes.
        bits = grad.detach().clone().cpu().view(torch.uint8)  # sync: a failed step
        found.update(bits.numpy().data)
    return found.digest()


def find_site(numbers: StepMetrics, engine: Engine, ps: ParallelState) -> NonFiniteSite:
    """On which rank and in which parameter a step went wrong that has just been run without reducing its gradients.

    The same on all ranks. Communicates over control.
    """
    mine = _local_site(numbers, engine, ps)
    sites: list[Any] = host_data.all_gather_json(
        None if mine is None else dataclasses.asdict(mine), ps.control_group
    )
    found = first_site(None if site is None else NonFiniteSite(**site) for site in sites)
    # Finite on every rank and yet not in the sum: the sum itself overflowed.
    return found or NonFiniteSite(ps.rank, value="finite on every rank, but the sum over ranks is not")


def _local_site(numbers: StepMetrics, engine: Engine, ps: ParallelState) -> NonFiniteSite | None:
    """This rank's own, from gradients that were not reduced; None where all is finite."""
    microbatch = numbers.first_nonfinite_microbatch
    weight = next(_nonfinite_weights(engine), None)
    if weight is not None:
        return NonFiniteSite(ps.rank, microbatch, weight, bad_weight=True, pp_rank=ps.pp_rank)
    gradient = next(_nonfinite_gradients(engine), None)
    if gradient is not None or microbatch is not None:
        return NonFiniteSite(ps.rank, microbatch, gradient, pp_rank=ps.pp_rank)
    return None


def _nonfinite_weights(engine: Engine) -> Iterator[str]:
    """Parameters of which the part that this rank updates is not finite."""
    buffer = engine.model.buffer
    return (name for name in buffer.names if not _is_finite(buffer.main_weight_part(name)))


def _nonfinite_gradients(engine: Engine) -> Iterator[str]:
    """Parameters whose own gradient of this rank is not finite, after a step without reduction, in model order."""
    buffer, found = engine.model.buffer, frozenset(engine.model.nonfinite_keys())
    return (name for name in buffer.names if not found.isdisjoint(buffer.param_meta[name].grad_keys))


def _is_finite(tensor: Tensor) -> bool:
    return bool(torch.isfinite(tensor).all())  # sync: a failed step
