"""A sharded module's state as `state_dict()` of the plain module has it: all names of tied weights, and buffers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from megatron.core.distributed.custom_fsdp.fully_sharded_data_parallel import FullyShardedDataParallel
from megatron.core.module import ModelError


@torch.no_grad()
def whole_state(module: nn.Module, engine: FullyShardedDataParallel) -> dict[str, Any]:
    """What `module.state_dict()` was before it was sharded, on the host, on every rank: weights whole, aliases of tied
    ones the same tensor, this rank's own buffers. Communicates over dp_gather, unit by unit."""
    engine.settle_weights()
    whole: dict[str, Tensor] = {}
    for unit in engine.units:
        engine.wait(0, unit.index)
        whole |= {name: engine.buffer.weight(name).detach().cpu().clone() for name in unit.names}
        engine.weights_read(unit.index)
    own = _parameter_names(module)
    return {
        name: whole[own[name]] if name in own else _copied(value) for name, value in _state(module).items()
    }


@torch.no_grad()
def load_whole_state(module: nn.Module, engine: FullyShardedDataParallel, state: Mapping[str, Any]) -> None:
    """Take a plain module's `state_dict()`, the same weights on every rank. Of a tied weight one name is enough.

    Raises ModelError where names or shapes differ, or where a tied weight's names have different values.
    """
    buffer, own, here = engine.buffer, _parameter_names(module), _state(module)
    given = {own[name] for name in own if name in state}
    wrong = {name for name in here if name not in state and own.get(name) not in given} | (
        state.keys() - here.keys()
    )
    shapes = {
        name: buffer.param_meta[own[name]].local_shape if name in own else _shape(here[name]) for name in here
    }
    wrong |= {name for name in here.keys() & state.keys() if shapes[name] != _shape(state[name])}
    if wrong:
        raise ModelError(f"weights that are missing, unknown or of another shape: {sorted(wrong)}")
    taken: dict[str, str] = {}  # parameter -> the first of its names in `state`
    for name in state:
        if name in own and taken.setdefault(own[name], name) != name:
            first = taken[own[name]]
            if not torch.equal(state[first].cpu(), state[name].cpu()):
                raise ModelError(
                    f"{first!r} and {name!r} are one weight here, and have different values: give one of them"
                )
    for parameter, name in taken.items():
        buffer.write_weight(parameter, state[name])
    module.load_state_dict({name: value for name, value in state.items() if name not in own}, strict=False)


def _state(module: nn.Module) -> dict[str, Any]:
    return module.state_dict(keep_vars=True)


def _parameter_names(module: nn.Module) -> dict[str, str]:
    """Every name of every parameter -> its first."""
    first = {id(parameter): name for name, parameter in module.named_parameters()}
    return {name: first[id(parameter)] for name, parameter in module.named_parameters(remove_duplicate=False)}


def _copied(value: Any) -> Any:
    return value.detach().cpu().clone() if isinstance(value, Tensor) else value


def _shape(value: Any) -> tuple[int, ...] | None:
    return tuple(value.shape) if isinstance(value, Tensor) else None
