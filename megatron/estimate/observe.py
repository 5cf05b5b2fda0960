"""A part of a model, described by running microbatches of it: F, split B and W, and whole backwards."""

from __future__ import annotations

import dataclasses
import math
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from megatron.core.module import MegatronModule
from megatron.core.param_meta import ParamMeta
from megatron.core.pipeline_parallel.runtime.stage import ModelStage
from megatron.core.tensor_parallel.mappings import SequenceShard
from megatron.core.transport.parallel_state import Group
from megatron.estimate.description import (
    EVALUATED,
    ComputationFigures,
    Ends,
    ModelPiece,
    ModuleFigures,
    Weight,
)
from megatron.estimate.watch import Handed, Watch, place_of, tensors_in

_Computation = Callable[[int, Tensor | None], Tensor | None]
_COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce", "broadcast", "all_to_all")


@dataclasses.dataclass(frozen=True)
class ObservedPart:
    """A part of a model, to be observed; of one that is not ours whole backwards alone.

    forward: of one microbatch, from hidden states to hidden states (None where it begins the model), or to the number
    to differentiate where it ends the model. hidden: shape and dtype of such states. main_grads: what gradients are
    accumulated in. groups: whose collectives are counted.
    """

    model: nn.Module
    forward: Callable[[Tensor | None], Tensor]
    hidden: Handed | None
    ends: bool
    main_grads: torch.dtype
    groups: Iterable[Group] = ()


def observe(part: ObservedPart) -> ModelPiece:
    """Its figures. Runs four microbatches, the first of which makes what lasts; the last is an evaluation's."""
    ours = part.model if isinstance(part.model, MegatronModule) else None
    stage = ModelStage(
        lambda _, hidden: part.forward(hidden),
        None if ours is None else ours.context.grads,
        begins=part.hidden is None,
        ends=part.ends,
    )
    with Watch(part.model, part.main_grads) as watch:
        _Microbatch(part, watch, stage, split=stage.splits)
        lasting = watch.held()
        split, whole = (_Microbatch(part, watch, stage, split=split) for split in (stage.splits, False))
        evaluated = {EVALUATED: _evaluated(part, watch, stage)}
    work = split.work | {name: of_paths for name, of_paths in whole.work.items() if name == "BW"}
    paths = set[str]().union(watch.parameters, lasting, split.kept, split.filed, *work.values())
    modules = {
        path: ModuleFigures(
            watch.parameters[path],
            lasting[path],
            split.kept[path],
            split.filed[path],
            {name: of_paths[path] for name, of_paths in work.items() if path in of_paths},
        )
        for path in sorted(paths)
    }
    weights = {
        name: _weight(parameter, None if ours is None else ours.param_meta.get(name))
        for name, parameter in part.model.named_parameters()
    }
    moved = whole.collectives | split.collectives
    most = split.most | whole.most | evaluated
    return ModelPiece(modules, split.ends, most, moved, weights, split.filed_for)


def _weight(parameter: Tensor, meta: ParamMeta | None) -> Weight:
    if meta is None:
        return Weight(parameter.numel(), parameter.numel())
    return Weight(parameter.numel(), math.prod(meta.global_shape), meta.expert, meta.shared)


def _evaluated(part: ObservedPart, watch: Watch, stage: ModelStage) -> int:
    """The most that a forward has at once, beside what it is handed."""
    part.model.eval()
    hidden = None if part.hidden is None else watch.hand(part.hidden)
    with torch.no_grad(), watch.computing():
        stage.forward(0, hidden)
    part.model.train()
    return watch.most


class _Microbatch:
    """One, run. split: B and W, else BW. kept, filed: bytes by path; work: by computation, then path. filed_for: as in
    `ModelPiece`."""

    def __init__(self, part: ObservedPart, watch: Watch, stage: ModelStage, *, split: bool) -> None:
        self._groups, self._watch = tuple(part.groups), watch
        self.work: dict[str, dict[str, ComputationFigures]] = {}
        self.most: dict[str, int] = {}
        self.collectives: dict[tuple[str, str, str], int] = {}
        before = watch.held()
        hidden = None if part.hidden is None else watch.hand(part.hidden)
        taken = _storage(hidden)
        input_bytes = 0 if hidden is None else hidden.nbytes
        with_input, saved = watch.held(), set[int]()

        def note(tensor: Tensor) -> Tensor:
            saved.add(place_of(tensor))
            return tensor

        with saved_tensors_hooks(note, lambda tensor: tensor):
            output = self._compute("F", stage.forward, hidden)
        saves_input = hidden is not None and place_of(hidden) in saved
        output_bytes = 0 if output is None else output.nbytes
        maker, handed_on = watch.maker(output), _storage(output)
        like = None if output is None else (output.shape, output.dtype)
        del hidden, output  # the next has it
        self.kept, keeps_output = watch.held() - with_input, handed_on() is not None
        grad = None if like is None else watch.hand(like)
        back = stage.backward_input if split else stage.backward
        answer = self._compute("B" if split else "BW", back, grad)
        back_maker, handed_back = watch.maker(answer), _storage(answer)
        self.filed_for = _filed_for(part.model, watch, answer)
        del grad, answer
        self.filed = watch.held() - before
        self.ends = Ends(
            input_bytes,
            output_bytes,
            keeps_input=saves_input or taken() is not None,
            keeps_output=keeps_output,
            files_back=handed_back() is not None,
            maker=maker,
            back_maker=back_maker,
        )
        if split:
            self._compute("W", lambda number, _: stage.backward_weight(number), None)
        stage.check_empty()

    def _compute(self, name: str, run: _Computation, handed: Tensor | None) -> Tensor | None:
        before = self._moved()
        with self._watch.computing():
            out = run(0, handed)
        self.work[name], self.most[name] = self._watch.work(), self._watch.most
        moved = self._moved() - before
        self.collectives |= {(name, group, kind): size for (group, kind), size in moved.items()}
        return out

    def _moved(self) -> Counter[tuple[str, str]]:
        """Payload bytes of all collectives until now, by group and kind."""
        return Counter(
            {
                (group.purpose, kind): group.traffic.moved(kind).payload_bytes
                for group in self._groups
                for kind in _COLLECTIVES
            }
        )


def _filed_for(model: nn.Module, watch: Watch, handed_back: Tensor | None) -> dict[tuple[str, ...], int]:
    """Bytes by whose gradients they are for, without what the stage was handed, or hands back."""
    if not isinstance(model, MegatronModule):
        return {}
    keys, sizes = defaultdict[int, set[str]](set), dict[int, int]()
    others = set() if handed_back is None else {place_of(handed_back)}
    for key, x, dy in model.context.grads.filed(0):
        operand = x.shard if isinstance(x, SequenceShard) else x
        for tensor in tensors_in(operand, dy):
            if (seen := watch.made(tensor)) is not None and seen[0] not in others:
                keys[seen[0]].add(key)
                sizes[seen[0]] = seen[1]
    found = Counter[tuple[str, ...]]()
    for place, size in sizes.items():
        found[tuple(sorted(keys[place]))] += size
    return dict(found)


def _storage(tensor: Tensor | None) -> Callable[[], object | None]:
    """Its memory, as long as somebody has it."""
    return (lambda: None) if tensor is None else weakref.ref(tensor.untyped_storage())
