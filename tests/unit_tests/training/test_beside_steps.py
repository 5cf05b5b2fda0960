"""What ranks hold in a save and in a load is what was planned for these, by the memory tracker and by what is read."""

import functools
import re
from types import SimpleNamespace

import pytest
import torch

from megatron.core.dist_checkpointing.chunk_reader import ChunkReader
from megatron.estimate.run_estimate import estimate_json, table_lines
from megatron.training.config.launch_env import LaunchEnv
from megatron.training.guard.nan_policy import NanPolicy
from megatron.training.run.arguments import parse_config
from megatron.training.run.build import build_engine, build_gpt_model
from megatron.training.run.describe import described
from megatron.training.run.parts import RunParts
from megatron.training.run.rehearse.comparison import full_account, parts_of
from megatron.training.run.rehearse.estimated import estimated
from megatron.training.run.run_checkpoints import RunCheckpoints
from megatron.training.state import TrainState
from tests.harness.launch_lines import SMALL
from tests.harness.layouts import session_of
from tests.harness.ranks import run_ranks

PADDING = 64 * 1024
MODEL = [
    *SMALL,
    *"--num-layers 2 --global-batch-size 4 --padded-vocab-size 386 --bf16 --async-save --save-interval 5".split(),
]
# By ranks: weights that ranks share the writing of, and weights that rest as main weights alone.
CASES = (
    (1, ""),
    (2, "--use-distributed-optimizer"),
    (2, "--use-custom-fsdp --data-parallel-sharding-strategy optim_grads_params"),
)


def config_of(folder, ranks, words=""):
    asked = [*MODEL, "--save", str(folder), "--load", str(folder), *words.split()]
    return described(parse_config(asked, env=LaunchEnv(world_size=ranks)))


def checkpoints_of(config, ps, engine, planner):
    session = session_of(config, ps)
    session.print_rank_0, session.device = lambda *_, **__: None, ps.device
    session.folder = SimpleNamespace(check=lambda: None)
    pipeline = SimpleNamespace(planner=planner, spec=planner.spec)
    parts = RunParts(session, engine, pipeline, NanPolicy("abort", 3), TrainState.start(config))
    parts.data = SimpleNamespace(description=None)
    parts.reporter = SimpleNamespace(saved=lambda *_: None)
    return RunCheckpoints(parts)


@pytest.mark.parametrize(("ranks", "words"), CASES)
def test_saves_and_loads_take_what_was_planned(ranks, words, tmp_path):
    config = config_of(tmp_path, ranks, words)

    def body(ctx):
        torch.set_num_threads(1)
        read = []
        rows = ChunkReader._rows

        def reading(*given):
            read.append(part := rows(*given))
            return part

        ChunkReader._rows = reading  # in a process of its own
        ps, planner = ctx.make_ps(dp=ranks), config.planner()
        engine = build_engine(config, ps, functools.partial(build_gpt_model, config, ps), planner)
        buffer, tracker = engine.model.buffer, engine.memory_tracker
        parts = parts_of(config, planner.spec, config.description, engine.model)
        account = full_account(config, planner, 2, 0, parts, buffer)
        checkpoints, seen = checkpoints_of(config, ps, engine, planner), {}
        for name in ("save", "load"):
            tracker.reset_peaks()
            getattr(checkpoints, name)()
            seen[name] = {"casts": tracker.peak("casts"), "saved": tracker.live("saved")}
        return account, seen, max(part.nbytes for part in read)

    for account, seen, most_read in run_ranks(body, ranks, timeout=120.0):
        save, load = account.beside["save"], account.beside["load"]
        assert {one.get("casts", 0) for one in (save, load)} == {seen[name]["casts"] for name in seen}
        assert bool(seen["save"]["casts"]) == ("params" in words)
        measured, planned = seen["save"]["saved"], save["saved"]
        slack = PADDING + (ranks > 1) * load["read"]
        assert planned - slack <= measured <= planned
        assert load["read"] / ranks <= most_read <= load["read"]
        assert account.at_rest["saved"] == account.peak.held["saved"] == planned


def test_the_estimate_shows_what_runs_between_steps(tmp_path):
    config = config_of(tmp_path, 2)
    estimate = estimated(config, config.planner())
    (rank,) = estimate.ranks
    assert set(rank.beside) == {"evaluation", "save", "load"}
    (of_rank,) = estimate_json(estimate)["ranks"]
    assert of_rank["beside"] == rank.beside
    *_, last = table_lines(estimate)
    assert re.fullmatch(r"at most in: evaluation [\d.]+ MiB, save [\d.]+ MiB, load [\d.]+ MiB", last)
    assert estimate.host_bytes == 2 * rank.peak.total
