"""The trainer's checkpoints by its flags."""

import math
import random
from pathlib import Path

import pytest
import torch

from megatron.core.dist_checkpointing.catalog import choose, config_of
from megatron.core.dist_checkpointing.files import CheckpointError
from megatron.core.dist_checkpointing.saving import save
from megatron.core.transport.parallel_state import single_process
from megatron.training.config.training_config import CheckpointConfig
from megatron.training.guard.weight_check import NonFiniteWeightsError
from megatron.training.run.checkpointing import Checkpointer, load_for_inference
from megatron.training.run.rng_state import rng_state
from tests.harness.pieces import FlatShard, flat_shards, whole_tensors
from tests.harness.ranks import run_ranks

CONFIG = {"num_layers": 2, "hidden_size": 8, "lr": 0.1}
COMMON = {"consumed_train_samples": 64, "config": CONFIG, "opt_param_scheduler": {"num_steps": 64}}


def model(value=0.0):
    return {"decoder.weight": torch.full((4, 3), value), "decoder.bias": torch.full((3,), value)}


def optimizer(value=0.0):
    return {"decoder.weight.exp_avg": torch.full((4, 3), value)}


class Run:
    """Model and optimizer of one run, with a checkpointer and the lines it logged."""

    def __init__(self, value=0.0, ps=None, **flags):
        self.lines, self.saved = [], []
        self.model, self.optimizer = model(value), optimizer(value)
        self.checkpointer = Checkpointer(
            ps or single_process(),
            CheckpointConfig(**flags),
            log=self.lines.append,
            saved=lambda iteration, directory: self.saved.append((iteration, directory.name)),
        )

    @property
    def pieces(self):
        return whole_tensors(self.model, "model."), whole_tensors(self.optimizer, "optimizer.")

    def save(self, iteration, **kwargs):
        return self.checkpointer.save(iteration, *self.pieces, COMMON, **kwargs)

    def load(self, config=CONFIG):
        return self.checkpointer.load(*self.pieces, config=config)

    def values(self):
        return {float(t.unique()) for t in self.model.values()}, {
            float(t.unique()) for t in self.optimizer.values()
        }


@pytest.fixture
def root(tmp_path):
    Run(5.0, save=str(tmp_path)).save(10)
    return str(tmp_path)


def test_save_and_load_with_megatrons_lines(tmp_path):
    root = str(tmp_path)
    run = Run(5.0, save=root)
    torch.manual_seed(3)
    random.seed(3)
    assert run.save(10) == tmp_path / "iter_0000010"
    expected = float(torch.rand(())), random.random()
    assert run.lines == [
        f"saving checkpoint at iteration      10 to {root} in torch_dist format",
        f"  successfully saved checkpoint from iteration      10 to {root} [ t 1/1, p 1/1 ]",
    ]
    resumed = Run(load=root)
    restored = resumed.load()
    assert (restored.iteration, restored.resumed, restored.optimizer) == (10, True, True)
    assert restored.common == COMMON
    assert resumed.values() == ({5.0}, {5.0})
    assert (float(torch.rand(())), random.random()) == expected
    assert resumed.lines == [
        f" loading checkpoint from {root} at iteration 10",
        f"  successfully loaded checkpoint from {root} [ t 1/1, p 1/1 ] at iteration 10",
    ]


def test_finetune_loads_weights_only(root):
    torch.manual_seed(1)
    state = torch.get_rng_state()
    run = Run(load=root, finetune=True)
    restored = run.load()
    assert (restored.iteration, restored.resumed, restored.optimizer) == (0, False, False)
    assert run.values() == ({5.0}, {0.0})
    assert torch.equal(torch.get_rng_state(), state)


def test_no_load_optim_and_no_load_rng(root):
    state = torch.get_rng_state()
    run = Run(load=root, no_load_optim=True, no_load_rng=True)
    restored = run.load()
    assert (restored.iteration, restored.resumed, restored.optimizer) == (10, True, False)
    assert run.values() == ({5.0}, {0.0})
    assert torch.equal(torch.get_rng_state(), state)


def test_no_save_optim_needs_no_load_optim(tmp_path):
    root = str(tmp_path)
    Run(5.0, save=root, no_save_optim=True).save(10)
    with pytest.raises(CheckpointError, match=r"--no-load-optim or --finetune"):
        Run(load=root).load()
    run = Run(load=root, no_load_optim=True)
    run.load()
    assert run.values() == ({5.0}, {0.0})


def test_no_save_rng_needs_no_load_rng(tmp_path):
    root = str(tmp_path)
    Run(5.0, save=root, no_save_rng=True).save(10)
    with pytest.raises(CheckpointError, match=r"manifest\.json.*--no-load-rng"):
        Run(load=root).load()
    assert Run(load=root, no_load_rng=True).load().iteration == 10


def test_without_load_nothing_happens(root):
    run = Run()
    assert run.load() is None
    assert run.lines == []


def test_nothing_there_starts_from_scratch_unless_forbidden(tmp_path):
    run = Run(load=str(tmp_path))
    assert run.load() is None
    assert "starting from scratch" in run.lines[0]
    with pytest.raises(CheckpointError, match="--exit-on-missing-checkpoint"):
        Run(load=str(tmp_path), exit_on_missing_checkpoint=True).load()


def test_ckpt_step(root):
    Run(6.0, save=root).save(20)
    run = Run(load=root, ckpt_step=10)
    assert run.load().iteration == 10
    assert run.values() == ({5.0}, {5.0})
    with pytest.raises(CheckpointError, match="--ckpt-step 15"):
        Run(load=root, ckpt_step=15).load()


def test_another_model_is_refused_by_its_flags_before_its_shapes(root):
    run = Run(load=root)
    with pytest.raises(
        CheckpointError, match=r"hidden_size: checkpoint 8, this run 16.*--use-checkpoint-args"
    ):
        run.load(config=CONFIG | {"hidden_size": 16, "lr": 0.2})
    assert run.values() == ({0.0}, {0.0})
    assert run.load(config=CONFIG | {"lr": 0.2}).iteration == 10


def test_retention_by_flag(root, tmp_path):
    run = Run(1.0, save=root, save_retain_interval=100)
    for iteration in (20, 30, 40):
        run.save(iteration)
    assert sorted(p.name for p in tmp_path.glob("iter_*")) == ["iter_0000030", "iter_0000040"]


def test_async_save_by_flag(tmp_path):
    root = str(tmp_path)
    run = Run(5.0, save=root, async_save=True)
    assert run.save(10) is None
    assert run.checkpointer._async.in_flight == 10
    assert run.checkpointer.maybe_finalize(blocking=True) == tmp_path / "iter_0000010"
    assert "scheduled an async checkpoint save" in run.lines[1]
    assert any(line.endswith(f"from iteration      10 to {root} [ t 1/1, p 1/1 ]") for line in run.lines)
    assert run.save(20, wait=True) == tmp_path / "iter_0000020"
    run.save(30)
    run.save(40)  # waits for 30, and says that it is saved
    assert any("from iteration      30 to" in line for line in run.lines)
    run.checkpointer.maybe_finalize(blocking=True)
    assert run.saved == [(number, f"iter_00000{number}") for number in (10, 20, 30, 40)]
    loaded = Run(load=root)
    assert loaded.load().iteration == 40
    assert loaded.values() == ({5.0}, {5.0})


def test_for_inference(root):
    config, load = load_for_inference(root)
    assert config == CONFIG == config_of(choose(Path(root)).found)
    weights = model()
    load(whole_tensors(weights, "model."))
    assert all(tensor.eq(5).all() for tensor in weights.values())


def test_for_inference_without_a_checkpoint(tmp_path):
    with pytest.raises(CheckpointError, match="no checkpoint"):
        load_for_inference(str(tmp_path))


def save_sharded(ctx, root):
    torch.manual_seed(100 + ctx.rank)
    checkpointer = Checkpointer(ctx.ps, CheckpointConfig(save=root))
    moments = torch.arange(12.0)
    cut = [0, 5, 12]
    start, end = cut[ctx.rank], cut[ctx.rank + 1]
    shard = FlatShard("optimizer.w.exp_avg", (4, 3), start, end, moments[start:end].clone())
    checkpointer.save(3, whole_tensors(model(2.0), "model."), flat_shards([shard]), COMMON)
    return float(torch.rand(()))


def load_on(ctx, root):
    torch.manual_seed(900 + ctx.rank)
    fresh = torch.get_rng_state()
    lines = []
    checkpointer = Checkpointer(ctx.ps, CheckpointConfig(load=root), log=lines.append)
    moments = torch.zeros(4, 3)
    weights = model()
    checkpointer.load(
        whole_tensors(weights, "model."), whole_tensors({"w.exp_avg": moments}, "optimizer."), config=CONFIG
    )
    assert torch.equal(moments, torch.arange(12.0).view(4, 3))
    is_fresh = torch.equal(torch.get_rng_state(), fresh)
    return is_fresh, float(torch.rand(())), lines


def test_another_number_of_ranks(tmp_path):
    """Moments saved as flat shards of two ranks load whole on three; ranks 0 and 1 go on drawing."""
    drawn = run_ranks(save_sharded, 2, str(tmp_path))
    results = run_ranks(load_on, 3, str(tmp_path))
    assert [fresh for fresh, _, _ in results] == [False, False, True]
    assert [number for _, number, _ in results[:2]] == drawn
    assert any("ranks without one keep fresh seeds" in line for line in results[0][2])
    assert results[1][2] == results[2][2] == []


def spoiled(root, name, value):
    """A checkpoint as versions wrote them that did not look: `name` of a whole one has one bad element."""
    run = Run(5.0, save=root)
    pieces = [piece for held in run.pieces for piece in held]
    next(piece for piece in pieces if piece.name == name).tensor.view(-1)[-1] = value
    save(root, 10, pieces, COMMON, {"rng": rng_state(single_process().device)})


@pytest.mark.parametrize("value", [math.nan, -math.inf])
def test_what_is_not_finite_is_not_loaded(tmp_path, value):
    root, what = str(tmp_path), "NaN" if math.isnan(value) else "infinite"
    spoiled(root, "optimizer.decoder.weight.exp_avg", value)
    expected = rf"iter_0000010: optimizer\.decoder\.weight\.exp_avg is {what} on rank 0: .*--no-load-optim"
    with pytest.raises(CheckpointError, match=expected):
        Run(load=root).load()
    assert Run(load=root, no_load_optim=True).load().iteration == 10
    spoiled(root, "model.decoder.weight", value)
    for flags in ({}, {"finetune": True}):
        with pytest.raises(
            CheckpointError, match=rf"model\.decoder\.weight is {what} on rank 0.*with --ckpt-step"
        ):
            Run(load=root, **flags).load()
    with pytest.raises(CheckpointError, match=rf"model\.decoder\.weight is {what}"):
        load_for_inference(root)[1](whole_tensors(model(), "model."))


def save_spoiled(ctx, root):
    weights = model(2.0)
    weights["decoder.weight"][0, 0] = math.nan if ctx.rank else 1.0
    try:
        Checkpointer(ctx.ps, CheckpointConfig(save=root)).save(
            3, whole_tensors(weights, "model."), [], COMMON
        )
    except NonFiniteWeightsError as error:
        return str(error)


def test_all_ranks_refuse_to_save_what_one_rank_has_broken(tmp_path):
    first, second = run_ranks(save_spoiled, 2, str(tmp_path))
    assert first == second
    assert first.startswith(
        f"iteration 3: model.decoder.weight is NaN on rank 1: no checkpoint of it is written to {tmp_path}."
    )
    assert list(tmp_path.iterdir()) == []
