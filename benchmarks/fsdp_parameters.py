"""What sharded parameters cost the host: microseconds a parameter, in the parts of a step that walk over all of them.

    python benchmarks/fsdp_parameters.py                 # the table of docs/custom_fsdp.md
    python benchmarks/fsdp_parameters.py --parameters 50

Two forked ranks, one thread each, over gloo. Parameters are so small that arithmetic is nothing. `plain`: the same
optimizer over 1-D tensors of the rank's own elements, for which torch's clipping knows each rank's norm only; `fsdp2`:
torch's fully_shard, whose parameters are DTensors. Medians of the slower rank.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.fsdp as fsdp2
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron.core.distributed.sharded_module.fully_shard import fully_shard
from tests.harness.ranks import RankContext, run_ranks

OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    f"AdamW, {how}": functools.partial(
        torch.optim.AdamW, lr=1e-3, foreach=how == "foreach", fused=how == "fused"
    )
    for how in ("single", "foreach", "fused")
}


def parameters_of(kind: str, count: int) -> list[nn.Parameter]:
    """With gradients."""
    model = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(count)))
    if kind == "fsdp2":
        fsdp2.fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    else:
        fully_shard(model)
    model(torch.randn(2, 8)).sum().backward()
    parameters = list(model.parameters())
    if kind != "plain":
        return parameters
    own = [nn.Parameter(torch.randn(64 // dist.get_world_size())) for _ in parameters]
    for one in own:
        one.grad = torch.randn_like(one)
    return own


def microseconds(work: Callable[[], object], count: int, rounds: int) -> float:
    """A parameter."""
    seconds = []
    for _ in range(rounds):
        dist.barrier()
        start = time.process_time()
        work()
        seconds.append(time.process_time() - start)
    return statistics.median(seconds[rounds // 5 :]) / count * 1e6


def measured(ctx: RankContext, count: int, rounds: int) -> dict[str, dict[str, float]]:
    """Figure -> kind of parameters -> microseconds."""
    table: dict[str, dict[str, float]] = {}
    for kind in ("plain", "sharded", "fsdp2"):
        parameters = parameters_of(kind, count)
        clip = functools.partial(nn.utils.clip_grad_norm_, parameters, 1e9)
        work: dict[str, Callable[[], object]] = {
            "clip_grad_norm_": clip,
            "clip_grad_norm_, foreach=False": functools.partial(clip, foreach=False),
        }
        work |= {name: make(parameters).step for name, make in OPTIMIZERS.items()}
        for name, one in work.items():
            table.setdefault(name, {})[kind] = microseconds(one, count, rounds)
    return table


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parameters", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=40)
    args = parser.parse_args()
    tables = run_ranks(measured, 2, args.parameters, args.rounds, timeout=300.0)
    print("us a parameter | " + " | ".join(tables[0]["clip_grad_norm_"]))
    for name in tables[0]:
        slower = (max(table[name][kind] for table in tables) for kind in tables[0][name])
        print(f"{name} | " + " | ".join(f"{figure:.1f}" for figure in slower))


if __name__ == "__main__":
    main()
