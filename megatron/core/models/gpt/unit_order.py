"""Which units a stage of a GPT has, by name, and in which order its computations go through them (floor 0)."""

from __future__ import annotations

from collections.abc import Sequence

from megatron.core.transformer.layer_table import LayerKind
from megatron.core.unit_accesses import Accesses

EXPERTS = ".mlp.experts"  # of a layer
ONE_MATRIX = "embedding_and_head"  # a tied matrix that this stage reads at both ends


def layer_name(number: int | str) -> str:
    return f"decoder.layers.{number}"


def layer_units(number: int | str, kind: LayerKind) -> tuple[str, ...]:
    """The units of a layer, in the order of the forward: all but its experts, and these, most of its bytes."""
    name = layer_name(number)
    return (name,) if kind.experts is None else (name, f"{name}{EXPERTS}")


def accesses_of_stage(
    layers: Sequence[int],
    table: Sequence[LayerKind],
    recomputed: Sequence[tuple[int, int, bool]],
    *,
    tied: bool,
    embeds: bool,
    ends: bool,
    other_end_here: bool,
) -> Accesses[str]:
    """Layers are needed one by one, in the backward those together that are recomputed together. The head reads a tied
    matrix too, which on a V is a part of the other end's `embedding`.

    layers: their global numbers. table: of all layers. recomputed: `TransformerConfig.recompute_chunks` of them.
    embeds, ends: the stage begins the model, ends it. other_end_here: the model's other end is another stage of this
    rank.
    """
    first, last = ("embedding",), ("head", *(("embedding",) if tied and other_end_here else ()))
    if embeds and ends and tied:
        first = last = (ONE_MATRIX,)
    units = [layer_units(number, table[number]) for number in layers]
    forward = [(name,) for names in units for name in names]
    backward: list[tuple[str, ...]] = []
    for start, end, together in reversed(recomputed):
        own = [name for names in units[start:end] for name in names]
        backward += [tuple(own)] if together else [(name,) for name in reversed(own)]
    begins, finishes = [first] * embeds, [last] * ends
    return Accesses((*begins, *forward, *finishes), (*finishes, *backward, *begins))
