"""The trainer's steps over every row of the sharding table: the same numbers, decisions and culprits as whole weights.

Engines, plans and optimizer are the trainer's own, made from flags; only data and loss are the tests'.
"""

from functools import partial

import pytest
import torch
from torch import nn

from megatron.core.transport import shm_transport
from megatron.training.config.launch_env import LaunchEnv
from megatron.training.guard.nan_policy import NanPolicy, NonFiniteError
from megatron.training.guard.weight_check import check_replicas
from megatron.training.run.arguments import parse_config
from megatron.training.run.build import build_engine, build_gpt_model
from megatron.training.run.data import StepBatches
from megatron.training.run.evaluate import evaluate
from megatron.training.run.pipeline import PipelineRunner
from megatron.training.run.step import StepRunner
from megatron.training.state import StepTask
from tests.harness.layouts import MODEL, NO_DROPOUT, forward_step, microbatch, session_of
from tests.harness.ranks import RanksError, run_ranks
from tests.harness.tiny_models import VOCAB
from tests.harness.validated_steps import parts_of

FSDP, STRATEGY = "--use-custom-fsdp", "--data-parallel-sharding-strategy"
ROWS = {
    "no_shard": "",
    "optim": "--use-distributed-optimizer",
    "optim, gathered late": "--use-distributed-optimizer --overlap-param-gather --overlap-grad-reduce",
    "optim by units": f"{FSDP} {STRATEGY} optim --overlap-param-gather",
    "optim_grads": f"{FSDP} {STRATEGY} optim_grads",
    "optim_grads_params": FSDP,
}


class Trainer:
    """One rank's trainer without its loop."""

    def __init__(self, ctx, words, policy="abort", num_microbatches=2, ps=None, provider=None):
        torch.set_num_threads(1)
        self.num_microbatches = num_microbatches
        batch = num_microbatches * ctx.world_size
        flags = [
            *MODEL,
            "--num-layers",
            "2",
            "--global-batch-size",
            str(batch),
            *NO_DROPOUT,
            *words.split(),
        ]
        env = LaunchEnv(world_size=ctx.world_size, rank=ctx.rank)
        self.config = parse_config([*flags, "--nan-policy", policy], env=env)
        self.ps = ps or ctx.ps
        self.engine = build_engine(
            self.config, self.ps, provider or partial(build_gpt_model, self.config, self.ps)
        )
        self.runner = PipelineRunner(
            session_of(self.config, self.ps), self.engine, forward_step, self.config.planner()
        )
        parts = parts_of(self.config, self.ps, self.engine, self.runner, NanPolicy(policy, 3))
        self.steps = StepRunner(parts)
        self.batches = StepBatches(self._microbatches(), reads=True)

    def _microbatches(self):
        step = 0
        while True:
            step += 1
            for index in range(self.num_microbatches):
                yield microbatch(step, index * self.ps.dp_size + self.ps.dp_rank)

    def step(self, iteration):
        (result,) = self.steps.step(self.batches, StepTask(iteration, self.num_microbatches))
        return result

    def run(self, count):
        results = [self.step(iteration) for iteration in range(1, count + 1)]
        return [(*result.losses["lm loss"], result.grad_norm) for result in results]

    def evaluated(self):
        batches = StepBatches(iter([microbatch(9, index) for index in range(2)]), reads=True)
        losses = evaluate(self.runner, self.ps, batches, StepTask(1, 2), 2)
        return losses["lm loss"]

    @property
    def layer(self):
        return self.engine.chunks[0].module.decoder.layers["1"]


def trained(ctx, words):
    trainer = Trainer(ctx, f"--fp64 {words}")
    before = trainer.evaluated()
    numbers = trainer.run(3)
    return before, numbers, trainer.evaluated()


@pytest.fixture(scope="module")
def whole():
    """tied -> losses and norms of whole weights."""
    untied = run_ranks(trained, 2, "--untie-embeddings-and-output-weights")[0]
    return {True: run_ranks(trained, 2, "")[0], False: untied}


@pytest.mark.grid
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("row", list(ROWS)[1:])
def test_every_row_trains_and_evaluates_alike(row, tied, whole):
    words = "" if tied else " --untie-embeddings-and-output-weights"
    expected = whole[tied]
    outcomes = run_ranks(trained, 2, ROWS[row] + words)
    for before, numbers, after in outcomes:
        assert before == pytest.approx(expected[0], rel=1e-12)
        assert after == pytest.approx(expected[2], rel=1e-12)
        for mine, other in zip(numbers, expected[1], strict=True):
            assert mine == pytest.approx(other, rel=1e-11)


def first_weights(ctx, words):
    trainer = Trainer(ctx, words)
    trainer.engine.model.settle_weights()
    buffer = trainer.engine.model.buffer
    parts = {name: (buffer.part(name, buffer.sharding.weights)) for name in buffer.names}
    return {name: (*part, buffer.weight_part(name).clone().tolist()) for name, part in parts.items()}


@pytest.mark.parametrize("row", ["no_shard", "optim", "optim_grads_params"])
def test_a_model_built_without_memory_starts_with_the_same_bits(row):
    plain = run_ranks(first_weights, 2, "--bf16")[0]
    for rank in run_ranks(first_weights, 2, f"--bf16 --init-model-with-meta-device {ROWS[row]}"):
        for name, (start, end, values) in rank.items():
            assert values == plain[name][2][start:end], name


def poisoned(ctx, words, policy):
    """On rank 1 the gradient that leaves layer 1 is NaN, the loss is not."""
    trainer = Trainer(ctx, words, policy)
    trainer.run(1)
    if ctx.rank == 1:

        def spoil(module, args, output):
            output.register_hook(lambda grad: torch.full_like(grad, float("nan")))

        trainer.layer.register_forward_hook(spoil)
    buffer = trainer.engine.model.buffer
    before = {name: buffer.main_weight_part(name).clone() for name in buffer.names}
    try:
        trainer.step(2)
    except NonFiniteError as error:
        unchanged = all(torch.equal(buffer.main_weight_part(name), before[name]) for name in buffer.names)
        return str(error), int(error.status), unchanged
    return None


@pytest.mark.grid
@pytest.mark.parametrize(("policy", "status"), [("abort", 5), ("rerun-once", 16)])
@pytest.mark.parametrize("row", ["no_shard", "optim", "optim_grads", "optim_grads_params"])
def test_a_gradient_that_is_not_finite_is_found_on_its_rank(row, policy, status):
    for message, ended, unchanged in run_ranks(
        poisoned, 2, f"{ROWS[row]} --untie-embeddings-and-output-weights", policy
    ):
        assert (
            "iteration 2: the gradient of embedding.word_embeddings.weight is not finite on rank 1" in message
        )
        assert ended == status
        assert unchanged


def bad_weight(ctx, words):
    """An element of one weight, that one rank updates, is NaN."""
    trainer = Trainer(ctx, f"{words} --untie-embeddings-and-output-weights")
    trainer.run(1)
    buffer = trainer.engine.model.buffer
    name = "decoder.layers.0.mlp.linear_fc1.weight"
    buffer.main_weight_part(name)[:1] = float("nan")  # of an empty part: nothing
    buffer.copy_main_to_weights()
    trainer.engine.model.weights_changed()
    try:
        trainer.step(2)
    except NonFiniteError as error:
        return str(error)
    return None


@pytest.mark.parametrize("row", ["no_shard", "optim", "optim_grads_params"])
def test_a_weight_that_is_not_finite_is_told_before_its_gradients(row):
    for message in run_ranks(bad_weight, 2, ROWS[row]):
        assert "weight of decoder.layers.0.mlp.linear_fc1.weight are not finite" in message


def held(ctx):
    ps = ctx.make_ps(dp=4, instances=2)
    words = f"{FSDP} --num-distributed-optimizer-instances 2 --untie-embeddings-and-output-weights"
    trainer = Trainer(ctx, words, num_microbatches=1, ps=ps)
    numbers = trainer.run(2)
    check_replicas(trainer.engine, ps, 2)
    tracker = trainer.engine.memory_tracker
    return (
        numbers,
        tracker.persistent_bytes,
        trainer.engine.persistent_bytes(),
        tracker.transient_bytes,
    )


def test_instances_train_alike_and_are_compared():
    (first, *_), *others = outcomes = run_ranks(held, 4)
    for numbers, booked, persistent, transient in outcomes:
        assert numbers == first
        assert booked == persistent
        assert transient == 0
    assert len(others) == 3


def booked(ctx):
    """By row, what is tracked after two steps: what lasts, what is left over, peaks of what is not the units'."""
    told = {}
    for row, words in {**ROWS, "optim, bf16": f"{ROWS['optim']} --bf16 --grad-reduce-in-bf16"}.items():
        trainer = Trainer(ctx, words)
        trainer.run(2)
        engine = trainer.engine
        engine.model.settle_weights()
        tracker, buffer = engine.memory_tracker, engine.model.buffer
        expected = sum(buffer.persistent_bytes().values()) + sum(engine.optimizer.persistent_bytes().values())
        whole = [bucket.full_grads for bucket in buffer.buckets if bucket.trained]
        sizes = sorted(grads.numel() * grads.element_size() for grads in whole)
        own = sum(bucket.optimizer_grads.numel() for bucket in buffer.buckets if bucket.trained)
        told[row] = (
            tracker.persistent_bytes - expected,
            engine.persistent_bytes() - expected,
            tracker.transient_bytes,
            tracker.peak("exchange"),
            tracker.peak("casts"),
            sizes,
            own,
        )
    return told


def test_every_row_is_tracked(monkeypatch):
    """Exchanges of whole gradients, conversions by the optimizer: booked without --use-custom-fsdp too. Ranks send
    messages, as those of several hosts."""
    monkeypatch.setattr(shm_transport, "new_file", lambda num_bytes, token: -1)
    for told in run_ranks(booked, 2):
        for row, (held, reported, transient, exchange, casts, sizes, own) in told.items():
            assert (held, reported, transient) == (0, 0, 0), row
            assert casts == (4 * own if "bf16" in row else 0), row
            if row == "no_shard":
                assert exchange == 0, "a sum of two is made in place"
            elif "optim_" not in row:
                assert max(sizes) // 2 <= exchange <= sum(sizes[-2:]) // 2, (row, exchange, sizes)
            else:
                assert exchange > 0


class Plain(nn.Module):
    """A model of a user's own: nothing declared, gradients from autograd."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(VOCAB, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(8, VOCAB)

    def forward(self, tokens, positions, mask, labels=None):
        x = self.words(tokens)
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(self.head(x).transpose(1, 2), labels, reduction="none")


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        return x + torch.tanh(self.linear(x))


def plain(ctx, words):
    torch.manual_seed(5 + ctx.rank)  # each rank its own: rank 0's count
    trainer = Trainer(ctx, words, provider=lambda pre_process=True, post_process=True: Plain())
    names = [unit.name for unit in trainer.engine.model.units]
    return names, trainer.run(3)


def test_a_model_of_the_users_own_is_cut_by_the_classes_that_the_flag_names():
    whole = run_ranks(plain, 2, "")[0][1]
    for names, numbers in run_ranks(plain, 2, f"{FSDP} --fsdp-unit-modules Block"):
        assert names == ["words", "blocks.0", "blocks.1", "blocks.2", "head"]
        for mine, other in zip(numbers, whole, strict=True):
            assert mine == pytest.approx(other, rel=1e-6)


def test_a_class_that_the_model_does_not_have_is_told():
    with pytest.raises(RanksError, match=r"--fsdp-unit-modules .*'Blok'.*no module of the model matches"):
        run_ranks(plain, 1, f"{FSDP} --fsdp-unit-modules Blok")
