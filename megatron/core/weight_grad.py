"""Every weight gradient of the framework, computed by one function, and the sink that does so, at once or later.

[Note: one GEMM per microbatch] A weight's gradient is a sum over microbatches. Each microbatch contributes one GEMM,
accumulated in microbatch order into one buffer, and GEMMs of several microbatches are never grouped. A pipeline
schedule, one process, or a split backward then add the same numbers in the same order, which is what makes them
bit-identical (docs/numerics.md).
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Container, Iterator, Mapping
from typing import Protocol

import torch
from torch import Tensor

from megatron.core.device import alike, elements_at_a_time, even_rows, kind_of, product
from megatron.core.protocols import GradListener, Operand, WeightGradSink

# key, x, dy, ends as in `WeightGradSink.put`
Contribution = tuple[str, "Tensor | Operand | None", Tensor, "tuple[int, ...] | None"]

# Of temporaries on CPU, 1 MiB of fp32. Measured on one core: a 4096 x 4096 gradient is added in 6 ms instead of 39.
WIDENED_ELEMENTS = 1 << 18


def accumulate_wgrad(
    main_grad: Tensor,
    x: Tensor | None,
    dy: Tensor,
    ends: tuple[int, ...] | None = None,
    *,
    overwrite: bool = False,
    scale: float = 1.0,
) -> None:
    """main_grad += scale * the contribution of one use in one microbatch, in place. Shapes as in `WeightGradSink.put`.

    overwrite: main_grad = instead, whatever it holds, which may be anything. An expert without rows adds nothing.
    """
    if ends is not None:
        _accumulate_by_expert(main_grad, x, dy, ends, overwrite, scale)
        return
    if x is None:
        if dy.dim() == main_grad.dim():
            add_gradient(main_grad, dy, overwrite=overwrite, scale=scale)
            return
        if dy.dim() > 2:
            dy = dy.flatten(0, -2)  # [tokens, out]
        if overwrite and scale == 1.0:
            torch.sum(dy, 0, dtype=main_grad.dtype, out=main_grad)
        else:
            add_gradient(main_grad, dy.sum(0, dtype=main_grad.dtype), overwrite=overwrite, scale=scale)
        return
    if dy.dim() > 2:
        dy = dy.flatten(0, -2)
    if not x.is_floating_point():
        if overwrite:
            main_grad.zero_()
        main_grad.index_add_(0, x.flatten(), dy.to(main_grad.dtype), alpha=scale)
        return
    if x.dim() > 2:
        x = x.flatten(0, -2)  # [tokens, in]
    outputs, inputs = main_grad.shape
    assert (outputs, inputs) == (dy.shape[1], x.shape[1]), (
        f"main_grad {main_grad.shape}, dy {dy.shape}, x {x.shape}"
    )
    dy = dy.t()  # [out, tokens]
    if main_grad.dtype == dy.dtype:
        main_grad.addmm_(dy, x, beta=0.0 if overwrite else 1.0, alpha=scale)
        return
    rows = max(1, WIDENED_ELEMENTS // inputs)
    if outputs > rows and kind_of(dy.device) == "cpu":
        # neither the narrow product nor its wide copy is ever whole
        for part, columns in alike([*zip(main_grad.split(rows), dy.split(rows), strict=True)]):
            add_gradient(part, product(columns, x), overwrite=overwrite, scale=scale)
    else:
        add_gradient(main_grad, product(dy, x), overwrite=overwrite, scale=scale)


def _accumulate_by_expert(
    main_grad: Tensor, x: Tensor | None, dy: Tensor, ends: tuple[int, ...], overwrite: bool, scale: float
) -> None:
    for grad, first, end in zip(main_grad.unbind(), (0, *ends), ends, strict=False):
        if first < end:
            of_x, of_dy = None, dy[first:end]
            if x is not None:
                of_x, of_dy = even_rows(x[first:end], dy.shape[1]), even_rows(of_dy, x.shape[1])
            accumulate_wgrad(grad, of_x, of_dy, overwrite=overwrite, scale=scale)
        elif overwrite:
            grad.zero_()


def add_gradient(total: Tensor, addend: Tensor, *, overwrite: bool = False, scale: float = 1.0) -> None:
    """total [...] += scale * addend [...]; overwrite: total = scale * addend. The product is taken in total's dtype.

    An addend of another dtype is added some rows at a time: the addition first widens it into a temporary. Without
    memory, where nothing is widened, it is one call.
    """
    if overwrite and scale != 1.0 and total.dtype == addend.dtype:
        torch.mul(addend, scale, out=total)
        return
    if overwrite:
        total.copy_(addend)
        if scale != 1.0:
            total.mul_(scale)
        return
    if total.dtype == addend.dtype and scale == 1.0:
        total.add_(addend)
        return
    most = elements_at_a_time(total, WIDENED_ELEMENTS)
    if total.dtype == addend.dtype or total.is_meta or total.dim() < 2 or total.numel() <= most:
        total.add_(addend, alpha=scale)
        return
    rows = max(1, most // (total.numel() // total.shape[0]))
    for part, narrow in zip(total.split(rows), addend.split(rows), strict=True):
        part.add_(narrow, alpha=scale)


class LinearKeys(Protocol):
    """Where a linear layer's gradients go."""

    @property
    def sink(self) -> WeightGradSink: ...
    @property
    def key(self) -> str: ...
    @property
    def bias_key(self) -> str | None: ...


def put_linear(
    keys: LinearKeys, x: Tensor | Operand, dy: Tensor, weight: Tensor, bias: Tensor | None
) -> None:
    """Hand to the sink what the gradients of a linear layer's weight and bias, where they are trained, are made of."""
    if dy.dim() > 2:
        dy = dy.flatten(0, -2)  # [tokens, out], once for both
    put = keys.sink.put
    if weight.requires_grad:
        put(keys.key, x, dy)
    if bias is not None and bias.requires_grad:
        assert keys.bias_key is not None, f"{keys.key}: a bias without a key"
        put(keys.bias_key, None, dy)


class WeightGradAccumulator:
    """The `WeightGradSink` that computes each gradient as soon as it is put, or in the W of its microbatch.

    An engine binds the buffers (`bind`) and listens; without one, `bind_new` allocates them, so that a model's
    gradients can be read with nothing around it. A pipeline stage says which microbatch a backward belongs to
    (`backward`): it is seldom the one whose forward ran last. deferring: `put` files what it is given, for W.
    keeps_gathered: see `WeightGradSink`; may be written between steps.

    [Note: what is deferred] In a split backward, B files every contribution and W (`flush`) adds it, also those that
    are put finished, as one row (norms, and whatever autograd computes): gradients are touched in W alone, so they
    need memory from there on, and only the order of the W's decides their bits.

    [Note: W by unit] Where a plan reduces gradients unit by unit, it has to know when W comes to a unit's first
    contribution (`report_units`), and may ask for those of some units only.
    """

    def __init__(self) -> None:
        self.microbatch = 0
        self.keeps_gathered = False
        self.main_grads: dict[str, Tensor] = {}
        self.deferring = False
        self._listener: GradListener | None = None
        # Keys whose contributions the listener hears of before they are written; None: it hears of all, twice.
        self._fresh: Container[str] | None = ()
        self._scale = 1.0
        self._filed: dict[int, deque[Contribution]] = {}
        self._unit_of: Mapping[str, int] = {}
        self._unit_begins: Callable[[int], None] | None = None

    def bind(
        self, main_grads: Mapping[str, Tensor], listener: GradListener | None = None, *, scale: float = 1.0
    ) -> None:
        """Use these buffers, one a key, and tell `listener` of every contribution. scale: of every contribution."""
        self.main_grads = dict(main_grads)
        self._listener = listener
        self._fresh = () if listener is None else getattr(listener, "fresh", None)
        self._scale = scale

    def bind_new(
        self, shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype, device: torch.device
    ) -> None:
        """Allocate zeroed buffers of these shapes."""
        self.bind({key: torch.zeros(shape, dtype=dtype, device=device) for key, shape in shapes.items()})

    def report_units(self, unit_of: Mapping[str, int], begins: Callable[[int], None]) -> None:
        """Tell `begins` of the unit of the contribution that comes next in a W, where it is another one than before.

        unit_of: the unit of each key, by its number in the chunk's `StageUnits`.
        """
        self._unit_of, self._unit_begins = dict(unit_of), begins

    @contextlib.contextmanager
    def backward(self, microbatch: int, *, split: bool = False) -> Iterator[None]:
        """What is put inside belongs to `microbatch`. split: this is a B, file it for its W."""
        assert not self.deferring, f"backward of microbatch {microbatch} inside the B of {self.microbatch}"
        self.microbatch = microbatch
        if split:
            assert microbatch not in self._filed, f"a second B of microbatch {microbatch} before its W"
            self._filed[microbatch] = deque()
        self.deferring = split
        try:
            yield
        finally:
            self.deferring = False

    def put(
        self, key: str, x: Tensor | Operand | None, dy: Tensor, ends: tuple[int, ...] | None = None
    ) -> None:
        main_grad, fresh, overwrite = self.main_grads.get(key), self._fresh, False
        assert main_grad is not None, (
            f"no gradient buffer bound for {key!r}; bound: {sorted(self.main_grads)}"
        )
        if self.deferring:
            if isinstance(x, Tensor) and x.requires_grad:
                # With its graph it would keep the stage's input and that one's gradient until W.
                x = x.detach()
            self._filed[self.microbatch].append((key, x, dy, ends))
            return
        if x is not None and not isinstance(x, Tensor):
            x = x.whole()
        if (fresh is None or key in fresh) and self._listener is not None:
            overwrite = self._listener.grad_begins(key)
            main_grad = self.main_grads[key]  # the listener may have put another one in its place
        # Most of them: as `accumulate_wgrad`, in as few calls as there can be.
        same = main_grad.dtype is dy.dtype
        common = self._scale == 1.0 and ends is None and dy.dim() <= 2
        common = common and (same or main_grad.numel() <= WIDENED_ELEMENTS)
        add = main_grad.copy_ if overwrite else main_grad.add_
        if common and x is None:
            add(dy if dy.dim() == main_grad.dim() else dy.sum(0, dtype=main_grad.dtype))
        elif common and x is not None and x.dtype is dy.dtype and x.dim() == 2:
            if not same:
                add(product(dy.t(), x))
            elif overwrite:
                main_grad.addmm_(dy.t(), x, beta=0.0)
            else:
                main_grad.addmm_(dy.t(), x)
        else:
            accumulate_wgrad(main_grad, x, dy, ends, overwrite=overwrite, scale=self._scale)
        if fresh is None:
            self.done(key, self.microbatch)

    @torch.no_grad()
    def flush(self, microbatch: int, units: tuple[int, int] | None = None) -> None:
        """W: compute what the B of `microbatch` filed, in that order, each contribution freed once it is added.

        units: (first, end) of those whose contributions are meant; those of the others stay for another call.
        Communicates (tp) where operands are held in parts; the next one is gathered behind the GEMM of this one.
        """
        assert microbatch in self._filed, (
            f"W of microbatch {microbatch} without its B; filed: {sorted(self._filed)}"
        )
        assert not self.deferring, f"W of microbatch {microbatch} inside the B of {self.microbatch}"
        filed, self.microbatch = self._filed.pop(microbatch), microbatch
        if units is not None:
            chosen = range(*units)
            # What is left may be nothing, and is asked for nevertheless: by another part of this W.
            self._filed[microbatch] = deque(one for one in filed if self._unit(one[0]) not in chosen)
            filed = deque(one for one in filed if self._unit(one[0]) in chosen)
        parts = deque(x for _, x, *_ in filed if x is not None and not isinstance(x, Tensor))
        if parts:
            parts[0].start()
        unit = None
        while filed:
            key, x, dy, ends = filed.popleft()
            if parts and x is parts[0]:
                parts.popleft()
            if parts:
                parts[0].start()
            if self._unit_begins is not None and self._unit(key) != unit:
                unit = self._unit(key)
                self._unit_begins(unit)
            self.put(key, x, dy, ends)

    def filed(self, microbatch: int) -> list[tuple[str, Tensor | Operand | None, Tensor]]:
        """What waits for a microbatch's W: keys, and what their gradients are made of."""
        return [(key, x, dy) for key, x, dy, _ in self._filed.get(microbatch, ())]

    def check_flushed(self) -> None:
        """At the end of a step every B had its W."""
        left = sorted(microbatch for microbatch, filed in self._filed.items() if filed)
        assert not left, f"weight gradients of microbatches {left} were never computed"
        self._filed.clear()

    def _unit(self, key: str) -> int:
        assert key in self._unit_of, f"{key!r} is in no unit; those of units: {sorted(self._unit_of)}"
        return self._unit_of[key]

    def done(self, key: str, microbatch: int) -> None:
        if self._listener is not None:
            self._listener.grad_ready(key, microbatch)
