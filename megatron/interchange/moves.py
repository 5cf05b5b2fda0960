"""Which elements of our tensors are which elements of theirs: pairs of rectangles, and their checks (floor 0).

A checkpoint of another format is mapped by a list of `Move`s. Import, export, checks and docs follow from that list: it
fills every tensor of either side exactly once, so both directions are the same data read from left or from right.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from megatron.core.rectangles import Dims, Rectangle, fill_error
from megatron.core.transformer.model_config import TransformerConfig


class Part(NamedTuple):
    """A rectangle of a tensor. shape: of the whole tensor."""

    name: str
    shape: Dims
    box: Rectangle


class Move(NamedTuple):
    """The same elements on both sides. transposed: their matrix is [in, out] where ours is [out, in]; `theirs` is in
    their order of dims. Where ours has a dim of experts in front, theirs is the tensor of one expert."""

    ours: Part
    theirs: Part
    transposed: bool = False


class Rows(NamedTuple):
    """Rows [first, first + rows) of their tensor `name`, which has `total`."""

    name: str
    total: int
    first: int
    rows: int

    def at(self, offset: int, rows: int) -> Rows:
        """So many of these rows, from the one at `offset`."""
        return Rows(self.name, self.total, self.first + offset, rows)


def all_rows(name: str, total: int) -> Rows:
    return Rows(name, total, 0, total)


def rows_of_one(name: str, counts: Sequence[int]) -> list[Rows]:
    """So many rows each of one tensor of theirs, one behind the other."""
    firsts = itertools.accumulate(counts, initial=0)
    return [Rows(name, sum(counts), first, count) for first, count in zip(firsts, counts, strict=False)]


def whole(ours: str, theirs: str, *shape: int) -> Iterator[Move]:
    """A tensor that is the same on both sides."""
    yield from stacked(ours, [all_rows(theirs, shape[0])], shape[1:])


def stacked(
    ours: str, parts: Sequence[Rows], columns: Dims = (), *, transposed: bool = False, padding: int = 0
) -> Iterator[Move]:
    """Our tensor is these rows of theirs, one below the other. columns: the other dims, the same on both sides; () for
    biases and norms. padding: rows of ours behind them that have none of theirs."""
    total, first = sum(part.rows for part in parts) + padding, 0
    for part in parts:
        mine = Part(ours, (total, *columns), _rows(first, part.rows, columns))
        yours = Part(part.name, (part.total, *columns), _rows(part.first, part.rows, columns))
        yield Move(mine, _turned(yours) if transposed and columns else yours, transposed and bool(columns))
        first += part.rows


def of_expert(expert: int, num_experts: int, moves: Iterable[Move]) -> Iterator[Move]:
    """The same of one expert's tensors, where ours hold all experts."""
    for move in moves:
        (name, shape, box), first = move.ours, (expert, *move.ours.box.offset)
        yield move._replace(ours=Part(name, (num_experts, *shape), Rectangle(first, (1, *box.shape))))


def grouped_qkv(
    config: TransformerConfig,
    ours: str,
    parts: Sequence[Rows],
    columns: Dims = (),
    *,
    transposed: bool = False,
) -> Iterator[Move]:
    """`linear_qkv` has for each query group its queries, its key, its value; theirs have all queries, all keys, all
    values, which are `parts`. Heads keep their order."""
    query, key, value = parts
    head, groups = config.kv_channels, config.num_query_groups
    queries = config.num_attention_heads // groups * head
    grouped = [
        part
        for group in range(groups)
        for part in (
            query.at(group * queries, queries),
            key.at(group * head, head),
            value.at(group * head, head),
        )
    ]
    yield from stacked(ours, grouped, columns, transposed=transposed)


def _rows(first: int, count: int, columns: Dims) -> Rectangle:
    return Rectangle((first, *(0 for _ in columns)), (count, *columns))


def _turned(part: Part) -> Part:
    box = Rectangle(part.box.offset[::-1], part.box.shape[::-1])
    return Part(part.name, part.shape[::-1], box)


@dataclasses.dataclass(frozen=True)
class Catalogue:
    """All moves between two checkpoints of one model. padding: rows that a tensor of ours has and theirs has not: of a
    vocabulary that does not divide over tensor parallel ranks."""

    moves: tuple[Move, ...]
    padding: tuple[Part, ...] = ()

    @property
    def ours(self) -> dict[str, Dims]:
        """Our tensors and their shapes, in the order of the table."""
        return {move.ours.name: move.ours.shape for move in self.moves}

    @property
    def theirs(self) -> dict[str, Dims]:
        """Their tensors and their shapes, in the order of the table."""
        return {move.theirs.name: move.theirs.shape for move in self.moves}

    def problems(
        self, ours: Mapping[str, Dims] | None = None, theirs: Mapping[str, Dims] | None = None
    ) -> list[str]:
        """Why the table does not fit: elements without a partner, or with two; tensors that only the table or only a
        checkpoint has; other shapes. [] for one that does.

        ours, theirs: the shapes of the tensors of two checkpoints; those of the table if not given.
        """
        problems = _differing("ours", self.ours, self.ours if ours is None else ours)
        problems += _differing("theirs", self.theirs, self.theirs if theirs is None else theirs)
        for move in self.moves:
            shape = move.theirs.box.shape[:: -1 if move.transposed else 1]
            if move.ours.box.shape not in (shape, (1, *shape)):
                both = f"{move.ours.name} {move.ours.box} and {move.theirs.name} {move.theirs.box}"
                problems.append(f"{both} are not as large as each other")
        problems += _unfilled("ours", [*(move.ours for move in self.moves), *self.padding])
        return problems + _unfilled("theirs", [move.theirs for move in self.moves])


def _differing(side: str, expected: Mapping[str, Dims], there: Mapping[str, Dims]) -> list[str]:
    missing = [f"{side} {name}: missing" for name in sorted(expected.keys() - there.keys())]
    placeless = [
        f"{side} {name}: has no place in the other format" for name in sorted(there.keys() - expected.keys())
    ]
    return (
        missing
        + placeless
        + [
            f"{side} {name}: shape {there[name]}, expected {expected[name]}"
            for name in sorted(expected.keys() & there.keys())
            if tuple(there[name]) != expected[name]
        ]
    )


def _unfilled(side: str, parts: Sequence[Part]) -> list[str]:
    boxes: dict[str, list[Rectangle]] = {}
    for part in parts:
        boxes.setdefault(part.name, []).append(part.box)
    shapes = {part.name: part.shape for part in parts}
    problems = [
        f"{side} {part.name}: shapes {part.shape} and {shapes[part.name]}"
        for part in parts
        if part.shape != shapes[part.name]
    ]
    for name, shape in shapes.items() if not problems else ():
        if (problem := fill_error(shape, boxes[name])) is not None:
            problems.append(f"{side} {name}: {problem}")
    return problems
