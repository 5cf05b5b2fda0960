"""What a run begins with, by its flags: a checkpoint, weights of others, a config.json; before torch (floor 0)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron.core.dist_checkpointing.catalog import (
    Found,
    check_loadable,
    choose,
    config_of,
    holds_any,
    holds_ours,
)
from megatron.core.dist_checkpointing.files import CheckpointError, named_errors
from megatron.interchange.foreign import Foreign
from megatron.interchange.foreign_checkpoint import heeded, opener
from megatron.interchange.hf_folder import read_config_file
from megatron.training.config.config import Config
from megatron.training.config.problems import ConfigurationError, Problem
from megatron.training.config.saved_config import (
    OPTIMIZER_PREFIX,
    SAME_MODEL,
    check_config,
    check_expressible,
    other_model,
)
from megatron.training.config.training_config import CheckpointConfig


def to_load(values: Mapping[str, Any]) -> tuple[Found | None, list[Problem]]:
    """Under --check-config: what a launch would load, and why it would end with status 3. It reads the checkpoint's
    manifest, no tensors."""
    names = {field.name for field in dataclasses.fields(CheckpointConfig)}
    checkpoint = CheckpointConfig(**{name: values[name] for name in names & values.keys()})
    try:
        found = check_start(checkpoint, values, manifest=True)
        if found is not None and checkpoint.use_checkpoint_args:
            config_of(found, check_config)
    except CheckpointError as error:
        return None, [_unloadable(error)]
    return found, []


def check_start(
    checkpoint: CheckpointConfig, settings: Mapping[str, Any], *, manifest: bool = False
) -> Found | None:
    """What a run begins with, as far as can be told without torch; None for nothing. settings: of the run. manifest:
    that of a checkpoint of ours is read too, which every rank of a launch would do at the same time.

    Raises CheckpointError where it cannot be loaded, or not with these flags.
    """
    if checkpoint.load is None:
        return None
    root = Path(checkpoint.load)
    with named_errors(root):
        found = None if holds_ours(root) else opener(settings)(root, checkpoint.ckpt_step)
    if found is not None:
        check_holds_state(found, checkpoint)
        return found
    check_loadable(checkpoint.load, needed_by=checkpoint.needs_checkpoint)
    return choose(root, checkpoint.ckpt_step).found if manifest else None


def check_holds_state(found: Found, checkpoint: CheckpointConfig) -> None:
    """Refuse a checkpoint that lacks what these flags go on from, or is of a model that we have not. Raises
    CheckpointError."""
    check_expressible(found)
    if checkpoint.finetune:
        return
    if isinstance(found, Foreign) and "train_state" not in found.manifest.common:
        raise CheckpointError(
            f"{found.described_in}: weights and no state of a run: start a new one from them with --finetune"
        )
    if not checkpoint.no_load_optim and not any(name.startswith(OPTIMIZER_PREFIX) for name in found.tensors):
        raise CheckpointError(
            f"{found.described_in}: tensors: no optimizer state (saved with --no-save-optim?): load with "
            "--no-load-optim or --finetune"
        )


def with_pretrained(values: dict[str, Any], origin: dict[str, str]) -> list[str]:
    """Where --load has nothing yet, --pretrained-checkpoint takes its place, with --finetune. Notes. Raises
    CheckpointError where --load is no folder."""
    start, load = values.get("pretrained_checkpoint"), values.get("load")
    asked = start is None or values.get("ckpt_step") is not None
    if asked or (load is not None and holds_any(Path(load))):
        return []
    values |= {"load": start, "finetune": True}
    origin |= dict.fromkeys(("load", "finetune"), origin.get("pretrained_checkpoint", "flag"))
    return [f"no checkpoint in --load {load}: weights of --pretrained-checkpoint {start}, as with --finetune"]


def with_hf_config(values: dict[str, Any], origin: dict[str, str]) -> list[str]:
    """The model's settings of --hf-config where nothing else gives them. Notes of what does. Raises
    ConfigurationError."""
    if (path := values.get("hf_config")) is None:
        return []
    try:
        model, _ = read_config_file(Path(path), heeded(values))
    except CheckpointError as error:
        fix = "name the config.json of an architecture in docs/interchange.md, or its folder"
        raise ConfigurationError(
            [Problem("hf-config", ("--hf-config",), f"--hf-config: {error}", fix)]
        ) from None
    stated = {**model.flags, "padded_vocab_size": model.vocab_size}
    notes = [
        f"--hf-config: {name} is {values[name]} as given, not {value} as in {path}"
        for name, value in stated.items()
        if values.get(name, value) != value
    ]
    values |= (taken := {name: one for name, one in stated.items() if name not in values})
    origin |= dict.fromkeys(taken, path)
    return notes


def model_problems(found: Found, config: Config) -> list[Problem]:
    """The same of a checkpoint whose weights are of another model. Of values that are missing rules tell."""
    here = {name: value for name, value in config.flat().items() if value is not None}
    try:
        differing = other_model(found, here)
    except CheckpointError as error:
        return [_unloadable(error)]
    told = f"--load: {found.directory}: saved from another model: {differing}"
    return [Problem("load", ("--load",), told, SAME_MODEL)] if differing else []


def _unloadable(error: CheckpointError) -> Problem:
    fix = "name a folder that --save has filled, or an empty one and no flag that needs a checkpoint"
    return Problem("load", ("--load",), f"--load: {error}", fix)
