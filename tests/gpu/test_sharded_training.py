"""Every sharding strategy on GPUs against one process. Skipped without the GPUs that a test needs."""

from __future__ import annotations

import pytest
import torch

from tests.harness.launch import ROOT, ok, run

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")

TRAIN = """
import dataclasses, functools, gc, os, sys, torch
from torch.nn.functional import cross_entropy
from megatron.core.device import current_device
from megatron.core.distributed.sharded_module.fully_shard import fully_shard
from megatron.core.distributed.custom_fsdp.data_parallel_config import DistributedDataParallelConfig
from megatron.core.module import ModelError
from megatron.core.transport.parallel_state import destroy_process_group, init_process_group, make_parallel_state
from megatron.core.transport.rank_grid import RankGrid
from tests.harness.sharded_training import STRATEGIES, Block, Net, seeded, tokens

rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
device = current_device(rank)
there = device.torch_device
STEPS, GA = 4, 2

def net(dtype):
    return seeded(lambda: Net(width=64)).to(there, dtype)

def loss_of(model, sample):
    batch = tokens(sample).to(there)
    logits = model(batch).flatten(0, 1)
    wide = logits if logits.dtype == torch.float64 else logits.float()
    return cross_entropy(wide, batch.roll(1, 1).flatten())

def one_process(dtype):
    model = net(dtype)
    main = [p.detach().float().clone() if dtype.itemsize == 2 else p for p in model.parameters()]
    optimizer = torch.optim.AdamW(main, lr=1e-2, fused=there.type == "cuda")
    for step in range(STEPS):
        for sample in range(GA * world):
            (loss_of(model, 1000 * step + sample) / (GA * world)).backward()
        for kept, p in zip(main, model.parameters(), strict=True):
            if kept is not p:
                kept.grad, p.grad = p.grad.float(), None
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for kept, p in zip(main, model.parameters(), strict=True):
                p.copy_(kept)
    return {name: p.detach().double().cpu() for name, p in model.named_parameters()}

def sharded(ps, dtype, **config):
    model = fully_shard(net(dtype), ps, DistributedDataParallelConfig(**config), fsdp_unit_modules=[Block])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=there.type == "cuda")
    for step in range(STEPS):
        for index in range(GA):
            last = index == GA - 1
            whole = config["data_parallel_sharding_strategy"] in ("no_shard", "optim")
            sample = 1000 * step + index * world + rank
            if whole and not last:
                with model.no_sync():
                    (loss_of(model, sample) / GA).backward()
            else:
                (loss_of(model, sample) / GA).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert model.engine.memory_tracker.transient_bytes == 0, model.engine.memory_tracker.lines()
    return {name: weight.double() for name, weight in model.full_state_dict().items()}

def assert_close(found, expected, tolerance, what):
    for name, weight in expected.items():
        off = (found[name] - weight).abs().max().item()
        assert off <= tolerance, f"{what} {name}: off by {off:.3g}"

init_process_group(device, rank=rank, world_size=world)
ps = make_parallel_state(RankGrid(world, dp=world), device)
double = one_process(torch.float64)
for strategy in STRATEGIES:
    variants = [{}, {"fsdp_debug": True}]
    if strategy in ("optim_grads", "optim_grads_params"):
        variants += [{"fsdp_double_buffer": True}, {"suggested_communication_unit_size": 1}]
    if strategy == "optim_grads_params":
        variants += [{"fsdp_reshard_policy": "backward"}]
    if strategy in ("no_shard", "optim"):
        variants += [{"overlap_grad_reduce": True, "overlap_param_gather": strategy == "optim"}]
    for variant in variants:
        config = {"data_parallel_sharding_strategy": strategy, **variant}
        assert_close(sharded(ps, torch.float64, **config), double, 1e-10, config)
        gc.collect()
coarse = one_process(torch.bfloat16)
rows = {s: sharded(ps, torch.bfloat16, data_parallel_sharding_strategy=s) for s in STRATEGIES}
for strategy, weights in rows.items():
    assert_close(weights, coarse, 0.05, f"bf16 {strategy}")  # 4 steps of 1e-2, rounded
    assert all(w.isfinite().all() for w in weights.values()), strategy

class Borrows(Block):
    def forward(self, x):
        y = super().forward(x)
        y.register_hook(lambda grad: grad + lender.up.weight.detach().sum())
        return y

if world > 1:  # else nothing is released
    blocks = torch.nn.Sequential(Block(), Block(), Borrows()).to(there)
    lender = blocks[0]
    config = DistributedDataParallelConfig(
        data_parallel_sharding_strategy="optim_grads_params", fsdp_debug=True, suggested_communication_unit_size=1
    )
    model = fully_shard(blocks, ps, config, fsdp_unit_modules=[Block])
    loss = model(torch.ones(2, 16, device=there)).sum()
    try:
        loss.backward()  # on CUDA in a thread of autograd's
    except ModelError as error:
        assert "weight of '0.up.weight'" in str(error), error
    else:
        raise AssertionError("a weight that is released was read, and nobody said so")
torch.cuda.synchronize() if there.type == "cuda" else None
print(f"rank {rank}: all strategies agree")
sys.stdout.flush()
destroy_process_group(ps)
"""


def train(tmp_path, ranks: int) -> None:
    script = tmp_path / "train.py"
    script.write_text(TRAIN)
    env = {"PYTHONPATH": str(ROOT)}
    if ranks == 1:
        env |= {"RANK": "0", "WORLD_SIZE": "1"}
    finished = ok(run([], ranks=ranks, script=str(script), cwd=tmp_path, env=env, timeout_s=110))
    for rank in range(ranks):
        assert f"rank {rank}: all strategies agree" in finished.output


def test_every_strategy_on_one_gpu_is_one_process(tmp_path):
    train(tmp_path, 1)


@two_gpus
def test_every_strategy_over_nccl_is_one_process(tmp_path):
    train(tmp_path, 2)
