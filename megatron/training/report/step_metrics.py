"""What a step's microbatches amount to: the loss of each, and numbers summed over them and over ranks."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from megatron.core.module import LayerCounts, ModelError
from megatron.core.transformer.experts.counted import Counted
from megatron.core.transport import collectives, host_data
from megatron.core.transport.host_data import host_values
from megatron.core.transport.parallel_state import ParallelState

LossFunc = Callable[[Tensor], tuple[Any, ...]]
ForwardStep = Callable[[Iterator[Any], nn.Module], tuple[Tensor, LossFunc]]


@dataclasses.dataclass(frozen=True)
class MicrobatchLoss:
    """loss: scalar to differentiate. num_tokens: count that `loss` is the sum over, or None when it is a mean."""

    loss: Tensor
    num_tokens: Tensor | None
    report: Mapping[str, Any]


def evaluate_loss(output: Tensor, loss_func: LossFunc) -> MicrobatchLoss:
    """Call the user's loss function, in either of Megatron's two shapes: (mean, report) or (sum, tokens, report)."""
    match loss_func(output):
        case (loss, num_tokens, report):
            return MicrobatchLoss(loss, torch.as_tensor(num_tokens, device=loss.device), report)
        case (loss, report):
            return MicrobatchLoss(loss, None, report)
        case result:
            raise ModelError(
                f"the loss function returned {len(result)} values; return (loss, report) or (loss sum, num tokens, "
                "report)"
            )


def loss_to_differentiate(result: MicrobatchLoss, per_token_loss: bool) -> Tensor:
    """The number whose gradient is summed over microbatches: see [Note: where gradients are divided] in step.py."""
    if not per_token_loss:
        return result.loss if result.num_tokens is None else result.loss / result.num_tokens.clamp(min=1)
    if result.num_tokens is None:
        raise ModelError(
            "--calculate-per-token-loss needs a loss function that returns (loss sum, num tokens, report)"
        )
    return result.loss


@dataclasses.dataclass(frozen=True)
class Totals:
    """One step's numbers over all ranks."""

    nonfinite_microbatches: int
    num_tokens: float
    flags: tuple[float, ...]
    losses: Mapping[str, tuple[float, float]]  # name -> (sum, count); their ratio is what is logged
    layers: Mapping[tuple[int, str], tuple[float, ...]]  # (layer, name) -> what it counted


class StepMetrics:
    """Sums over the microbatches of one step, packed into one float64 vector for one all-reduce.

    Layout: [flags..., microbatches with a non-finite loss, tokens, (sum, count) for each reported loss, what layers
    count]. counted: what layers of the whole model count.
    """

    def __init__(self, device: torch.device, counted: Sequence[Counted] = ()) -> None:
        self._device, self._counted = device, counted
        self.clear()

    def clear(self) -> None:
        """As if no microbatch had been added."""
        self._nonfinite = self._zeros()
        self._tokens = self._zeros()
        self._report: dict[str, Tensor] = {}  # name -> [sum, count]
        self._layers: dict[tuple[int, str], Tensor] = {}
        self._finite: list[Tensor] = []  # one flag a microbatch, of this rank

    def _zeros(self, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.float64, device=self._device)

    def add(self, result: MicrobatchLoss) -> None:
        """Count one microbatch of this rank."""
        finite = torch.isfinite(result.loss.detach())
        self._finite.append(finite)
        self._nonfinite += ~finite
        if result.num_tokens is not None:
            self._tokens += result.num_tokens
        for name, value in result.report.items():
            pair = _sum_and_count(name, value, self._device)
            self._report[name] = self._report[name] + pair if name in self._report else pair

    def add_layers(self, counts: LayerCounts) -> None:
        """Take what layers of this rank have counted in the step."""
        self._layers |= counts.totals

    @property
    def first_nonfinite_microbatch(self) -> int | None:
        """This rank's first microbatch with a non-finite loss."""
        return next((i for i, finite in enumerate(self._finite) if not finite), None)  # sync: a failed step

    @property
    def names(self) -> tuple[str, ...]:
        """The losses that were reported here."""
        return tuple(self._report)

    def agree(self, names: Sequence[str]) -> None:
        """Take the names that all ranks agreed on (`agreed_names`): a stage without the loss reports none itself.

        Raises ModelError where the loss function reports other losses than it did first.
        """
        if self._report and self.names != tuple(names):
            raise ModelError(
                f"the loss function reported {list(self.names)}, and {list(names)} before: in a pipeline report the "
                "same losses in every step, because stages without the loss know them by their order"
            )
        for name in names:
            self._report.setdefault(name, self._zeros(2))

    def reduce(self, ps: ParallelState, flags: tuple[float, ...] = ()) -> Totals:
        """Sum over all ranks. Communicates over world, once; syncs with the device, once.

        Losses and what layers count are those of tensor parallel rank 0; flags count on every rank.
        """
        vector = self.vector(ps, flags)
        collectives.all_reduce(vector, ps.world_group)
        return self.totals(host_values(vector), len(flags))  # sync: the step's only look at its own numbers

    def vector(self, ps: ParallelState, flags: tuple[float, ...] = ()) -> Tensor:
        """This rank's numbers, fp64, in the layout above: to be summed over all ranks."""
        layers = [self._layers.get((one.layer, one.name)) for one in self._counted]
        of_layers = [
            self._zeros(one.size) if numbers is None else numbers.reshape(one.size)
            for one, numbers in zip(self._counted, layers, strict=True)
        ]
        first = torch.stack([self._nonfinite, self._tokens])
        numbers = torch.cat([first, *self._report.values(), *of_layers])
        if ps.tp_rank:
            numbers.zero_()
        return torch.cat([torch.tensor(flags, dtype=torch.float64, device=self._device), numbers])

    def totals(self, summed: Sequence[float], num_flags: int) -> Totals:
        """Of vectors that were summed over all ranks."""
        nonfinite, tokens, *rest = summed[num_flags:]
        numbers, pairs = iter(rest), 2 * len(self._report)
        sums = tuple(itertools.islice(numbers, pairs))
        losses = dict(zip(self._report, zip(sums[::2], sums[1::2], strict=True), strict=True))
        layers = {(one.layer, one.name): tuple(itertools.islice(numbers, one.size)) for one in self._counted}
        return Totals(int(nonfinite), tokens, tuple(summed[:num_flags]), losses, layers)

    def num_tokens(self, ps: ParallelState) -> float:
        """Over all ranks. Communicates over world."""
        tokens = self._zeros() if ps.tp_rank else self._tokens.clone()
        collectives.all_reduce(tokens, ps.world_group)
        return float(host_values(tokens))  # sync: the host divides by it


def agreed_names(names: Sequence[str], ps: ParallelState) -> tuple[str, ...]:
    """The names of the losses on every rank, from the ranks that compute them. Communicates over control."""
    everyone = host_data.all_gather_json(list(names), ps.control_group)
    return tuple(next((found for found in everyone if found), ()))


def _sum_and_count(name: str, value: Any, device: torch.device) -> Tensor:
    """A reported loss as [sum, count] in float64: a pair as it is, a single number with count 1.

    Raises ModelError for anything else.
    """
    values = value if isinstance(value, tuple | list) else (value,)
    parts = [torch.as_tensor(v, dtype=torch.float64, device=device).detach().reshape(-1) for v in values]
    flat = torch.cat(parts) if parts else torch.empty(0)
    if flat.numel() == 1 and value is not values:
        flat = torch.cat([flat, flat.new_ones(1)])
    if flat.numel() != 2:
        raise ModelError(
            f"the loss function reported {flat.numel()} values as {name!r}: report a number or (sum, count)"
        )
    return flat
