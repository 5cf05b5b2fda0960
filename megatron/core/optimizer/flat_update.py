"""torch's fused AdamW (arXiv 1711.05101) or SGD over this rank's parts of flat main weights, 1-D.

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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TypedDict

import torch
from torch import Tensor
from torch.optim.adamw import adamw
from torch.optim.sgd import sgd

from megatron.core.device import kind_of
from megatron.core.distributed.custom_fsdp.bucket_memory import BucketMemory, num_bytes, trained
from megatron.core.distributed.custom_fsdp.flat_buffer import FlatBuffer
from megatron.core.distributed.custom_fsdp.shard_layout import BufferSpan
from megatron.core.optimizer.inverse_update import undo_adamw, undo_sgd
from megatron.core.optimizer.optimization_config import OptimizerConfig

# Elements: a multiple of what any CPU's vectors hold, and of the cache lines that threads share work by.
VECTOR = 64

Batches = Iterable[tuple[Mapping[int, Tensor], bool]]


def vector_of(device: torch.device) -> int:
    """Elements that slices are multiples of. CUDA's kernels treat all elements alike."""
    return VECTOR if kind_of(device) == "cpu" else 1


class ParamGroup(TypedDict):
    """Rates of one kind of parameters, with what the scheduler needs to set `lr` and `weight_decay`.

    wd_mult: 1.0, or 0.0 where nothing decays. decoupled: max_lr and min_lr are --decoupled-lr's.
    """

    name: str
    lr: float
    weight_decay: float
    wd_mult: float
    max_lr: float
    min_lr: float
    decoupled: bool


@dataclasses.dataclass(frozen=True, eq=False)
class Updated:
    """What one call of torch's kernel updates: weights of one group and their moments by name, all 1-D, same shape.

    num_steps: fp32, no dimensions, which AdamW's kernel counts up.
    """

    group: str
    main_weights: Tensor
    moments: Mapping[str, Tensor]
    num_steps: Tensor


@dataclasses.dataclass(frozen=True, eq=False)
class FlatSlice(Updated):
    """A part of one group's parameters in a bucket's main weights: elements [start, end) of the bucket's part. Weights
    and moments are views."""

    bucket: BucketMemory
    start: int
    end: int

    def grads(self, by_bucket: Mapping[int, Tensor]) -> Tensor | None:
        """This slice's, of gradients by the buckets' identity; None where its bucket is not among these."""
        found = by_bucket.get(id(self.bucket))
        return None if found is None else found[self.start : self.end]


class UnalignedTails:
    """The tails of the slices of one group in one arena, which are updated as one tensor, made anew each time."""

    def __init__(self, pieces: Sequence[FlatSlice]) -> None:
        assert pieces, "no tails of any group"
        self.pieces = pieces
        self._sizes = [piece.main_weights.numel() for piece in pieces]

    def gather(self, grads: Sequence[Tensor]) -> tuple[Updated, Tensor]:
        """All tails as one, and their gradient. grads: of the pieces."""
        first = self.pieces[0]
        moments = {
            name: self._filled([piece.moments[name] for piece in self.pieces]) for name in first.moments
        }
        weights = self._filled([piece.main_weights for piece in self.pieces])
        return Updated(first.group, weights, moments, first.num_steps), self._filled(grads)

    def scatter(self, updated: Updated) -> None:
        """Put what was updated back to where it came from."""
        pairs = [([piece.main_weights for piece in self.pieces], updated.main_weights)]
        pairs += [([p.moments[name] for p in self.pieces], flat) for name, flat in updated.moments.items()]
        for views, flat in pairs:
            torch._foreach_copy_(views, list(flat[: sum(self._sizes)].split(self._sizes)))

    def _filled(self, views: Sequence[Tensor]) -> Tensor:
        return torch.cat([*views, views[0].new_zeros(self._padding)])

    @property
    def _padding(self) -> int:
        return -sum(self._sizes) % VECTOR

    @property
    def num_bytes(self) -> int:
        """What `gather` takes, and copies of gradients until then."""
        first, size = self.pieces[0], sum(self._sizes)
        tensors = len(first.moments) + 2
        return (tensors * (size + self._padding) + size) * first.main_weights.itemsize


class FlatUpdate:
    """Moments from the start, and the calls of torch's kernels.

    moments: name -> one flat tensor an arena, of the optimizer's part at rest; empty for frozen parameters.
    param_groups: one for each kind of parameter that the model has; the scheduler writes into them. None where this
    rank has no part of any parameter.
    """

    def __init__(self, config: OptimizerConfig, buffer: FlatBuffer, device: torch.device) -> None:
        self._config, self._device = config, device
        if config.optimizer == "adam":
            names: tuple[str, ...] = ("exp_avg", "exp_avg_sq")
        else:
            names = ("momentum_buffer",) * (config.sgd_momentum != 0)
        numels = [buffer.optimizer_numel(arena) if arena.trained else 0 for arena in buffer.arenas]
        self.moments = {
            moment: tuple(
                torch.zeros(numel, dtype=arena.main_dtype, device=arena.weights.device)
                for numel, arena in zip(numels, buffer.arenas, strict=True)
            )
            for moment in names
        }
        self._slices: list[FlatSlice] = []
        tails: dict[tuple[int, str], list[FlatSlice]] = {}  # by arena and group
        vector = vector_of(device)
        for memory, span, first in _spans(buffer):
            start, end = span.start - first, span.end - first
            middle = end - (end - start) % vector
            if start < middle:
                self._slices.append(self._slice(memory, span.group, first, start, middle))
            if middle < end:
                tail = self._slice(memory, span.group, first, middle, end)
                tails.setdefault((memory.arena, span.group), []).append(tail)
        self._tails = [UnalignedTails(pieces) for pieces in tails.values()]
        self._tail_pieces = [piece for pieces in tails.values() for piece in pieces]
        any_part = bool(self._slices or self._tails)
        self.param_groups = build_param_groups(config, buffer) if any_part else []

    def _slice(self, memory: BucketMemory, group: str, first: int, start: int, end: int) -> FlatSlice:
        """first: where the bucket's part begins in moments."""
        moments = {
            name: flats[memory.arena][first + start : first + end] for name, flats in self.moments.items()
        }
        weights = trained(memory.main_weights)[start:end]
        num_steps = torch.zeros((), dtype=torch.float32, device=self._device)
        return FlatSlice(group, weights, moments, num_steps, memory, start, end)

    @torch.no_grad()
    def step(self, batches: Batches) -> None:
        """One update. batches: buckets' gradients in the dtype of their main weights, by the buckets' identity, and
        whether the batch is the last; together they are all trained buckets, each once. A batch is let go before the
        next is asked for.
        """
        gathered: list[tuple[Updated, Tensor]] = []
        tails_of: dict[int, Tensor] = {}  # gradients of tails, which are updated together, by slice
        for by_bucket, is_last in batches:
            due: list[tuple[Updated, Tensor]] = [*_with_grads(self._slices, by_bucket)]
            tails = _with_grads(self._tail_pieces, by_bucket)
            tails_of |= {id(piece): grads if is_last else grads.clone() for piece, grads in tails}
            del tails, by_bucket  # a temporary may be freed
            if is_last:
                gathered = [
                    tail.gather([tails_of[id(piece)] for piece in tail.pieces]) for tail in self._tails
                ]
                due += gathered
            self._update(due)
            del due
        for tail, (updated, _) in zip(self._tails, gathered, strict=True):
            tail.scatter(updated)

    def _update(self, due: Sequence[tuple[Updated, Tensor]]) -> None:
        """torch's fused kernel over tensors and their gradients, once a group."""
        for group in self.param_groups:
            of_group = [pair for pair in due if pair[0].group == group["name"]]
            self._update_group(group["lr"], group["weight_decay"], of_group)

    def _update_group(self, lr: float, decay: float, due: Sequence[tuple[Updated, Tensor]]) -> None:
        config = self._config
        weights, grads = [part.main_weights for part, _ in due], [grads for _, grads in due]
        moments = [[part.moments[name] for part, _ in due] for name in self.moments]
        if config.optimizer == "adam":
            adamw(
                weights,
                grads,
                exp_avgs=moments[0],
                exp_avg_sqs=moments[1],
                max_exp_avg_sqs=[],
                state_steps=[part.num_steps for part, _ in due],
                fused=True,
                amsgrad=False,
                beta1=config.adam_beta1,
                beta2=config.adam_beta2,
                lr=lr,
                weight_decay=decay,  # decoupled: of the weights
                eps=config.adam_eps,
                maximize=False,
            )
        else:
            sgd(
                weights,
                grads,
                momentum_buffer_list=[*moments[0]] if moments else [None for _ in due],
                fused=True,
                weight_decay=decay,  # added to the gradient
                momentum=config.sgd_momentum,
                lr=lr,
                dampening=0.0,
                nesterov=False,
                maximize=False,
            )

    @property
    def tail_bytes(self) -> int:
        """What `step` takes for tails."""
        return sum(tail.num_bytes for tail in self._tails)

    def undo(self, batches: Batches, num_steps: int) -> None:
        """Take the last update back, by arithmetic: see inverse_update, [Note: what is lost].

        batches: as they were given to `step`, and the same rates in `param_groups`. num_steps: updates until now.
        """
        config = self._config
        rates = {group["name"]: (group["lr"], group["weight_decay"]) for group in self.param_groups}
        pieces = [*self._slices, *self._tail_pieces]
        adam = {"betas": (config.adam_beta1, config.adam_beta2), "eps": config.adam_eps}
        rest = adam if config.optimizer == "adam" else {"momentum": config.sgd_momentum}
        undone = undo_adamw if config.optimizer == "adam" else undo_sgd
        for by_bucket, _ in batches:
            for piece in pieces:
                if (grads := piece.grads(by_bucket)) is not None:
                    lr, decay = rates[piece.group]
                    state = piece.main_weights, tuple(piece.moments.values())
                    undone(*state, grads, lr=lr, weight_decay=decay, num_steps=num_steps, **rest)
        if config.optimizer == "adam":
            self.set_num_steps(num_steps - 1)

    def mutable(self) -> Iterator[Tensor]:
        """What `step` changes besides main weights."""
        for flats in self.moments.values():
            yield from flats
        yield from self._step_counts()

    def set_num_steps(self, num_steps: int) -> None:
        """So many updates lie behind."""
        for counter in self._step_counts():
            counter.fill_(num_steps)

    def _step_counts(self) -> list[Tensor]:
        return [piece.num_steps for piece in (*self._slices, *(tails.pieces[0] for tails in self._tails))]

    def persistent_bytes(self) -> dict[str, int]:
        """Bytes held for the whole run, by moment."""
        return {name: num_bytes(flats) for name, flats in self.moments.items()}


def _with_grads(
    pieces: Iterable[FlatSlice], by_bucket: Mapping[int, Tensor]
) -> list[tuple[FlatSlice, Tensor]]:
    """Those whose gradients are among these, with them."""
    found = ((piece, piece.grads(by_bucket)) for piece in pieces)
    return [(piece, grads) for piece, grads in found if grads is not None]


def _spans(buffer: FlatBuffer) -> Iterator[tuple[BucketMemory, BufferSpan, int]]:
    """What this rank updates, without padding, in the buffer's order: the bucket, elements of the arena's flat buffer
    at rest, and where the bucket's part begins in that. Nothing where it has no part of any parameter."""
    memory_of = {(memory.arena, memory.bucket.index): memory for memory in buffer.buckets}
    for index, arena in enumerate(buffer.arenas):
        layout, place, cut = arena.layout, arena.place, arena.sharding.optimizer
        for span in layout.spans_at_rest(place, cut) if arena.trained else ():
            first = layout.rest_start(span.bucket, place, cut)
            yield memory_of[index, span.bucket], span, first


def build_param_groups(config: OptimizerConfig, buffer: FlatBuffer) -> list[ParamGroup]:
    """One group for each kind of parameter that the buffer holds, in order of first use in the model.

    Biases and 1-D parameters never decay (`ParamMeta.decay`). `--decoupled-lr` applies to the word embeddings and the
    output layer only (`ParamMeta.embedding_or_output`), as in Megatron: learned positions have the ordinary rate.
    """
    groups: dict[str, ParamGroup] = {}
    floor = config.min_lr if config.decoupled_min_lr is None else config.decoupled_min_lr
    for meta in (buffer.param_meta[name] for name in buffer.names):
        max_lr, min_lr, wd_mult = config.lr, config.min_lr, 1.0 if meta.decay else 0.0
        if decoupled := meta.embedding_or_output and config.decoupled_lr is not None:
            max_lr, min_lr = config.decoupled_lr or 0.0, floor
        groups[meta.group] = ParamGroup(
            name=meta.group,
            lr=max_lr,
            weight_decay=config.weight_decay * wd_mult,
            wd_mult=wd_mult,
            max_lr=max_lr,
            min_lr=min_lr,
            decoupled=decoupled,
        )
    return list(groups.values())
