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
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from megatron.core.distributed.custom_fsdp.shard_parameters import (
    BUILD_IT_AFTERWARDS,
    ShownShards,
    shared_with_others,
)
from megatron.core.distributed.custom_fsdp.sharded_engine import (
    FullyShardedDataParallel,
    ranks_of,
)
from megatron.core.distributed.custom_fsdp.step_driver import DRIVER, StepDriver
from megatron.core.distributed.data_parallel_config import DistributedDataParallelConfig
from megatron.core.module import MegatronModule, ModelError
from megatron.core.transport.parallel_state import ParallelState
from megatron.core.units import UnitModule, matched_units


class InnerCalls:
    """The calls inside a module that no call around them has taken over yet. drivers: theirs, by path of the module.
    places: id of a parameter that was taken over -> the engine and the unit that hold its values.

    Raises ModelError where the module or something around it is sharded already, or where one of them has run.
    """

    def __init__(self, module: nn.Module) -> None:
        self._name = name = f"fully_shard({type(module).__name__})"
        self._paths = {id(one): path for path, one in module.named_modules()}
        here = dict.fromkeys(one.__dict__[DRIVER] for one in module.modules() if DRIVER in one.__dict__)
        inside = (driver for driver in here if id(driver.module) in self._paths)
        self.drivers: dict[str, StepDriver] = {self._paths[id(one.module)]: one for one in inside}
        self.places: dict[int, tuple[FullyShardedDataParallel, int]] = {}
        if DRIVER in module.__dict__:
            raise ModelError(
                f"{name} for a second time: it is sharded already, in place; leave out one of the calls"
            )
        known = [driver.shards for driver in self.drivers.values()]
        for own in (one.__dict__["_parameters"] for one in module.modules()):
            if isinstance(own, ShownShards) and own.shards not in known:
                raise ModelError(
                    f"{name}: a module around it is sharded already, and its parameters with it; call fully_shard from "
                    "the inside out: each layer, then the model"
                )
        if shared := shared_with_others(module.named_parameters(), known):
            raise ModelError(
                f"{name}: {shared!r} is shared with a module that was given to fully_shard before, which has cut it: "
                "leave out the calls for modules that share weights; the call around both makes them one unit"
            )
        if self.drivers and isinstance(module, MegatronModule):
            raise ModelError(
                f"{name} after fully_shard of modules inside it: it says its units itself (units()); leave the calls "
                "inside it out"
            )
        for path, driver in self.drivers.items():
            if driver.used or driver.shards.take_changes():
                raise ModelError(
                    f"{name}: {path!r} inside it has run or was written to since its own call; call fully_shard from "
                    "the inside out before the first forward, and load weights afterwards"
                )

    @property
    def first(self) -> FullyShardedDataParallel | None:
        """The engine whose ranks and config a call around these has where it is given none."""
        return next((driver.engine for driver in self.drivers.values()), None)

    def unit_modules(self, own: Sequence[UnitModule]) -> list[UnitModule]:
        """The modules of the calls inside, the units that they were given, and the call's `own`, which take
        precedence."""
        together = [set(names) for names in own if isinstance(names, tuple)]
        found: list[tuple[str, ...]] = []
        for path, driver in self.drivers.items():
            found.append((path,))
            for modules in matched_units(driver.module, driver.unit_modules):
                found.append(tuple(self._paths[id(module)] for module in modules))
        kept = (names for names in dict.fromkeys(found) if not any(set(names) <= one for one in together))
        return [*kept, *own]

    def take_over(self, ps: ParallelState, config: DistributedDataParallelConfig) -> None:
        """The modules inside are plain ones again. Raises ModelError where their ranks or configs are others."""
        given = dataclasses.asdict(config)
        for path, driver in self.drivers.items():
            theirs = dataclasses.asdict(driver.engine.config)
            fields = [one for one in given if one != "fsdp_unit_modules" and theirs[one] != given[one]]
            fields += ["mesh"] * (driver.engine.ps is not ps)
            if fields:
                raise ModelError(
                    f"{self._name}: {path!r} inside it was given another {', '.join(fields)}: give all calls the same, "
                    "or the calls around others nothing"
                )
        for driver in self.drivers.values():
            driver.release()
            engine, parameters = driver.engine, dict(driver.module.named_parameters())
            self.places |= {
                id(parameters[name]): (engine, unit.index) for unit in engine.units for name in unit.names
            }

    @contextlib.contextmanager
    def reading(self, parameters: Sequence[nn.Parameter]) -> Iterator[None]:
        """Their values are there inside. Communicates over dp_gather."""
        places = (self.places[id(one)] for one in parameters if id(one) in self.places)
        with contextlib.ExitStack() as inside:
            for engine, unit in dict.fromkeys(places):
                inside.enter_context(engine.gathered([unit]))
            yield


def refuse_optimizers(module: nn.Module) -> None:
    """Raises ModelError where an optimizer has parameters of a module that is about to be sharded."""
    if max(_references(module), default=0) <= _references(nn.Linear(1, 1, bias=False))[0]:
        return  # nobody has any of them but the module
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    if _optimizers_over(names):
        gc.collect()  # one that nobody can reach any more is no mistake
    for optimizer, name in _optimizers_over(names):
        raise ModelError(
            f"fully_shard({type(module).__name__}): {type(optimizer).__name__} was built before it over {name!r} and "
            f"would train nothing: {BUILD_IT_AFTERWARDS}"
        )


def _references(module: nn.Module) -> list[int]:
    return [sys.getrefcount(parameter) for parameter in module.parameters()]


def _optimizers_over(names: dict[int, str]) -> list[tuple[torch.optim.Optimizer, str]]:
    """Those alive, and the name of the first parameter that each has. names: by ids of parameters."""
    found = []
    for one in gc.get_objects():
        if issubclass(type(one), torch.optim.Optimizer):
            held = (id(parameter) for group in one.param_groups for parameter in group["params"])
            found += [(one, names[parameter]) for parameter in held if parameter in names][:1]
    return found


def lasting_ranks(ps_or_mesh: ParallelState | DeviceMesh | None) -> ParallelState:
    """As `ranks_of`, the same for the same ranks, so that one call for each layer makes communicators once."""
    if isinstance(ps_or_mesh, ParallelState) or not dist.is_initialized():
        return ranks_of(ps_or_mesh)
    return _ranks_within(ps_or_mesh, dist.group.WORLD)


@functools.lru_cache(maxsize=4)
def _ranks_within(mesh: DeviceMesh | None, world: object) -> ParallelState:
    return ranks_of(mesh)
