"""The checkpoints of a run: all that an exact resume needs, put back at the start and saved on the way."""

from __future__ import annotations

import dataclasses
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron.core.dist_checkpointing.catalog import TRACKER_NAME, Found, config_of
from megatron.core.dist_checkpointing.files import CheckpointError
from megatron.core.dist_checkpointing.manifest import MANIFEST_NAME
from megatron.core.optimizer.grad_scaler import SCALER_SCHEMA, GradScalerStateError
from megatron.core.optimizer.mixed_precision import OPTIMIZER_SCHEMA, OptimizerStateError
from megatron.core.optimizer.optimizer_param_scheduler import SCHEDULER_SCHEMA
from megatron.core.pipeline_parallel.plan.planned_residency import kept_groupings
from megatron.core.pipeline_parallel.plan.residency import PlannedResidency
from megatron.core.schema import Place, Schema, array, check, integer, one_of
from megatron.training.config.microbatches import ends_at
from megatron.training.config.saved_config import OPTIMIZER_PREFIX, check_config
from megatron.training.guard.nan_policy import NAN_POLICY_SCHEMA
from megatron.training.run.checkpointing import Checkpointer, Restored
from megatron.training.run.data import first_difference
from megatron.training.run.parts import RunParts
from megatron.training.run.rng_state import check_rng_state
from megatron.training.state import TRAIN_STATE_SCHEMA

SECTIONS: Mapping[str, Schema] = {"train_state": TRAIN_STATE_SCHEMA, "nan_policy": NAN_POLICY_SCHEMA}
OPTIMIZER_SECTIONS: Mapping[str, Schema] = {
    "optimizer": OPTIMIZER_SCHEMA,
    "scheduler": SCHEDULER_SCHEMA,
    "scaler": SCALER_SCHEMA,
}
_MOST_GROUPS = 1 << 22  # of a saved plan: so many groups of microbatches are not made by any run


def _residency(content: Any) -> PlannedResidency:
    return PlannedResidency.from_json(content, _MOST_GROUPS)


def _is_residency(value: Any, place: Place) -> None:
    try:
        _residency(value)
    except ValueError as error:
        place.fail(f"the residency of a plan ({error})", value)


_GROUPINGS = array({"microbatches": integer(low=1), "plan": _is_residency}, max_items=1 << 10)


def check_state(found: Found, with_optimizer: bool) -> None:
    """Raises CheckpointError naming the field of a manifest's `common` that no run has written."""
    place, manifest, common = found.place("common"), found.manifest, found.manifest.common
    sections = {**SECTIONS, **(OPTIMIZER_SECTIONS if with_optimizer else {})}
    for name, schema in sections.items():
        check(schema, common.get(name), place.at(name))
    check(_GROUPINGS, common.get("groupings", []), place.at("groupings"))
    for name in ("iteration", "consumed_train_samples"):
        check(one_of(getattr(manifest, name)), common["train_state"][name], place.at(f"train_state.{name}"))
    for field, (least, most) in _counters(found, sections).items():
        section, _, name = field.partition(".")
        if section in sections and (value := common[section].get(name)) is not None:
            check(integer(least, most), value, place.at(field))


def _counters(found: Found, sections: Mapping[str, Schema]) -> dict[str, tuple[int, int]]:
    """The least and the most that counters of a run can be, by the others.

    An iteration is a step on its samples, or it has drawn them and taken none: for --iterations-to-skip, because the
    step was not finite, or before this optimizer began (--no-load-optim). Each iteration has a sample at least.
    """
    manifest, common = found.manifest, found.manifest.common
    iteration, samples = manifest.iteration, manifest.consumed_train_samples
    counters = {
        "train_state.skipped_train_samples": (0, samples),
        "nan_policy.consecutive_skips": (0, iteration),
        "scaler.clean_steps": (0, iteration),
    }
    if "optimizer" not in sections:
        return counters
    left_out, trained = common["train_state"]["skipped_train_samples"], common["scheduler"]["samples"]
    idle = samples - left_out - trained  # of iterations without a step of this optimizer
    without_step = max(common["nan_policy"]["consecutive_skips"], int(idle > 0)) + int(left_out > 0)
    least = int(trained > 0) if idle else iteration - left_out
    counters["scheduler.samples"] = (0, samples - left_out)
    counters["optimizer.num_steps"] = (least, min(trained, iteration - without_step))
    return counters


def check_manifest(found: Found) -> None:
    """Raises CheckpointError naming the field for which a run would refuse a checkpoint, whatever the run's flags. A
    trainer of its own may have no configuration or state of ours in it."""
    manifest = found.manifest
    if "config" in manifest.common:
        config_of(found, check_config)
    if "train_state" in manifest.common:
        check_state(found, any(name.startswith(OPTIMIZER_PREFIX) for name in manifest.tensors))
    place = found.place("per_rank")
    for rank, own in enumerate(manifest.per_rank):
        if isinstance(own, dict) and "rng" in own:
            check_rng_state(own["rng"], place[rank].at("rng"))


class RunCheckpoints:
    """Saves and loads the state of a run. last: directory of the newest complete checkpoint. Every method communicates
    over the world: all ranks call it together."""

    def __init__(self, parts: RunParts) -> None:
        self._parts, self._session, self._engine = parts, parts.session, parts.engine
        session, self._flags = parts.session, parts.session.config.checkpoint
        log, guard = self._log, session.folder.check
        self._checkpointer = Checkpointer(session.ps, self._flags, log=log, guard=guard, saved=self._saved)
        self._saved_data: Any = None  # `GPTDataset.description` of the checkpoint that was loaded
        self.last: str | None = None
        self._began_s: dict[int, float] = {}  # iteration -> when its save began
        self._converts = self._flags.ckpt_convert_format is not None  # without data, and nothing to report

    def _log(self, text: str) -> None:
        """On a terminal without the place in the grid, which is rank 0's in every line, and names of files."""
        told = text.partition(" [ t ")[0].strip().removesuffix(" in torch_dist format")
        brief = re.sub("iteration +", "iteration ", told)
        self._session.print_rank_0(text, brief=brief.replace(f": no {TRACKER_NAME}, no iter_*", ""))

    # --- at the start

    def load(self) -> None:
        """Put back what --load names, if anything. Raises what `Checkpointer.load` does."""
        engine, config = self._engine, self._session.config.flat()
        with self._session.watchdog.phase("load"), engine.model.buffer.resting_weights():
            pieces = engine.model_pieces(), engine.optimizer.pieces()
            restored = self._checkpointer.load(*pieces, config=config, check_state=check_state)
            if restored is not None and not restored.optimizer:
                engine.model.buffer.copy_weights_to_main()
        if restored is None:
            return
        engine.model.weights_changed()
        if restored.resumed:
            self._resume(restored)

    def _resume(self, restored: Restored) -> None:
        common, parts, tell = restored.common, self._parts, self._session.print_rank_0
        parts.state.load_state(common["train_state"])
        parts.policy.load_state(common["nan_policy"])
        for name in OPTIMIZER_SECTIONS if restored.optimizer else ():
            try:
                told = getattr(self._engine, name).load_state(common[name])
            except (CheckpointError, OptimizerStateError, GradScalerStateError) as error:
                path = restored.directory / MANIFEST_NAME
                raise CheckpointError(f"{path}: field 'common.{name}': {error}") from None
            if told is not None:
                tell(told)
        saved = {one["microbatches"]: _residency(one["plan"]) for one in common.get("groupings", ())}
        taken, lines = kept_groupings(parts.pipeline.spec, saved)
        parts.pipeline.planner.keep_groupings(taken)
        tell(*lines)
        self._saved_data = common.get("data")
        self.last = str(restored.directory)

    def compare_data(self) -> None:
        """Say so when a resumed run would not see the samples that the saved one would have seen."""
        saved, here = self._saved_data, self._parts.data.description
        difference = None if saved is None or here is None else first_difference(saved, here)
        if difference is not None:
            self._session.print_rank_0(
                f"WARNING: the training data is not the checkpoint's ({difference}): from sample "
                f"{self._parts.state.consumed_train_samples} on this run sees other samples than the saved run would "
                "have, perhaps some of them again"
            )

    # --- between iterations

    def is_due(self, iteration: int, *, last: bool = False) -> bool:
        """Whether the run saves after this iteration. last: the run ends there."""
        return self._flags.save is not None and (last or ends_at(iteration, self._flags.save_interval))

    def save(self, *, wait: bool = True) -> None:
        """Save everything that an exact resume needs. wait: until it is committed, also with --async-save."""
        session, engine, state = self._session, self._engine, self._parts.state
        common = {
            "iteration": state.iteration,
            "consumed_train_samples": state.consumed_train_samples,
            "train_state": state.state(),
            **{name: getattr(engine, name).state() for name in OPTIMIZER_SECTIONS},
            "nan_policy": self._parts.policy.state(),
            "config": dataclasses.replace(
                session.config, ddp=engine.model.config
            ).flat(),  # with what was chosen
            "data": self._saved_data if self._converts else self._parts.data.description,
        }
        if residencies := self._parts.pipeline.planner.ran:
            common["groupings"] = [
                {"microbatches": size, "plan": one.as_json()} for size, one in sorted(residencies.items())
            ]
        timer = session.timers("save-checkpoint", log_level=1)
        self._began_s[state.iteration] = time.monotonic()
        with session.watchdog.phase("save"), timer, engine.model.buffer.rounded_weights():
            pieces = engine.model_pieces(), engine.optimizer.pieces()
            self._checkpointer.save(state.iteration, *pieces, common, wait=wait)
        if session.device.kind == "cpu":  # whose memory is the host's
            tracker = engine.memory_tracker
            tracker.hold("saved", "", self._checkpointer.copied_bytes - tracker.live("saved"))

    def finish(self, *, blocking: bool = False) -> None:
        """Commit an asynchronous save whose files are written. blocking: wait for that."""
        self._checkpointer.maybe_finalize(blocking=blocking)

    def _saved(self, iteration: int, directory: Path) -> None:
        self.last = str(directory)
        seconds = time.monotonic() - self._began_s.pop(iteration)
        if not self._converts:
            self._parts.reporter.saved(iteration, self.last, seconds)
