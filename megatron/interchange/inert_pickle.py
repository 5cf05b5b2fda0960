"""Pickles read without running anything in them (floor 0).

A pickle is a program that may call what it names. Python's library only takes it apart into opcodes; they are carried
out here, where a name of a short list stands for an empty class of ours, which keeps what it was called with and does
nothing, and any other is refused. What comes out is dicts, lists, tuples, numbers, texts and `Inert` values. Their
number is bounded, and so is what a key of a dict is made of: hashing tuples in one another, each twice in the next,
would never end.
"""

from __future__ import annotations

import pickletools
from collections.abc import Callable, Iterable, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from megatron.core.dist_checkpointing.files import CheckpointError

MAX_BYTES = 1 << 30  # of one pickle: the description of the largest models is a tenth of it
MAX_OPCODES = 1 << 26  # some seconds a million
MAX_DEPTH, MAX_VALUES = 64, 1 << 17
MAX_BITS = 1024  # of an integer
MAX_COPIED = 1024  # values in what a call copies, or in a key: a pickle may do so with one list over and over

# What checkpoints of torch and Megatron name: containers, shapes, dtypes, storages, and records of settings.
CONTAINERS: Mapping[str, type] = {
    "collections.OrderedDict": dict,
    "builtins.set": set,
    "torch.Size": tuple,
}
NAMES = (
    "torch.*Storage", "torch.serialization._get_layout", "torch._utils._rebuild_tensor_v2",
    "torch._utils._rebuild_parameter", "torch._utils._rebuild_parameter_with_state", "torch.nn.parameter.Parameter",
    "torch._tensor._rebuild_from_type_v2", "torch.Tensor",
    *(f"torch.{name}" for name in "float64 float32 float16 bfloat16 int64 int32 int16 int8 uint8 bool "
      "float8_e4m3fn float8_e5m2 device".split()),
    "torch.distributed.checkpoint.metadata.*", "torch.distributed.checkpoint.filesystem._StorageInfo",
    "torch.distributed.checkpoint.planner.*", "collections.defaultdict", "collections.deque",
    "argparse.Namespace", "types.SimpleNamespace", "pathlib.PosixPath", "pathlib._local.PosixPath", "enum.*",
    "numpy.*", "_codecs.encode", "signal.Signals", "megatron.*", "builtins.bytearray", "io.BytesIO",
    "_io.BytesIO", "datetime.timedelta",
)  # fmt: skip


class Inert:
    """Something that a pickle makes by calling `path` with `args`; state: what it sets afterwards, {} if nothing."""

    path = ""

    def __new__(cls, *args: Any, **kwargs: Any) -> Inert:
        made = object.__new__(cls)
        made.args, made.state = args, {}
        return made

    args: tuple[Any, ...]
    state: Any

    def get(self, name: str) -> Any:
        """A field of its state; None where there is none of that name."""
        return self.state.get(name) if isinstance(self.state, dict) else None


# Opcodes whose argument is the value, and those that make one of nothing. What only protocol 0 needs is not read.
_GIVEN = frozenset(
    "INT BININT BININT1 BININT2 LONG LONG1 LONG4 BINFLOAT BINSTRING SHORT_BINSTRING BINUNICODE SHORT_BINUNICODE "
    "BINUNICODE8 BINBYTES SHORT_BINBYTES BINBYTES8 BYTEARRAY8".split()
)
_MADE: Mapping[str, Callable[[], Any]] = {
    "NONE": lambda: None, "NEWTRUE": lambda: True, "NEWFALSE": lambda: False,
    "EMPTY_TUPLE": tuple, "EMPTY_LIST": list, "EMPTY_DICT": dict, "EMPTY_SET": set,
}  # fmt: skip
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_MARKED = frozenset({"TUPLE", "APPENDS", "SETITEMS", "ADDITEMS"})  # of all since the last mark
_OF_LAST = frozenset({"STACK_GLOBAL", "REDUCE", "NEWOBJ", "BUILD", "APPEND", "SETITEM", "BINPERSID"})


class _RefusedError(ValueError):
    """Something in a pickle that is not read here."""


class _Machine:
    """A pickle under way. stack: values; marks: how high it was; memo: values by number."""

    def __init__(self, storage: Callable[[Any], Any]) -> None:
        self._storage = storage
        self._stack: list[Any] = []
        self._marks: list[int] = []
        self._classes: dict[str, type] = {}

    def value(self, data: bytes) -> Any:
        stack = self._stack
        memo: dict[Any, Any] = {}
        for count, (opcode, given, _) in enumerate(pickletools.genops(data)):
            name = opcode.name
            if count >= MAX_OPCODES:
                raise _RefusedError(f"more than {MAX_OPCODES} opcodes")
            if name in _GIVEN:
                if isinstance(given, int) and given.bit_length() > MAX_BITS:
                    raise _RefusedError(f"an integer of {given.bit_length()} bits")
                stack.append(given)
            elif name in ("MEMOIZE", "BINPUT", "LONG_BINPUT"):
                memo[len(memo) if given is None else given] = stack[-1]
            elif name in ("BINGET", "LONG_BINGET"):
                stack.append(memo[given])
            elif name == "MARK":
                self._marks.append(len(stack))
            elif name in _MADE:
                stack.append(_MADE[name]())
            elif name in _TUPLES:
                stack.append(tuple(self._taken(len(stack) - _TUPLES[name])))
            elif name in _MARKED:
                self._marked(name, self._taken(self._marks.pop()))
            elif name == "GLOBAL":
                stack.append(self._named(str(given).replace(" ", ".", 1)))
            elif name in _OF_LAST:
                self._of_last(name, stack.pop())
            elif name not in ("PROTO", "FRAME", "STOP"):
                raise _RefusedError(f"opcode {name}")
        return stack.pop()

    def _taken(self, first: int) -> list[Any]:
        values = self._stack[first:]
        del self._stack[first:]
        return values

    def _marked(self, name: str, values: list[Any]) -> None:
        if name == "TUPLE":
            self._stack.append(tuple(values))
        elif name == "SETITEMS":
            _filled(self._stack[-1], values)
        elif name == "APPENDS":
            _extended(self._stack[-1], values)
        else:
            self._stack[-1].update(map(_key, values))

    def _of_last(self, name: str, last: Any) -> None:
        """last: what lay uppermost."""
        stack = self._stack
        if name == "STACK_GLOBAL":
            stack.append(self._named(".".join((stack.pop(), last))))
        elif name in ("REDUCE", "NEWOBJ"):
            stack.append(_called(stack.pop(), last))
        elif name == "BINPERSID":
            stack.append(self._storage(last))
        elif name == "APPEND":
            _extended(stack[-1], [last])
        elif name == "SETITEM":
            key = stack.pop()
            _filled(stack[-1], [key, last])
        elif isinstance(stack[-1], Inert):
            stack[-1].state = last
        elif not isinstance(stack[-1], dict):  # attributes of a module's OrderedDict say nothing of tensors
            raise _RefusedError("a state of what has none")

    def _named(self, path: str) -> type:
        if path in CONTAINERS:
            return CONTAINERS[path]
        if ".." in path or "__" in path or not any(fnmatchcase(path, pattern) for pattern in NAMES):
            raise _RefusedError(f"it names {path!r:.200}, which is not read")
        return self._classes.setdefault(path, type(path.rpartition(".")[2], (Inert,), {"path": path}))


def _called(function: Any, args: Any) -> Any:
    """What stands for a call. Containers copy what they are given; everything else keeps it."""
    if not isinstance(args, tuple) or not isinstance(function, type):
        raise _RefusedError("a call that is none")
    if issubclass(function, Inert):
        return function(*args)
    given = args[0] if args else ()
    if len(args) > 1 or function not in (tuple, set, dict) or not isinstance(given, list | tuple | set):
        raise _RefusedError(f"a {function.__name__} of what makes none")
    if len(given) > MAX_COPIED:
        raise _RefusedError(f"a {function.__name__} of {len(given)} values")
    if function is dict:
        return _filled({}, [value for pair in given for value in pair])
    return tuple(given) if function is tuple else set(map(_key, given))


def _filled(target: Any, keys_and_values: list[Any]) -> Any:
    """A dict with these items too. What stands for a subclass keeps none: nothing that is read is one."""
    items = zip(keys_and_values[::2], keys_and_values[1::2], strict=True)
    if isinstance(target, dict):
        target.update((_key(key), value) for key, value in items)
    elif not isinstance(target, Inert):
        raise _RefusedError("items of what has none")
    return target


def _extended(target: Any, values: Iterable[Any]) -> None:
    if isinstance(target, list):
        target.extend(values)
    elif not isinstance(target, Inert):
        raise _RefusedError("values of what holds none")


def _key(value: Any) -> Any:
    """A value that is a key: no container but a short tuple of none."""
    if isinstance(value, tuple | frozenset):
        inner = any(isinstance(part, tuple | frozenset) for part in value)
        if inner or len(value) > MAX_COPIED:
            raise _RefusedError("a key of containers in one another, or a long one")
    return value


def _no_storage(pid: Any) -> Any:
    raise _RefusedError("a storage outside of an archive")


def read_pickle(data: bytes, path: Path, storage: Callable[[Any], Any] = _no_storage) -> Any:
    """The value in a pickle. path: for messages. storage: what a persistent id stands for.

    Raises CheckpointError for what is none, names anything that is not listed, or goes beyond the bounds above.
    """
    if len(data) > MAX_BYTES:
        raise CheckpointError(f"{path}: a pickle of {len(data)} bytes; at most {MAX_BYTES} are read")
    try:
        return _Machine(storage).value(data)
    except CheckpointError:
        raise
    except Exception as error:  # a broken pickle raises anything
        raise CheckpointError(f"{path}: not a pickle that is read here: {str(error)[:300]}") from None


def plain(value: Any, depth: int = 0, left: list[int] | None = None) -> Any:
    """Settings as JSON values: what is no number, text, list or dict of such is None. left: how many more values are
    taken, for a list may hold another many times. Raises CheckpointError."""
    left = [MAX_VALUES] if left is None else left
    left[0] -= 1
    if depth > MAX_DEPTH or left[0] < 0:
        raise CheckpointError(f"settings nested deeper than {MAX_DEPTH}, or of more than {MAX_VALUES} values")
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple):
        return [plain(item, depth + 1, left) for item in value]
    if isinstance(value, dict):
        pairs = ((key, item) for key, item in value.items() if isinstance(key, str | int))
        return {str(key): plain(item, depth + 1, left) for key, item in pairs}
    if isinstance(value, type) and issubclass(value, Inert):
        return value.path
    return None
