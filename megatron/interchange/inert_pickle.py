"""Pickles read without running anything in them (floor 0).

A pickle is a program that may call what it names. Here each name of a short list stands for an empty class of ours,
which keeps what it was called with and does nothing; any other name is refused. So no foreign constructor runs, torch
is not needed, and what comes out is dicts, lists, tuples, numbers, texts and `Inert` values.
"""

from __future__ import annotations

import io
import pickle
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from megatron.core.dist_checkpointing.files import CheckpointError

MAX_BYTES = 1 << 30  # of one pickle: the description of the largest models is a tenth of it
MAX_DEPTH, MAX_VALUES = 64, 1 << 17
_PAGE_BYTES = 4096  # of stack: for eight nested tuples


class _Ordered(dict[Any, Any]):
    """An OrderedDict: a module's state has attributes, which say nothing of tensors."""

    def __setstate__(self, state: Any) -> None:
        pass


# What checkpoints of torch and Megatron name: containers, shapes, dtypes, storages, and records of settings.
CONTAINERS: Mapping[str, type] = {
    "collections.OrderedDict": _Ordered,
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

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __setitem__(self, key: Any, value: Any) -> None:
        """Of a subclass of dict. Nothing that is read is one."""

    def append(self, value: Any) -> None:
        """Of a subclass of list."""

    def extend(self, values: Any) -> None:
        """Of a subclass of list."""

    def get(self, name: str) -> Any:
        """A field of its state; None where there is none of that name."""
        return self.state.get(name) if isinstance(self.state, dict) else None


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, storage: Callable[[Any], Any]) -> None:
        super().__init__(file, encoding="latin1")
        self._storage = storage
        self._classes: dict[str, type] = {}

    def find_class(self, module: str, name: str) -> Any:
        path = f"{module}.{name}"
        if path in CONTAINERS:
            return CONTAINERS[path]
        if ".." in path or "__" in path or not any(fnmatchcase(path, pattern) for pattern in NAMES):
            raise pickle.UnpicklingError(f"it names {path!r:.200}, which is not read")
        return self._classes.setdefault(path, type(name.rpartition(".")[2], (Inert,), {"path": path}))

    def persistent_load(self, pid: Any) -> Any:
        return self._storage(pid)


def _no_storage(pid: Any) -> Any:
    raise pickle.UnpicklingError(f"a storage outside of an archive: {pid!r:.80}")


def read_pickle(data: bytes, path: Path, storage: Callable[[Any], Any] = _no_storage) -> Any:
    """The value in a pickle. path: for messages. storage: what a persistent id stands for.

    Raises CheckpointError for what is none, names anything that is not listed, or is nested too deeply.
    """
    if len(data) > MAX_BYTES:
        raise CheckpointError(f"{path}: a pickle of {len(data)} bytes; at most {MAX_BYTES} are read")
    try:
        return _with_stack_for(data, _Unpickler(io.BytesIO(data), storage).load)
    except CheckpointError:
        raise
    except Exception as error:  # a broken pickle raises anything
        raise CheckpointError(f"{path}: not a pickle that is read here: {str(error)[:300]}") from None


def _with_stack_for(data: bytes, load: Callable[[], Any]) -> Any:
    """Hashing a dict's key goes down as deep as its tuples are nested, and no further than the stack: a pickle may have
    as many in one another as it has opcodes that make one, so the thread that loads it has a stack for them all."""
    num_tuples = sum(data.count(opcode) for opcode in (b"\x85", b"\x86", b"\x87", b"t"))
    before = threading.stack_size((num_tuples // 8 + 256) * _PAGE_BYTES)
    try:
        with ThreadPoolExecutor(1) as thread:
            return thread.submit(load).result()
    finally:
        threading.stack_size(before)


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
