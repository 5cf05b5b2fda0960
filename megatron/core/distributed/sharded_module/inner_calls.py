"""`fully_shard` of a module inside which there were calls before: their modules become units of one engine, which takes
their shards."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from torch import nn

from megatron.core.distributed.custom_fsdp.data_parallel_config import DistributedDataParallelConfig
from megatron.core.distributed.sharded_module.shard_parameters import ShownShards, cut_by_others
from megatron.core.distributed.sharded_module.sharded_engine import FullyShardedDataParallel
from megatron.core.distributed.sharded_module.step_driver import DRIVER, StepDriver
from megatron.core.module import MegatronModule, ModelError
from megatron.core.transport.parallel_state import ParallelState
from megatron.core.units import UnitModule


class InnerCalls:
    """The calls inside a module that no call around them has taken over yet. drivers: theirs, by path of the module.

    Raises ModelError where the module or something around it is sharded already, or where one of them has run.
    """

    def __init__(self, module: nn.Module) -> None:
        self._name = name = f"fully_shard({type(module).__name__})"
        self._paths = {id(one): path for path, one in module.named_modules()}
        here: list[StepDriver] = [one.__dict__[DRIVER] for one in module.modules() if DRIVER in one.__dict__]
        self.drivers = {self._paths[key]: one for one in here if (key := id(one.module)) in self._paths}
        if DRIVER in module.__dict__:
            raise ModelError(
                f"{name} for a second time: it is sharded already, in place; leave out one of the calls"
            )
        known = [driver.shards for driver in self.drivers.values()]
        cut = cut_by_others(known)
        for path, owner in module.named_modules():
            for parameter, own in dict.items(owner._parameters):
                if id(own) not in cut:
                    continue
                if isinstance(owner._parameters, ShownShards):
                    raise ModelError(
                        f"{name}: a module around it is sharded already, and its parameters with it; call fully_shard "
                        "from the inside out: each layer, then the model"
                    )
                shared = ".".join(filter(None, (path, parameter)))
                raise ModelError(
                    f"{name}: {shared!r} is shared with a module that was given to fully_shard before, which has cut "
                    "it: leave out the calls for modules that share weights; the call around both makes them one unit"
                )
        if self.drivers and isinstance(module, MegatronModule):
            raise ModelError(
                f"{name} after fully_shard of modules inside it: it says its units itself (units()); leave the calls "
                "inside it out"
            )
        for path, driver in self.drivers.items():
            if driver.used:
                raise ModelError(
                    f"{name}: {path!r} inside it has run since its own call; call fully_shard from the inside out "
                    "before the first forward"
                )

    @property
    def first(self) -> FullyShardedDataParallel | None:
        """The engine whose ranks and config a call around these has where it is given none."""
        return next((driver.engine for driver in self.drivers.values()), None)

    def unit_modules(self, own: Sequence[UnitModule]) -> list[UnitModule]:
        """The modules of the calls inside, the units that they were given, and the call's `own`, which take
        precedence."""
        together = [set(names) for names in own if isinstance(names, tuple)]
        found = dict.fromkeys(
            tuple(self._paths[id(module)] for module in unit)
            for driver in self.drivers.values()
            for unit in driver.units
            if all(id(module) in self._paths for module in unit)  # others were taken out of the module since
        )
        kept = (names for names in found if not any(set(names) <= one for one in together))
        return [*kept, *own]

    def take_over(self, ps: ParallelState, config: DistributedDataParallelConfig) -> dict[int, nn.Parameter]:
        """The modules inside are plain ones again: their shards, by the id of the parameter. Raises ModelError where
        their ranks or configs are others."""
        given = dataclasses.asdict(config) | {"fsdp_unit_modules": None}
        for path, driver in self.drivers.items():
            theirs = dataclasses.asdict(driver.engine.config) | {"fsdp_unit_modules": None}
            fields = [field for field, value in given.items() if theirs[field] != value]
            fields += ["mesh"] * (driver.engine.ps is not ps)
            if fields:
                raise ModelError(
                    f"{self._name}: {path!r} inside it was given another {', '.join(fields)}: give all calls the same, "
                    "or the calls around others nothing"
                )
        return {own: shard for driver in self.drivers.values() for own, shard in driver.release().items()}
