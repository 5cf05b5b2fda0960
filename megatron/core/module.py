"""What a model shares with whatever runs it, and the chunks of one rank as one set of parameters."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn

from megatron.core.param_meta import ParamMeta
from megatron.core.unit_accesses import Accesses
from megatron.core.weight_grad import WeightGradAccumulator


class LayerCounts:
    """Numbers that layers count in forwards: each is the sum over a step's microbatches. `clear` begins a step, or
    begins it again. What is computed again for the backward has been counted (`ModelContext.repeating`).

    mean_over_dp: of numbers that all data parallel ranks have, which all call alike; to be set where there are several.
    """

    def __init__(self) -> None:
        self.totals: dict[tuple[int, str], Tensor] = {}  # (layer, name) -> fp64
        self.paused = False
        self.mean_over_dp: Callable[[Tensor], Tensor] = lambda numbers: numbers
        self._running: dict[int, tuple[Tensor, int]] = {}  # layer -> sum, of how many microbatches
        self._for_repeats: dict[tuple[int, int], Tensor] = {}  # (layer, microbatch)

    def add(self, layer: int, name: str, numbers: Tensor) -> None:
        if not self.paused:
            numbers, known = numbers.to(torch.float64), self.totals.get((layer, name))
            self.totals[layer, name] = numbers if known is None else known + numbers

    def running_mean(self, layer: int, microbatch: int, numbers: Tensor) -> Tensor:
        """Of a microbatch's numbers and those of the step's microbatches before it, over data parallel ranks: fp64.
        Where the forward is repeated, what it has been the first time. Communicates over dp, the first time."""
        if self.paused:
            return self._for_repeats.pop((layer, microbatch))
        total, count = self._running.get(layer, (0, 0))
        total, count = self.mean_over_dp(numbers.to(torch.float64)) + total, count + 1
        self._running[layer], mean = (total, count), total / count
        if not torch.is_grad_enabled():  # a forward that will be repeated (recompute.py)
            self._for_repeats[layer, microbatch] = mean
        return mean

    def clear(self) -> None:
        for kept in (self.totals, self._running, self._for_repeats):
            kept.clear()


class Moment(NamedTuple):
    """What a forward depends on beside its inputs and the weights."""

    iteration: int
    microbatch: int
    loss_scale: float


@dataclasses.dataclass
class ModelContext:
    """Made by the model, driven by the trainer: the sink for weight gradients, the clock that keys dropout, and what
    layers count.

    Dropout masks are a function of (seed, iteration, microbatch, layer, site) and of nothing else; `microbatch` is
    global: index within the step * data-parallel size + data-parallel rank. loss_scale: what the step's loss is
    multiplied by before it is differentiated, and losses of layers are, too.
    """

    seed: int
    iteration: int = 0
    microbatch: int = 0
    loss_scale: float = 1.0
    grads: WeightGradAccumulator = dataclasses.field(default_factory=WeightGradAccumulator)
    counts: LayerCounts = dataclasses.field(default_factory=LayerCounts)

    def begin_microbatch(self, iteration: int, index: int, global_index: int) -> None:
        """Call before the forward of microbatch `index` of this rank's step."""
        self.iteration = iteration
        self.microbatch = global_index
        self.grads.microbatch = index

    @property
    def moment(self) -> Moment:
        return Moment(self.iteration, self.microbatch, self.loss_scale)

    @contextlib.contextmanager
    def repeating(self, moment: Moment) -> Iterator[None]:
        """A forward inside is that of `moment`, once more. The sink's microbatch stays as it is."""
        now, paused = self.moment, self.counts.paused
        self.iteration, self.microbatch, self.loss_scale = moment
        self.counts.paused = True
        try:
            yield
        finally:
            self.iteration, self.microbatch, self.loss_scale = now
            self.counts.paused = paused


@dataclasses.dataclass(frozen=True)
class ModelUnit:
    """Modules whose parameters are gathered and reduced together.

    modules: in the order in which they run; the unit's parameters are all those below them. A parameter that modules
    share, or that is used where no module of the unit runs, must be read between the first module's forward and the
    end of the last one's. backward_reads: backward needs the weights too (lookup tables do not).
    begins_with_lookup: its first use is that of a lookup table, others follow: of these alone the backward reads.
    entered_by: the modules whose forward or backward begins its use, where another unit lies inside of `modules`.
    """

    name: str
    modules: tuple[nn.Module, ...]
    backward_reads: bool = True
    begins_with_lookup: bool = False
    entered_by: tuple[nn.Module, ...] = ()


class ModelError(ValueError):
    """A model, its provider or its loss function cannot do what the flags ask of it."""


class MegatronModule(nn.Module):
    """A model of ours: carries its context and the facts about its parameters."""

    context: ModelContext
    param_meta: dict[str, ParamMeta]

    def units(self) -> tuple[ModelUnit, ...] | None:
        """What is gathered and reduced together under sharding, in the order of the forward; every parameter is in
        exactly one. None: to be derived from --fsdp-unit-modules."""
        return None

    def unit_accesses(self) -> Accesses[str] | None:
        """In which order computations need the units (held/units.py, [Note: accesses]). None: one by one, in the order
        in which their modules are registered, and in the backward in reverse."""
        return None

    def set_input_tensor(self, input_tensor: Tensor | None) -> None:
        """What the next forward starts from where the model does not embed: [s, b, h] of the stage before."""
        raise ModelError(
            f"--pipeline-model-parallel-size: {type(self).__name__} has no set_input_tensor(tensor) of its own, which "
            "hands a stage what the one before has computed: give it one, or use 1 stage"
        )


class ModelChunks:
    """Chunks of one rank, one pipeline stage each; parameters by the names that they have in the whole model.

    parameters: of all chunks, in their order. holders: name -> the chunks that hold it (several hold it only as the
    very same tensor). names_of: the names of each chunk. stage_of: name -> global stage, the first of several.

    Raises ModelError where chunks have different parameters of one name, or one parameter under two.
    """

    def __init__(self, modules: tuple[nn.Module, ...], stages: tuple[int, ...] | None = None) -> None:
        stages = tuple(range(len(modules))) if stages is None else stages
        assert len(stages) == len(modules), f"{len(modules)} chunks, stages {stages}"
        assert list(stages) == sorted(set(stages)), f"chunks in the order of their stages, not {stages}"
        self.modules = modules
        self.stages = stages
        self.parameters: dict[str, nn.Parameter] = {}
        self.holders: dict[str, list[int]] = {}
        self.names_of: list[list[str]] = [[] for _ in modules]
        name_of: dict[int, str] = {}
        for chunk, module in enumerate(modules):
            for name, parameter in module.named_parameters():
                known = self.parameters.setdefault(name, parameter)
                if known is not parameter:
                    raise ModelError(
                        f"model chunks {self.holders[name][0]} and {chunk} both have a parameter {name!r}: give the "
                        "parameters of different chunks different names, those of the whole model"
                    )
                other = name_of.setdefault(id(parameter), name)
                if other != name:
                    raise ModelError(
                        f"one tensor has two names, {other!r} and {name!r}: give a parameter that several chunks hold "
                        "the same name in all of them"
                    )
                self.holders.setdefault(name, []).append(chunk)
                self.names_of[chunk].append(name)
        self.stage_of = {name: stages[chunks[0]] for name, chunks in self.holders.items()}
