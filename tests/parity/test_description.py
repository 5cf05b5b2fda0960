"""What parts of a model are seen to take: on tensors with memory and without, in any row, and beside engines."""

import dataclasses
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from megatron.core.device import Device, imagining
from megatron.core.models.gpt.stage_layers import StageSpec
from megatron.core.transport.parallel_state import single_process
from megatron.estimate.description import COMPUTATIONS, ComputationFigures, ModuleFigures
from megatron.estimate.observe import ObservedPart, observe
from megatron.estimate.step_watch import let_threads_end
from megatron.estimate.watch import StorageWatch
from megatron.training.config.config import flops_per_token
from megatron.training.config.launch_env import LaunchEnv
from megatron.training.run.arguments import parse_config
from megatron.training.run.build import imagined_engines, imagined_world, part_of_model
from megatron.training.run.describe import ModelParts, described_model
from tests.harness.launch_lines import SMALL
from tests.harness.ranks import run_ranks

PLAIN = "--hidden-dropout 0 --attention-dropout 0"
LLAMA = (
    f"{PLAIN} --swiglu --position-embedding-type rope --disable-bias-linear --normalization RMSNorm "
    "--untie-embeddings-and-output-weights"
)
GQA = "--group-query-attention --num-query-groups 2"
RECOMPUTE = "--recompute-granularity full --recompute-num-layers"
TP = "--tensor-model-parallel-size 2"
WHOLE = StageSpec((0, 1, 2, 3), embedding=True, loss=True)
STAGES = (
    StageSpec((0,), embedding=True, loss=False),
    StageSpec((0, 1, 2), embedding=False, loss=False),
    StageSpec((3,), embedding=False, loss=True),
    StageSpec((), embedding=False, loss=True),
    WHOLE,
)


def config_of(words, ranks=1):
    flags = "--num-layers 4 --global-batch-size 16 --padded-vocab-size 386"
    return parse_config([*SMALL, *flags.split(), *words.split()], env=LaunchEnv(world_size=ranks))


def described(config, stages=STAGES):
    return described_model(config, imagined_world(config).state(0), stages)


def stage_of(description, config, spec):
    chunks = config.model.recompute_chunks(len(spec.layers))
    return description.stage(spec.layers, chunks, embeds=spec.embedding, ends=spec.loss)


@pytest.mark.parametrize(
    "words",
    ["", LLAMA, f"{LLAMA} --bf16 {GQA} --qk-layernorm", f"{RECOMPUTE} 2 --recompute-method uniform",
     f"{LLAMA} --bf16 --attention-backend unfused --reset-attention-mask", "--bf16 --normalization RMSNorm --swiglu",
     "--bf16 --normalization RMSNorm --padded-vocab-size 12416"],
)  # fmt: skip
def test_tensors_without_memory_tell_what_tensors_with_memory_do(words):
    config = config_of(words)
    assert described(config) == described_model(config, single_process(Device("cpu")), STAGES)


def described_on_ranks(ctx, config):
    """By real ranks, whose sums are made when threads of gloo have let go of what they carried."""
    count_ends = StorageWatch._count_ends

    def counted(watch):
        let_threads_end()
        count_ends(watch)

    with mock.patch.object(StorageWatch, "_count_ends", counted):
        return described_model(config, ctx.make_ps(tp=2), STAGES)


def test_ranks_that_share_layers_see_what_they_see_in_an_imagined_world():
    config = config_of(f"{TP} --sequence-parallel {LLAMA}", 2)
    real = run_ranks(described_on_ranks, 2, config)
    for rank, seen in enumerate(real):
        imagined = described_model(config, imagined_world(config).state(rank), STAGES)
        assert list(map(without_moved, pieces_of(imagined))) == list(map(without_moved, pieces_of(seen)))
    moved = next(iter(real[0].kinds.values())).collectives
    states = 32 * 2 * 64 * 4  # a microbatch's hidden states, in fp32
    assert moved["F", "tp", "all_gather"] == moved["F", "tp", "reduce_scatter"] == 2 * states
    # gathered beside the products: gradients of row layers, then for W inputs of column layers
    assert moved["B", "tp", "all_gather"] == moved["W", "tp", "all_gather"] == 2 * states
    assert moved["BW", "tp", "all_gather"] == 4 * states


@pytest.mark.parametrize(
    "words",
    [f"{LLAMA} --bf16 {GQA}", *(pytest.param(words, marks=pytest.mark.grid) for words in (
        "", f"{RECOMPUTE} 2 --recompute-method uniform", f"{RECOMPUTE} 1 --recompute-method block",
        f"{PLAIN} {TP} --sequence-parallel"))],
)  # fmt: skip
def test_a_stage_is_the_sum_of_its_pieces_to_the_byte(words):
    config = config_of(words, 2 if TP in words else 1)
    description, ps = described(config), imagined_world(config).state(0)
    for spec in STAGES:
        part = {"layers": spec.layers, "pre_process": spec.embedding, "post_process": spec.loss}
        with imagining(ps.device), torch.device("meta"):
            seen = ModelParts(config, ps, False).piece(config, **part)
        places = StageSpec(tuple(range(len(spec.layers))), spec.embedding, spec.loss)
        summed = stage_of(description, config, places)
        assert summed.most_bytes["F"] == seen.most_bytes["F"]
        states = 32 * 2 * 64 * 4
        assert all(abs(summed.most_bytes[name] - seen.most_bytes[name]) <= states for name in COMPUTATIONS)
        assert (summed.ends, summed.collectives) == (seen.ends, seen.collectives)
        assert without_made(summed) == without_made(seen)
        assert summed.kept_bytes == seen.kept_bytes


def pieces_of(description):
    return description.embedding, description.head, *description.kinds.values()


def without(piece, **figures):
    """Modules with some figures of their work replaced; what then does nothing is left out."""
    modules = {}
    for path, one in piece.modules.items():
        work = {name: dataclasses.replace(done, **figures) for name, done in one.work.items()}
        work = {name: done for name, done in work.items() if done != ComputationFigures()}
        modules[path] = dataclasses.replace(one, work=work)
    return {path: one for path, one in modules.items() if one != ModuleFigures()}


def without_made(piece):
    """Of two uses of one module what it had made at once is not known from each."""
    return without(piece, made_bytes=0)


def without_moved(piece):
    """A collective that moves nothing does not copy a rank's own part either."""
    return without(piece, moved_bytes=0), piece.ends, piece.most_bytes, piece.collectives


class _SavesMore(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x.new_empty(1001))
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        return grads[0]


class Odd(nn.Module):
    """In front of a part of a layer. How: what it does besides."""

    def __init__(self, inner, how):
        super().__init__()
        self.inner, self.how = inner, how

    def forward(self, x):
        if self.how == "saves":
            x = _SavesMore.apply(x)
        elif self.how == "keeps":
            self.own = x.new_empty(1001)
        elif self.how == "takes":
            assert x.new_empty(1001).fill_(1.0).numel() == 1001
        return self.inner(x)


@pytest.mark.parametrize("how", ["saves", "keeps", "takes"])
def test_what_a_layer_does_besides_is_seen_by_module(how):
    """An odd tensor that it saves, one that it keeps by itself, a temporary: there is no line for them."""
    config, piece = config_of(PLAIN), {}
    ps = imagined_world(config).state(0)
    with imagining(ps.device), torch.device("meta"):
        hidden = torch.Size((32, 2, 64)), torch.float32
        for name in ("does nothing", how):
            model = part_of_model(config, layers=[2], pre_process=False, post_process=False)
            layer = model.decoder.layers["2"]
            layer.mlp = Odd(layer.mlp, name)

            def forward(states, model=model):
                model.set_input_tensor(states)
                return model()

            piece[name] = observe(ObservedPart(model, forward, hidden, False, torch.float32))
    path = "decoder.layers.2.mlp"
    plain, odd = piece["does nothing"].modules, piece[how].modules
    before, after = plain.get(path, ModuleFigures()), odd[path]
    assert after.kept_bytes - before.kept_bytes == 4 * 1001 * (how == "saves")
    assert after.lasting_bytes - before.lasting_bytes == 4 * 1001 * (how == "keeps")
    assert after.work["F"].made_bytes >= 4 * 1001
    others = plain.keys() - {path}
    assert {name: odd[name].kept_bytes for name in others} == {
        name: plain[name].kept_bytes for name in others
    }


PUBLISHED = {
    "llama3-8b": (8_030_261_248, "4096 32 32 8 14336"),
    "llama3-70b": (70_553_706_496, "8192 80 64 8 28672"),
    "llama3.1-405b": (405_853_388_800, "16384 126 128 8 53248"),
}
GPT3 = {"22b": (22.07e9, "6144 48 64"), "175b": (174.62e9, "12288 96 96"), "530b": (529.60e9, "20480 105 128"),
        "1t": (1008.0e9, "25600 128 160")}  # fmt: skip


@pytest.mark.parametrize("name", [*PUBLISHED, *GPT3])
def test_parameters_of_published_models_are_exact(name):
    llama = name in PUBLISHED
    total, sizes = (PUBLISHED if llama else GPT3)[name]
    hidden, layers, heads, *rest = sizes.split()
    shape = (
        f"--hidden-size {hidden} --num-layers {layers} --num-attention-heads {heads} --mock-data --lr 1e-3 "
    )
    shape += (
        "--micro-batch-size 1 --global-batch-size 1 --train-iters 2 --tokenizer-type NullTokenizer --bf16 "
    )
    if llama:
        shape += f"{LLAMA} --group-query-attention --num-query-groups {rest[0]} --ffn-hidden-size {rest[1]} "
        shape += "--vocab-size 128255 --seq-length 8192 --max-position-embeddings 8192"
    else:
        shape += f"{PLAIN} --vocab-size 51199 --seq-length 2048 --max-position-embeddings 2048"
    config = parse_config(shape.split(), env=LaunchEnv(world_size=1)).replace(
        padded_vocab_size=128256 if llama else 51200, distributed_backend="nccl"
    )
    spec = StageSpec(tuple(range(int(layers))), embedding=True, loss=True)
    found = stage_of(described(config, [spec]), config, spec).parameters
    assert found == total if llama else found == pytest.approx(total, rel=5e-4)


@pytest.mark.parametrize("words", [PLAIN, LLAMA, f"{LLAMA} {GQA}", f"{PLAIN} --attention-backend unfused"])
def test_flops_are_those_that_megatron_counts(words):
    """Products of all weights, and half of the scores, which a causal kernel computes alone."""
    config = config_of(words)
    forward = described(config).stage(WHOLE.layers, [(0, 4, False)], embeds=True, ends=True).work("F")
    halved = forward.attention / (2 if "unfused" in words else 1)
    flops = flops_per_token(config.model, config.model.padded_vocab_size, config.model.seq_length)
    assert (
        3 * (forward.products + halved) == flops * config.training.micro_batch_size * config.model.seq_length
    )


@pytest.mark.parametrize("ranks", [2, 64])
def test_units_by_flags_are_those_of_engines_of_any_size(ranks):
    sharded = "--use-custom-fsdp --data-parallel-sharding-strategy optim_grads_params --bf16"
    config = config_of(f"{PLAIN} {TP} {sharded} --global-batch-size 128", ranks)
    config = dataclasses.replace(config, description=described(config))
    (by_flags,) = config.units_of(config.planner().spec)
    for engine in imagined_engines(config, ranks - 1).values():
        (built,) = engine.model.stage_units()
        assert [one.shares for one in built.units] == [one.shares for one in by_flags.units]
