"""What a rank holds while its steps run, by kind, looked at behind every operation of its row.

[Note: shapes once] torch finds many shapes of tensors without memory in Python, in up to some milliseconds. Steps do
the same things to the same shapes, so what an operation makes is found once, and made by its shape from then on. One
that writes to its arguments has nothing left to do, and one that gives views makes no memory that has to be watched.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron.core import machine
from megatron.core.memory_tracker import GRADIENTS, PERSISTENT, MemoryTracker
from megatron.core.pipeline_parallel.plan import ir
from megatron.estimate.peak import MOST_HOLDERS, MemoryHolder
from megatron.estimate.watch import StorageWatch, place_of, tensors_in

_MOMENT = 2e-4  # seconds
_STEP_KINDS = ("figures", "tails")  # the tracker's, of the optimizer's step
# Paths, in place of modules', of what is no module: who carries messages, gives batches, adds up figures, and the
# engine with its optimizer, most of whose memory the tracker knows.
MESSAGES, BATCHES, FIGURES, ENGINE = "/messages", "/batches", "/figures", "/engine"
_TRACKED = (
    "exchange",
    "packed",
    "casts",
    "snapshot",
    *_STEP_KINDS,
)  # of what operations make, that which the tracker counts too
_OF_STEP, _OF_SUMS = ("casts", "snapshot", *_STEP_KINDS), ("exchange", "packed")
# Texts of operations by which steps are validated.
_STEP, _VALIDATE, _SENDS_STATE = (ir.NAMES[kind] for kind in (ir.STEP, ir.VALIDATE, ir.SEND_STATE))


class Seen(NamedTuple):
    """Bytes by kind behind an operation, by its text."""

    operation: str
    held: Mapping[str, int]

    @property
    def total(self) -> int:
        return sum(self.held.values())


class _Output:
    """A tensor that an operation makes. is_whole: its storage has nothing else."""

    def __init__(
        self, shape: torch.Size, stride: tuple[int, ...], dtype: torch.dtype, num_bytes: int
    ) -> None:
        self._facts = shape, stride, dtype
        self.is_whole = self.made().untyped_storage().nbytes() == num_bytes

    @classmethod
    def of(cls, tensor: Tensor) -> _Output:
        return cls(tensor.shape, tensor.stride(), tensor.dtype, tensor.untyped_storage().nbytes())

    def made(self) -> Tensor:
        shape, stride, dtype = self._facts
        return torch.empty_strided(shape, stride, dtype=dtype, device="meta")


def _replaced(kind: type, replace: Callable[[Any], Any], value: Any) -> Any:
    """What an operation gives, which is one of a kind or a row of them, with these replaced."""
    if isinstance(value, kind):
        return replace(value)
    if isinstance(value, tuple | list):
        return type(value)(_replaced(kind, replace, one) for one in value)
    return value


def _shapes(value: Any) -> Any:
    """Arguments as far as shapes depend on them."""
    if isinstance(value, Tensor):
        return value.shape, value.stride(), value.storage_offset(), value.dtype, value.device.type
    if isinstance(value, dict):
        return tuple((name, _shapes(one)) for name, one in value.items())
    if isinstance(value, tuple | list):
        return tuple(map(_shapes, value))
    return type(value), value  # 1, 1.0 and True are equal


def _key(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """By which operations make the same; None where that has no hash."""
    key = func, _shapes(args), _shapes(kwargs)
    try:
        hash(key)
    except TypeError:
        return None
    return key


def _gives(func: Any) -> str:
    """By what an operation says of itself: "arguments" that it writes to, "views" of them, or "memory"."""
    if func._schema.is_mutable:
        return "arguments"
    returns = func._schema.returns
    return "views" if returns and all(value.alias_info is not None for value in returns) else "memory"


class StepWatch(StorageWatch):
    """Inside `with`, in this thread. tracker: of the engine, whose gathered weights and gradients no operation makes.

    seen: of the step, what is held behind each operation that ran as a `region`. peak: the most at once since `begin`,
    whose operation is the one under way; holders: who had it. parts: of what ends a step, by name, what the tracker
    counted at most of what they take, and what it did not (temporaries).
    """

    def __init__(
        self,
        device: torch.device,
        paths: Mapping[int, str],
        owned: Iterable[tuple[str, Tensor]],
        tracker: MemoryTracker,
    ) -> None:
        self._tracker, self._by_kind = tracker, Counter[str]()
        self._under_way: list[str] = []
        self._temporaries = 0
        self._outputs: dict[Any, Any] = {}
        self._giving: dict[Any, str] = {}  # operations: what they give
        self.begin()
        super().__init__(device, paths, owned)

    def begin(self) -> None:
        """A step begins."""
        self.seen: list[Seen] = []
        self.parts: dict[str, dict[str, int]] = {}
        self.peak, self.holders = Seen("", {}), list[MemoryHolder]()
        self._most = -1

    @contextlib.contextmanager
    def region(self, operation: str) -> Iterator[None]:
        """An operation of the row: `Executor.run`. One that VALIDATE does again has been seen."""
        again = any(one.endswith(_VALIDATE) for one in self._under_way)
        self._under_way.append(operation)
        with self.deciding(operation):
            yield
        if self.device.type == "cpu":
            let_threads_end()
        self._look()
        self._under_way.pop()
        if not again:
            self.seen.append(Seen(operation, self.held_by_kind()))

    @contextlib.contextmanager
    def deciding(self, operation: str) -> Iterator[None]:
        """An operation of the row, which may be one of those by which steps are validated: what the parts of the
        optimizer's step take in it."""
        if operation.endswith(_STEP) or _SENDS_STATE in operation:
            names = dict.fromkeys(_OF_STEP, "optimizer") | {"figures": "grad-norm"}
        elif operation.endswith(_VALIDATE):
            names = dict.fromkeys(_OF_STEP, "rollback")
        else:
            yield
            return
        with self.part(operation):
            yield
        for kind, size in self.parts.pop(operation).items():
            if kind in names:
                self.parts.setdefault(names[kind], {})[kind] = size

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        """A part of a step, of which all begin and end outside of the row."""
        kinds = (*_OF_STEP, *_OF_SUMS)
        self._tracker.reset_peaks()
        held = {kind: self._tracker.live(kind) for kind in kinds}
        before = self._temporaries = self._untracked()
        yield
        most = {kind: self._tracker.peak(kind) - held[kind] for kind in kinds}
        most["temporaries"] = self._temporaries - before
        self.parts[name] = {kind: size for kind, size in most.items() if size}

    def held_by_kind(self) -> dict[str, int]:
        """What there is now."""
        self._count_ends()
        live, made = self._tracker.live, self._by_kind
        held = {kind: live(kind) for kind in (*PERSISTENT, "gathered", *_TRACKED)}
        held["grads"] = sum(live(kind) for kind in GRADIENTS)
        held["activations"], held["messages"], held["batches"] = (
            made[kind] for kind in ("", MESSAGES, BATCHES)
        )
        held["temporaries"] = self._untracked()
        return {kind: size for kind, size in held.items() if size}

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """See [Note: shapes once]."""
        if self.device.type != "meta":
            return super().__torch_dispatch__(func, types, args, kwargs)
        kwargs = kwargs or {}
        if (gives := self._giving.get(func)) is None:
            gives = self._giving[func] = _gives(func)
        if gives == "views":
            out = func(*args, **kwargs)
        elif gives == "arguments":
            out = self._written(func, args, kwargs)
        else:
            out, is_known = self._made_by(func, args, kwargs)
            outputs = tensors_in(out)
            before = set[int]() if is_known else set(map(place_of, tensors_in(args, kwargs)))
            if new := [tensor for tensor in outputs if place_of(tensor) not in before]:
                path = self._owner(tensors_in(args, kwargs))
                for tensor in new:
                    self._see(tensor, path)
                return out
        if not self._has_owner():
            self._owner(tensors_in(args, kwargs))
        return out

    def _written(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """What an operation gives that writes to its arguments."""
        key = _key(func, args, kwargs)
        if key is not None and (known := self._outputs.get(key)) is not None:
            name = known[0]
            return None if name is None else args[name] if isinstance(name, int) else kwargs[name]
        out = func(*args, **kwargs)
        are_meta = all(tensor.is_meta for tensor in tensors_in(args, kwargs))
        keeps_shapes = key is not None and key == _key(func, args, kwargs)
        if are_meta and keeps_shapes:
            names = [name for name, one in (*enumerate(args), *kwargs.items()) if one is out]
            if names or out is None:
                self._outputs[key] = [*names, None]
        return out

    def _made_by(self, func: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, bool]:
        """What an operation gives that makes memory; whether that was known."""
        key = _key(func, args, kwargs)
        if key is not None and (known := self._outputs.get(key)) is not None:
            return _replaced(_Output, _Output.made, known), True
        out = func(*args, **kwargs)
        outputs = tensors_in(out)
        if key is not None and outputs and all(one.is_meta for one in outputs):
            places = {place_of(one) for one in outputs}
            inputs = tensors_in(args, kwargs)
            if len(places) == len(outputs) and places.isdisjoint(map(place_of, inputs)):
                told = _replaced(Tensor, _Output.of, out)
                if all(_Output.of(one).is_whole for one in outputs):
                    self._outputs[key] = told
        return out, False

    def _owner(self, inputs: Sequence[Tensor]) -> str:
        """Copies of weights that a step can be taken back to are not the model's."""
        decides = self._under_way and self._under_way[-1].endswith((_STEP, _VALIDATE))
        path = super()._owner(inputs)
        return ENGINE if decides and not _kind_of(path) else path

    def _grew(self, path: str, num_bytes: int) -> None:
        super()._grew(path, num_bytes)
        self._by_kind[_kind_of(path)] += num_bytes
        if num_bytes:
            self._look()

    def _gone(self, place: int) -> None:
        path, num_bytes, *_ = self._live[place]
        super()._gone(place)
        self._by_kind[_kind_of(path)] -= num_bytes

    def _untracked(self) -> int:
        """What the engine and its optimizer have made that the tracker does not know of."""
        return max(0, self._by_kind[ENGINE] - sum(map(self._tracker.live, _TRACKED)))

    def _look(self) -> None:
        """Whether there was never more."""
        self._count_ends()
        live, made = self._tracker.live, self._by_kind
        untracked = self._untracked()
        engine = untracked + sum(live(kind) for kind in _TRACKED)
        self._temporaries = max(self._temporaries, untracked)
        total = self._tracker.persistent_bytes + live("gathered") + live("grads") + live("extra") + engine
        total += made[""] + made[MESSAGES] + made[BATCHES]
        if total > self._most:
            self._most = total
            where = self._under_way[1:2] or self._under_way  # in the step
            self.peak = Seen(where[0] if where else "", self.held_by_kind())
            # Sorting at each is slow, and only the last counts: who it was is found from copies.
            self._fullest = +self._sizes

    def name_holders(self) -> None:
        """Who had most at the peak."""
        sizes = [
            MemoryHolder(_kind_of(path)[1:] or "activations", path, size)
            for path, size in self._fullest.items()
        ]
        known = [one for one in sizes if one.kind not in ("figures", "engine")]
        self.holders = sorted(known, key=lambda one: -one.num_bytes)[:MOST_HOLDERS]


def let_threads_end() -> None:
    """A thread of gloo lets go of what it has carried a moment after that was waited for, and needs Python's lock for
    it: it gets the lock here, and the time that it takes."""
    at_rest = 0
    while at_rest < 2:
        time.sleep(_MOMENT)
        at_rest = 0 if machine.other_threads_run() else at_rest + 1


def _kind_of(path: str) -> str:
    """The path of what is no module, "" of modules."""
    return path if path.startswith("/") else ""
