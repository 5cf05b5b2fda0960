"""Where gradients come from: the sinks of our layers, and autograd's hooks for everything else.

[Note: hooks of parameters] Python's collector does not look into a tensor's own hooks: an engine that such a hook held
would hold its parameters, and with them the hook, for ever.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence

from torch import Tensor
from torch.utils.hooks import RemovableHandle

from megatron.core.distributed.custom_fsdp.flat_buffer import FlatBuffer
from megatron.core.module import ModelChunks, ModelError
from megatron.core.param_meta import GradRoute
from megatron.core.protocols import GradListener
from megatron.core.weight_grad import WeightGradAccumulator, add_gradient

Sinks = Sequence[WeightGradAccumulator | None] | WeightGradAccumulator | None


def connect(
    chunks: ModelChunks, buffer: FlatBuffer, sinks: Sinks, listener: GradListener, *, scale: float = 1.0
) -> list[RemovableHandle]:
    """Bind every sink to the accumulators of its chunks' parameters, and hook what autograd accumulates. Each chunk
    reports each key once a microbatch. scale: of every contribution. Returns what removes the hooks of parameters."""
    if sinks is None or isinstance(sinks, WeightGradAccumulator):
        sinks = (sinks,) * len(chunks.modules)
    assert len(sinks) == len(chunks.modules), f"{len(sinks)} sinks for {len(chunks.modules)} chunks"
    hooks: list[RemovableHandle] = []
    keys_of: dict[int, tuple[WeightGradAccumulator, dict[str, Tensor]]] = {}
    for name in buffer.names:
        meta, holders = buffer.param_meta[name], chunks.holders[name]
        here = [sink for chunk in holders if (sink := sinks[chunk]) is not None]
        assert len(here) in (0, len(holders)), f"{name}: of chunks {holders} only some have a sink"
        for sink in here:
            grads = keys_of.setdefault(id(sink), (sink, {}))[1]
            grads |= {key: buffer.main_grad(key) for key in meta.grad_keys}
        if not here or meta.route is GradRoute.AUTOGRAD:
            hook = autograd_hook(name, buffer.main_grad(name), listener, scale, here)
            hooks.append(chunks.parameters[name].register_post_accumulate_grad_hook(hook))
    for sink, grads in keys_of.values():
        sink.bind(grads, listener, scale=scale)
    return hooks


def autograd_hook(
    name: str, main_grad: Tensor, listener: GradListener, scale: float, sinks: Sequence[WeightGradAccumulator]
) -> Callable[[Tensor], None]:
    """What is to be registered with a parameter whose gradient autograd accumulates. sinks: of the chunks that use the
    parameter; the one whose B is under way files the gradient for W."""
    heard = weakref.ref(listener)  # see [Note: hooks of parameters]

    def take(parameter: Tensor) -> None:
        engine = heard()
        assert engine is not None, f"a gradient for {name}: the engine around the module is gone"
        grad, parameter.grad = parameter.grad, None  # first, so that nothing of it stays where it is refused
        assert grad is not None
        if grad.requires_grad:
            raise ModelError(
                f"a gradient of parameter {name!r} comes with create_graph=True: parameters' gradients are added into "
                "memory that they share, through which no backward goes; take gradients of inputs, with "
                "torch.autograd.grad(outputs, inputs, create_graph=True), and leave it out of backward()"
            )
        for sink in sinks:
            if sink.deferring:
                sink.put(name, None, grad)
                return
        overwrite = engine.grad_begins(name)
        add_gradient(main_grad, grad, overwrite=overwrite, scale=scale)
        engine.grad_ready(name, 0)

    return take
