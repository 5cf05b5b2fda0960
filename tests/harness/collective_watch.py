"""Collectives over data parallel ranks, counted where they are called: by nobody who also makes or plans them."""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any
from unittest import mock

from torch import Tensor

from megatron.core.transport import collectives
from megatron.core.transport.traffic import Moved, Traffic

KINDS = {  # what is called, over which ranks -> what it is called where it is planned
    ("all_gather", "dp_gather"): "all_gather",
    ("reduce_scatter", "dp_reduce"): "reduce_scatter",
    ("sum_gradients", "dp_reduce"): "all_reduce",
    ("all_gather", "dp_outer"): "outer_all_gather",
    ("reduce_scatter", "dp_outer"): "outer_reduce_scatter",
    ("sum_gradients", "dp_outer"): "outer_all_reduce",
}
DATA_PARALLEL = ("dp_gather", "dp_reduce", "dp_outer")


class Watch:
    """Calls over data parallel ranks, with the bytes of their whole buffers."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.calls: collections.Counter[tuple[str, str]] = collections.Counter()
        self.payload: collections.Counter[tuple[str, str]] = collections.Counter()

    @property
    def traffic(self) -> Traffic:
        unknown = self.calls.keys() - KINDS.keys()
        assert not unknown, unknown
        return Traffic(
            **{kind: Moved(self.calls[called], self.payload[called]) for called, kind in KINDS.items()}
        )

    @contextlib.contextmanager
    def installed(self) -> Iterator[Watch]:
        """Counts inside."""

        def counting(op: str, function: Callable[..., Any], size: Callable[[Any], int]) -> Callable[..., Any]:
            def call(buffers: Any, group: Any, **options: Any) -> Any:
                if group.purpose in DATA_PARALLEL and group.size > 1:
                    self.calls[op, group.purpose] += 1
                    self.payload[op, group.purpose] += size(buffers)
                return function(buffers, group, **options)

            return call

        patches = {
            "all_gather_units": counting("all_gather", collectives.all_gather_units, _whole_outputs),
            "reduce_scatter_units": counting(
                "reduce_scatter", collectives.reduce_scatter_units, _whole_inputs
            ),
            "sum_gradients": counting("sum_gradients", collectives.sum_gradients, _num_bytes),
        }
        with mock.patch.multiple(collectives, **patches):
            yield self


def _num_bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _whole_outputs(pairs: Sequence[tuple[Tensor, Tensor]]) -> int:
    return sum(_num_bytes(output) for output, _ in pairs)


def _whole_inputs(items: Iterable[tuple[Tensor, Tensor]]) -> int:
    return sum(_num_bytes(full) for _, full in items)
