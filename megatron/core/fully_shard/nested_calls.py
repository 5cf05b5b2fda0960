"""`fully_shard` of a module inside which there were calls before: their modules become units of one engine.

Each call shards at once, with an engine of its own. A call around it takes that engine's hooks off and reads its
weights out, a unit at a time, into buffers of its own.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import sys
from collections.abc import Collection, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from megatron.core.distributed.distributed_data_parallel_config import DistributedDataParallelConfig
from megatron.core.fully_shard.fully_sharded_data_parallel import (
    FullyShardedDataParallel,
    ranks_of,
)
from megatron.core.fully_shard.shard_parameters import BUILD_IT_AFTERWARDS
from megatron.core.fully_shard.step_driver import DRIVER, StepDriver
from megatron.core.module import MegatronModule, ModelError
from megatron.core.own_parameters import OwnParameters
from megatron.core.transport.parallel_state import ParallelState
from megatron.core.units import UnitModule, matched_units


class InnerCalls:
    """The calls inside a module that no call around them has taken over yet.

    Raises ModelError where the module or something around it is sharded already, or where one of them has run.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._paths = {id(one): name for name, one in module.named_modules()}
        here = (one.__dict__.get(DRIVER) for one in module.modules())
        self._drivers = [
            driver for driver in dict.fromkeys(here) if driver and id(driver.module) in self._paths
        ]
        name = type(module).__name__
        if DRIVER in module.__dict__:
            raise ModelError(
                f"fully_shard({name}) for a second time: it is sharded already, in place; leave out one of the calls"
            )
        known = {id(driver.shards) for driver in self._drivers}
        for one in module.modules():
            own = one.__dict__["_parameters"]
            if isinstance(own, OwnParameters) and own.view is not None and id(own.view) not in known:
                raise ModelError(
                    f"fully_shard({name}): a module around it is sharded already, and its parameters with it; call "
                    "fully_shard from the inside out: each layer, then the model"
                )
        if self._drivers and isinstance(module, MegatronModule):
            raise ModelError(
                f"fully_shard({name}) after fully_shard of modules inside it: it says its units itself (units()); "
                "leave the calls inside it out"
            )
        for driver in self._drivers:
            if driver.used or driver.shards.take_changes():
                raise ModelError(
                    f"fully_shard({name}): {self._path(driver)!r} inside it has run or was written to since its own "
                    "call; call fully_shard from the inside out before the first forward, and load weights afterwards"
                )

    def __bool__(self) -> bool:
        return bool(self._drivers)

    @property
    def ps(self) -> ParallelState:
        return self._drivers[0].engine.ps

    @property
    def config(self) -> DistributedDataParallelConfig:
        return dataclasses.replace(self._drivers[0].engine.config, fsdp_unit_modules=None)

    def unit_modules(self, own: Sequence[UnitModule]) -> list[UnitModule]:
        """The modules of the calls inside, the units that they were given, and the call's `own`, which take
        precedence."""
        together = [set(names) for names in own if isinstance(names, tuple)]
        found: list[tuple[str, ...]] = []
        for driver in self._drivers:
            found.append((self._path(driver),))
            for modules in matched_units(driver.module, driver.unit_modules):
                found.append(tuple(self._paths[id(module)] for module in modules))
        kept = (names for names in dict.fromkeys(found) if not any(set(names) <= one for one in together))
        return [*kept, *own]

    def take_over(self, ps: ParallelState, config: DistributedDataParallelConfig) -> None:
        """The modules inside are plain ones again. Raises ModelError where their ranks or configs are others."""
        for driver in self._drivers:
            theirs = driver.engine.config
            fields = [
                field.name
                for field in dataclasses.fields(config)
                if field.name != "fsdp_unit_modules"
                and getattr(theirs, field.name) != getattr(config, field.name)
            ]
            fields += ["mesh"] * (driver.engine.ps is not ps)
            if fields:
                raise ModelError(
                    f"fully_shard({type(self._module).__name__}): {self._path(driver)!r} inside it was given another "
                    f"{', '.join(fields)}: give all calls the same, or the calls around others nothing"
                )
        self._engine_of: dict[int, tuple[FullyShardedDataParallel, int]] = {}
        self.own_parameters = set[int]()
        for driver in self._drivers:
            driver.release()
            engine = driver.engine
            parameters = dict(driver.module.named_parameters())
            self.own_parameters |= {id(parameter) for parameter in parameters.values()}
            self._engine_of |= {
                id(parameters[name]): (engine, unit.index) for unit in engine.units for name in unit.names
            }

    @contextlib.contextmanager
    def reading(self, parameters: Sequence[nn.Parameter]) -> Iterator[None]:
        """Their values are there inside. Communicates over dp_gather."""
        places = dict.fromkeys(self._engine_of.get(id(parameter)) for parameter in parameters)
        units = [place for place in places if place is not None]
        with contextlib.ExitStack() as inside:
            for engine, unit in units:
                inside.enter_context(engine.gathered([unit]))
            yield

    def hand_over(self, driver: StepDriver) -> None:
        """From here on `driver` drives the modules of the calls inside."""
        for inner in self._drivers:
            for module in inner.module.modules():
                if DRIVER in module.__dict__:
                    module.__dict__[DRIVER] = driver

    def _path(self, driver: StepDriver) -> str:
        return self._paths[id(driver.module)]


def refuse_optimizers(module: nn.Module) -> None:
    """Raises ModelError where an optimizer has parameters of a module that is about to be sharded."""
    if max(_references(module), default=0) <= _references(nn.Linear(1, 1, bias=False))[0]:
        return  # nobody has any of them but the module
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    if _optimizers_over(names.keys()):
        gc.collect()  # one that nobody can reach any more is no mistake
    for optimizer, found in _optimizers_over(names.keys()):
        raise ModelError(
            f"fully_shard({type(module).__name__}): {type(optimizer).__name__} was built before it over "
            f"{names[found]!r} and would train nothing: {BUILD_IT_AFTERWARDS}"
        )


def _references(module: nn.Module) -> list[int]:
    return [sys.getrefcount(parameter) for parameter in module.parameters()]


def _optimizers_over(parameters: Collection[int]) -> list[tuple[torch.optim.Optimizer, int]]:
    """Those alive, and the first parameter that each has. parameters: ids."""
    found = []
    for one in gc.get_objects():
        if issubclass(type(one), torch.optim.Optimizer):
            held = (id(parameter) for group in one.param_groups for parameter in group["params"])
            found += [(one, parameter) for parameter in held if parameter in parameters][:1]
    return found


def lasting_ranks(ps_or_mesh: ParallelState | DeviceMesh | None) -> ParallelState:
    """As `ranks_of`, the same for the same ranks, so that one call for each layer makes communicators once."""
    if isinstance(ps_or_mesh, ParallelState) or not dist.is_initialized():
        return ranks_of(ps_or_mesh)
    return _ranks_within(ps_or_mesh, dist.group.WORLD)


@functools.lru_cache(maxsize=4)
def _ranks_within(mesh: DeviceMesh | None, world: object) -> ParallelState:
    return ranks_of(mesh)
