"""Checkpoints of a loop of one's own: Megatron's `save_checkpoint` and `load_checkpoint`, and `dist_checkpointing`."""

from __future__ import annotations

import atexit
import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import nn

from megatron.compat.fields import config_of
from megatron.compat.layers import ShardedStateDict
from megatron.compat.loop import DataParallelModel, MegatronOptimizer, context_of, unwrap_model
from megatron.compat.model import GPTModelOfSpec
from megatron.compat.parallel_state import current
from megatron.core.dist_checkpointing.files import CheckpointError
from megatron.core.dist_checkpointing.loading import find, load_pieces
from megatron.core.dist_checkpointing.saving import no_guard
from megatron.core.dist_checkpointing.saving import save as save_pieces
from megatron.core.dist_checkpointing.state import LocalPiece
from megatron.core.transport import host_data
from megatron.training import global_vars
from megatron.training.config.launch_env import LaunchEnv
from megatron.training.config.saved_config import WEIGHT_FIELDS
from megatron.training.guard.lease import LeaseError
from megatron.training.guard.run_folder import RunFolder, is_held
from megatron.training.guard.weight_check import NonFiniteWeightsError, first_nonfinite
from megatron.training.run.checkpointing import Checkpointer

__all__ = ["hold", "load", "load_checkpoint", "save", "save_checkpoint"]


class _LeaseHeld:
    """What this process holds a lease on. save: the folder's path without links."""

    save: str | None = None
    folder: RunFolder | None = None


def hold(save: str | None) -> None:
    """Take `pretrain`'s lease on --save, until the process ends or holds another folder. Communicates over the world.
    Raises LeaseError where another run holds it, OutputPathError."""
    path = None if save is None else os.path.realpath(save)
    if path == _LeaseHeld.save:
        return
    if _LeaseHeld.folder is not None:
        _LeaseHeld.folder.release()
    _LeaseHeld.save, _LeaseHeld.folder = None, None
    if save is None:
        return
    ps, folder = (
        current(),
        RunFolder(save, on_lost=lambda error: global_vars.print_rank_0(f"WARNING: {error}")),
    )
    claimed = folder.claim(LaunchEnv.read(), global_vars.print_rank_0) if ps.is_first_rank else None
    folder.adopt(host_data.all_gather_json(claimed, ps.control_group)[0])
    _LeaseHeld.save, _LeaseHeld.folder = path, folder
    atexit.register(folder.release)


def save_checkpoint(
    iteration: int,
    model: Sequence[Any],
    optimizer: Any,
    opt_param_scheduler: Any,
    num_floating_point_operations_so_far: float = 0,
    *_: Any,
    **__: Any,
) -> None:
    """Into `--save`, under `pretrain`'s lease: weights, optimizer, scheduler. Communicates over the world. Raises
    CheckpointError, LeaseError where another run holds the folder, NonFiniteWeightsError."""
    pieces, config = _pieces(model, optimizer), config_of(global_vars.get_args())
    common = {
        "iteration": iteration,
        "config": _settings(model),
        "steps_trained": max((context_of(one).iteration for one in model), default=0),
        "num_floating_point_operations_so_far": num_floating_point_operations_so_far,
        "scheduler": opt_param_scheduler and opt_param_scheduler.state_dict(),
        **({} if optimizer is None else optimizer.values()),
    }
    if config.checkpoint.save is None:
        raise ValueError(
            f"save_checkpoint(iteration={iteration}): no folder; give --save to initialize_megatron()"
        )
    _checkpointer(optimizer).save(iteration, *pieces, common, wait=True)


def load_checkpoint(
    model: Sequence[nn.Module], optimizer: Any, opt_param_scheduler: Any, *_: Any, **__: Any
) -> tuple[int, float]:
    """(iteration, floating point operations) of what `--load` holds, which is put back; (0, 0) where it holds nothing.
    Communicates over the world. Raises CheckpointError."""
    pieces, config = _pieces(model, optimizer), _settings(model)
    restored = _checkpointer(optimizer).load(*pieces, config=config)
    if restored is None:
        return 0, 0.0
    for one in model:
        if isinstance(one, DataParallelModel):
            one.weights_loaded(with_main_weights=bool(restored.optimizer))
    if not restored.resumed:
        return 0, 0.0
    for one in model:
        context_of(one).iteration = restored.common.get("steps_trained", restored.iteration)
    if optimizer is not None and restored.optimizer:
        optimizer.load_values(restored.common)
    if opt_param_scheduler is not None and restored.common.get("scheduler"):
        opt_param_scheduler.load_state_dict(restored.common["scheduler"])
    return restored.iteration, float(restored.common.get("num_floating_point_operations_so_far", 0))


def _checkpointer(optimizer: Any) -> Checkpointer:
    flags = config_of(global_vars.get_args()).checkpoint
    if optimizer is None:
        flags = dataclasses.replace(flags, no_load_optim=True, no_save_optim=True)
    hold(flags.save)
    guard = no_guard if _LeaseHeld.folder is None else _LeaseHeld.folder.check
    return Checkpointer(current(), flags, log=global_vars.print_rank_0, guard=guard)


def _settings(model: Sequence[Any]) -> dict[str, Any]:
    """The flat configuration, in which what decides the meaning of weights is what each `GPTModel` was made with: its
    `TransformerConfig` may say other things than the flags."""
    config = config_of(global_vars.get_args()).flat()
    for inner in map(unwrap_model, model):
        if isinstance(inner, GPTModelOfSpec):
            made_with = vars(inner.resolved_config)
            # num_query_groups is read beside group_query_attention.
            names = (*WEIGHT_FIELDS, "group_query_attention")
            config |= {name: made_with[name] for name in names if name in made_with}
    return config


def _pieces(model: Sequence[Any], optimizer: Any) -> tuple[list[LocalPiece], list[LocalPiece]]:
    if not isinstance(optimizer, MegatronOptimizer | None):
        told = f"save_checkpoint, load_checkpoint(optimizer={type(optimizer).__name__})"
        raise ValueError(f"{told}: give that of get_megatron_optimizer(), or None")
    weights = [piece for one in model for piece in one.sharded_state_dict().pieces]
    return weights, [] if optimizer is None else optimizer.inner.pieces()


def save(sharded_state_dict: Any, checkpoint_dir: str, *strategies: Any, **named: Any) -> None:
    """`dist_checkpointing.save` of a model's `sharded_state_dict()`, or of a dict of it and JSON values; any layout can
    load it. Communicates over the world. Raises CheckpointError, NonFiniteWeightsError; ValueError for other values and
    for strategies."""
    model, values = _split(sharded_state_dict, *strategies, **named)
    if (wrong := first_nonfinite(model.pieces, current())) is not None:
        raise NonFiniteWeightsError(
            f"dist_checkpointing.save: {wrong}: nothing is written to {checkpoint_dir}"
        )

    def guard() -> None:
        own = _LeaseHeld.folder
        if own is not None and os.path.realpath(checkpoint_dir) == _LeaseHeld.save:
            own.check()
        elif is_held(Path(checkpoint_dir)):
            raise LeaseError(
                f"dist_checkpointing.save(checkpoint_dir={checkpoint_dir!r}): another run holds it"
            )

    try:
        save_pieces(checkpoint_dir, 0, model.pieces, {"values": values}, {}, current(), guard=guard)
    except TypeError as error:
        raise ValueError(f"dist_checkpointing.save, of {sorted(values)}: {error}; vars(args) is") from error


def load(sharded_state_dict: Any, checkpoint_dir: str, *strategies: Any, **named: Any) -> Any:
    """`dist_checkpointing.load`, of what `save` takes: the model's tensors are filled in place, values are the saved
    ones. Communicates over the world. Raises as `save`."""
    model, _ = _split(sharded_state_dict, *strategies, **named)
    if (found := find(checkpoint_dir, current()).found) is None:
        raise CheckpointError(f"{checkpoint_dir}: no checkpoint that dist_checkpointing.save has written")
    load_pieces(found, model.pieces, current())
    if (wrong := first_nonfinite(model.pieces, current())) is not None:
        raise CheckpointError(f"dist_checkpointing.load: {found.directory}: {wrong}; load another checkpoint")
    model.loaded()
    sharded_state_dict.update(found.manifest.common.get("values", {}))
    return sharded_state_dict


def _split(given: Any, *strategies: Any, **named: Any) -> tuple[ShardedStateDict, dict[str, Any]]:
    """The model's, and what else is in the dict."""
    state = {"model": given} if isinstance(given, ShardedStateDict) else given
    named.pop("validate_access_integrity", None)  # always so
    models = [one for one in state.values() if isinstance(one, ShardedStateDict)]
    if len(models) != 1 or any((*strategies, *named.values())):
        raise ValueError(
            "dist_checkpointing: sharded_state_dict() of one model, no strategies, nothing async"
        )
    return models[0], {name: one for name, one in state.items() if one is not models[0]}
