"""--fsdp-debug: whoever reads or writes a tensor of an engine whose memory is released hears which, instead of reading
freed memory.

Such are a view of a gathered weight that is kept beyond its unit (`self.kept = self.weight.t()`), a weight that is read
between steps, a gradient that is looked at after its reduction. Torch itself finds no such use, because the tensor
looks as it always does. Every operation of the watching thread, and of the threads that autograd uses for it, is looked
at before it runs. That costs some microseconds an operation. What torch does without an operation of its own
(`numpy()`, `tolist()`, `data_ptr()`) is not seen.

[Note: one mode for all owners] Modes of torch form a stack; one that outlives a `with` block has to lie below all that
come and go. So there is one for all owners of a thread, put in below the others with the first owner and taken out
with the last. A thread that ends an owner of another thread leaves its mode, which then knows of nothing.
"""

from __future__ import annotations

import dataclasses
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.utils import _python_dispatch as dispatch

from megatron.core.distributed.custom_fsdp.flat_buffer import BucketMemory, FlatBuffer
from megatron.core.module import ModelError
from megatron.core.sharding_table import ShardOver

# They take a tensor's shape and type, and read no element.
_NEW_TENSORS = frozenset(
    f"aten::{name}"
    for name in (
        "empty_like new_empty new_empty_strided new_zeros new_ones new_full zeros_like ones_like full_like rand_like "
        "randn_like randint_like is_same_size"
    ).split()
)


@dataclasses.dataclass(frozen=True)
class _Released:
    """What lies in a storage that comes and goes. places: (first byte, last byte + 1, name) of each parameter."""

    unit: str
    what: str
    places: tuple[tuple[int, int, str], ...] = ()


def watch_released(owner: object, buffer: FlatBuffer) -> None:
    """From here on, for as long as `owner` lives, this thread's operations on released tensors of the buffer raise
    ModelError. Does nothing where the buffer releases none."""
    known = {tensor.untyped_storage()._cdata: what for tensor, what in _released(buffer)}
    if not known:
        return
    mode = next((mode for mode in _stack() if isinstance(mode, _Watch)), None)
    if mode is None:
        mode = _Watch()
        _replace_stack([mode, *_stack()])
    mode.known[id(owner)] = known
    weakref.finalize(owner, mode.forget, id(owner)).atexit = False


def _released(buffer: FlatBuffer) -> Iterator[tuple[Tensor, _Released]]:
    """All that an engine takes memory away from."""
    for bucket in buffer.buckets:
        row = buffer.arenas[bucket.arena].sharding
        if row.weights is not ShardOver.NONE:
            yield bucket.full_weights, _in_full(buffer, bucket, bucket.full_weights, "weight")
        if row.main_grads is ShardOver.NONE or bucket.full_grads is None:
            continue
        assert bucket.main_grads is not None, bucket.name
        yield bucket.full_grads, _in_full(buffer, bucket, bucket.full_grads, "gradient")
        yield bucket.main_grads, _Released(bucket.name, "sharded gradients")
        for key in (key for name in bucket.bucket.names for key in buffer.param_meta[name].grad_keys[1:]):
            extra, name = buffer.extra_grads[key], buffer.param_of_key(key)
            yield extra, _Released(bucket.name, "gradient of a further use", ((0, extra.nbytes, name),))


def _in_full(buffer: FlatBuffer, bucket: BucketMemory, full: Tensor, what: str) -> _Released:
    layout, size, start = buffer.arenas[bucket.arena].layout, full.element_size(), bucket.bucket.start
    slots = [layout.by_name[name] for name in bucket.bucket.names]
    places = [((slot.start - start) * size, (slot.end - start) * size, slot.name) for slot in slots]
    return _Released(bucket.name, what, tuple(places))


class _Watch(dispatch.TorchDispatchMode):
    """See [Note: one mode for all owners]. known: owner -> storage -> what lies in it."""

    def __init__(self) -> None:
        super().__init__()
        self.known: dict[int, Mapping[int, _Released]] = {}
        self._thread = threading.get_ident()

    def forget(self, key: int) -> None:
        """An owner is gone."""
        del self.known[key]
        if not self.known and threading.get_ident() == self._thread:
            _replace_stack([mode for mode in _stack() if mode is not self])

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        found = next(self._in((args, kwargs.values())), None)
        if found is None or func._schema.name in _NEW_TENSORS:
            return func(*args, **kwargs)
        if not func.is_view:
            raise ModelError(_message(func, *found))
        try:
            return func(*args, **kwargs)
        except RuntimeError as error:  # most views cannot be made of what has no memory
            raise ModelError(_message(func, *found)) from error

    def _in(self, value: Any) -> Iterator[tuple[_Released, Tensor]]:
        """Released tensors in the arguments of an operation."""
        if isinstance(value, Tensor):
            if not value.numel() or value.is_sparse or value.is_meta or value.untyped_storage().nbytes():
                return
            for known in self.known.values():
                if (released := known.get(value.untyped_storage()._cdata)) is not None:
                    yield released, value
        elif isinstance(value, tuple | list | type({}.values())):
            for item in value:
                yield from self._in(item)


def _message(func: Any, released: _Released, tensor: Tensor) -> str:
    byte = int(tensor.storage_offset()) * tensor.element_size()
    name = next((name for start, end, name in released.places if start <= byte < end), None)
    which = f"unit {released.unit!r}" if name is None else f"{name!r} (unit {released.unit!r})"
    return (
        f"--fsdp-debug: {func._schema.name.removeprefix('aten::')} reads or writes the {released.what} of {which}, "
        "whose memory is released: a view of it was kept, or it is used where its unit does not run. Use it inside the "
        "unit's forward, keep a clone of it there, or declare the modules that share it as one unit"
    )


def _stack() -> list[Any]:
    """The modes of this thread, the innermost last (torch keeps no public word for it)."""
    return list(dispatch._get_current_dispatch_mode_stack())


def _replace_stack(modes: Sequence[Any]) -> None:
    for _ in _stack():
        dispatch._pop_mode()
    for mode in modes:
        dispatch._push_mode(mode)
