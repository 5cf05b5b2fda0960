"""Groups and collectives on NCCL, live memory on CUDA. Skipped without the GPUs that a test needs."""

from __future__ import annotations

import json
import re

import pytest
import torch

from megatron.core.device import device_in_use
from tests.harness.launch import ROOT, ok, run
from tests.harness.live_peak import LivePeak

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")

MEET = """
import datetime, json, os, torch, torch.distributed as dist
from megatron.core.transport import collectives, parallel_state
from megatron.core.device import current_device
from megatron.core.transport.parallel_state import destroy_process_group, init_process_group, make_parallel_state
from megatron.core.transport.rank_grid import RankGrid
from megatron.core.transport.rank_grid import PURPOSES

rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
device = current_device(rank)
cuda = device.torch_device
"""
STREAMS = """
dist.init_process_group("nccl", rank=0, world_size=1, store=dist.HashStore(), device_id=cuda)
found = {}
for purpose in PURPOSES:
    options = parallel_state._options(purpose, (0,), "nccl", datetime.timedelta(seconds=30))
    made = dist.new_group([0], datetime.timedelta(seconds=30), "nccl", group_desc=purpose.name, **options)
    found[purpose.name] = made._get_backend(cuda).options.is_high_priority_stream
dist.destroy_process_group()
print("found: " + json.dumps(found))
"""
UNITS = """
init_process_group(device, rank=rank, world_size=world)
ps = make_parallel_state(RankGrid(world, dp=world), device)

def values(rank, n, dtype):
    return torch.arange(n, device=cuda).add(100 * rank).to(dtype)

pairs = [(torch.zeros(world * n, dtype=t, device=cuda), values(rank, n, t))
         for n, t in ((5, torch.float32), (3, torch.bfloat16), (2, torch.float64))]
side = torch.cuda.Stream()
full = [values(rank, world * 4, t) for t in (torch.float32, torch.bfloat16, torch.float32)]
shards = [torch.ones(4, device=cuda) for _ in full]
gathers = collectives.all_gather_units(pairs, ps.dp_gather_group)
items = list(zip(shards, full))
sums = [collectives.reduce_scatter_units(items[:2], ps.dp_reduce_group, accumulate=True),
        collectives.reduce_scatter_units(items[2:], ps.dp_reduce_group, accumulate=False)]
side.wait_stream(torch.cuda.current_stream())
with torch.cuda.stream(side):  # made on one stream, waited for on another
    for one in sums:
        one.wait()
torch.cuda.current_stream().wait_stream(side)
gathers.wait()
for output, _ in pairs:
    n = output.numel() // world
    expected = torch.cat([values(r, n, output.dtype) for r in range(world)])
    assert torch.equal(output, expected), (output, expected)
for shard, one, before in zip(shards, full, (1, 1, 0)):
    total = sum(values(r, world * 4, one.dtype).float() for r in range(world))[rank * 4 : rank * 4 + 4]
    assert torch.equal(shard, total + before), (shard, total)
    assert torch.equal(one, values(rank, world * 4, one.dtype))
own = full[0].view(world, 4)[rank]
expected = sum(values(r, world * 4, torch.float32) for r in range(world)).view(world, 4)[rank]
collectives.reduce_scatter(own, full[0], ps.dp_reduce_group)
assert torch.equal(own, expected)
destroy_process_group(ps)
"""


def test_gradients_and_parameters_have_high_priority_streams(tmp_path):
    script = tmp_path / "streams.py"
    script.write_text(MEET + STREAMS)
    finished = ok(
        run(
            [],
            script=str(script),
            cwd=tmp_path,
            env={"RANK": "0", "WORLD_SIZE": "1", "PYTHONPATH": str(ROOT)},
        )
    )
    found = json.loads(re.findall(r"found: (.*)", finished.output)[0])
    assert {name for name, high in found.items() if high} == {"dp_reduce", "dp_gather"}
    assert "pg_options" not in finished.output, "torch warned about a timeout"


@two_gpus
def test_units_of_several_types_on_nccl(tmp_path):
    script = tmp_path / "units.py"
    script.write_text(MEET + UNITS)
    ok(run([], ranks=2, script=str(script), cwd=tmp_path, env={"PYTHONPATH": str(ROOT)}))


def test_the_peak_of_live_memory_is_the_allocators():
    device = device_in_use()
    before = torch.ones(2**20, device=device.torch_device)
    with LivePeak(device) as live:
        block = torch.ones(2**22, device=device.torch_device)
        del block
        small = torch.ones(2**10, device=device.torch_device)
    assert live.above_baseline == 4 * 2**22
    assert before.numel() + small.numel() == 2**20 + 2**10
