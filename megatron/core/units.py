"""What is gathered and reduced together: units of modules, declared by a model or derived from its module classes.

A parameter belongs to the innermost unit around the module that owns it. Where units are derived (`unit_modules`), what
is outside of every one of them forms units of its own: a run of neighbours in the order of registration (embeddings
before the layers, norm and head behind them) is one, and what a container or the model itself owns directly is one that
stays gathered from the model's first operation to its last. Derived units that share a parameter (tied embeddings) are
one.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from torch import nn

from megatron.core.module import MegatronModule, ModelError, ModelUnit

# A class, the name of one, or names of modules that form one unit together.
UnitModule = type[nn.Module] | str | tuple[str, ...]

CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
LOOKUP_TABLES = (nn.Embedding, nn.EmbeddingBag)  # plain modules whose backward does not read their weights


@dataclasses.dataclass(frozen=True)
class Unit:
    """modules: in the order in which they run. names: of its parameters. backward_reads: backward needs the weights;
    begins_with_lookup: not for the first of its uses (`ModelUnit`).
    spans: a chunk of the model is one of its modules, so it is in use from the chunk's beginning to its end. lasts: it
    spans, or other units run between its modules, so that they come and go while it stays. nests: other units lie
    inside its modules. nested: it lies inside those of one that does not last. entered_by: as in `ModelUnit`, `modules`
    where that is nothing. Names are unique."""

    index: int
    name: str
    modules: tuple[nn.Module, ...]
    names: tuple[str, ...]
    backward_reads: bool
    begins_with_lookup: bool
    spans: bool
    lasts: bool
    nests: bool = False
    nested: bool = False
    entered_by: tuple[nn.Module, ...] = ()


def declared_units(chunks: Sequence[nn.Module]) -> list[ModelUnit] | None:
    """What the chunks declare themselves; None where one of them does not."""
    own = [chunk.units() if isinstance(chunk, MegatronModule) else None for chunk in chunks]
    return None if None in own else [unit for units in own for unit in units or ()]


def find_units(
    chunks: Sequence[nn.Module],
    parameters: Mapping[str, nn.Parameter],
    declared: Iterable[ModelUnit] | None,
    unit_modules: Sequence[UnitModule] | None,
) -> tuple[Unit, ...]:
    """The units of a rank's chunks, in the order of the forward as far as declaration or registration tell it.

    declared: `MegatronModule.units` of all chunks; they cover every parameter. unit_modules: otherwise.
    Raises ModelError where nothing matches, or where a parameter is in two units.
    """
    given = tuple(derive_units(chunks, unit_modules or ()) if declared is None else declared)
    owners = _owners(chunks, parameters, given)
    missing = [name for name in parameters if name not in owners]
    assert declared is None or not missing, f"parameters in no unit: {missing}"
    order = _registered(chunks, given)
    units: list[Unit] = []
    called: Counter[str] = Counter()
    for place, unit in enumerate(given):
        names = tuple(name for name in parameters if owners[name] == place)
        if not names:
            continue
        called[unit.name] += 1
        again = "" if called[unit.name] == 1 else f"#{called[unit.name]}"
        spans = any(module is chunk for module in unit.modules for chunk in chunks)
        # Whether modules of other units are registered between its first and its last.
        between = order[order.index(place) : len(order) - order[::-1].index(place)]
        units.append(
            Unit(
                len(units),
                unit.name + again,
                unit.modules,
                names,
                unit.backward_reads,
                unit.begins_with_lookup,
                spans,
                lasts=spans or len(set(between)) > 1,
                entered_by=unit.entered_by or unit.modules,
            )
        )
    inside = [set(_registered(unit.modules, units)) - {unit.index} for unit in units]
    around = (unit for unit in units if not unit.lasts and unit.entered_by == unit.modules)
    nested = {inner for unit in around for inner in inside[unit.index]}
    return tuple(
        dataclasses.replace(unit, nests=bool(inside[unit.index]), nested=unit.index in nested)
        for unit in units
    )


def derive_units(chunks: Sequence[nn.Module], unit_modules: Sequence[UnitModule]) -> tuple[ModelUnit, ...]:
    """Units for models that declare none: those that match, and what is in none of them. Raises ModelError where a
    class or name matches nothing."""
    of_chunks = [_with_rest(chunk, _matched(chunk, unit_modules)) for chunk in chunks]
    units = [unit for of_chunk in of_chunks for unit in of_chunk]
    found = {unit.name for unit in units}
    found |= {cls.__name__ for unit in units for module in unit.modules for cls in type(module).__mro__}
    unmatched = [word for word in map(_spelled, unit_modules) if word not in found]
    if unmatched:
        classes = sorted({type(module).__name__ for chunk in chunks for module in chunk.modules()})
        raise ModelError(
            f"--fsdp-unit-modules (fsdp_unit_modules) {unmatched}: no module of the model matches; its classes are "
            f"{classes}"
        )
    return tuple(unit for of_chunk in of_chunks for unit in _joined(of_chunk))


def whole_unit(chunk: nn.Module) -> ModelUnit:
    """A chunk as one unit, of what is in no unit inside it."""
    return ModelUnit(type(chunk).__name__, (chunk,))


def matched_units(module: nn.Module, unit_modules: Sequence[UnitModule]) -> list[tuple[nn.Module, ...]]:
    """The modules of each unit that `unit_modules` finds in a module."""
    return [unit.modules for unit in dict.fromkeys(_matched(module, unit_modules).values())]


def owning_modules(module: nn.Module, parts: Collection[int]) -> Iterator[nn.Module]:
    """The modules with parameters of their own at and below one, without `parts` below it (ids of modules)."""
    if next(module.parameters(recurse=False), None) is not None:
        yield module
    for child in module.children():
        if id(child) not in parts:
            yield from owning_modules(child, parts)


def _registered(chunks: Sequence[nn.Module], units: Sequence[ModelUnit | Unit]) -> list[int]:
    """Places of units by their modules, in the order in which these are registered."""
    unit_of = {id(module): place for place, unit in enumerate(units) for module in unit.modules}
    return [unit_of[id(module)] for chunk in chunks for module in chunk.modules() if id(module) in unit_of]


def _spelled(word: UnitModule) -> str:
    if isinstance(word, str):
        return word
    return "+".join(word) if isinstance(word, tuple) else word.__name__


def _matched(chunk: nn.Module, unit_modules: Sequence[UnitModule]) -> dict[int, ModelUnit]:
    """id of a module -> the unit that it belongs to."""
    by_name = dict(chunk.named_modules())
    found: dict[int, ModelUnit] = {}
    for words in (word for word in unit_modules if isinstance(word, tuple)):
        unknown = [name for name in words if name not in by_name]
        if unknown:
            raise ModelError(f"fsdp_unit_modules {words}: the model has no modules {unknown}")
        unit = _unit_of("+".join(words), *(by_name[name] for name in words))
        found |= {id(module): unit for module in unit.modules}
    classes = tuple(word for word in unit_modules if isinstance(word, type))
    spelled = {word for word in unit_modules if isinstance(word, str)}
    for name, module in by_name.items():
        names = {cls.__name__ for cls in type(module).__mro__}
        if id(module) not in found and (isinstance(module, classes) or names & spelled):
            found[id(module)] = _unit_of(name or type(module).__name__, module)
    for name, module in by_name.items():
        has_forward = getattr(module.forward, "__func__", None) is not nn.Module.forward
        if id(module) not in found or not isinstance(module, CONTAINERS) or has_forward:
            continue
        if (owner := next(owning_modules(module, found.keys()), None)) is not None:
            path = next(path for path, one in by_name.items() if one is owner)
            own, _ = next(owner.named_parameters(path, recurse=False))
            raise ModelError(
                f"--fsdp-unit-modules (fsdp_unit_modules): {name!r} is a {type(module).__name__}, which has no "
                f"forward, so that nothing tells when its parameters ({own!r}) are in use: name the class of the "
                "modules inside it, or of the module around it, whose forward runs"
            )
    return found


def _unit_of(name: str, *modules: nn.Module) -> ModelUnit:
    lookup = all(isinstance(module, LOOKUP_TABLES) for module in modules)
    return ModelUnit(name, modules, backward_reads=not lookup)


def _with_rest(chunk: nn.Module, matched: Mapping[int, ModelUnit]) -> list[ModelUnit]:
    """The matched units and those of what is left, in the order of registration."""
    found: list[ModelUnit] = []
    in_run = direct = (
        False  # the last of `found` is a run of neighbours; a container has parameters of its own
    )
    inside: set[int] = set()  # below a matched module
    for name, module in chunk.named_modules():
        if (unit := matched.get(id(module))) is not None:
            in_run = False
            inside |= {id(child) for member in unit.modules for child in member.modules()}
            found += [unit] if unit not in found else []
        elif id(module) in inside or next(module.parameters(recurse=False), None) is None:
            continue
        elif next(module.children(), None) is not None or module is chunk:
            direct = True  # only the whole model's forward is known to enclose their use
        elif in_run:
            found[-1] = _unit_of(f"{found[-1].name}+{name}", *found[-1].modules, module)
        else:
            found.append(_unit_of(name, module))
            in_run = True
    return [whole_unit(chunk), *found] if direct and id(chunk) not in matched else found


def _joined(units: Sequence[ModelUnit]) -> list[ModelUnit]:
    """Those that share a parameter as one unit, at the first one's place. Of a module inside another of the same unit
    the outer one is named."""
    joined = list(units)
    while (pair := _sharing(joined)) is not None:
        into, other = joined[pair[0]], joined.pop(pair[1])
        modules = (*into.modules, *other.modules)
        inside = {id(inner) for one in modules for inner in one.modules() if inner is not one}
        outer = [one for one in modules if id(one) not in inside]
        joined[pair[0]] = _unit_of(f"{into.name}+{other.name}", *outer)
    return joined


def _sharing(units: Sequence[ModelUnit]) -> tuple[int, int] | None:
    """Places of two units that own one parameter."""
    parts = {id(module) for unit in units for module in unit.modules}
    owner: dict[int, int] = {}
    for place, unit in enumerate(units):
        for module in (own for one in unit.modules for own in owning_modules(one, parts)):
            for parameter in module.parameters(recurse=False):
                if owner.setdefault(id(parameter), place) != place:
                    return owner[id(parameter)], place
    return None


def _owners(
    chunks: Sequence[nn.Module], parameters: Mapping[str, nn.Parameter], declared: Sequence[ModelUnit]
) -> dict[str, int]:
    """Parameter name -> place of its unit, the first chunk's where several hold it. Raises ModelError where a chunk has
    it in two units."""
    parts = {id(module): place for place, unit in enumerate(declared) for module in unit.modules}
    name_of = {id(parameter): name for name, parameter in parameters.items()}
    all_owners: dict[str, int] = {}
    for chunk in chunks:
        owners: dict[str, int] = {}
        for module, place in ((one, parts[id(one)]) for one in chunk.modules() if id(one) in parts):
            for owner in owning_modules(module, parts.keys()):
                for name in (name_of[id(parameter)] for parameter in owner.parameters(recurse=False)):
                    other = owners.setdefault(name, place)
                    if other != place:
                        raise ModelError(
                            f"parameter {name!r} is shared by the units {declared[other].name!r} and "
                            f"{declared[place].name!r}: declare them as one, in units() of the model"
                        )
        all_owners = owners | all_owners
    return all_owners
