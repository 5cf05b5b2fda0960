"""Chains of modules whose steps a test drives by hand: each gather, free and reduction is a call of its own.

`run_step` is a step of the engine, `reference` the same steps in one plain PyTorch process that sees all samples.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence

import torch
from torch import Tensor, nn

from megatron.core.distributed.custom_fsdp.data_parallel_config import DistributedDataParallelConfig
from megatron.core.distributed.data_parallel import DistributedDataParallel
from megatron.core.module import ModelUnit
from megatron.core.transport.parallel_state import ParallelState

WIDTH, LR = 6, 0.02


class Link(nn.Module):
    """[4, WIDTH] -> [4, WIDTH]."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(WIDTH, WIDTH)
        self.gain = nn.Parameter(torch.rand(WIDTH) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.fc(x)) * self.gain


class Chain(nn.Module):
    """Links by their numbers in the whole model."""

    def __init__(self, links: dict[str, Link]) -> None:
        super().__init__()
        self.links = nn.ModuleDict(links)

    def forward(self, x: Tensor) -> Tensor:
        for link in self.links.values():
            x = link(x)
        return x


@dataclasses.dataclass(frozen=True)
class Model:
    """sizes: links of each chunk. tied: the last link of the only chunk has the first one's matrix. frozen: what is not
    trained, by the end of its name."""

    sizes: tuple[int, ...] = (3,)
    tied: bool = False
    frozen: tuple[str, ...] = ("1.fc.bias",)
    dtype: torch.dtype = torch.float64

    def chains(self) -> list[Chain]:
        torch.manual_seed(0)
        links = [Link() for _ in range(sum(self.sizes))]
        if self.tied:
            links[-1].fc.weight = links[0].fc.weight
        starts = [sum(self.sizes[:chunk]) for chunk in range(len(self.sizes))]
        chains = [
            Chain({str(number): links[number] for number in range(start, start + size)}).to(self.dtype)
            for start, size in zip(starts, self.sizes, strict=True)
        ]
        for chain in chains:
            for name, parameter in chain.named_parameters():
                parameter.requires_grad_(not name.endswith(self.frozen))
        return chains

    def units(self, chains: Sequence[Chain]) -> list[ModelUnit]:
        """A unit a link; "ends" where the matrix is tied."""
        links = [(f"link {name}", link) for chain in chains for name, link in chain.links.items()]
        if not self.tied:
            return [ModelUnit(name, (link,)) for name, link in links]
        ends = ModelUnit("ends", (links[0][1], links[-1][1]))
        return [ends, *(ModelUnit(name, (link,)) for name, link in links[1:-1])]


def build(
    ps: ParallelState, model: Model, strategy: str, **config: object
) -> tuple[DistributedDataParallel, list[Chain]]:
    chains = model.chains()
    made = DistributedDataParallelConfig(data_parallel_sharding_strategy=strategy, **config)  # type: ignore[arg-type]
    return DistributedDataParallel(chains, ps, made, units=model.units(chains)), chains


def sample(number: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(1000 + number)
    return torch.randn(4, WIDTH, generator=generator, dtype=torch.float64).to(dtype)


def loss_of(output: Tensor) -> Tensor:
    return output.square().sum()


def run_step(
    engine: DistributedDataParallel,
    chains: Sequence[Chain],
    inputs: Sequence[Tensor],
    *,
    reduce_after: Collection[int] = (),
    by_unit: bool = False,
) -> None:
    """reduce_after: the microbatches behind which every unit is reduced, in the order of the backward; the rest is left
    to `finish`. With the last one, sums over instances are begun by hand too. by_unit: units are gathered for each link
    and freed behind it, else once for the step."""
    stages = engine.stage_units()
    everything = [
        engine.unit_number(chunk, unit)
        for chunk, stage in enumerate(stages)
        for unit in range(len(stage.units))
    ]
    number_of = {
        module: engine.unit_number(chunk, unit)
        for chunk, units in enumerate(engine.unit_modules())
        for unit, modules in enumerate(units)
        for module in modules
    }
    engine.begin_step(len(inputs))
    if not by_unit:
        for unit in everything:
            engine.gathers.start(unit)
        for unit in everything:
            engine.gathers.wait(unit)
    for microbatch, x in enumerate(inputs):
        links = [link for chain in chains for link in chain.links.values()]
        runs = []
        for link in links:
            if by_unit:
                engine.gathers.start(number_of[link])
                engine.gathers.wait(number_of[link])
            start = x.detach().requires_grad_()
            x = link(start)
            runs.append((start, x))
            if by_unit:
                engine.gathers.free(number_of[link])
        loss = loss_of(x.detach().requires_grad_())
        grad = 2 * x.detach()
        assert loss.isfinite()
        for link, (start, output) in zip(reversed(links), reversed(runs), strict=True):
            if by_unit:
                engine.gathers.start(number_of[link])
                engine.gathers.wait(number_of[link])
            output.backward(grad)
            assert start.grad is not None
            grad = start.grad
            if by_unit:
                engine.gathers.free(number_of[link])
        if microbatch in reduce_after:
            for unit in reversed(everything):
                engine.reductions.start(unit)
                if microbatch + 1 == len(inputs):
                    engine.reductions.start_outer(unit)
    engine.finish()
    if not by_unit:
        for unit in everything:
            engine.gathers.free(unit)


def update(engine: DistributedDataParallel) -> None:
    """A step of plain SGD of what this rank's optimizer has."""
    buffer = engine.buffer
    for name in buffer.names:
        grad = buffer.main_grad_part(name) * buffer.grads_divided_by
        buffer.main_weight_part(name).sub_(LR * grad.to(buffer.main_weight_part(name).dtype))
    buffer.copy_main_to_weights()
    engine.weights_changed()


Parts = dict[str, tuple[int, Tensor]]  # name -> (first element, elements) of what a rank's optimizer has


def gradient_parts(engine: DistributedDataParallel) -> Parts:
    buffer = engine.buffer
    return {
        name: (buffer.part(name, buffer.sharding.optimizer)[0], buffer.main_grad_part(name).clone())
        for name in buffer.names
    }


def whole_weights(engine: DistributedDataParallel) -> dict[str, Tensor]:
    engine.settle_weights()
    with engine.gathered(range(len(engine.units))):
        return {name: engine.buffer.weight(name).clone() for name in engine.buffer.param_meta}


def joined(ranks: Sequence[Parts]) -> dict[str, Tensor]:
    """Flattened whole gradients; ranks that hold the same elements hold the same bits."""
    found = {}
    for name in ranks[0]:
        numel = max(start + part.numel() for start, part in (rank[name] for rank in ranks))
        whole = torch.full((numel,), float("nan"), dtype=ranks[0][name][1].dtype)
        for start, part in (rank[name] for rank in ranks):
            known = whole[start : start + part.numel()]
            assert known.isnan().all() or torch.equal(known, part), f"{name}: ranks differ"
            known.copy_(part)
        assert not whole.isnan().any(), name
        found[name] = whole
    return found


@dataclasses.dataclass
class Trained:
    """grads: of each step, flattened; weights: after the last one."""

    grads: list[dict[str, Tensor]]
    weights: dict[str, Tensor]


def reference(model: Model, steps: int, samples: int) -> Trained:
    """One process. samples: of each step, of all ranks and microbatches."""
    chains = model.chains()
    parameters = {name: p for chain in chains for name, p in chain.named_parameters()}
    grads = []
    for step in range(steps):
        for parameter in parameters.values():
            parameter.grad = None
        for number in range(samples):
            x = sample(step * samples + number, model.dtype)
            for chain in chains:
                x = chain(x)
            loss_of(x).backward()
        trained = {name: p for name, p in parameters.items() if p.requires_grad}
        grads.append({name: p.grad.flatten().clone() for name, p in trained.items() if p.grad is not None})
        with torch.no_grad():
            for parameter in trained.values():
                parameter.sub_(LR * parameter.grad)
    return Trained(grads, {name: p.detach().clone() for name, p in parameters.items()})
