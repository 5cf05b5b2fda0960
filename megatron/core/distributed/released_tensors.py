"""Tensors whose memory is released: whoever reads or writes one hears which, instead of reading freed memory.

Torch itself finds no such use, because the tensor looks as it always does. Every operation of the watching thread, and
of the threads that autograd uses for it, is looked at before it runs. That costs some microseconds an operation. What
torch does without an operation of its own (`numpy()`, `tolist()`, `data_ptr()`) is not seen.

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

from megatron.core.module import ModelError

# They take a tensor's shape and type, and read no element.
_NEW_TENSORS = frozenset(
    f"aten::{name}"
    for name in (
        "empty_like new_empty new_empty_strided new_zeros new_ones new_full zeros_like ones_like full_like rand_like "
        "randn_like randint_like is_same_size"
    ).split()
)


@dataclasses.dataclass(frozen=True)
class Released:
    """What lies in a storage that comes and goes. places: (first byte, last byte + 1, name) of each parameter."""

    unit: str
    what: str
    places: tuple[tuple[int, int, str], ...]

    def name_at(self, byte: int) -> str | None:
        """The parameter that a byte belongs to; None for padding."""
        return next((name for start, end, name in self.places if start <= byte < end), None)


def watch(owner: object, known: Mapping[int, Released]) -> None:
    """From here on, for as long as `owner` lives, this thread's operations on tensors that are in `known` and have no
    memory raise ModelError. known: storage (`_cdata`) -> what lies in it."""
    mode = next((mode for mode in _stack() if isinstance(mode, _Watch)), None)
    if mode is None:
        mode = _Watch()
        _replace_stack([mode, *_stack()])
    key = id(owner)
    mode.known[key] = known
    weakref.finalize(owner, mode.forget, key).atexit = False


class _Watch(dispatch.TorchDispatchMode):
    """See [Note: one mode for all owners]. known: owner -> storage -> what lies in it."""

    def __init__(self) -> None:
        super().__init__()
        self.known: dict[int, Mapping[int, Released]] = {}
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

    def _in(self, value: Any) -> Iterator[tuple[Released, str | None]]:
        """Released tensors in the arguments of an operation."""
        if isinstance(value, Tensor):
            if (one := self._look_up(value)) is not None:
                yield one
        elif isinstance(value, str):
            return
        elif isinstance(value, tuple | list | type({}.values())):
            for item in value:
                yield from self._in(item)

    def _look_up(self, tensor: Tensor) -> tuple[Released, str | None] | None:
        if not tensor.numel() or tensor.is_sparse or tensor.is_meta:
            return None
        storage = tensor.untyped_storage()
        if storage.nbytes():
            return None
        for known in self.known.values():
            if (released := known.get(storage._cdata)) is not None:
                return released, released.name_at(int(tensor.storage_offset()) * tensor.element_size())
        return None


def _message(func: Any, released: Released, name: str | None) -> str:
    op = func._schema.name.removeprefix("aten::")
    which = f"unit {released.unit!r}" if name is None else f"{name!r} (unit {released.unit!r})"
    return (
        f"--fsdp-debug: {op} reads or writes the {released.what} of {which}, whose memory is released: a "
        "view of it was kept, or it is used where its unit does not run. Use it inside the unit's forward, keep a "
        "clone of it there, or declare the modules that share it as one unit"
    )


def _stack() -> list[Any]:
    """The modes of this thread, the innermost last (torch keeps no public word for it)."""
    return list(dispatch._get_current_dispatch_mode_stack())


def _replace_stack(modes: Sequence[Any]) -> None:
    for _ in _stack():
        dispatch._pop_mode()
    for mode in modes:
        dispatch._push_mode(mode)
