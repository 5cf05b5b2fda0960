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
from typing import Any, TypedDict, cast

import torch
from torch import Tensor, nn

from megatron.core.distributed.bucket_memory import BucketMemory, num_bytes, trained
from megatron.core.distributed.flat_buffer import FlatBuffer
from megatron.core.distributed.shard_layout import BufferSpan
from megatron.core.optimizer.inverse_update import undo_adamw, undo_sgd
from megatron.core.optimizer.optimizer_config import OptimizerConfig

# Elements: a multiple of what any CPU's vectors hold, and of the cache lines that threads share work by.
VECTOR = 64

Batches = Iterable[tuple[Mapping[int, Tensor], bool]]


def vector_of(device: torch.device) -> int:
    """Elements that slices are multiples of. CUDA's kernels treat all elements alike."""
    return VECTOR if device.type == "cpu" else 1


class ParamGroup(TypedDict):
    """One of torch's parameter groups, with what the scheduler needs to set its `lr` and `weight_decay`.

    wd_mult: 1.0, or 0.0 where nothing decays. decoupled: max_lr and min_lr are --decoupled-lr's.
    """

    params: list[nn.Parameter]
    name: str
    lr: float
    weight_decay: float
    wd_mult: float
    max_lr: float
    min_lr: float
    decoupled: bool


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

    def grads(self, by_bucket: Mapping[int, Tensor]) -> Tensor | None:
        """This slice's, of gradients by the buckets' identity; None where its bucket is not among these."""
        found = by_bucket.get(id(self.bucket))
        return None if found is None else found[self.start : self.end]


class UnalignedTails:
    """The tails of the slices of one group in one arena, as one parameter of torch's optimizer, which holds no memory
    between steps."""

    def __init__(self, pieces: Sequence[FlatSlice]) -> None:
        assert pieces, "no tails of any group"
        self.pieces, self.group = pieces, pieces[0].group
        self._sizes = [piece.main_weights.numel() for piece in pieces]
        self._empty = pieces[0].main_weights.new_empty(0)
        self.parameter = nn.Parameter(self._empty)

    def gather(self, grads: Sequence[Tensor]) -> dict[str, Tensor]:
        """Fill the parameter and its gradient; returns its moments. grads: of the pieces."""
        self.parameter.data = self._filled([piece.main_weights for piece in self.pieces])
        self.parameter.grad = self._filled(grads)
        names = self.pieces[0].moments
        return {name: self._filled([piece.moments[name] for piece in self.pieces]) for name in names}

    @torch.no_grad()
    def scatter(self, moments: Mapping[str, Tensor]) -> None:
        """Put what was updated back to where it came from, and forget it."""
        updated = [([piece.main_weights for piece in self.pieces], self.parameter.data)]
        updated += [([piece.moments[name] for piece in self.pieces], flat) for name, flat in moments.items()]
        for views, flat in updated:
            torch._foreach_copy_(views, list(flat[: sum(self._sizes)].split(self._sizes)))
        self.parameter.grad, self.parameter.data = None, self._empty

    @torch.no_grad()
    def _filled(self, views: Sequence[Tensor]) -> Tensor:
        return torch.cat([*views, self._empty.new_zeros(-sum(self._sizes) % VECTOR)])


class FlatUpdate:
    """Moments and torch's optimizer, both from the start.

    moments: name -> one flat tensor an arena, of the optimizer's part at rest; empty for frozen parameters.
    param_groups: torch's own, into which the scheduler writes; none where this rank has no part of any parameter.
    """

    def __init__(self, config: OptimizerConfig, buffer: FlatBuffer, device: torch.device) -> None:
        self._config, adam = config, config.optimizer == "adam"
        # torch's, of one tensor each as large as the weights
        names = ("exp_avg", "exp_avg_sq") if adam else ("momentum_buffer",) * (config.sgd_momentum != 0)
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
        self._tails = [UnalignedTails(pieces) for pieces in tails.values()]
        parameters = [(piece.group, parameter) for piece, parameter in self._slices]
        parameters += [(one.group, one.parameter) for one in self._tails]
        self._torch: torch.optim.Optimizer | None = None
        self.param_groups: list[ParamGroup] = []
        self._steps = [torch.zeros((), dtype=torch.float32, device=device) for _ in parameters]
        if parameters:
            groups = build_param_groups(config, buffer, parameters)
            params = cast(list[dict[str, Any]], groups)
            if (
                adam
            ):  # decays decoupled (AdamW); SGD adds the decay to the gradient. The groups hold lr and decay.
                betas = (config.adam_beta1, config.adam_beta2)
                self._torch = torch.optim.AdamW(params, betas=betas, eps=config.adam_eps, fused=True)
            else:
                self._torch = torch.optim.SGD(params, momentum=config.sgd_momentum, fused=True)
            self.param_groups = cast(list[ParamGroup], self._torch.param_groups)
            # torch's state from before the first step: step counts, and views of our moments; tails get theirs in it.
            for (_, parameter), step in zip(parameters, self._steps, strict=True):
                self._torch.state[parameter] = {"step": step} if adam else {}
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
            for piece, parameter in self._slices:
                parameter.grad = piece.grads(grads)
            for piece in (piece for tails in self._tails for piece in tails.pieces):
                if (tail := piece.grads(grads)) is not None:
                    tails_of[id(piece)] = tail if is_last else tail.clone()
            del grads  # a temporary may be freed
            if is_last:
                for tails in self._tails:
                    gathered = tails.gather([tails_of[id(piece)] for piece in tails.pieces])
                    self._torch.state[tails.parameter].update(gathered)
            self._torch.step()
            for _, parameter in self._slices:
                parameter.grad = None
        for tails in self._tails:
            state = self._torch.state[tails.parameter]
            tails.scatter({moment: state.pop(moment) for moment in self.moments})

    def undo(self, batches: Batches, num_steps: int) -> None:
        """Take the last update back, by arithmetic: see inverse_update, [Note: what is lost].

        batches: as they were given to `step`, and the same rates in `param_groups`. num_steps: updates until now.
        """
        config = self._config
        rates = {group["name"]: (group["lr"], group["weight_decay"]) for group in self.param_groups}
        pieces = [piece for piece, _ in self._slices]
        pieces += [piece for tails in self._tails for piece in tails.pieces]
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


def build_param_groups(
    config: OptimizerConfig, buffer: FlatBuffer, parameters: Iterable[tuple[str, nn.Parameter]]
) -> list[ParamGroup]:
    """One group for each kind of parameter that the buffer holds, in order of first use in the model. parameters: of
    torch's optimizer, by the layout's group.

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
            params=[],
            name=meta.group,
            lr=max_lr,
            weight_decay=config.weight_decay * wd_mult,
            wd_mult=wd_mult,
            max_lr=max_lr,
            min_lr=min_lr,
            decoupled=decoupled,
        )
    for key, parameter in parameters:
        groups[key]["params"].append(parameter)
    return list(groups.values())
