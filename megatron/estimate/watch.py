"""Which module makes which memory and computes what, looked at from outside: no layer has a line for it.

[Note: whose it is] Every operation below autograd passes by. It belongs to the module whose parameter it reads, or
whose gradient it adds to; else to the innermost module on the stack of Python; in a backward to that of the node of
autograd that it is in, which was made in some module's forward. A storage belongs to the module that has made it: so it
is seen whether autograd saves it, a sink files it, or a layer keeps it for itself.
"""

from __future__ import annotations

import contextlib
import sys
import weakref
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from megatron.core.device import stands_for
from megatron.core.distributed.custom_fsdp.gradient_sources import autograd_hook
from megatron.core.module import MegatronModule
from megatron.core.param_meta import GradRoute, infer_param_meta
from megatron.core.weight_grad import WeightGradAccumulator
from megatron.estimate.description import OUTSIDE, ComputationFigures

# Where a product's factors are among its arguments; those of batches are of activations with each other.
_PRODUCTS = {"mm": 0, "addmm": 1, "addmm_": 1}
_BATCHED = {"bmm": 0, "baddbmm": 1, "baddbmm_": 1}
_KERNELS = "_scaled_dot_product"
Handed = tuple[torch.Size, torch.dtype]


class StorageWatch(TorchDispatchMode):
    """Inside `with`, in this thread: what is made, and whose it is.

    device: whose tensors count. paths: by identity, of modules, and of other objects or classes whose methods make
    tensors. owned: tensors that are there before, with the paths of theirs.
    """

    def __init__(
        self, device: torch.device, paths: Mapping[int, str], owned: Iterable[tuple[str, Tensor]]
    ) -> None:
        super().__init__()
        self.device, self._paths = device, dict(paths)
        self._owners = {place_of(tensor): path for path, tensor in owned}
        # By place: whose, bytes, in which computation, and what tells of their end.
        self._live: dict[int, tuple[str, int, int, object]] = {}
        self._sizes = Counter[str]()  # of what lives, by path
        # Places of what lives no more, which other threads add to: see `_count_ends`.
        self._ended = deque[int]()
        self._computation = 0
        self._of_nodes: dict[int, str] = {}
        self._added_to: str | None = None
        self._begin()

    def _begin(self) -> None:
        self._count_ends()
        self._computation += 1
        self._sums: dict[str, Counter[str]] = {}
        self._now, self._made, self._most_made, self.most = 0, Counter[str](), Counter[str](), 0

    @contextlib.contextmanager
    def computing(self) -> Iterator[None]:
        """What is done inside is in `work`; `most` is the most that there was at once beyond what there was before."""
        self._begin()
        yield

    def work(self) -> dict[str, ComputationFigures]:
        """Of the last computation, by path."""
        works = {
            path: ComputationFigures(**sums, made_bytes=self._most_made[path])
            for path, sums in self._sums.items()
        }
        return {path: work for path, work in works.items() if work != ComputationFigures()}

    def held(self) -> Counter[str]:
        """Bytes that are there now, by the path of who made them."""
        self._count_ends()
        return +self._sizes

    def maker(self, tensor: Tensor | None) -> str:
        """The path of who made a tensor."""
        return "" if tensor is None else self._live[place_of(tensor)][0]

    def made(self, tensor: Tensor) -> tuple[int, int] | None:
        """Of a tensor's storage the place, and bytes; None where it was there before, or comes from outside."""
        place = place_of(tensor)
        path, size, *_ = self._live.get(place, (OUTSIDE, 0))
        return None if path == OUTSIDE else (place, size)

    def hand(self, like: Handed) -> Tensor:
        """A tensor that comes from outside: from `OUTSIDE`, by path."""
        shape, dtype = like
        self._added_to = OUTSIDE
        tensor = torch.empty(shape, dtype=dtype, device=self.device)
        self._added_to = None
        return tensor

    # --- operations

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """torch asks: it would import the compiler, which takes two seconds."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        inputs = tensors_in(args, kwargs)
        path = self._owner(inputs)
        out = func(*args, **(kwargs or {}))
        outputs = tensors_in(out)
        self._count(func, inputs, outputs, args, path)
        known = {place_of(tensor) for tensor in inputs}
        for tensor in outputs:
            if place_of(tensor) not in known:
                self._see(tensor, path)
        return out

    def _owner(self, inputs: Sequence[Tensor]) -> str:
        """See [Note: whose it is]."""
        node = torch._C._current_autograd_node()
        read = (self._owners.get(place_of(tensor)) for tensor in inputs)
        path = self._added_to or next((one for one in read if one is not None), None)
        frame: FrameType | None = sys._getframe(2)
        while path is None and frame is not None:
            own, kind = _owner_of(frame)
            path, frame = self._paths.get(own, self._paths.get(kind)), frame.f_back
        if path is None:
            return "" if node is None else self._of_nodes.get(node._sequence_nr(), "")
        # The node of autograd that this operation is in the forward of was the last to be made.
        self._of_nodes.setdefault(_last_node(), path)
        return path

    def _has_owner(self) -> bool:
        """Whether the last node of autograd is somebody's already."""
        return _last_node() in self._of_nodes

    def _count(
        self, func: Any, inputs: Sequence[Tensor], outputs: Sequence[Tensor], args: Any, path: str
    ) -> None:
        name, times = func._overloadpacket.__name__, stands_for()
        sums = self._sums.setdefault(path, Counter())
        if (at := _PRODUCTS.get(name)) is not None:
            sums["products"] += times * 2 * args[at].numel() * args[at + 1].shape[-1]
        elif (at := _BATCHED.get(name)) is not None:
            sums["attention"] += 2 * args[at].numel() * args[at + 1].shape[-1]
        elif name.startswith(_KERNELS):
            sums["attention"] += _attention_flops(func, args, backward=name.endswith("_backward"))
        elif func._schema.is_mutable or not _only_views(inputs, outputs):
            sums["moved_bytes"] += times * sum(tensor.nbytes for tensor in (*inputs, *outputs))

    def _see(self, tensor: Tensor, path: str) -> None:
        """A tensor of a storage that is new: it is there until nobody has it."""
        self._count_ends()
        place = place_of(tensor)
        if tensor.device.type != self.device.type or place in self._live or place in self._owners:
            return
        storage = tensor.untyped_storage()
        num_bytes, end = storage.nbytes(), weakref.ref(storage, lambda _: self._ended.append(place))
        self._live[place] = path, num_bytes, self._computation, end
        self._grew(path, num_bytes)

    def _grew(self, path: str, num_bytes: int) -> None:
        self._sizes[path] += num_bytes
        self._now += num_bytes
        self._made[path] += num_bytes
        self.most = max(self.most, self._now)
        self._most_made[path] = max(self._most_made[path], self._made[path])

    def _count_ends(self) -> None:
        """Of the messages that they carry, threads of gloo may be the last to have the memory: sums are this one's."""
        while self._ended:
            self._gone(self._ended.popleft())

    def _gone(self, place: int) -> None:
        path, num_bytes, computation, _ = self._live.pop(place)
        self._sizes[path] -= num_bytes
        self._now -= num_bytes
        if computation == self._computation:
            self._made[path] -= num_bytes


class Watch(StorageWatch):
    """A `StorageWatch` of a model whose gradients go to buffers of this dtype, made here.

    parameters: elements by path. It is the listener of the model's sink, and of what autograd accumulates.
    """

    def __init__(self, model: nn.Module, main_grads: torch.dtype) -> None:
        named, is_ours = list(model.named_parameters()), isinstance(model, MegatronModule)
        device = named[0][1].device if named else torch.get_default_device()
        metas = model.param_meta if isinstance(model, MegatronModule) else infer_param_meta(model)
        # Of a module that is not ours nothing goes there.
        sink = model.context.grads if isinstance(model, MegatronModule) else WeightGradAccumulator()
        shapes = {key: meta.local_shape for meta in metas.values() for key in meta.grad_keys}
        sink.bind_new(shapes, main_grads, device)
        sink.bind(sink.main_grads, self)
        self.parameters = Counter[str]()
        for name, parameter in named:
            self.parameters[_path_of(name)] += parameter.numel()
            if name in metas and metas[name].route is GradRoute.AUTOGRAD and parameter.requires_grad:
                taken = autograd_hook(name, sink.main_grads[name], self, 1.0, [sink] * is_ours)
                parameter.register_post_accumulate_grad_hook(taken)
        held = [*named, *model.named_buffers(), *sink.main_grads.items()]
        paths = {id(module): path for path, module in model.named_modules()}
        super().__init__(device, paths, ((_path_of(name), tensor) for name, tensor in held))

    # --- the sink's listener

    def grad_begins(self, key: str) -> bool:
        """As in a microbatch after the first."""
        self._added_to = _path_of(key)
        return False

    def grad_ready(self, key: str, microbatch: int) -> None:
        self._added_to = None


def _last_node() -> int:
    return int(torch._C._autograd._get_sequence_nr()) - 1


def _owner_of(frame: FrameType) -> tuple[int, int]:
    """The identities of a method's object and of its class."""
    code = frame.f_code
    if not code.co_argcount or code.co_varnames[0] != "self":
        return 0, 0
    variables = frame.f_locals
    owner = id(variables["self"]), id(type(variables["self"]))
    if isinstance(variables, dict):  # until Python 3.12 a copy, which would keep what the frame lets go
        variables.clear()
    return owner


def place_of(tensor: Tensor) -> int:
    """Of its storage, while there is one."""
    return tensor.untyped_storage()._cdata


def _path_of(key: str) -> str:
    """The module of a parameter, by its name or one of its gradients' keys."""
    return key.rpartition(".")[0]


def tensors_in(*values: Any) -> list[Tensor]:
    """Of arguments and results of operations: nothing but lists and tables of plain values lie around them."""
    found: list[Tensor] = []
    for one in values:
        if isinstance(one, Tensor):
            found.append(one)
        elif isinstance(one, list | tuple):
            found += tensors_in(*one)
        elif isinstance(one, dict):
            found += tensors_in(*one.values())
    return found


def _only_views(inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> bool:
    return {place_of(one) for one in outputs} <= {place_of(one) for one in inputs}


def _attention_flops(func: Any, args: Any, *, backward: bool) -> int:
    """Of torch's fused kernels: QK^T and PV; backwards QK^T again and four others. A causal one leaves out what is
    masked, half of the scores."""
    query, key, value = args[1:4] if backward else args[:3]
    names = [one.name for one in func._schema.arguments]
    causal = names.index("is_causal")
    halved = args[causal] if causal < len(args) else False
    scores, widths = query.shape[:-1].numel() * key.shape[-2], (query.shape[-1], value.shape[-1])
    times = (3, 2) if backward else (1, 1)
    flops = 2 * scores * sum(width * count for width, count in zip(widths, times, strict=True))
    return flops // 2 if halved else flops
