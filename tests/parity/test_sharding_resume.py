"""A checkpoint of any sharding strategy and number of ranks continues under any other.

Two steps under one layout, saved and loaded by the trainer's own means, two more under another. The model's weights,
main weights and moments are those that were saved, bit for bit; in fp64 losses and weights after the further steps are
those of the unbroken run to 1e-10.
"""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
import torch

from megatron.training.config.training_config import CheckpointConfig
from megatron.training.run.checkpointing import Checkpointer
from tests.harness.layouts import NO_DROPOUT, Layout, Pieces, Run, assembled
from tests.harness.ranks import run_ranks

BEFORE, AFTER = (1, 2), (3, 4)
STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")
SHARDED = {name: ("--use-custom-fsdp", "--data-parallel-sharding-strategy", name) for name in STRATEGIES}
ZERO3 = SHARDED["optim_grads_params"]
TWO = ("--num-distributed-optimizer-instances", "2")
LAYOUTS = {
    "one rank": Layout(),
    "no_shard DP2": Layout(dp=2, more=SHARDED["no_shard"]),
    "optim DP2": Layout(dp=2, more=SHARDED["optim"]),
    "optim_grads DP2": Layout(dp=2, more=SHARDED["optim_grads"]),
    "ZeRO-3 DP2": Layout(dp=2, more=ZERO3),
    "ZeRO-3 DP4": Layout(dp=4, more=ZERO3),
    "HSDP 2x2": Layout(dp=4, more=(*ZERO3, *TWO)),
    "HFSDP 2x2": Layout(dp=4, more=(*ZERO3, *TWO, "--outer-dp-sharding-strategy", "optim")),
}
PARALLEL = {
    "distributed optimizer DP2": Layout(
        dp=2, more=("--use-distributed-optimizer", "--ddp-bucket-size", "3000")
    ),
    "TP2 ZeRO-3 DP2": Layout(tp=2, sp=True, dp=2, more=ZERO3),
    "PP2 optim DP2": Layout(pp=2, dp=2, more=(*SHARDED["optim"], "--overlap-param-gather")),
    "PP2": Layout(pp=2),
    "one rank of ZeRO-3": Layout(more=ZERO3),
}
OVER_TP = {"TP4": Layout(tp=4), "TP2 optim DP2": Layout(tp=2, dp=2, more=SHARDED["optim"])}
SMALL = ("--num-layers", "1")
UNTIED = ("--untie-embeddings-and-output-weights",)
GLOBAL_BATCH = 4


@dataclasses.dataclass
class State:
    """What one rank holds, or all of them together."""

    model: Pieces
    main_weights: Pieces
    moments: Pieces

    @classmethod
    def of(cls, run: Run) -> State:
        return cls(run.model_weights(), run.main_weights(), run.moments())


@dataclasses.dataclass
class Resumed:
    """state: when saved, or loaded. losses, weights: of the further steps, after them; nothing without."""

    state: State
    losses: list[float]
    weights: Pieces


def new_run(ctx, layout, words):
    torch.set_num_threads(1)
    return Run(ctx, layout, [*NO_DROPOUT, *words], global_batch=GLOBAL_BATCH)


def go_on(run, state, steps=AFTER):
    losses = [run.step(step)[0] for step in steps]
    return Resumed(state, losses, run.main_weights())


def save_all(ctx, layouts, words, root):
    """name -> what was saved, and the unbroken run."""
    found = {}
    for name, layout in layouts.items():
        run = new_run(ctx, layout, words)
        for step in BEFORE:
            run.step(step)
        state, engine = State.of(run), run.engine
        common = {"optimizer": engine.optimizer.state(), "config": run.config.flat()}
        checkpointer = Checkpointer(run.ps, CheckpointConfig(save=f"{root}/{name}"))
        checkpointer.save(BEFORE[-1], engine.model_pieces(), engine.optimizer.pieces(), common)
        found[name] = go_on(run, state)
    return found


def load_all(ctx, layouts, sources, continued, words, root):
    """(source, target) -> what was loaded, and how the `continued` ones went on. A target's engine is used again: each
    load overwrites all that the one before has left."""
    found = {}
    for target, layout in layouts.items():
        run = new_run(ctx, layout, words)
        for source in sources[target]:
            engine = run.engine
            checkpointer = Checkpointer(run.ps, CheckpointConfig(load=f"{root}/{source}"))
            restored = checkpointer.load(
                engine.model_pieces(), engine.optimizer.pieces(), config=run.config.flat()
            )
            assert restored is not None
            engine.model.weights_changed()
            engine.optimizer.load_state(restored.common["optimizer"])
            steps = AFTER if (source, target) in continued else ()
            found[source, target] = go_on(run, State.of(run), steps)
    return found


def by_world(names, every):
    worlds: dict[int, dict[str, Layout]] = {}
    for name in names:
        worlds.setdefault(every[name].world_size, {})[name] = every[name]
    return worlds


def joined(ranks):
    """Of all ranks: replicas have the same bits, nobody lacks an element."""
    state = State(
        *(
            assembled([getattr(rank.state, field.name) for rank in ranks])
            for field in dataclasses.fields(State)
        )
    )
    for rank in ranks:
        assert rank.losses == ranks[0].losses
    return Resumed(state, ranks[0].losses, assembled([rank.weights for rank in ranks]))


def check(pairs, words, root, *, continued=(), timeout=600):
    """pairs: (source, target). continued: those whose further steps are compared too, in fp64."""
    every = {**LAYOUTS, **PARALLEL, **OVER_TP}
    saved, loaded = {}, {}
    for world, layouts in by_world(dict.fromkeys(source for source, _ in pairs), every).items():
        ranks = run_ranks(save_all, world, layouts, words, root, timeout=timeout)
        saved |= {name: joined([rank[name] for rank in ranks]) for name in layouts}
    for world, layouts in by_world(dict.fromkeys(target for _, target in pairs), every).items():
        sources = {name: [source for source, target in pairs if target == name] for name in layouts}
        ranks = run_ranks(load_all, world, layouts, sources, continued, words, root, timeout=timeout)
        loaded |= {pair: joined([rank[pair] for rank in ranks]) for pair in ranks[0]}
    assert set(loaded) == set(pairs)
    failed = []
    for (source, target), resumed in loaded.items():
        try:
            compare(saved[source], resumed, continued=(source, target) in continued)
        except AssertionError as error:
            failed.append(f"{source} -> {target}: {error}")
    assert not failed, "\n".join(failed)
    return saved


def compare(source, resumed, *, continued):
    for field in dataclasses.fields(State):
        expected, found = getattr(source.state, field.name), getattr(resumed.state, field.name)
        assert found.keys() == expected.keys()
        for name, values in expected.items():
            assert values.dtype == found[name].dtype, name
            assert np.array_equal(found[name], values), f"{field.name}: {name} has other bits"
            assert np.any(values), f"{field.name}: {name} is zero everywhere, which proves nothing"
    if continued:
        np.testing.assert_allclose(resumed.losses, source.losses, rtol=0, atol=1e-10)
        for name, values in source.weights.items():
            difference = np.abs(resumed.weights[name] - values).max()
            assert difference < 1e-10, f"{name} after further steps: {difference}"


@pytest.mark.grid
def test_every_layout_continues_under_every_other(tmp_path):
    names = list(LAYOUTS)
    continued = list(zip(names, [*names[3:], *names[:3]], strict=True))  # the full set continues from all
    check(list(itertools.product(names, names)), (*SMALL, "--fp64"), tmp_path, continued=continued)


@pytest.mark.grid
def test_matrices_that_pipeline_stages_share(tmp_path):
    """The first and the last stage hold the tied one, and cut it at different places."""
    pairs = list(itertools.product(["PP2 optim DP2", "ZeRO-3 DP2"], repeat=2))
    check(pairs, ("--num-layers", "2", "--fp64"), tmp_path, continued=pairs)


@pytest.mark.grid
def test_a_vocabulary_that_tensor_ranks_do_not_divide(tmp_path):
    """What is saved has its 65 rows, whatever ranks had behind theirs."""
    pairs = [("TP2 optim DP2", "TP4"), ("TP2 optim DP2", "one rank"), ("TP4", "TP2 optim DP2")]
    words = (*SMALL, "--fp64", "--padded-vocab-size", "65")
    saved = check(pairs, words, tmp_path, continued=pairs)
    for of in ("TP2 optim DP2", "TP4"):
        for kind in dataclasses.fields(State):
            tables = [value for name, value in getattr(saved[of].state, kind.name).items() if "word" in name]
            assert {len(table) for table in tables} == {65}, (of, kind.name)


@pytest.mark.grid
def test_bf16_with_fp32_main_weights(tmp_path):
    pairs = list(itertools.permutations(["optim DP2", "ZeRO-3 DP2", "HFSDP 2x2"], 2))
    saved = check(pairs, (*SMALL, "--bf16", *UNTIED), tmp_path)
    kinds = {values.dtype for values in saved["ZeRO-3 DP2"].state.main_weights.values()}
    assert kinds == {np.dtype(np.float32)}
    kinds = {values.dtype for values in saved["ZeRO-3 DP2"].state.model.values()}
    assert kinds == {np.dtype(np.int16)}  # bf16's bits


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize("words", [("--fp64", *UNTIED), ("--bf16",), ()], ids=" ".join)
def test_other_parallelism_continues_and_is_continued(words, tmp_path):
    every = {**LAYOUTS, **PARALLEL}
    pairs = list(itertools.product(every, every))
    continued = pairs if "--fp64" in words else ()
    check(pairs, ("--num-layers", "2", *words), tmp_path, continued=continued, timeout=850)
