"""What torch's operations mean for a `ShardedTensor`, by kind:

elementwise   on this rank's part; whole tensors beside it are cut likewise, single numbers stay
lists         the same for foreach and fused kernels
views         of another shape in the same flat order
random        drawn for the whole tensor and cut: ranks of one seed have the numbers that one process has
over ranks    sums and norms of all elements (`sharded_figures.py`); extremes, deviations, truth values of the whole
              tensor, which is gathered for them: all ranks have to ask
refused       everything else: it would need more than the rank's part
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from megatron.core.distributed.sharded_module.flat_span import TensorPart
from megatron.core.distributed.sharded_module.sharded_figures import FIGURES, norms
from megatron.core.transport import collectives

Args = tuple[Any, ...]
Options = dict[str, Any]
_LISTS = (list, tuple)
Operation = Callable[[Any, Args, Options], Any]


def run(func: Any, args: Args, kwargs: Options) -> Any:
    """One operation that has a sharded tensor among its arguments."""
    return _operation(func)(func, args, kwargs)


@functools.cache
def _operation(func: Any) -> Operation:
    name = _name(func)
    if name in _BY_NAME and func._overloadname != "other":  # the larger of two
        return _BY_NAME[name]
    if name.startswith(("_foreach_", "_fused_")):
        return _lists
    if torch.Tag.nondeterministic_seeded in func.tags:
        return _random
    return _elementwise if torch.Tag.pointwise in func.tags else _refused


def _name(func: Any) -> str:
    return str(func._schema.name).removeprefix("aten::")


# Elementwise ---------------------------------------------------------------------------------------------


def _elementwise(func: Any, args: Args, kwargs: Options) -> Any:
    writes = _arguments(func)
    named = dict(zip(writes, args, strict=False)) | kwargs
    like = _first(named.values())
    result = func(**{name: _own(value, like, func, writes[name]) for name, value in named.items()})
    written = [value for name, value in named.items() if writes[name]]
    return written[0] if written else _again(result, like, func)


def _lists(func: Any, args: Args, kwargs: Options) -> Any:
    """Of foreach and fused kernels, place by place."""
    writes = _arguments(func)
    named = dict(zip(writes, args, strict=False)) | kwargs
    lists = {name: value for name, value in named.items() if isinstance(value, _LISTS)}
    likes = [_first(place) for place in itertools.zip_longest(*lists.values())]
    for name, values in lists.items():
        pairs = zip(values, likes, strict=False)
        named[name] = [one if like is None else _own(one, like, func, writes[name]) for one, like in pairs]
    result = func(**named)
    pairs = zip(result or (), likes, strict=False)
    return result and [one if like is None else _again(one, like, func) for one, like in pairs]


def _own(value: Any, like: Any, func: Any, writes: bool) -> Any:
    """This rank's part of an argument of an operation on `like`."""
    if isinstance(value, TensorPart):
        if value.place is like.place and value.dims is like.dims:
            return value.local
        if value.shape != like.shape:
            raise like.refusal(f"{_name(func)} with a sharded tensor of shape {tuple(value.shape)}")
        return like.part_of(value)
    if isinstance(value, _LISTS):
        return [_own(one, like, func, writes) for one in value]
    if not isinstance(value, Tensor) or value.dim() == 0:
        return value
    if writes:
        raise like.refusal(f"writing a whole tensor ({_name(func)}) with values")
    if value.dim() > like.dim():
        raise like.refusal(f"{_name(func)} with a tensor of shape {tuple(value.shape)}")
    return like.place.part_of(value.expand(like.shape))


def _again(result: Any, like: Any, func: Any) -> Any:
    """A sharded tensor of what was computed of a part."""
    if not isinstance(result, Tensor) or result.shape != like.local.shape:
        raise like.refusal(_name(func))
    return like.again(result)


def _new(func: Any, args: Args, kwargs: Options) -> Any:
    """`new_zeros` and its kin: sharded where the shape is the tensor's."""
    like, size, *more = args
    if tuple(size) != tuple(like.shape):
        return func(like.local, size, *more, **kwargs)
    return like.again(func(like.local, like.local.shape, *more, **kwargs))


def _put_where(func: Any, args: Args, kwargs: Options) -> Any:
    """`index_put_` of one number where a mask of the whole shape says so."""
    _, masks, value, *_ = args
    if len(masks) != 1 or not isinstance(masks[0], TensorPart) or masks[0].dtype != torch.bool or value.dim():
        return _refused(func, args, kwargs)
    return _elementwise(func, args, kwargs)


def _random(func: Any, args: Args, kwargs: Options) -> Any:
    like, *more = args
    drawn = func._schema.is_mutable or _name(func).endswith("_like")  # not from values of the tensor
    if not isinstance(like, TensorPart) or not drawn or any(isinstance(one, Tensor) for one in more):
        return _refused(func, args, kwargs)
    whole = func(torch.empty(like.shape, dtype=like.dtype, device=like.device), *more, **kwargs)
    part = like.place.part_of(whole)
    if not func._schema.is_mutable:
        return like.again(part.clone())
    like.local.copy_(part)
    return like


# Views ---------------------------------------------------------------------------------------------------


def _alias(func: Any, args: Args, kwargs: Options) -> Any:
    return args[0].again(args[0].local)


def _view(func: Any, args: Args, kwargs: Options) -> Any:
    like, *more = args
    asked = _of_whole(func, like, more, kwargs)
    if (asked.numel(), asked.dtype) != (like.numel(), like.dtype):
        raise like.refusal(_name(func))
    return like.again(like.local, asked.shape)


def _of_whole(func: Any, like: Any, more: Iterable[Any], kwargs: Options) -> Any:
    """What the operation gives for the whole tensor, without values."""
    return func(torch.empty(like.shape, dtype=like.dtype, device="meta"), *more, **kwargs)


# Over ranks ----------------------------------------------------------------------------------------------


def _list_of_norms(func: Any, args: Args, kwargs: Options) -> Any:
    tensors, order = args[0], float(args[1] if len(args) > 1 else kwargs.get("ord", 2))
    pairs = zip(norms(tensors, order), tensors, strict=True)
    return [norm.to(kwargs.get("dtype") or one.dtype) for norm, one in pairs]


def _reduced(func: Any, args: Args, kwargs: Options) -> Any:
    like, *more = args
    expected = _of_whole(func, like, more, kwargs)
    figure = expected if isinstance(expected, Tensor) else expected[0]  # with its place, of `max(dim)`
    if figure.numel() != 1:
        raise like.refusal(f"{_name(func)} over some dims")
    if _name(func) not in FIGURES:
        return _gathered(func, args, kwargs)
    return FIGURES[_name(func)](like, *more, **kwargs).to(expected.dtype).view(expected.shape)


def _gathered(func: Any, args: Args, kwargs: Options) -> Any:
    """Of the whole tensors."""
    return func(*(one.full_tensor() if isinstance(one, TensorPart) else one for one in args), **kwargs)


def _unscale(func: Any, args: Args, kwargs: Options) -> None:
    """GradScaler's look at gradients: what one rank finds is found on all that hold parts."""
    grads, found_inf, factor = args
    func([one.local if isinstance(one, TensorPart) else one for one in grads], found_inf, factor)
    for group in dict.fromkeys(
        group for one in grads if isinstance(one, TensorPart) for group in one.place.groups
    ):
        collectives.all_reduce(found_inf, group, "max")


def _of_part(func: Any, args: Args, kwargs: Options) -> Any:
    """Said of memory."""
    return func(args[0].local, *args[1:], **kwargs)


def _refused(func: Any, args: Args, kwargs: Options) -> Any:
    raise _first((*args, *kwargs.values())).refusal(_name(func))


def _first(values: Iterable[Any]) -> Any:
    """The first sharded tensor, in lists too."""
    for one in values:
        if isinstance(one, TensorPart):
            return one
        if isinstance(one, _LISTS) and (inside := _first(one)) is not None:
            return inside
    return None


@functools.cache
def _arguments(func: Any) -> dict[str, bool]:
    """Names of its arguments, and whether it writes them."""
    return {
        one.name: one.alias_info is not None and one.alias_info.is_write for one in func._schema.arguments
    }


_KINDS: dict[Operation, str] = {
    _elementwise: "copy_ fill_ fill zero_ abs_ floor_divide floor_divide_ isclose masked_fill masked_fill_ "
    "_to_copy _pin_memory empty_like zeros_like ones_like full_like",
    _new: "new_empty new_zeros new_ones new_full",
    _alias: "detach alias lift_fresh",
    _view: "view _unsafe_view _reshape_alias unsqueeze squeeze expand",
    _reduced: "sum mean linalg_vector_norm max amax min amin any all var std count_nonzero",
    _gathered: "dot vdot equal allclose _local_scalar_dense is_nonzero",
    _of_part: "is_pinned record_stream",
    _put_where: "index_put_",
    _list_of_norms: "_foreach_norm",
    _unscale: "_amp_foreach_non_finite_check_and_unscale_",
}
_BY_NAME = {name: operation for operation, names in _KINDS.items() for name in names.split()}
