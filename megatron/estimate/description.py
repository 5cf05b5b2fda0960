"""What parts of a model take on one rank, as plain data, and what follows for any stage made of them (floor 0, pure).

Nothing here was declared: `observe.py` has looked at one microbatch of each part. Bytes are those of one microbatch on
one of the ranks that share a layer; FLOPs are those of the kernels that ran.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from megatron.core.models.gpt.unit_order import layer_name

COMPUTATIONS = ("F", "B", "W", "BW")
EVALUATED = "E"  # a forward without gradients, of which there is no more than the most that it has at once
EXCHANGE = "ep_etp"  # the ranks that tokens are sent to
OUTSIDE = "outside"  # in place of a path, of what a stage is handed


@dataclasses.dataclass(frozen=True)
class ComputationFigures:
    """One computation of a module. products, attention: FLOPs of matrix products with weights, and of products of
    activations with each other. moved_bytes: what everything else reads and writes. made_bytes: the most that it had
    made and not let go at once."""

    products: int = 0
    attention: int = 0
    moved_bytes: int = 0
    made_bytes: int = 0

    def __add__(self, other: ComputationFigures) -> ComputationFigures:
        """Of two pieces, one after the other."""
        return ComputationFigures(
            self.products + other.products,
            self.attention + other.attention,
            self.moved_bytes + other.moved_bytes,
            max(self.made_bytes, other.made_bytes),
        )


@dataclasses.dataclass(frozen=True)
class ModuleFigures:
    """A module without those below it.

    parameters: elements. lasting_bytes: made once, such as tables. kept_bytes: made by it, and there from F to B.
    filed_bytes: from B to W. work: by computation.
    """

    parameters: int = 0
    lasting_bytes: int = 0
    kept_bytes: int = 0
    filed_bytes: int = 0
    work: Mapping[str, ComputationFigures] = dataclasses.field(default_factory=dict)

    def beside(self, other: ModuleFigures) -> ModuleFigures:
        """Of one path in two pieces: what the module has is there once, what a microbatch needs is added."""
        names = self.work.keys() | other.work.keys()
        return ModuleFigures(
            max(self.parameters, other.parameters),
            max(self.lasting_bytes, other.lasting_bytes),
            self.kept_bytes + other.kept_bytes,
            self.filed_bytes + other.filed_bytes,
            {
                name: self.work.get(name, ComputationFigures()) + other.work.get(name, ComputationFigures())
                for name in sorted(names)
            },
        )


@dataclasses.dataclass(frozen=True)
class Ends:
    """What a piece is handed and hands on, and their gradients the other way.

    input_bytes: 0 where it begins the model; output_bytes: 0 where it ends it. keeps_input, keeps_output: whether it
    keeps these from F to B. files_back: whether it files what it hands back. maker, back_maker: the paths of who makes
    what it hands on, and back.
    """

    input_bytes: int
    output_bytes: int
    keeps_input: bool = True
    keeps_output: bool = False
    files_back: bool = False
    maker: str = OUTSIDE
    back_maker: str = OUTSIDE


class Weight(NamedTuple):
    """A parameter: elements on this rank, and in all. expert: of experts; shared: another stage has it too (a tied
    matrix): both lie in flat buffers of their own."""

    numel: int
    whole_numel: int
    expert: bool = False
    shared: bool = False


@dataclasses.dataclass(frozen=True)
class ModelPiece:
    """A part of a model through which a microbatch passes: an embedding, a layer, a head, or several of them in a row.

    modules: by path in the model. most_bytes: by computation, the most that there was at once, beyond what was there
    when it began; of several pieces in a row exact for F, else within the bytes of hidden states: what is gathered for
    the next piece meanwhile, or copied at a stage's end, is not seen in one. collectives: payload bytes by
    (computation, group, kind). weights: by name in the model. filed_for: of what is filed the bytes by the gradients
    that they are for (keys of the sink), without what is handed on and back; of a piece as it was observed alone.
    """

    modules: Mapping[str, ModuleFigures]
    ends: Ends
    most_bytes: Mapping[str, int]
    collectives: Mapping[tuple[str, str, str], int] = dataclasses.field(default_factory=dict)
    weights: Mapping[str, Weight] = dataclasses.field(default_factory=dict)
    filed_for: Mapping[tuple[str, ...], int] = dataclasses.field(default_factory=dict)

    @property
    def parameters(self) -> int:
        return self._sum("parameters")

    @property
    def lasting_bytes(self) -> int:
        return self._sum("lasting_bytes")

    @property
    def kept_bytes(self) -> int:
        """From F to B."""
        return self._sum("kept_bytes") + self.ends.keeps_input * self.ends.input_bytes

    @property
    def filed_bytes(self) -> int:
        """From B to W."""
        return self._sum("filed_bytes")

    def work(self, computation: str) -> ComputationFigures:
        none = ComputationFigures()
        return sum((one.work.get(computation, none) for one in self.modules.values()), none)

    def exchanged_bytes(self, *, splits: bool) -> int:
        """What a microbatch moves to the ranks that have its experts, and back. splits: backwards are B and W."""
        computations = COMPUTATIONS[:3] if splits else ("F", "BW")
        return sum(
            size
            for (one, group, _), size in self.collectives.items()
            if group == EXCHANGE and one in computations
        )

    def left_bytes(self, computation: str) -> int:
        """What there is more (less, where negative) after a computation than before it, between other pieces."""
        kept, filed, ends = self.kept_bytes, self.filed_bytes, self.ends
        handed_on = ends.output_bytes * (not ends.keeps_output)
        handed_back = ends.input_bytes * (not ends.files_back)
        return {
            "F": kept + handed_on - ends.input_bytes,
            "B": filed + handed_back - kept - ends.output_bytes,
            "W": -filed,
            "BW": ends.input_bytes - kept - ends.output_bytes,
            EVALUATED: ends.output_bytes,  # and whoever runs the stage still has what that was handed
        }[computation]

    def then(self, other: ModelPiece) -> ModelPiece:
        """Both in a row. What the first hands on is what the second is handed."""
        mine, its = self.ends, other.ends
        assert mine.output_bytes == its.input_bytes, (
            f"{mine.output_bytes} bytes handed on, {its.input_bytes} taken"
        )
        modules = dict(self.modules)
        back = modules.pop(OUTSIDE, ModuleFigures())  # what the second hands back, and the first may file
        between = {
            mine.maker: ModuleFigures(
                kept_bytes=its.input_bytes * (its.keeps_input and not mine.keeps_output)
            ),
            its.back_maker: ModuleFigures() if its.files_back else back,
        }
        for path, figures in (*other.modules.items(), *between.items()):
            modules[path] = modules.get(path, ModuleFigures()).beside(figures)
        most = {name: self._most(other, name) for name in self.most_bytes}
        ends = Ends(
            mine.input_bytes,
            its.output_bytes,
            mine.keeps_input,
            its.keeps_output,
            mine.files_back,
            its.maker,
            mine.back_maker,
        )
        moved = dict(Counter(self.collectives) + Counter(other.collectives))
        return ModelPiece(modules, ends, most, moved, {**self.weights, **other.weights})

    def _most(self, other: ModelPiece, computation: str) -> int:
        first, second = (self, other) if computation in ("F", EVALUATED) else (other, self)
        return max(
            first.most_bytes[computation], first.left_bytes(computation) + second.most_bytes[computation]
        )

    def _sum(self, name: str) -> int:
        return sum(getattr(one, name) for one in self.modules.values())


@dataclasses.dataclass(frozen=True)
class ModelDescription:
    """A model by pieces.

    embedding, head: its ends. layers: the kind of each of its layers. kinds: a layer of each kind, as layer 0.
    recomputed: layers of these kinds that are recomputed together, as layers 0, 1, ... gathered: the same of a model
    whose F keeps what sequence parallel has gathered; None where it has nothing to choose.
    """

    embedding: ModelPiece
    head: ModelPiece
    layers: tuple[str, ...]
    kinds: Mapping[str, ModelPiece]
    recomputed: Mapping[tuple[str, ...], ModelPiece] = dataclasses.field(default_factory=dict)
    gathered: ModelDescription | None = None

    def __hash__(self) -> int:
        """Of what is quick to see; equal ones are equal all over."""
        return hash((self.layers, self.embedding.kept_bytes, self.head.filed_bytes))

    @property
    def hidden_bytes(self) -> int:
        """Of what stages hand on."""
        return self.embedding.ends.output_bytes

    def pieces(
        self, layers: Sequence[int], chunks: Iterable[tuple[int, int, bool]], *, embeds: bool, ends: bool
    ) -> list[tuple[ModelPiece, Sequence[int], Sequence[int]]]:
        """What `stage` is made of: pieces, each with the numbers of its layers there, and in the model."""
        found: list[tuple[ModelPiece, Sequence[int], Sequence[int]]] = [(self.embedding, (), ())] * embeds
        for first, end, recomputed in chunks:
            numbers = layers[first:end]
            kinds = tuple(self.layers[number] for number in numbers)
            if recomputed:
                found.append((self.recomputed[kinds], range(len(numbers)), numbers))
            else:
                each = zip(kinds, numbers, strict=True)
                found += [(self.kinds[kind], (0,), (number,)) for kind, number in each]
        return [*found, *[(self.head, (), ())] * ends]

    def stage(
        self, layers: Sequence[int], chunks: Iterable[tuple[int, int, bool]], *, embeds: bool, ends: bool
    ) -> ModelPiece:
        """Any part of the model as one piece. layers: their numbers. chunks: `TransformerConfig.recompute_chunks` of
        them."""
        return functools.reduce(ModelPiece.then, self.stage_pieces(layers, chunks, embeds=embeds, ends=ends))

    def stage_pieces(
        self, layers: Sequence[int], chunks: Iterable[tuple[int, int, bool]], *, embeds: bool, ends: bool
    ) -> list[ModelPiece]:
        """Of `stage`, in the order of the forward."""
        found = self.pieces(layers, chunks, embeds=embeds, ends=ends)
        pieces = [renumbered(*one) for one in found]
        hidden = self.hidden_bytes
        if not pieces:  # it hands on what it gets
            pieces = [ModelPiece({}, Ends(hidden, hidden), dict.fromkeys((*COMPUTATIONS, EVALUATED), 0))]
        kept = dataclasses.replace(pieces[0].ends, keeps_input=not embeds)  # a stage keeps what it was handed
        return [dataclasses.replace(pieces[0], ends=kept), *pieces[1:]]


def renumbered(piece: ModelPiece, old: Sequence[int], new: Sequence[int]) -> ModelPiece:
    """With other numbers of its layers."""
    names = {layer_name(before): layer_name(after) for before, after in zip(old, new, strict=True)}

    def renamed(path: str) -> str:
        for name, own in names.items():
            if path == name or path.startswith(f"{name}."):
                return own + path[len(name) :]
        return path

    makers = renamed(piece.ends.maker), renamed(piece.ends.back_maker)
    ends = dataclasses.replace(piece.ends, maker=makers[0], back_maker=makers[1])
    modules = {renamed(path): one for path, one in piece.modules.items()}
    weights = {renamed(name): one for name, one in piece.weights.items()}
    return dataclasses.replace(piece, modules=modules, ends=ends, weights=weights, filed_for={})


def as_json(described: ModelDescription | Sequence[ModelPiece]) -> Any:
    """For ranks to tell each other."""
    return _plain(described)


def _plain(value: Any) -> Any:
    """Records as lists of their fields, tables as lists of pairs."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [_plain(getattr(value, field.name)) for field in dataclasses.fields(value)]
    if isinstance(value, Mapping):
        return [[_plain(key), _plain(one)] for key, one in value.items()]
    return [_plain(one) for one in value] if isinstance(value, tuple) else value


def from_json(content: Any) -> ModelDescription:
    """What `as_json` wrote."""
    embedding, head, layers, kinds, recomputed, gathered = content
    return ModelDescription(
        piece_of(embedding),
        piece_of(head),
        tuple(layers),
        {kind: piece_of(one) for kind, one in kinds},
        {tuple(held): piece_of(one) for held, one in recomputed},
        None if gathered is None else from_json(gathered),
    )


def piece_of(content: Any) -> ModelPiece:
    """What `as_json` wrote of one."""
    modules, ends, most, moved, weights, filed_for = content
    return ModelPiece(
        {
            path: ModuleFigures(
                parameters, lasting, kept, filed, {name: ComputationFigures(*done) for name, done in work}
            )
            for path, (parameters, lasting, kept, filed, work) in modules
        },
        Ends(*ends),
        dict(most),
        {tuple(what): size for what, size in moved},
        {name: Weight(*one) for name, one in weights},
        {tuple(keys): size for keys, size in filed_for},
    )
