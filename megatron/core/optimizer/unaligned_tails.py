"""Every element is updated by the same instructions, wherever a slice ends.

[Note: whole vectors] torch's fused CPU kernels work on vectors of elements, and on what is left at the end of a tensor
one by one, with another rounding (it contracts multiplications and additions differently: up to 2 % of such elements
differ in the last bit after 5 steps of AdamW in fp32). What is at the end of a slice depends on how the buffer is cut,
so slices are cut to whole vectors here, and the ends of all slices of a group of parameters are updated as one tensor
that is filled up to whole vectors. The bits of an update then depend neither on buckets, nor on strategy, nor on the
number of ranks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

VECTOR = 64  # elements: a multiple of what any CPU's vectors hold, and of the cache lines that threads share work by


def vector_of(device: torch.device) -> int:
    """Elements that slices are multiples of. CUDA's kernels treat all elements alike."""
    return VECTOR if device.type == "cpu" else 1


class RaggedEnds:
    """The ends of the slices of one group in one arena, as one parameter of torch's optimizer.

    weights: views of what is updated. moments: name -> views of theirs. Holds no memory between steps.
    """

    def __init__(
        self, group: str, weights: Sequence[Tensor], moments: Mapping[str, Sequence[Tensor]]
    ) -> None:
        assert weights, f"no ends of group {group!r}"
        self.group = group
        self._weights = list(weights)
        self._moments = {name: list(views) for name, views in moments.items()}
        self._sizes = [view.numel() for view in weights]
        self._empty = weights[0].new_empty(0)
        self.parameter = nn.Parameter(self._empty)

    def gather(self, grads: Sequence[Tensor]) -> dict[str, Tensor]:
        """Fill the parameter and its gradient; returns its moments. grads: as the weights."""
        self.parameter.data = self._filled(self._weights)
        self.parameter.grad = self._filled(grads)
        return {name: self._filled(views) for name, views in self._moments.items()}

    def scatter(self, moments: Mapping[str, Tensor]) -> None:
        """Put what was updated back to where it came from, and forget it."""
        self._put(self.parameter.data, self._weights)
        for name, views in self._moments.items():
            self._put(moments[name], views)
        self.parameter.grad = None
        self.parameter.data = self._empty

    @torch.no_grad()
    def _filled(self, views: Sequence[Tensor]) -> Tensor:
        numel = sum(self._sizes)
        fill = self._empty.new_zeros(math.ceil(numel / VECTOR) * VECTOR - numel)
        return torch.cat([*views, fill])

    @torch.no_grad()
    def _put(self, flat: Tensor, views: Sequence[Tensor]) -> None:
        torch._foreach_copy_(list(views), list(flat[: sum(self._sizes)].split(self._sizes)))
