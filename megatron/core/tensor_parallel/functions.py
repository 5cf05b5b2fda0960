"""Functions of autograd as objects: a forward and a backward that are lists of calls.

A list may be a part of a longer one: whoever calls `forward` and `backward` of several in turn has one Function of them
(`transformer/layer_halves.py`). So whatever is shared by two Functions is written once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

Kept = Sequence[Any]  # tensors from forward to backward, None where there is none


class GradFunction(Protocol):
    """Both run without autograd."""

    @property
    def forward(self) -> Callable[..., tuple[Any, Kept]]:
        """Inputs -> (outputs, a tensor or a tuple of them; what backward is given)."""

    @property
    def backward(self) -> Callable[..., Sequence[Tensor | None]]:
        """(what was kept, gradients of the outputs) -> of the inputs, None for what is no tensor."""


def direct(operator: Any) -> Callable[..., Any]:
    """An operator of ATen, one overload, without torch's call in Python around it."""
    return getattr(operator, "_op", operator)


def direct_apply(node: type[torch.autograd.Function]) -> Callable[..., Any]:
    """node.apply without torch's search among the inputs for what torch.func has left, of which nothing is here."""
    applied: Callable[..., Any] = super(torch.autograd.Function, node).apply  # type: ignore[misc]
    return applied


class _Node(torch.autograd.Function):
    """Of autograd, around a `GradFunction`."""

    @staticmethod
    def forward(ctx: Any, function: GradFunction, anchor: Tensor | None, *inputs: Any) -> Any:
        ctx.function = function
        outputs, kept = function.forward(*inputs)
        ctx.save_for_backward(*kept)
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *ctx.function.backward(ctx.saved_tensors, *grads)


_new_node = direct_apply(_Node)


def apply(
    function: GradFunction,
    x: Tensor,
    *inputs: Any,
    parameters: Iterable[Tensor | None] = (),
    new_node: Callable[..., Any] = _new_node,
) -> Tensor:
    """The output of function.forward(x, *inputs), differentiable; where there are several, a tuple of them.

    parameters: of the function, whose gradients its backward hands to a sink. They are no inputs of it: autograd would
    go to each of them with nothing in its hands. Where x needs no gradient one hangs the Function into the graph.
    """
    anchor = None
    if not x.requires_grad and torch.is_grad_enabled():
        anchor = next((one for one in parameters if one is not None and one.requires_grad), None)
    output: Tensor = new_node(function, anchor, x, *inputs)
    return output
