"""torch's fused AdamW or SGD over this rank's parts of flat main weights."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

from megatron.core.distributed.bucket_memory import Arena, num_bytes
from megatron.core.distributed.flat_buffer import FlatBuffer
from megatron.core.optimizer.inverse_update import undo_adamw, undo_sgd
from megatron.core.optimizer.optimizer_config import OptimizerConfig
from megatron.core.optimizer.param_groups import FlatSlice, ParamGroup, build_param_groups, flat_slices
from megatron.core.optimizer.unaligned_tails import RaggedEnds, vector_of


class FlatUpdate:
    """Moments and torch's optimizer, both from the start.

    moments: name -> one flat tensor an arena, of the optimizer's part at rest; empty for frozen parameters.
    param_groups: torch's own, into which the scheduler writes; none where this rank has no part of any parameter.
    """

    def __init__(self, config: OptimizerConfig, buffer: FlatBuffer, device: torch.device) -> None:
        self._config = config
        self.moments = {
            moment: tuple(_moment(buffer, arena) for arena in buffer.arenas)
            for moment in _moment_names(config)
        }
        bodies, ends = flat_slices(buffer, vector_of(device))
        self._slices = [(piece, nn.Parameter(piece.main_weights)) for piece in bodies]
        self._ends = self._ends_of_groups(ends)
        parameters = [(piece.span.group, parameter) for piece, parameter in self._slices]
        parameters += [(group.group, group.parameter) for group, _ in self._ends]
        self._torch: torch.optim.Optimizer | None = None
        self.param_groups: list[ParamGroup] = []
        self._steps = [torch.zeros((), dtype=torch.float32, device=device) for _ in parameters]
        if parameters:
            self._torch = _torch_optimizer(config, build_param_groups(config, buffer, parameters))
            self.param_groups = cast(list[ParamGroup], self._torch.param_groups)
            self._bind(self._torch, config)

    def step(self, batches: Iterable[tuple[Mapping[int, Tensor], bool]]) -> None:
        """One update. batches: buckets' gradients in the dtype of their main weights, by the buckets' identity, and
        whether the batch is the last; together they are all trained buckets, each once. A batch is let go before the
        next is asked for.

        torch skips parameters without a gradient, their step counts included, so several calls are one update.
        """
        if self._torch is None:
            return
        ends_of: dict[int, Tensor] = {}  # gradients of ragged ends, which are updated together, by slice
        for grads, is_last in batches:
            self._set_grads(grads, ends_of, copied=not is_last)
            del grads  # a temporary may be freed
            if is_last:
                for ends, pieces in self._ends:
                    gathered = ends.gather([ends_of[id(piece)] for piece in pieces])
                    self._torch.state[ends.parameter].update(gathered)
            self._torch.step()
            for _, parameter in self._slices:
                parameter.grad = None
        for ends, _ in self._ends:
            state = self._torch.state[ends.parameter]
            ends.scatter({moment: state.pop(moment) for moment in self.moments})

    def _set_grads(self, grads: Mapping[int, Tensor], ends_of: dict[int, Tensor], *, copied: bool) -> None:
        """Of these buckets: slices get theirs, ends_of those of ragged ends. copied: these outlive the batch."""
        for piece, parameter in self._slices:
            if (found := grads.get(id(piece.bucket))) is not None:
                parameter.grad = found[piece.start : piece.end]
        for piece in (piece for _, pieces in self._ends for piece in pieces):
            if (found := grads.get(id(piece.bucket))) is not None:
                end = found[piece.start : piece.end]
                ends_of[id(piece)] = end.clone() if copied else end

    def undo(self, batches: Iterable[tuple[Mapping[int, Tensor], bool]], num_steps: int) -> None:
        """Take the last update back, by arithmetic: see inverse_update, [Note: what is lost].

        batches: as they were given to `step`, and the same rates in `param_groups`. num_steps: updates until now.
        """
        group_of = {group["name"]: group for group in self.param_groups}
        pieces = [piece for piece, _ in self._slices]
        pieces += [piece for _, of_group in self._ends for piece in of_group]
        for grads, _ in batches:
            for piece in pieces:
                if (found := grads.get(id(piece.bucket))) is not None:
                    self._undo(piece, found[piece.start : piece.end], group_of[piece.span.group], num_steps)
        if self._config.optimizer == "adam":
            self.set_num_steps(num_steps - 1)

    def _undo(self, piece: FlatSlice, grad: Tensor, group: ParamGroup, num_steps: int) -> None:
        config, lr, decay = self._config, group["lr"], group["weight_decay"]
        moments = [self._moment_of(moment, piece) for moment in self.moments]
        if config.optimizer == "adam":
            first, second = moments
            betas = (config.adam_beta1, config.adam_beta2)
            undo_adamw(
                piece.main_weights, (first, second), grad, lr=lr, weight_decay=decay, betas=betas,
                eps=config.adam_eps, num_steps=num_steps,
            )  # fmt: skip
            return
        undo_sgd(
            piece.main_weights, moments[0] if moments else None, grad, lr=lr, weight_decay=decay,
            momentum=config.sgd_momentum, num_steps=num_steps,
        )  # fmt: skip

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

    def _ends_of_groups(self, slices: list[FlatSlice]) -> list[tuple[RaggedEnds, list[FlatSlice]]]:
        pieces_of: dict[tuple[int, str], list[FlatSlice]] = {}
        for piece in slices:
            pieces_of.setdefault((piece.bucket.arena, piece.span.group), []).append(piece)
        made = []
        for (_, group), pieces in pieces_of.items():
            moments = {
                moment: [self._moment_of(moment, piece) for piece in pieces] for moment in self.moments
            }
            made.append((RaggedEnds(group, [piece.main_weights for piece in pieces], moments), pieces))
        return made

    def _moment_of(self, moment: str, piece: FlatSlice) -> Tensor:
        return self.moments[moment][piece.bucket.arena][piece.span.start : piece.span.end]

    def _bind(self, optimizer: torch.optim.Optimizer, config: OptimizerConfig) -> None:
        """Give torch its state before the first step: views of our moments (but of ragged ends, which get theirs in a
        step), and a step count a parameter."""
        of_ends = [ends.parameter for ends, _ in self._ends]
        parameters = [*(parameter for _, parameter in self._slices), *of_ends]
        for parameter, step in zip(parameters, self._steps, strict=True):
            optimizer.state[parameter] = {"step": step} if config.optimizer == "adam" else {}
        for piece, parameter in self._slices:
            moments = {moment: self._moment_of(moment, piece) for moment in self.moments}
            optimizer.state[parameter].update(moments)


def _moment(buffer: FlatBuffer, arena: Arena) -> Tensor:
    numel = buffer.optimizer_numel(arena) if arena.trained else 0
    return torch.zeros(numel, dtype=arena.main_dtype, device=arena.weights.device)


def _torch_optimizer(config: OptimizerConfig, groups: list[ParamGroup]) -> torch.optim.Optimizer:
    """Adam decays decoupled (AdamW); SGD adds the decay to the gradient. The groups hold lr and decay."""
    params = cast(list[dict[str, Any]], groups)
    if config.optimizer == "adam":
        betas = (config.adam_beta1, config.adam_beta2)
        return torch.optim.AdamW(params, betas=betas, eps=config.adam_eps, fused=True)
    return torch.optim.SGD(params, momentum=config.sgd_momentum, fused=True)


def _moment_names(config: OptimizerConfig) -> tuple[str, ...]:
    """torch's names for the state it keeps, one tensor each as large as the weights."""
    if config.optimizer == "adam":
        return "exp_avg", "exp_avg_sq"
    return ("momentum_buffer",) if config.sgd_momentum else ()
