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

from collections.abc import Callable, Iterable, Sequence
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
    operation = _KNOWN.get(func)
    if operation is None:
        operation = _KNOWN[func] = _operation(func)
    return operation(func, args, kwargs)


def _operation(func: Any) -> Operation:
    name = _name(func)
    if name in _BY_NAME:
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
    like = args[0] if isinstance(args[0], TensorPart) else _first((*args, *kwargs.values()))
    written = _written(func)
    if written:
        target = (
            args[written[0]] if written[0] < len(args) else kwargs[func._schema.arguments[written[0]].name]
        )
        if not isinstance(target, TensorPart):
            raise like.refusal(f"writing a whole tensor ({_name(func)}) with values")
    own = [_own(one, like, func) for one in args]
    result = func(*own, **{name: _own(one, like, func) for name, one in kwargs.items()})
    return target if written else _again(result, like, func)


def _lists(func: Any, args: Args, kwargs: Options) -> Any:
    likes: list[Any] = []  # the first sharded tensor at each place of the lists
    for one in args:
        if isinstance(one, _LISTS):
            likes += [None] * (len(one) - len(likes))
            for place, tensor in enumerate(one):
                if likes[place] is None and isinstance(tensor, TensorPart):
                    likes[place] = tensor
    written = _written(func)
    own: list[Any] = []
    for index, one in enumerate(args):
        if isinstance(one, _LISTS):
            if index in written:
                _check_written(one, likes, func)
            one = [
                (
                    value.local
                    if isinstance(value, TensorPart) and value.place is like.place
                    else _own(value, like, func)
                )
                if like is not None
                else value
                for value, like in zip(one, likes, strict=False)
            ]
        own.append(one)
    results = func(*own, **kwargs)
    if results is None:
        return None
    pairs = zip(results, likes, strict=True)
    return [one if like is None else _again(one, like, func) for one, like in pairs]


def _check_written(values: Sequence[Any], likes: Sequence[Any], func: Any) -> None:
    for value, like in zip(values, likes, strict=False):
        if (
            like is not None
            and not isinstance(value, TensorPart)
            and isinstance(value, Tensor)
            and value.dim()
        ):
            raise like.refusal(f"writing a whole tensor ({_name(func)}) with values")


def _own(value: Any, like: Any, func: Any) -> Any:
    """This rank's part of an argument of an operation on `like`."""
    if isinstance(value, TensorPart):
        if value.place is like.place and value.dims is like.dims:
            return value.local
        if value.shape != like.shape:
            raise like.refusal(f"{_name(func)} with a sharded tensor of shape {tuple(value.shape)}")
        return like.part_of(value)
    if isinstance(value, _LISTS):
        return [_own(one, like, func) for one in value]
    if not isinstance(value, Tensor) or value.dim() == 0:
        return value
    if value.dim() > like.dim():
        raise like.refusal(f"{_name(func)} with a tensor of shape {tuple(value.shape)}")
    return like.place.part_of(value.expand(like.shape))


def _again(result: Any, like: Any, func: Any) -> Any:
    """A sharded tensor of what was computed of a part."""
    if isinstance(result, _LISTS):
        return type(result)(_again(one, like, func) for one in result)
    if isinstance(result, Tensor) and result.shape != like.local.shape:
        raise like.refusal(_name(func))
    return like.again(result) if isinstance(result, Tensor) else result


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
    if asked.numel() != like.numel() or any(isinstance(one, torch.dtype) for one in more):
        raise like.refusal(_name(func))
    return like.again(like.local, asked.shape)


def _of_whole(func: Any, like: Any, more: Iterable[Any], kwargs: Options) -> Tensor:
    """What the operation gives for the whole tensor, without values."""
    result: Tensor = func(torch.empty(like.shape, dtype=like.dtype, device="meta"), *more, **kwargs)
    return result


# Over ranks ----------------------------------------------------------------------------------------------


def _list_of_norms(func: Any, args: Args, kwargs: Options) -> Any:
    tensors, order = args[0], float(args[1] if len(args) > 1 else kwargs.get("ord", 2))
    pairs = zip(norms(tensors, order), tensors, strict=True)
    return [norm.to(kwargs.get("dtype") or one.dtype) for norm, one in pairs]


def _reduced(func: Any, args: Args, kwargs: Options) -> Any:
    like, *more = args
    if func in (torch.ops.aten.max.other, torch.ops.aten.min.other):
        return _elementwise(func, args, kwargs)
    names = [argument.name for argument in func._schema.arguments]
    options = dict(zip(names[1:], more, strict=False)) | kwargs
    dims = options.get("dim")
    dims = [dims] if isinstance(dims, int) else dims
    if dims and {dim % like.dim() for dim in dims} != set(range(like.dim())):
        raise like.refusal(f"{_name(func)} over dims {dims}")
    if _name(func) not in FIGURES:
        return _gathered(func, args, kwargs)
    expected = _of_whole(func, like, more, kwargs)  # its shape and dtype
    return FIGURES[_name(func)](like, options).to(expected.dtype).view(expected.shape)


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


def _written(func: Any) -> tuple[int, ...]:
    """Places of the arguments that it writes."""
    found = _WRITTEN.get(func)
    if found is None:
        arguments = enumerate(func._schema.arguments)
        found = tuple(i for i, one in arguments if one.alias_info is not None and one.alias_info.is_write)
        _WRITTEN[func] = found
    return found


_KNOWN: dict[Any, Operation] = {}
_WRITTEN: dict[Any, tuple[int, ...]] = {}
_BY_NAME: dict[str, Operation] = {
    **dict.fromkeys(
        ("copy_", "fill_", "zero_", "_to_copy", "masked_fill", "masked_fill_", "isclose", "_pin_memory"),
        _elementwise,
    ),
    **dict.fromkeys(
        (
            "abs_",
            "fill",
            "floor_divide",
            "floor_divide_",
            "empty_like",
            "zeros_like",
            "ones_like",
            "full_like",
        ),
        _elementwise,
    ),
    **dict.fromkeys(("new_empty", "new_zeros", "new_ones", "new_full"), _new),
    **dict.fromkeys(("detach", "alias", "lift_fresh"), _alias),
    **dict.fromkeys(("view", "_unsafe_view", "_reshape_alias", "unsqueeze", "squeeze", "expand"), _view),
    **dict.fromkeys(
        (*FIGURES, "max", "amax", "min", "amin", "any", "all", "var", "std", "count_nonzero"), _reduced
    ),
    **dict.fromkeys(("dot", "vdot", "equal", "allclose", "_local_scalar_dense", "is_nonzero"), _gathered),
    **dict.fromkeys(("is_pinned", "record_stream"), _of_part),
    "index_put_": _put_where,
    "_foreach_norm": _list_of_norms,
    "_amp_foreach_non_finite_check_and_unscale_": _unscale,
}
