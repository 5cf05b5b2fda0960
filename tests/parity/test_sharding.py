"""Every sharding strategy against a plain PyTorch loop on one process, and against torch's FSDP2 of the same model.

fp64, twenty clipped AdamW steps: losses, norms and weights agree to 1e-10. Data parallel over 2 and 4 ranks, 1 to 4
microbatches a step, instances (HSDP, HFSDP), with tensor and pipeline parallelism; losses a microbatch and a token,
where ranks count different numbers of tokens. fp32: losses agree to 2e-6 of them.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools

import numpy as np
import pytest
import torch
from torch.distributed.fsdp import fully_shard

from megatron.core.transport.mesh import device_mesh
from tests.harness.layouts import CLIP, NO_DROPOUT, Layout, assembled, microbatch, reference_config, train
from tests.harness.ranks import run_ranks
from tests.harness.reference_gpt import ReferenceGPT

STEPS = 20
UNTIED = ("--untie-embeddings-and-output-weights",)
TOGETHER = tuple("--recompute-granularity full --recompute-method uniform --recompute-num-layers 2".split())
RECOMPUTE = tuple("--recompute-granularity full --recompute-method uniform --recompute-num-layers 1".split())
PER_TOKEN = ("--calculate-per-token-loss",)
STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")
TWO = ("--num-distributed-optimizer-instances", "2")
SHARDED = {
    **{name: ("--use-custom-fsdp", "--data-parallel-sharding-strategy", name) for name in STRATEGIES},
    "distributed optimizer": ("--use-distributed-optimizer",),
}
WITH_INSTANCES = {
    **{f"HSDP {name}": (*SHARDED[name], *TWO) for name in STRATEGIES[1:]},
    "HSDP distributed optimizer": (*SHARDED["distributed optimizer"], *TWO),
    "HFSDP": (*SHARDED["optim_grads_params"], *TWO, "--outer-dp-sharding-strategy", "optim"),
}


@dataclasses.dataclass(frozen=True)
class Case:
    """layout: None for FSDP2. words: of the model and its loss. reshard: FSDP2's reshard_after_forward."""

    layout: Layout | None
    words: tuple[str, ...] = ()
    ga: int = 1
    fp32: bool = False
    reshard: bool = True
    num_layers: int = 2

    @property
    def model(self) -> tuple[str, ...]:
        """The flags that decide its weights."""
        return model_of(self.num_layers, UNTIED[0] in self.words)

    @property
    def per_token(self) -> bool:
        return PER_TOKEN[0] in self.words

    @property
    def flags(self) -> list[str]:
        precision = () if self.fp32 else ("--fp64",)
        return ["--num-layers", str(self.num_layers), *NO_DROPOUT, *self.words, *precision]

    def __str__(self) -> str:
        name = f"FSDP2 reshard={self.reshard}" if self.layout is None else str(self.layout)
        return " ".join([name, *self.flags, f"GA {self.ga}"])


def model_of(num_layers: int, untied: bool) -> tuple[str, ...]:
    return ("--num-layers", str(num_layers), *NO_DROPOUT, *(UNTIED if untied else ()))


@dataclasses.dataclass
class Outcome:
    losses: list[float]
    norms: list[float]
    weights: dict[str, np.ndarray]


@functools.cache
def initial_weights(model: tuple[str, ...]) -> dict[str, np.ndarray]:
    """Of one process, fp64."""
    return assembled([run_ranks(train, 1, Layout(), [*model, "--fp64"], steps=0)[0].initial])


def new_reference(words, weights, dtype) -> ReferenceGPT:
    model = ReferenceGPT(reference_config(words)).to(dtype)
    state = {name: torch.from_numpy(values.copy()) for name, values in weights.items()}
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert not missing, missing
    assert not unexpected, unexpected
    return model


def new_adamw(model):
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.dim() == 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=1e-2)


def loss_of(model, step, index, global_batch, per_token):
    """(what one of the global batch's microbatches adds to the number that is differentiated, its sum, its tokens)."""
    batch = microbatch(step, index, masked=True)
    mask = batch["loss_mask"].double()
    losses = model(batch["tokens"], labels=batch["labels"])
    total, count = (losses * mask).sum(), mask.sum().item()
    everyone = tokens_of(step, global_batch) if per_token else count * global_batch
    return total / everyone, total.item(), count


@functools.cache
def tokens_of(step: int, global_batch: int) -> float:
    return sum(microbatch(step, i, masked=True)["loss_mask"].sum().item() for i in range(global_batch))


@functools.cache
def plain_run(words: tuple[str, ...], per_token: bool, global_batch: int, fp32: bool, steps: int) -> Outcome:
    """One process that sees every microbatch itself."""
    model = new_reference(words, initial_weights(words), torch.float32 if fp32 else torch.float64)
    adam = new_adamw(model)
    outcome = Outcome([], [], {})
    for step in range(1, steps + 1):
        adam.zero_grad()
        total = count = 0.0
        for index in range(global_batch):
            loss, own, tokens = loss_of(model, step, index, global_batch, per_token)
            loss.backward()
            total, count = total + own, count + tokens
        outcome.norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP).item())
        adam.step()
        outcome.losses.append(total / count)
    outcome.weights = {name: p.detach().numpy() for name, p in model.named_parameters()}
    return outcome


def train_fsdp2(ctx, case, weights, steps) -> Outcome:
    """torch's FSDP2 of the plain GPT, with its layers as units."""
    global_batch = case.ga * ctx.world_size
    model = new_reference(case.model, weights, torch.float64)
    mesh = device_mesh(ctx.ps, "dp_reduce")
    for layer in model.decoder.layers:
        fully_shard(layer, mesh=mesh, reshard_after_forward=case.reshard)
    fully_shard(model, mesh=mesh, reshard_after_forward=case.reshard)
    adam = new_adamw(model)
    outcome = Outcome([], [], {})
    for step in range(1, steps + 1):
        adam.zero_grad()
        numbers = torch.zeros(2, dtype=torch.float64)
        for turn in range(case.ga):
            index = turn * ctx.world_size + ctx.rank
            loss, own, tokens = loss_of(model, step, index, global_batch, case.per_token)
            (loss * ctx.world_size).backward()  # it averages over ranks
            numbers += torch.tensor([own, tokens], dtype=torch.float64)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        adam.step()
        torch.distributed.all_reduce(numbers)
        outcome.norms.append(norm.full_tensor().item())
        outcome.losses.append((numbers[0] / numbers[1]).item())
    outcome.weights = {name: p.full_tensor().detach().numpy() for name, p in model.named_parameters()}
    return outcome


def run_cases(ctx, cases, steps, weights):
    torch.set_num_threads(1)
    return [
        train_fsdp2(ctx, case, weights[case.model], steps)
        if case.layout is None
        else train(
            ctx,
            case.layout,
            case.flags,
            global_batch=case.ga * case.layout.dp,
            steps=steps,
            masked=True,
        )
        for case in cases
    ]


def compare(case, results, steps):
    """results: of each rank."""
    dp = len(results) if case.layout is None else case.layout.dp
    expected = plain_run(case.model, case.per_token, case.ga * dp, case.fp32, steps)
    for one in results:
        if case.fp32:
            np.testing.assert_allclose(one.losses, expected.losses, rtol=2e-6, atol=0)
            continue
        np.testing.assert_allclose(one.losses, expected.losses, rtol=0, atol=1e-10)
        np.testing.assert_allclose(one.norms, expected.norms, rtol=0, atol=1e-10)
    if case.fp32:
        return
    weights = results[0].weights
    if case.layout is not None:
        weights = assembled([one.weights for one in results])
        model = {
            name.removeprefix("model."): values
            for name, values in assembled([one.model for one in results]).items()
        }
        for name, values in weights.items():
            assert np.array_equal(model[name], values), f"{name}: the model computes with other bits"
        for name, values in assembled([one.initial for one in results]).items():
            assert np.array_equal(initial_weights(case.model)[name], values), f"{name} starts elsewhere"
    assert weights.keys() == expected.weights.keys()
    for name, values in expected.weights.items():
        difference = np.abs(weights[name] - values).max()
        assert difference < 1e-10, f"{name}: {difference}"


def check(world, cases, *, steps=STEPS, timeout=600):
    weights = {case.model: initial_weights(case.model) for case in cases}
    by_rank = run_ranks(run_cases, world, cases, steps, weights, timeout=timeout)
    failed = []
    for number, case in enumerate(cases):
        try:
            compare(case, [rank[number] for rank in by_rank], steps)
        except AssertionError as error:
            failed.append(f"{case}: {error}")
    assert not failed, "\n".join(failed)


CUT = ("optim_grads", "optim_grads_params")
INSTANCES = ("HSDP distributed optimizer", "HSDP optim_grads", "HSDP optim_grads_params", "HFSDP")


def test_strategies_and_fsdp2_equal_the_plain_loop_over_two_ranks():
    words = {
        "no_shard": PER_TOKEN,
        "optim": UNTIED,
        "optim_grads": (*PER_TOKEN, *RECOMPUTE),
        "optim_grads_params": PER_TOKEN,
        "distributed optimizer": PER_TOKEN,
    }
    cases = [Case(Layout(dp=2, more=SHARDED[name]), words[name], ga=1 + (name in CUT)) for name in SHARDED]
    check(2, [*cases, Case(None, PER_TOKEN, ga=2)])


@pytest.mark.grid
def test_models_and_precision_equal_the_plain_loop_over_two_ranks():
    zero3 = SHARDED["optim_grads_params"]
    cases = [
        Case(Layout(dp=2, more=zero3), (*UNTIED, *RECOMPUTE)),
        Case(Layout(dp=2, more=zero3), fp32=True),
        Case(Layout(dp=2, more=(*zero3, "--init-model-with-meta-device"))),
    ]
    check(2, cases, steps=5)


@pytest.mark.grid
def test_instances_and_other_parallelism_equal_the_plain_loop_over_four_ranks():
    zero3 = SHARDED["optim_grads_params"]
    cases = [Case(Layout(dp=4, more=WITH_INSTANCES[name]), PER_TOKEN) for name in INSTANCES]
    cases += [
        Case(Layout(dp=4, more=zero3), (*UNTIED, *RECOMPUTE)),
        Case(Layout(tp=2, sp=True, dp=2, more=zero3), PER_TOKEN),
        Case(Layout(tp=2, dp=2, more=SHARDED["optim_grads"]), UNTIED),
        Case(Layout(pp=2, dp=2, more=(*SHARDED["optim"], "--overlap-param-gather")), PER_TOKEN, ga=2),
    ]
    check(4, cases, steps=3)


FAR = {
    **SHARDED,
    "average": (*SHARDED["optim_grads_params"], "--ddp-average-in-collective"),
    "keep to backward": (*SHARDED["optim_grads_params"], "--fsdp-reshard-policy", "backward"),
    "keep the step": (*SHARDED["optim_grads_params"], "--fsdp-reshard-policy", "step"),
    "double buffer": (*SHARDED["optim_grads_params"], "--fsdp-double-buffer"),
    "no prefetch": (*SHARDED["optim_grads_params"], "--suggested-communication-unit-size", "0"),
}
MODELS = [
    (*tied, *loss, *memory)
    for tied, loss, memory in itertools.product(((), UNTIED), ((), PER_TOKEN), ((), RECOMPUTE))
]


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("ga", [1, 2, 4])
@pytest.mark.parametrize("world", [2, 4])
def test_every_strategy_equals_the_plain_loop(world, ga):
    flags = {**FAR, **(WITH_INSTANCES if world == 4 else {})}
    cases = [
        Case(Layout(dp=world, more=more), words, ga)
        for words, more in itertools.product(MODELS, flags.values())
    ]
    cases += [
        Case(
            Layout(dp=world, more=(*SHARDED["optim_grads_params"], *more)),
            (*UNTIED, *TOGETHER),
            ga,
            num_layers=4,
        )
        for more in ((), ("--suggested-communication-unit-size", "0"), ("--fsdp-double-buffer",))
    ]
    cases += [
        Case(None, words, ga, reshard=reshard)
        for words in MODELS
        if RECOMPUTE[0] not in words
        for reshard in (True, False)
    ]
    cases += [Case(Layout(dp=world, more=more), fp32=True, ga=ga) for more in flags.values()]
    check(world, cases, timeout=1700)


@pytest.mark.full
@pytest.mark.timeout(900)
def test_strategies_under_tensor_parallelism_equal_the_plain_loop():
    cases = [
        Case(Layout(tp=2, sp=sp, dp=2, more=flags), words, ga)
        for flags in SHARDED.values()
        for words in MODELS
        for sp, ga in ((False, 1), (True, 2))
    ]
    check(4, cases, timeout=850)


@pytest.mark.full
@pytest.mark.timeout(900)
def test_strategies_under_pipelines_equal_the_plain_loop():
    flags = {
        **{name: SHARDED[name] for name in ("no_shard", "optim", "distributed optimizer")},
        "overlapped": (*SHARDED["optim"], "--overlap-param-gather", "--overlap-grad-reduce"),
        "gather overlapped": (*SHARDED["distributed optimizer"], "--overlap-param-gather"),
        "reduce overlapped": (*SHARDED["no_shard"], "--overlap-grad-reduce"),
        "both": (*SHARDED["distributed optimizer"], "--overlap-param-gather", "--overlap-grad-reduce"),
    }
    cases = [
        Case(Layout(pp=2, dp=2, more=more, **schedule), words, ga, num_layers=4)
        for more in flags.values()
        for words in ((), UNTIED, PER_TOKEN)
        for schedule, ga in (({"schedule": "1f1b"}, 4), ({"schedule": "interleaved", "chunks": 2}, 2))
    ]
    check(4, cases, timeout=850)
