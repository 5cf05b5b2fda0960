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
    """A name in a pickle, or something that it makes by calling one.

    args: of the call; None for the name alone. state: what the pickle sets afterwards, {} if nothing.
    """

    def __init__(self, path: str, args: tuple[Any, ...] | None = None) -> None:
        self.path, self.args = path, args
        self.state: Any = {}


def at(value: Any, *names: str | int) -> Any:
    """What a value has by a name, and that by the next one: an item of a dict, a field of a state; None where there is
    none."""
    for name in names:
        fields = value.state if isinstance(value, Inert) else value
        value = fields.get(name) if isinstance(fields, dict) else None
    return value


# Opcodes whose argument is the value, and those that make one of nothing. What only protocol 0 needs is not read.
_GIVEN = frozenset(
    "INT BININT BININT1 BININT2 LONG LONG1 LONG4 BINFLOAT BINSTRING SHORT_BINSTRING BINUNICODE SHORT_BINUNICODE "
    "BINUNICODE8 BINBYTES SHORT_BINBYTES BINBYTES8 BYTEARRAY8".split()
)
_MADE: Mapping[str, Callable[[], Any]] = {
    "NONE": lambda: None, "NEWTRUE": lambda: True, "NEWFALSE": lambda: False,
    "EMPTY_TUPLE": tuple, "EMPTY_LIST": list, "EMPTY_DICT": dict, "EMPTY_SET": set,
}  # fmt: skip
# How many values an opcode takes from the stack; None: all since the last mark.
_TAKES = {
    "TUPLE": None, "TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3, "APPEND": 1, "APPENDS": None, "SETITEM": 2, "SETITEMS": None,
    "ADDITEMS": None, "STACK_GLOBAL": 2, "REDUCE": 2, "NEWOBJ": 2, "BUILD": 1, "BINPERSID": 1,
}  # fmt: skip


class _RefusedError(ValueError):
    """Something in a pickle that is not read here."""


class _Machine:
    """A pickle under way. stack: values; marks: how high it was; memo: values by number."""

    def __init__(self, storage: Callable[[Any], Any]) -> None:
        self._storage = storage
        self._stack: list[Any] = []
        self._marks: list[int] = []
        self._memo: dict[Any, Any] = {}

    def value(self, data: bytes) -> Any:
        for count, (opcode, given, _) in enumerate(pickletools.genops(data)):
            if count >= MAX_OPCODES:
                raise _RefusedError(f"more than {MAX_OPCODES} opcodes")
            if opcode.name in _TAKES:
                takes = _TAKES[opcode.name]
                first = self._marks.pop() if takes is None else len(self._stack) - takes
                values = self._stack[first:]
                del self._stack[first:]
                self._take(opcode.name, values)
            else:
                self._push(opcode.name, given)
        return self._stack.pop()

    def _push(self, name: str, given: Any) -> None:
        stack, memo = self._stack, self._memo
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
        elif name == "GLOBAL":
            stack.append(_named(str(given).replace(" ", ".", 1)))
        elif name not in ("PROTO", "FRAME", "STOP"):
            raise _RefusedError(f"opcode {name}")

    def _take(self, name: str, values: list[Any]) -> None:
        stack = self._stack
        match name:
            case "APPEND" | "APPENDS":
                _extended(stack[-1], values)
            case "SETITEM" | "SETITEMS":
                _filled(stack[-1], values)
            case "ADDITEMS":
                stack[-1].update(map(_key, values))
            case "STACK_GLOBAL":
                stack.append(_named(".".join(values)))
            case "REDUCE" | "NEWOBJ":
                stack.append(_called(*values))
            case "BINPERSID":
                stack.append(self._storage(*values))
            case "BUILD":
                if isinstance(stack[-1], Inert):
                    [stack[-1].state] = values
                elif not isinstance(stack[-1], dict):  # attributes of an OrderedDict say nothing of tensors
                    raise _RefusedError("a state of what has none")
            case _:
                stack.append(tuple(values))


def _named(path: str) -> type | Inert:
    if path in CONTAINERS:
        return CONTAINERS[path]
    if ".." in path or "__" in path or not any(fnmatchcase(path, pattern) for pattern in NAMES):
        raise _RefusedError(f"it names {path!r:.200}, which is not read")
    return Inert(path)


def _called(function: Any, args: Any) -> Any:
    """What stands for a call. Containers copy what they are given; everything else keeps it."""
    if not isinstance(args, tuple) or not isinstance(function, type | Inert):
        raise _RefusedError("a call that is none")
    if isinstance(function, Inert):
        return Inert(function.path, args)
    given = args[0] if args else ()
    if len(args) > 1 or not isinstance(given, list | tuple | set):
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
    return value.path if isinstance(value, Inert) and value.args is None else None
