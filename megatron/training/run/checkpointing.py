"""What the trainer saves and loads, by its flags, with Megatron's log lines.

    checkpointer = Checkpointer(ps, config.checkpoint, log=print_rank_0)
    restored = checkpointer.load(model_pieces, optimizer_pieces, config=config.flat())
    ...
    checkpointer.save(iteration, model_pieces, optimizer_pieces, common)  # common["config"] = config.flat()
    checkpointer.maybe_finalize()                                            # once a step (--async-save)
    checkpointer.maybe_finalize(blocking=True)                               # before leaving

Weights are named `model.<parameter>`, optimizer state `optimizer.<...>`; everything else is JSON in the
manifest: `common` (iteration, consumed samples, scheduler, scaler, configuration) and, per rank, its random generators.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import __version__ as torch_version

from megatron.core.dist_checkpointing import catalog
from megatron.core.dist_checkpointing.agree import step
from megatron.core.dist_checkpointing.catalog import Found
from megatron.core.dist_checkpointing.files import CheckpointError
from megatron.core.dist_checkpointing.loading import find, load_pieces
from megatron.core.dist_checkpointing.pieces import PlanCache
from megatron.core.dist_checkpointing.saving import (
    AsyncSaver,
    Guard,
    Log,
    SaveOptions,
    no_guard,
    no_log,
    save,
)
from megatron.core.dist_checkpointing.state import LocalPiece
from megatron.core.schema import Place
from megatron.core.transport.parallel_state import ParallelState
from megatron.core.words import counted, first_of
from megatron.interchange.foreign_checkpoint import opener
from megatron.training.config.saved_config import (
    MODEL_PREFIX,
    OPTIMIZER_PREFIX,
    SAME_MODEL,
    SCHEMAS,
    other_model,
    to_be_loaded,
    whole_config,
)
from megatron.training.config.training_config import CheckpointConfig
from megatron.training.guard.weight_check import NonFiniteWeightsError, first_nonfinite
from megatron.training.report import metrics
from megatron.training.run.load_flags import check_holds_state
from megatron.training.run.rng_state import check_rng_state, rng_state, set_rng_state

__all__ = ["CheckpointError", "Checkpointer", "Restored", "load_for_inference"]


@dataclasses.dataclass(frozen=True)
class Restored:
    """What a load brought. common: the saved one. resumed: False with --finetune: only weights were loaded, the run
    starts at iteration 0 and nothing in `common` applies. optimizer: the optimizer's tensors were loaded, so its JSON
    state and the schedule in `common` apply too."""

    directory: Path
    iteration: int
    common: Mapping[str, Any]
    resumed: bool
    optimizer: bool


CheckState = Callable[[Found, bool], None]


class Checkpointer:
    """Saves and loads for one run. `log` gets rank 0's lines; calls communicate over the whole world. saved: told of
    each checkpoint once it is one: its iteration, its directory.

    guard: called on rank 0 before it changes anything in --save, see `save.save`.
    """

    def __init__(
        self,
        ps: ParallelState,
        config: CheckpointConfig,
        *,
        log: Log = no_log,
        guard: Guard = no_guard,
        saved: Callable[[int, Path], None] = lambda iteration, directory: None,
    ) -> None:
        self._ps, self._config, self._log, self._guard, self._tell = ps, config, log, guard, saved
        self._say = log if ps.rank == 0 else no_log
        self._cache, self._async = PlanCache(), AsyncSaver(log, guard)
        # Iterations in --save that are this run's; None: all, until `load`.
        self._owned: set[int] | None = None
        self._place = metrics.PLACE.format(
            tp=ps.tp_rank + 1, tp_size=ps.tp_size, pp=ps.pp_rank + 1, pp_size=ps.pp_size
        )

    def save(
        self,
        iteration: int,
        model_pieces: Sequence[LocalPiece],
        optimizer_pieces: Sequence[LocalPiece],
        common: Mapping[str, Any],
        *,
        wait: bool = False,
    ) -> Path | None:
        """Save to `--save`; the directory once it is a checkpoint, None while it is written in the background.

        common: JSON that all ranks share; `consumed_train_samples` and a hash of `config` also become
        fields of the manifest itself. wait: finish before returning whatever `--async-save` says (the last
        save of a run). Raises CheckpointError on all ranks together, and NonFiniteWeightsError where a tensor is not
        finite: a checkpoint of it would be the newest, and of no use.
        """
        flags, root = self._config, self._config.save
        assert root is not None, "save without --save"
        pieces = list(model_pieces) + ([] if flags.no_save_optim else list(optimizer_pieces))
        if (wrong := first_nonfinite(pieces, self._ps)) is not None:
            raise NonFiniteWeightsError(
                f"iteration {iteration}: {wrong}: no checkpoint of it is written to {root}. Lower --lr and start again "
                "from the last checkpoint; if no step was taken, look at --init-method-std and at --load"
            )
        per_rank = {} if flags.no_save_rng else {"rng": rng_state(self._ps.device)}
        self._say(metrics.SAVING.format(iteration=iteration, directory=root, format="torch_dist"))
        content = root, iteration, pieces, common, per_rank, self._ps
        options: SaveOptions = {"retain_interval": flags.save_retain_interval, "owned": self._owned}
        options |= {"cache": self._cache, "log": self._log, "guard": self._guard}
        if not flags.async_save:
            return self._saved(save(*content, **options))
        self._saved(self._async.save(*content, **options))  # an earlier one, which had to be waited for
        self._say(f"scheduled an async checkpoint save at iteration {iteration:7d} to {root}")
        return self.maybe_finalize(blocking=True) if wait else None

    def maybe_finalize(self, blocking: bool = False) -> Path | None:
        """Commit a background save that all ranks have written; its directory if that happened now.

        Call it once a step at the same place on every rank, and with `blocking` before leaving.
        """
        return self._saved(self._async.maybe_finalize(blocking))

    @property
    def copied_bytes(self) -> int:
        """What --async-save keeps of this rank in host memory, from the first save on."""
        return self._async.copied_bytes

    def load(
        self,
        model_pieces: Sequence[LocalPiece],
        optimizer_pieces: Sequence[LocalPiece],
        *,
        config: Mapping[str, Any] | None = None,
        check_state: CheckState | None = None,
    ) -> Restored | None:
        """Load from `--load` into the pieces, and set the random generators; None: start from scratch.

        config: this run's flat configuration, compared with the checkpoint's where it decides what the
        weights mean. check_state(found, with_optimizer): refuses a `common` that the caller cannot go on from. Raises
        CheckpointError on all ranks together, before any tensor is touched, unless what was saved is not finite.
        """
        flags, config = self._config, config or {}
        choice = self._choose(config)
        if flags.load is None:
            return None
        if (found := choice.found) is None:
            why = "; ".join(choice.notes)
            if (flag := flags.needs_checkpoint) is not None:
                raise CheckpointError(catalog.nothing_for(flag, why))
            self._say(f"{why}; starting from scratch")
            return None
        for note in choice.notes:
            self._say(note)
        with_optimizer = not (flags.finetune or flags.no_load_optim)
        # Others wrote it: no generators of ours.
        imported = not found.manifest.per_rank or "imported" in found.manifest.common
        with_rng = not (imported or flags.finetune or flags.no_load_rng)
        check_holds_state(found, flags)
        self._compare_settings(found, config)
        if with_rng:
            self._each_rng(found, check_rng_state)
        if check_state is not None and not flags.finetune:
            check_state(found, with_optimizer)
        self._say(f" loading checkpoint from {flags.load} at iteration {found.iteration}")
        pieces = list(model_pieces) + (list(optimizer_pieces) if with_optimizer else [])
        prefixes = (MODEL_PREFIX, OPTIMIZER_PREFIX) if with_optimizer else (MODEL_PREFIX,)
        load_pieces(found, pieces, self._ps, prefixes=prefixes, convert=not with_optimizer)
        _refuse_nonfinite(found, pieces, self._ps)
        if with_rng:
            there, here = len(found.manifest.per_rank), self._ps.world_size
            if there != here:
                self._say(
                    f"random generators: the checkpoint has those of {counted(there, 'rank')}, this has {here}: ranks "
                    "without one keep fresh seeds"
                )
            self._each_rng(found, lambda state, place: set_rng_state(state, self._ps.device, place))
        if (theirs := found.manifest.torch_version) not in ("", torch_version):
            self._say(
                f"the checkpoint was written with torch {theirs}, this is {torch_version}: numbers "
                "may differ in the last bits"
            )
        iteration = 0 if flags.finetune else found.iteration
        self._say(metrics.LOADED.format(iteration=iteration, directory=flags.load, place=self._place))
        return Restored(found.directory, iteration, found.manifest.common, not flags.finetune, with_optimizer)

    def _choose(self, config: Mapping[str, Any]) -> catalog.LoadChoice:
        """What --load has, of any format that is read; and which of --save are this run's. Communicates."""
        flags, choice = self._config, catalog.LoadChoice(None, ())
        if flags.load is not None:
            settings = {**config, **dataclasses.asdict(flags)}
            open_other = opener(settings, rows=config.get("padded_vocab_size"))
            choice = find(flags.load, self._ps, flags.ckpt_step, open_other)
        with step() as claimed:
            if self._ps.rank == 0:  # who commits
                self._own(choice.found)
        claimed.gather(self._ps)
        return choice

    def _compare_settings(self, found: Found, config: Mapping[str, Any]) -> None:
        """Raises CheckpointError where settings make another model of the weights; with --finetune a line says so."""
        if not (differing := other_model(found, config)):
            return
        if self._config.finetune:
            self._say(f"WARNING: --finetune goes on from weights of another model: {differing}")
            return
        raise CheckpointError(f"{found.described_in}: saved from another model: {differing}: {SAME_MODEL}")

    def _each_rng(self, found: Found, use: Callable[[Any, Place], None]) -> None:
        """use(state, its place in the file): of the generators that the checkpoint has of this rank, if any. Raises
        CheckpointError on all ranks together."""
        saved, rank, place = found.manifest.per_rank, self._ps.rank, found.place("per_rank")
        for of, own in enumerate(saved[: self._ps.world_size]):
            if not isinstance(own, dict) or "rng" not in own:
                raise CheckpointError(
                    f"{place.path}: field 'per_rank[{of}]': no random generator state of rank {of} (saved with "
                    "--no-save-rng?): load with --no-load-rng"
                )
        with step() as used:
            if rank < len(saved):
                use(saved[rank]["rng"], place[rank].at("rng"))
        used.gather(self._ps)

    def _own(self, loaded: Found | None) -> None:
        """Which checkpoints in --save are this run's: [Note: what a save may replace] in commit."""
        flags = self._config
        if flags.save is None:
            return
        same_folder = os.path.realpath(flags.save) == os.path.realpath(flags.load or "")
        goes_on = loaded is not None and not flags.finetune and same_folder
        if goes_on and flags.ckpt_step is not None:
            self._owned = None
            return
        there = sorted(catalog.candidates(catalog.list_entries(Path(flags.save))))
        last = loaded.iteration if loaded is not None and goes_on else -1
        self._owned = {iteration for iteration in there if iteration <= last}
        if others := [str(iteration) for iteration in there if iteration > last]:
            self._say(
                f"WARNING: {flags.save} has checkpoints that this run does not go on from (iterations "
                f"{first_of(others)}): they are never removed, and where this run saves the same iteration they are "
                "put aside as iter_*.kept-*"
            )

    def _saved(self, directory: Path | None) -> Path | None:
        """directory: None where nothing was committed now."""
        if directory is not None:
            iteration = int(directory.name.removeprefix("iter_"))
            if self._owned is not None:
                self._owned.add(iteration)
            save, place = self._config.save, self._place
            self._say(metrics.SAVED.format(iteration=iteration, directory=save, place=place))
            self._tell(iteration, directory)
        return directory


def _refuse_nonfinite(found: Found, pieces: Sequence[LocalPiece], ps: ParallelState | None = None) -> None:
    """Nothing can come of weights that had gone wrong: `save` refuses them, earlier versions did not."""
    if (wrong := first_nonfinite(pieces, ps)) is not None:
        more = ", or leave its optimizer with --no-load-optim" if wrong.startswith(OPTIMIZER_PREFIX) else ""
        raise CheckpointError(
            f"{found.directory}: {wrong}: the run that saved it had failed, or this run's precision cannot hold it: "
            f"load an earlier one with --ckpt-step{more}"
        )


def load_for_inference(
    load_dir: str, ckpt_step: int | None = None, max_position_embeddings: int | None = None
) -> tuple[dict[str, Any], Callable[..., None]]:
    """The flat configuration of a model that a run can load, of any format, and a function that fills a model's pieces,
    (pieces, ps=None), without an optimizer. Weights are converted into the pieces' dtypes. With ps it communicates over
    the world, and the pieces of all ranks are the whole model. max_position_embeddings: as many as are used of a
    Hugging Face model, which may have more than its attention window spans.

    Raises CheckpointError when the folder holds none, or what cannot be read.
    """
    used = {"hidden_dropout": 0.0, "max_position_embeddings": max_position_embeddings}
    choice = to_be_loaded({"load": load_dir, "ckpt_step": ckpt_step, "finetune": True, **used})
    if (found := choice.found) is None:
        raise CheckpointError("; ".join(choice.notes))

    def load(pieces: Sequence[LocalPiece], ps: ParallelState | None = None) -> None:
        load_pieces(found, pieces, ps, prefixes=(MODEL_PREFIX,), convert=True)
        _refuse_nonfinite(found, pieces, ps)

    config = whole_config(found)
    if unknown := sorted(config.keys() - SCHEMAS.keys()):
        place = found.place("common.config")
        place.fail("settings of this version", found_words=f"others: {', '.join(map(ascii, unknown))}")
    if max_position_embeddings not in (None, positions := config.get("max_position_embeddings")):
        found.place("common.config.max_position_embeddings").fail(
            f"{max_position_embeddings} as given", positions
        )
    return config, load
