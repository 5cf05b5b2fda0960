"""torch's fused AdamW or SGD over this rank's parts of flat main weights.

Its parameters are long slices of what this rank holds of the flat main weights, not the model's own tensors: the update
is elementwise, so cutting the buffer elsewhere changes no value.

[Note: whole vectors] torch's fused CPU kernels work on vectors of elements, and on what is left at the end of a tensor
one by one, with another rounding (it contracts multiplications and additions differently: up to 2 % of such elements
differ in the last bit after 5 steps of AdamW in fp32). What is at the end of a slice depends on how the buffer is
sharded, so slices are cut to whole vectors here, and their unaligned tails, all of one group of parameters, are updated
as one tensor that is filled up to whole vectors. The bits of an update then depend neither on buckets, nor on strategy,
nor on the number of ranks.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from megatron.core.distributed.bucket_memory import BucketMemory, num_bytes, trained
from megatron.core.distributed.flat_buffer import FlatBuffer
from megatron.core.distributed.shard_layout import BufferSpan
from megatron.core.optimizer.inverse_update import undo_adamw, undo_sgd
from megatron.core.optimizer.optimizer_config import OptimizerConfig
from megatron.core.optimizer.param_groups import ParamGroup, build_param_groups

# Elements: a multiple of what any CPU's vectors hold, and of the cache lines that threads share work by.
VECTOR = 64

Batches = Iterable[tuple[Mapping[int, Tensor], bool]]


def vector_of(device: torch.device) -> int:
    """Elements that slices are multiples of. CUDA's kernels treat all elements alike."""
    return VECTOR if device.type == "cpu" else 1


@dataclasses.dataclass(frozen=True, eq=False)
class FlatSlice:
    """A part of one group's parameters in a bucket's main weights: elements [start, end) of the bucket's part.

    main_weights: a view of it; moments: name -> a view.
    """

    bucket: BucketMemory
    group: str
    start: int
    end: int
    main_weights: Tensor
    moments: Mapping[str, Tensor]


class UnalignedTails:
    """The tails of the slices of one group in one arena, as one parameter of torch's optimizer, which holds no memory
    between steps. weights: views of what is updated. moments: name -> views of theirs."""

    def __init__(
        self, group: str, weights: Sequence[Tensor], moments: Mapping[str, Sequence[Tensor]]
    ) -> None:
        assert weights, f"no tails of group {group!r}"
        self.group, self._weights, self._moments = group, list(weights), moments
        self._sizes = [view.numel() for view in weights]
        self._empty = weights[0].new_empty(0)
        self.parameter = nn.Parameter(self._empty)

    def gather(self, grads: Sequence[Tensor]) -> dict[str, Tensor]:
        """Fill the parameter and its gradient; returns its moments. grads: as the weights."""
        self.parameter.data = self._filled(self._weights)
        self.parameter.grad = self._filled(grads)
        return {name: self._filled(views) for name, views in self._moments.items()}

    @torch.no_grad()
    def scatter(self, moments: Mapping[str, Tensor]) -> None:
        """Put what was updated back to where it came from, and forget it."""
        updated = [(self._weights, self.parameter.data)]
        updated += [(list(views), moments[name]) for name, views in self._moments.items()]
        for views, flat in updated:
            torch._foreach_copy_(views, list(flat[: sum(self._sizes)].split(self._sizes)))
        self.parameter.grad, self.parameter.data = None, self._empty

    @torch.no_grad()
    def _filled(self, views: Sequence[Tensor]) -> Tensor:
        numel = sum(self._sizes)
        return torch.cat([*views, self._empty.new_zeros(math.ceil(numel / VECTOR) * VECTOR - numel)])


class FlatUpdate:
    """Moments and torch's optimizer, both from the start.

    moments: name -> one flat tensor an arena, of the optimizer's part at rest; empty for frozen parameters.
    param_groups: torch's own, into which the scheduler writes; none where this rank has no part of any parameter.
    """

    def __init__(self, config: OptimizerConfig, buffer: FlatBuffer, device: torch.device) -> None:
        self._config = config
        names: tuple[str, ...] = (
            "exp_avg",
            "exp_avg_sq",
        )  # torch's, of one tensor each as large as the weights
        if config.optimizer != "adam":
            names = ("momentum_buffer",) if config.sgd_momentum else ()
        numels = [buffer.optimizer_numel(arena) if arena.trained else 0 for arena in buffer.arenas]
        self.moments = {
            moment: tuple(
                torch.zeros(numel, dtype=arena.main_dtype, device=arena.weights.device)
                for numel, arena in zip(numels, buffer.arenas, strict=True)
            )
            for moment in names
        }
        bodies: list[FlatSlice] = []
        tails: dict[tuple[int, str], list[FlatSlice]] = {}  # by arena and group
        vector = vector_of(device)
        for memory, span, first in _spans(buffer):
            start, end = span.start - first, span.end - first
            middle = end - (end - start) % vector
            if start < middle:
                bodies.append(self._slice(memory, span.group, first, start, middle))
            if middle < end:
                tail = self._slice(memory, span.group, first, middle, end)
                tails.setdefault((memory.arena, span.group), []).append(tail)
        self._slices = [(piece, nn.Parameter(piece.main_weights)) for piece in bodies]
        self._tails = [
            (
                UnalignedTails(
                    group,
                    [one.main_weights for one in pieces],
                    {moment: [one.moments[moment] for one in pieces] for moment in self.moments},
                ),
                pieces,
            )
            for (_, group), pieces in tails.items()
        ]
        parameters = [(piece.group, parameter) for piece, parameter in self._slices]
        parameters += [(one.group, one.parameter) for one, _ in self._tails]
        self._torch: torch.optim.Optimizer | None = None
        self.param_groups: list[ParamGroup] = []
        self._steps = [torch.zeros((), dtype=torch.float32, device=device) for _ in parameters]
        if parameters:
            self._torch = _torch_optimizer(config, build_param_groups(config, buffer, parameters))
            self.param_groups = cast(list[ParamGroup], self._torch.param_groups)
            # torch's state from before the first step: step counts, and views of our moments; tails get theirs in it.
            for (_, parameter), step in zip(parameters, self._steps, strict=True):
                self._torch.state[parameter] = {"step": step} if config.optimizer == "adam" else {}
            for piece, parameter in self._slices:
                self._torch.state[parameter].update(piece.moments)

    def _slice(self, memory: BucketMemory, group: str, first: int, start: int, end: int) -> FlatSlice:
        """first: where the bucket's part begins in moments."""
        flats = {
            name: flats[memory.arena][first + start : first + end] for name, flats in self.moments.items()
        }
        return FlatSlice(memory, group, start, end, trained(memory.main_weights)[start:end], flats)

    def step(self, batches: Batches) -> None:
        """One update. batches: buckets' gradients in the dtype of their main weights, by the buckets' identity, and
        whether the batch is the last; together they are all trained buckets, each once. A batch is let go before the
        next is asked for.

        torch skips parameters without a gradient, their step counts included, so several calls are one update.
        """
        if self._torch is None:
            return
        tails_of: dict[int, Tensor] = {}  # gradients of tails, which are updated together, by slice
        for grads, is_last in batches:
            self._set_grads(grads, tails_of, copied=not is_last)
            del grads  # a temporary may be freed
            if is_last:
                for tails, pieces in self._tails:
                    gathered = tails.gather([tails_of[id(piece)] for piece in pieces])
                    self._torch.state[tails.parameter].update(gathered)
            self._torch.step()
            for _, parameter in self._slices:
                parameter.grad = None
        for tails, _ in self._tails:
            state = self._torch.state[tails.parameter]
            tails.scatter({moment: state.pop(moment) for moment in self.moments})

    def _set_grads(self, grads: Mapping[int, Tensor], tails_of: dict[int, Tensor], *, copied: bool) -> None:
        """Of these buckets: slices get theirs, tails_of those of tails. copied: these outlive the batch."""
        for piece, parameter in self._slices:
            if (found := grads.get(id(piece.bucket))) is not None:
                parameter.grad = found[piece.start : piece.end]
        for piece in (piece for _, pieces in self._tails for piece in pieces):
            if (found := grads.get(id(piece.bucket))) is not None:
                tail = found[piece.start : piece.end]
                tails_of[id(piece)] = tail.clone() if copied else tail

    def undo(self, batches: Batches, num_steps: int) -> None:
        """Take the last update back, by arithmetic: see inverse_update, [Note: what is lost].

        batches: as they were given to `step`, and the same rates in `param_groups`. num_steps: updates until now.
        """
        config = self._config
        rates = {group["name"]: (group["lr"], group["weight_decay"]) for group in self.param_groups}
        pieces = [piece for piece, _ in self._slices]
        pieces += [piece for _, of_group in self._tails for piece in of_group]
        for grads, _ in batches:
            for piece in (piece for piece in pieces if id(piece.bucket) in grads):
                grad, (lr, decay) = grads[id(piece.bucket)][piece.start : piece.end], rates[piece.group]
                weights, moments = piece.main_weights, list(piece.moments.values())
                if config.optimizer == "adam":
                    undo_adamw(
                        weights, (moments[0], moments[1]), grad, lr=lr, weight_decay=decay,
                        betas=(config.adam_beta1, config.adam_beta2), eps=config.adam_eps, num_steps=num_steps,
                    )  # fmt: skip
                else:
                    undo_sgd(
                        weights, moments[0] if moments else None, grad, lr=lr, weight_decay=decay,
                        momentum=config.sgd_momentum, num_steps=num_steps,
                    )  # fmt: skip
        if config.optimizer == "adam":
            self.set_num_steps(num_steps - 1)

    def mutable(self) -> Iterator[Tensor]:
        """What `step` changes besides main weights."""
        for flats in self.moments.values():
            yield from flats
        yield from self._steps

    def set_num_steps(self, num_steps: int) -> None:
        """So many updates lie behind."""
        for step in self._steps:
            step.fill_(num_steps)

    def persistent_bytes(self) -> dict[str, int]:
        """Bytes held for the whole run, by moment."""
        return {name: num_bytes(flats) for name, flats in self.moments.items()}


def _spans(buffer: FlatBuffer) -> Iterator[tuple[BucketMemory, BufferSpan, int]]:
    """What this rank updates, without padding, in the buffer's order: the bucket, elements of the arena's flat buffer
    at rest, and where the bucket's part begins in that. Nothing where it has no part of any parameter."""
    memory_of = {(memory.arena, memory.bucket.index): memory for memory in buffer.buckets}
    cut = buffer.sharding.optimizer
    for index, arena in enumerate(buffer.arenas):
        for span in arena.layout.spans_at_rest(buffer.place, cut) if arena.trained else ():
            first = arena.layout.rest_start(span.bucket, buffer.place, cut)
            yield memory_of[index, span.bucket], span, first


def _torch_optimizer(config: OptimizerConfig, groups: list[ParamGroup]) -> torch.optim.Optimizer:
    """Adam decays decoupled (AdamW); SGD adds the decay to the gradient. The groups hold lr and decay."""
    params = cast(list[dict[str, Any]], groups)
    if config.optimizer == "adam":
        betas = (config.adam_beta1, config.adam_beta2)
        return torch.optim.AdamW(params, betas=betas, eps=config.adam_eps, fused=True)
    return torch.optim.SGD(params, momentum=config.sgd_momentum, fused=True)
