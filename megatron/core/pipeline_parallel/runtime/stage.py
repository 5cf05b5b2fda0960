"""A chunk of a model as a pipeline stage: F, B, W and BW of a microbatch.

[Note: outputs are not kept] Backward needs the graph behind an output, not its values. The stage keeps the
output's `GradientEdge`; the output itself belongs to whoever sends it, and is free once it is sent.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from megatron.core.module import ModelError
from megatron.core.weight_grad import WeightGradAccumulator

# (microbatch, hidden or None) -> output, or the number to differentiate
Run = Callable[[int, Tensor | None], Tensor]


class ModelStage:
    """`protocols.Stage` over a function that runs one chunk forwards.

    run: with the microbatch and the hidden states [seq, batch, hidden] (None where the model begins): the hidden
    states to hand on, or where it ends the scalar to differentiate. sink: where the chunk's layers put their weight
    gradients; None for a module whose gradients autograd accumulates, which cannot split B from W. begins: the chunk
    embeds, and takes no hidden states. ends: it computes the loss. timed: around each B, W and BW.

    Under `torch.no_grad` (evaluation) nothing is kept.
    """

    def __init__(
        self,
        run: Run,
        sink: WeightGradAccumulator | None,
        *,
        begins: bool,
        ends: bool,
        timed: Callable[[], contextlib.AbstractContextManager[object]] = contextlib.nullcontext,
    ) -> None:
        self._run, self._sink, self._timed = run, sink, timed
        self._begins, self._ends = begins, ends
        # By microbatch, from F to B: the input as a leaf (None where the model begins) and the output's place in the
        # graph (None where nothing behind it needs a gradient).
        self._saved: dict[int, tuple[Tensor | None, GradientEdge | None]] = {}

    @property
    def splits(self) -> bool:
        """Whether B and W can run apart: only weight gradients that go to a sink can wait."""
        return self._sink is not None

    def forward(self, microbatch: int, hidden: Tensor | None) -> Tensor | None:
        """F. hidden: as the stage before returned it. Returns None where the loss is computed.

        Raises ModelError where the chunk's output is no tensor.
        """
        assert (hidden is None) == self._begins, (
            f"F{microbatch}: begins {self._begins}, hidden {hidden is not None}"
        )
        keeps = torch.is_grad_enabled()
        assert not keeps or microbatch not in self._saved, f"a second F{microbatch} before its backward"
        leaf = hidden.detach().requires_grad_() if keeps and hidden is not None else hidden
        output: object = self._run(microbatch, leaf)  # user code, whose types nobody has checked
        if not isinstance(output, Tensor):
            raise ModelError(
                f"the forward of microbatch {microbatch} returned {type(output).__name__}; a stage returns one tensor,"
                " hidden states for the next stage or the loss"
            )
        if keeps:
            self._saved[microbatch] = leaf, get_gradient_edge(output) if output.requires_grad else None
            output = output.detach()
        return None if self._ends else output

    def backward(self, microbatch: int, grad: Tensor | None) -> Tensor | None:
        """BW. grad: of the output, None after the loss. Returns the gradient of the input, None where it begins."""
        return self._backward(microbatch, grad, split=False)

    def backward_input(self, microbatch: int, grad: Tensor | None) -> Tensor | None:
        """B: as `backward`; what the weight gradients are made of is filed in the sink."""
        assert self._sink is not None, f"B{microbatch} of a stage whose gradients autograd accumulates"
        return self._backward(microbatch, grad, split=True)

    def backward_weight(self, microbatch: int, units: tuple[int, int] | None = None) -> None:
        """W of a microbatch whose B has run, or a part of it. Communicates (tp) where inputs are held in parts."""
        assert self._sink is not None, f"W{microbatch} of a stage whose gradients autograd accumulates"
        with self._timed():
            self._sink.flush(microbatch, units)

    def forget(self, microbatch: int) -> None:
        """The F of a microbatch did not happen; it may run again."""
        assert microbatch in self._saved, f"no F{microbatch} to forget; kept: {sorted(self._saved)}"
        del self._saved[microbatch]

    def check_empty(self) -> None:
        """After a step: every F had its backward, every B its W."""
        assert not self._saved, f"no backward of microbatches {sorted(self._saved)}"
        if self._sink is not None:
            self._sink.check_flushed()

    def _backward(self, microbatch: int, grad: Tensor | None, *, split: bool) -> Tensor | None:
        assert (grad is None) == self._ends, f"B{microbatch}: ends {self._ends}, gradient {grad is not None}"
        assert microbatch in self._saved, f"B{microbatch} without its F; kept: {sorted(self._saved)}"
        leaf, edge = self._saved.pop(microbatch)
        sink = self._sink
        with (
            self._timed(),
            contextlib.nullcontext() if sink is None else sink.backward(microbatch, split=split),
        ):
            if edge is not None:
                torch.autograd.backward(edge, grad)
        if leaf is None:
            return None
        # An output that does not depend on the input: its gradient is zero.
        return torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
