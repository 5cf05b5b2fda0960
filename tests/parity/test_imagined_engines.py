"""Engines of an imagined world hold, to the byte, what engines of forked ranks hold."""

import functools

import pytest
import torch

from megatron.core.transport.parallel_state import Group, ParallelState
from megatron.training.config.launch_env import LaunchEnv
from megatron.training.run.arguments import parse_config
from megatron.training.run.build import build_engine, build_gpt_model, imagined_engines
from tests.harness.launch_lines import SMALL
from tests.harness.ranks import run_ranks

ZERO_3 = "--use-custom-fsdp --data-parallel-sharding-strategy optim_grads_params"
INSTANCES = "--num-distributed-optimizer-instances 2"
PP, TP = "--pipeline-model-parallel-size 2", "--tensor-model-parallel-size 2"
LLAMA = "--position-embedding-type rope --swiglu --disable-bias-linear --normalization RMSNorm"
CASES = (
    ({"dp": 4}, ""),
    ({"dp": 4}, f"--use-distributed-optimizer --ddp-num-buckets 3 --bf16 {LLAMA}"),
    ({"dp": 2, "pp": 2}, f"{PP} --use-distributed-optimizer --ddp-bucket-size 9000 --fp16"),
    ({"dp": 2, "pp": 2}, f"{PP} {ZERO_3} --bf16 --megatron-fsdp-grad-comm-dtype bf16"),
    ({"dp": 2, "pp": 2}, f"{PP} {ZERO_3} --zero-bubble-v-schedule --swiglu --disable-bias-linear"),
    ({"dp": 4, "instances": 2}, f"{ZERO_3} {INSTANCES} --outer-dp-sharding-strategy optim --bf16"),
    ({"dp": 4, "instances": 2}, f"--use-distributed-optimizer {INSTANCES} --optimizer sgd"),
    ({"dp": 2, "tp": 2}, f"{TP} {ZERO_3} --position-embedding-type rope --qk-layernorm --fsdp-double-buffer"),
    ({"tp": 2, "pp": 2}, f"{TP} {PP} --sequence-parallel --bf16 --group-query-attention --num-query-groups 1"),
    ({"tp": 2, "pp": 2}, f"{TP} {PP} {LLAMA} --untie-embeddings-and-output-weights --num-layers 5 "
     "--allow-padding-num-layers --init-model-with-meta-device"),
)  # fmt: skip
APART = (ParallelState, Group, type, type(functools), type(lambda: 0), torch.dtype, torch.device)


def config_of(words, ranks):
    flags = "--num-layers 4 --global-batch-size 16 --padded-vocab-size 386"
    return parse_config([*SMALL, *flags.split(), *words.split()], env=LaunchEnv(world_size=ranks))


def storages(thing, seen=None, found=None):
    """Bytes of every storage that can be reached from a thing, by storage."""
    seen, found = {} if seen is None else seen, {} if found is None else found
    if id(thing) in seen or isinstance(thing, APART):
        return found
    seen[id(thing)] = thing
    if isinstance(thing, torch.Tensor):
        storage = thing.untyped_storage()
        found[storage._cdata] = storage.nbytes()
    elif isinstance(thing, dict):
        for item in thing.items():
            storages(item, seen, found)
    elif isinstance(thing, list | tuple | set | frozenset):
        for one in thing:
            storages(one, seen, found)
    elif isinstance(thing, functools.partial):
        storages((thing.func, thing.args, thing.keywords), seen, found)
    else:
        storages(getattr(thing, "__self__", None), seen, found)
        storages(getattr(thing, "__dict__", {}), seen, found)
    return found


def at_rest(engine):
    """By category of the tracker, and all tensors there are."""
    by_category = {category: size for category, size in engine.memory_tracker._by_category.items() if size}
    every = storages(engine)
    return by_category, engine.persistent_bytes(), sorted(size for size in every.values() if size)


@pytest.mark.parametrize(
    ("ranks", "words"), [CASES[0], *(pytest.param(*case, marks=pytest.mark.grid) for case in CASES[1:])]
)
def test_bytes_at_rest_are_those_of_real_ranks(ranks, words):
    config = config_of(words, 4)

    def body(ctx):
        ps = ctx.make_ps(**ranks)
        return at_rest(build_engine(config, ps, functools.partial(build_gpt_model, config, ps)))

    real = run_ranks(body, 4)
    by_category, _, every = real[0]
    assert 0 < sum(by_category.values()) <= sum(every)
    seen = {}
    for rank in range(4):
        if rank not in seen:
            seen |= {one: at_rest(engine) for one, engine in imagined_engines(config, rank).items()}
    for rank in range(4):
        assert seen[rank] == real[rank], f"rank {rank}"


LLAMA_70B = (
    "--hidden-size 8192 --ffn-hidden-size 28672 --num-attention-heads 64 --group-query-attention "
    "--num-query-groups 8 --seq-length 8192 --max-position-embeddings 8192 --micro-batch-size 1 --mock-data "
    f"--tokenizer-type NullTokenizer --vocab-size 128255 --bf16 {LLAMA} --untie-embeddings-and-output-weights "
    "--lr 1e-3 --train-iters 2"
)


def wide(words, ranks):
    return parse_config([*LLAMA_70B.split(), *words.split()], env=LaunchEnv(world_size=ranks))


def test_16_layers_of_70b_width_are_built_without_memory():
    config = wide("--num-layers 16 --global-batch-size 1 --padded-vocab-size 128256", 1)
    engine = imagined_engines(config)[0]
    assert all(bucket.full_weights.is_meta for bucket in engine.model.buffer.buckets)
    layer = 2 * 8192**2 + 2 * 8192 * 1024 + 3 * 8192 * 28672 + 2 * 8192
    parameters = 16 * layer + 2 * 128256 * 8192 + 8192
    assert engine.memory_tracker.live("weights") == pytest.approx(2 * parameters, rel=1e-6)
    assert engine.memory_tracker.live("moments") == pytest.approx(8 * parameters, rel=1e-6)


@pytest.mark.grid
def test_any_rank_of_512():
    config = wide(
        "--num-layers 16 --global-batch-size 512 --tensor-model-parallel-size 8 --sequence-parallel "
        "--pipeline-model-parallel-size 8 --use-distributed-optimizer --padded-vocab-size 128256",
        512,
    )
    engines = imagined_engines(config, 301)
    assert 301 in engines
    assert len(engines) == 64
    for engine in engines.values():
        held = sum(parameter.numel() for chunk in engine.chunks for parameter in chunk.module.parameters())
        assert engine.memory_tracker.live("weights") == pytest.approx(2 * held, rel=1e-4)
        assert engine.memory_tracker.live("moments") == pytest.approx(8 * held / config.grid().dp, rel=1e-4)
