"""Manifests with right digests and wrong content, and what a run makes of them: loaded in this process."""

from __future__ import annotations

import contextlib
import hashlib
import json
import random
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from megatron.core.dist_checkpointing.manifest import config_digest, sign
from megatron.core.transport.parallel_state import single_process
from megatron.training.guard.nan_policy import NanPolicy
from megatron.training.run.arguments import parse_config
from megatron.training.run.build import build_engine, build_gpt_model
from megatron.training.run.parts import RunParts
from megatron.training.run.rng_state import rng_state
from megatron.training.run.run_checkpoints import RunCheckpoints
from megatron.training.state import TrainState

# A checkpoint of iteration 2 that the code before this schema wrote, and the flags of its run.
SAVED_BEFORE = Path(__file__).parents[1] / "functional_tests" / "front_door" / "data" / "saved_before"
FLAGS = (
    "--num-layers 1 --hidden-size 8 --num-attention-heads 2 --seq-length 8 --max-position-embeddings 8 "
    "--micro-batch-size 1 --global-batch-size 2 --lr 1e-2 --lr-decay-style constant --weight-decay 0.1 --seed 7 "
    "--tokenizer-type NullTokenizer --vocab-size 15 --make-vocab-size-divisible-by 16 --mock-data --num-workers 0 "
    "--log-interval 1 --no-create-attention-mask-in-dataloader --eval-iters 0 --train-iters 4 --save-interval 2"
).split()
Path_ = tuple[Any, ...]


def forge(directory: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change a manifest's fields and make its digests right again."""
    path = directory / "manifest.json"
    fields = json.loads(path.read_text())
    del fields["digest"]
    digest = config_digest(fields["common"])
    change(fields)
    with contextlib.suppress(AttributeError, KeyError):  # gone, or no object any more
        now = config_digest(fields["common"])
        if fields.get("config_hash") == digest:
            fields["config_hash"] = now
    path.write_bytes(sign(fields))


def kinds(value: Any, path: Path_ = (), shape: Path_ = ()) -> dict[Path_, Path_]:
    """One path for each kind of value in a manifest: of all tensors, files and items of a list the first."""
    found = {shape: path} if path else {}
    if isinstance(value, dict):
        named = shape in (("files",), ("tensors",))
        for name in list(value)[: 1 if named else None]:
            found |= kinds(value[name], (*path, name), (*shape, "*" if named else name))
    elif isinstance(value, list) and value:
        found |= kinds(value[0], (*path, 0), (*shape, 0))
    return found


def at(fields: Any, path: Path_) -> Any:
    for step in path:
        fields = fields[step]
    return fields


class Loader:
    """Loads a folder into one model again and again, and tells what came of it."""

    def __init__(self, flags: Sequence[str]) -> None:
        torch.set_num_threads(1)
        self._ps = single_process()
        config = self._config = parse_config([*flags, "--load", "ck", "--save", "ck"]).replace(
            padded_vocab_size=16
        )
        self._engine = build_engine(config, self._ps, lambda **kw: build_gpt_model(config, self._ps, **kw))
        self.lines: list[str] = []

    def load(self, root: Path) -> dict[str, Any]:
        """All that the run would go on from. Raises what the trainer ends with."""
        config = self._config.replace(load=str(root), save=str(root))
        engine = self._engine
        session = SimpleNamespace(
            config=config,
            ps=self._ps,
            print_rank_0=lambda *lines, brief="": self.lines.extend(lines),
            folder=SimpleNamespace(check=lambda: None),
            watchdog=SimpleNamespace(phase=lambda name: contextlib.nullcontext()),
        )
        unplanned = SimpleNamespace(residency=None)
        pipeline = SimpleNamespace(
            spec=unplanned, planner=SimpleNamespace(keep_groupings=lambda groupings: None)
        )
        state, policy = TrainState.start(config), NanPolicy("abort", 3, dynamic_loss_scale=False)
        pieces = [*engine.model_pieces(), *engine.optimizer.pieces()]
        for piece in pieces:
            piece.tensor.zero_()
        with _kept_generators():
            RunCheckpoints(RunParts(session, engine, pipeline, policy, state)).load()  # type: ignore[arg-type]
            generators = rng_state(self._ps.device)
        tensors = {
            f"{piece.name}{piece.offset}": hashlib.sha256(piece.tensor.numpy().tobytes()).hexdigest()
            for piece in pieces
        }
        counters = state.state()
        del counters["num_floating_point_operations_so_far"]  # is logged, and no more
        return {
            "state": counters,
            "optimizer": engine.optimizer.state(),
            "scheduler": engine.scheduler.state(),
            "scaler": engine.scaler.state(),
            "policy": policy.state(),
            "tensors": tensors,
            "generators": generators,
        }


@contextlib.contextmanager
def _kept_generators() -> Iterator[None]:
    device = single_process().device
    before = random.getstate(), np.random.get_state(), device.rng_states()
    try:
        yield
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])
        device.set_rng_states(before[2])


def copy_of(source: Path, target: Path) -> Path:
    shutil.rmtree(target, ignore_errors=True)
    return Path(shutil.copytree(source, target))


def nested(depth: int) -> list[Any]:
    """[[[...]]]"""
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


def hostile_values(value: Any) -> Mapping[str, Any]:
    """What no run writes in the place of `value`; a value of another kind, or one out of all bounds."""
    values: dict[str, Any] = {
        "true": True,
        "null": None,
        "text": "x",
        "long text": "y" * 5000,
        "surrogate": "\ud800",
        "control": "\x1b[2J\n",
        "empty list": [],
        "empty object": {},
        "list of itself": [value],
        "nested": nested(300),
        "2**63": 1 << 63,
        "-2**70": -(1 << 70),
        "1e308": 1e308,
        "0.5": 0.5,
        "-1": -1,
    }
    if isinstance(value, float) or value is None:
        del values["0.5"], values["-1"]  # may well be
    return {
        name: forged for name, forged in values.items() if forged != value or type(forged) is not type(value)
    }
