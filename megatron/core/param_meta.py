"""Typed facts about a parameter, kept beside the model and never tagged onto a tensor.

A model built from our layers carries `param_meta: dict[name, ParamMeta]`, keyed by the parameter's global name
(`decoder.layers.3.mlp.linear_fc1.weight`, whatever stage or shard holds it). For any other `nn.Module`,
`infer_param_meta` derives the same record.
"""

from __future__ import annotations

import dataclasses
import math
from enum import Enum

from torch import Tensor, nn

from megatron.core.rectangles import Dims, Rectangle, cut_flat_slice, flat_range


class InitKind(Enum):
    """How a parameter starts."""

    NORMAL = "normal"
    ZEROS = "zeros"
    ONES = "ones"


class GradRoute(Enum):
    """Who adds a parameter's gradient to its buffer."""

    SINK = "sink"  # a WeightGradSink, which may defer it from B to W (weight_grad.py)
    AUTOGRAD = "autograd"  # autograd's own accumulation, seen by a post-accumulate hook (plain modules)


@dataclasses.dataclass(frozen=True)
class Region:
    """A rectangle of this rank's part of a parameter.

    local: its first element in the local tensor; offset: in the global one; an index a dim.
    copies: so many consecutive tensor parallel ranks (an aligned block of them) hold this rectangle.
    partial: each copy has computed a part of the gradient only; the sum over the copies is whole.
    """

    local: Dims
    offset: Dims
    shape: Dims
    copies: int = 1
    partial: bool = False

    def __post_init__(self) -> None:
        assert len(self.local) == len(self.offset) == len(self.shape), self
        assert self.copies > 1 or not self.partial, f"{self}: a part of a gradient without others"

    def view(self, tensor: Tensor) -> Tensor:
        """The rectangle in a tensor of the local shape."""
        return _narrowed(tensor, self.local, self.shape)

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


def _narrowed(tensor: Tensor, offset: Dims, shape: Dims) -> Tensor:
    for dim, (start, size) in enumerate(zip(offset, shape, strict=True)):
        tensor = tensor.narrow(dim, start, size)
    return tensor


def region_parts(
    region: Region, shape: Dims, part: Tensor, start: int, end: int
) -> list[tuple[Dims, Tensor]]:
    """What `part`, elements [start, end) of a flattened local tensor of `shape`, holds of a region, in flat order:
    rectangles, each by its first element in the global tensor and a view in its shape. They are few: a flat slice is at
    most 2 x dims - 1 rectangles."""
    _check_part(part, start, end)
    held, first, found = Rectangle(region.local, region.shape), 0, []
    for box in cut_flat_slice(shape, start, end):
        if (common := box.common(held)) is not None:
            inside = tuple(a - origin for a, origin in zip(common.offset, box.offset, strict=True))
            view = _narrowed(part.narrow(0, first, box.numel).view(box.shape), inside, common.shape)
            starts = zip(region.offset, region.local, common.offset, strict=True)
            found.append((tuple(there + a - here for there, here, a in starts), view))
        first += box.numel
    return found


def region_slices(region: Region, shape: Dims, part: Tensor, start: int, end: int) -> list[Tensor]:
    """The same elements in as few tensors as possible: a single 1-D one where a region's elements are neighbours."""
    _check_part(part, start, end)
    if region.numel == 0:
        return []
    span = flat_range(shape, Rectangle(region.local, region.shape))
    if span is None:
        return [view for _, view in region_parts(region, shape, part, start, end)]
    low, high = max(span[0], start), min(span[1], end)
    return [part[low - start : high - start]] if low < high else []


def _check_part(part: Tensor, start: int, end: int) -> None:
    assert tuple(part.shape) == (end - start,), (
        f"elements [{start}, {end}) in a tensor of {tuple(part.shape)}"
    )


@dataclasses.dataclass(frozen=True)
class ParamMeta:
    """One parameter.

    global_shape: shape of the whole tensor over all ranks.
    regions: what of it this rank holds; () for all of it, held by no other tensor parallel rank.
    shared: another pipeline stage holds this parameter too (tied embeddings); each has the gradient of its own use,
        which are added over the group `embedding`.
    uses: the sink keys under which gradient contributions arrive. One key for most; tied embeddings have
        (name, name + LOOKUP): each use has its own accumulator, added once after the last microbatch.
    decay: weight decay applies. embedding_or_output: of words, or the output layer: `--decoupled-lr` applies.
    padding: rows of this rank's tensor behind the regions, which belong to no whole: zeros that stay zeros.
    expert: of experts, [experts, ...], which lies in flat buffers of its own: other ranks hold copies of it than of the
        rest.
    """

    name: str
    global_shape: tuple[int, ...]
    init: InitKind = InitKind.NORMAL
    init_std: float = 0.02
    route: GradRoute = GradRoute.AUTOGRAD
    uses: tuple[str, ...] = ()
    decay: bool = True
    embedding_or_output: bool = False
    regions: tuple[Region, ...] = ()
    shared: bool = False
    expert: bool = False
    padding: int = 0

    @property
    def parts(self) -> tuple[Region, ...]:
        """The regions; the whole parameter where none are given."""
        start = (0,) * len(self.global_shape)
        return self.regions or (Region(start, start, self.global_shape),)

    @property
    def summed_parts(self) -> tuple[Region, ...]:
        """What norms have a sum of each of: the regions, of experts each one's, whoever holds them."""
        if not self.expert:
            return self.parts
        return tuple(
            dataclasses.replace(
                part,
                local=(part.local[0] + number, *part.local[1:]),
                offset=(part.offset[0] + number, *part.offset[1:]),
                shape=(1, *part.shape[1:]),
            )
            for part in self.parts
            for number in range(part.shape[0])
        )

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Shape of this rank's tensor."""
        return tuple(
            max(part.local[dim] + part.shape[dim] for part in self.parts) + (self.padding if dim == 0 else 0)
            for dim in range(len(self.global_shape))
        )

    @property
    def group(self) -> str:
        """Parameters of one group are treated alike by the optimizer, and lie together (see optimizer/param_groups)."""
        return ("decay" if self.decay else "no_decay") + ("+embedding_or_output" * self.embedding_or_output)

    @property
    def grad_keys(self) -> tuple[str, ...]:
        return self.uses or (self.name,)


LOOKUP = "@lookup"  # suffix of the key under which the embedding lookup's gradient of a tied weight arrives


def infer_param_meta(module: nn.Module) -> dict[str, ParamMeta]:
    """ParamMeta for a module that is not ours: 1-D parameters and biases do not decay."""
    return {
        name: ParamMeta(
            name=name, global_shape=tuple(p.shape), decay=p.dim() > 1 and not name.endswith(".bias")
        )
        for name, p in module.named_parameters()
    }
