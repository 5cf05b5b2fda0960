"""What is gathered and reduced together: units of modules, declared by a model or derived from its module classes.

A parameter belongs to the innermost unit around the module that owns it. Where units are derived (`unit_modules`), what
is outside of every one of them forms units of its own: a run of neighbours in the order of registration (embeddings
before the layers, norm and head behind them) is one, and what a container or the model itself owns directly is one that
stays gathered from the model's first operation to its last.
"""

from __future__ import annotations

import dataclasses
import itertools
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
    inside its modules. nested: it lies inside those of one that does not last. Names are unique."""

    index: int
    name: str
    modules: tuple[nn.Module, ...]
    names: tuple[str, ...]
    backward_reads: bool
    spans: bool
    lasts: bool
    nests: bool = False
    nested: bool = False
    begins_with_lookup: bool = False


def declared_units(chunks: Sequence[nn.Module]) -> list[ModelUnit] | None:
    """What the chunks declare themselves; None where one of them does not."""
    units: list[ModelUnit] = []
    for chunk in chunks:
        own = chunk.units() if isinstance(chunk, MegatronModule) else None
        if own is None:
            return None
        units += own
    return units


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
    if declared is None:
        declared = derive_units(chunks, unit_modules or ())
        covered = False
    else:
        declared = tuple(declared)
        covered = True
    owners = _owners(chunks, parameters, declared)
    missing = [name for name in parameters if name not in owners]
    assert not (covered and missing), f"parameters in no unit: {missing}"
    units: list[Unit] = []
    called: dict[str, int] = {}  # how many units have a name
    for place, unit in enumerate(declared):
        names = tuple(name for name in parameters if owners[name] == place)
        if names:
            spans = any(module is chunk for module in unit.modules for chunk in chunks)
            lasts = spans or _encloses(chunks, declared, place)
            called[unit.name] = called.get(unit.name, 0) + 1
            name = unit.name if called[unit.name] == 1 else f"{unit.name}#{called[unit.name]}"
            units.append(
                Unit(
                    len(units),
                    name,
                    unit.modules,
                    names,
                    unit.backward_reads,
                    spans,
                    lasts,
                    begins_with_lookup=unit.begins_with_lookup,
                )
            )
    around = {unit.index: _units_inside(unit, units) for unit in units}
    nested = {inner for unit in units if not unit.lasts for inner in around[unit.index]}
    return tuple(
        dataclasses.replace(unit, nests=bool(around[unit.index]), nested=unit.index in nested)
        for unit in units
    )


def _units_inside(unit: Unit, units: Sequence[Unit]) -> set[int]:
    """The other units with modules inside this one's."""
    inside = {id(module) for own in unit.modules for module in own.modules()}
    others = (other for other in units if other.index != unit.index)
    return {other.index for other in others if any(id(module) in inside for module in other.modules)}


def forward_order(chunks: Sequence[nn.Module], units: Sequence[Unit]) -> tuple[int, ...]:
    """The units in the order in which their modules are registered: the order of the forward, as far as that tells."""
    unit_of = {id(module): unit.index for unit in units for module in unit.modules}
    order = [unit_of[id(module)] for chunk in chunks for module in chunk.modules() if id(module) in unit_of]
    order += [unit.index for unit in units if unit.spans]  # to the very end
    return tuple(unit for unit, _ in itertools.groupby(order))


def _encloses(chunks: Sequence[nn.Module], declared: Sequence[ModelUnit], place: int) -> bool:
    """Whether modules of other units are registered between the first and the last of the one declared at `place`."""
    unit_of = {id(module): other for other, unit in enumerate(declared) for module in unit.modules}
    order = [unit_of[id(module)] for chunk in chunks for module in chunk.modules() if id(module) in unit_of]
    first, last = order.index(place), len(order) - order[::-1].index(place)
    return any(other != place for other in order[first:last])


def derive_units(
    chunks: Sequence[nn.Module], unit_modules: Sequence[UnitModule], *, one_rest: bool = False
) -> tuple[ModelUnit, ...]:
    """Units for models that declare none. one_rest: what is in no matched unit is one that spans its chunk. Raises
    ModelError where a class or name matches nothing."""
    units: list[ModelUnit] = []
    for chunk in chunks:
        matched = _matched(chunk, unit_modules)
        if one_rest:
            units.append(ModelUnit(type(chunk).__name__, (chunk,)))
            units += [_unit_of(name, modules) for name, modules in dict.fromkeys(matched.values())]
        else:
            units += _with_rest(chunk, matched)
    found = {word for unit in units for word in _words(unit)}
    unmatched = [word for word in unit_modules if _spelled(word) not in found]
    if unmatched:
        classes = sorted({type(module).__name__ for chunk in chunks for module in chunk.modules()})
        raise ModelError(
            f"--fsdp-unit-modules (fsdp_unit_modules) {[_spelled(word) for word in unmatched]}: no module of the model "
            f"matches; its classes are {classes}"
        )
    return tuple(units)


def _spelled(word: UnitModule) -> str:
    if isinstance(word, str):
        return word
    return "+".join(word) if isinstance(word, tuple) else word.__name__


def _words(unit: ModelUnit) -> tuple[str, ...]:
    return unit.name, *(cls.__name__ for module in unit.modules for cls in type(module).__mro__)


def _matched(
    chunk: nn.Module, unit_modules: Sequence[UnitModule]
) -> dict[int, tuple[str, tuple[nn.Module, ...]]]:
    """id of a module -> (name, modules) of the unit that it belongs to."""
    by_name = dict(chunk.named_modules())
    found: dict[int, tuple[str, tuple[nn.Module, ...]]] = {}
    for words in (word for word in unit_modules if isinstance(word, tuple)):
        unknown = [name for name in words if name not in by_name]
        if unknown:
            raise ModelError(f"fsdp_unit_modules {words}: the model has no modules {unknown}")
        modules = tuple(by_name[name] for name in words)
        found |= {id(module): ("+".join(words), modules) for module in modules}
    classes = tuple(word for word in unit_modules if isinstance(word, type))
    spelled = {word for word in unit_modules if isinstance(word, str)}
    for name, module in by_name.items():
        names = {cls.__name__ for cls in type(module).__mro__}
        if id(module) not in found and (isinstance(module, classes) or names & spelled):
            found[id(module)] = (name or type(module).__name__, (module,))
    for name, module in by_name.items():
        if id(module) in found and isinstance(module, CONTAINERS) and not _has_forward(module):
            _refuse_uncalled(name, module, found)
    return found


def matched_units(module: nn.Module, unit_modules: Sequence[UnitModule]) -> list[tuple[nn.Module, ...]]:
    """The modules of each unit that `unit_modules` finds in a module."""
    return list(dict.fromkeys(modules for _, modules in _matched(module, unit_modules).values()))


def _has_forward(module: nn.Module) -> bool:
    return getattr(module.forward, "__func__", None) is not nn.Module.forward


def _refuse_uncalled(name: str, module: nn.Module, units: Collection[int]) -> None:
    """Raises ModelError where a container is a unit of its own parameters. units: ids of modules."""
    own = _first_own_parameter(name, module, units)
    if own is not None:
        raise ModelError(
            f"--fsdp-unit-modules (fsdp_unit_modules): {name!r} is a {type(module).__name__}, which has no forward, so "
            f"that nothing tells when its parameters ({own!r}) are in use: name the class of the modules inside it, or "
            "of the module around it, whose forward runs"
        )


def _first_own_parameter(name: str, module: nn.Module, units: Collection[int]) -> str | None:
    """The first parameter at or below a module that is in no unit inside it."""
    for own, _ in module.named_parameters(name, recurse=False):
        return own
    below = (
        _first_own_parameter(f"{name}.{word}", child, units)
        for word, child in module.named_children()
        if id(child) not in units
    )
    return next((own for own in below if own is not None), None)


def _unit_of(name: str, modules: tuple[nn.Module, ...]) -> ModelUnit:
    lookup = all(isinstance(module, LOOKUP_TABLES) for module in modules)
    return ModelUnit(name, modules, backward_reads=not lookup)


def _with_rest(
    chunk: nn.Module, matched: dict[int, tuple[str, tuple[nn.Module, ...]]]
) -> Iterator[ModelUnit]:
    """The matched units and those of what is left, in the order of registration."""
    spanning = ModelUnit(type(chunk).__name__, (chunk,))
    units: list[ModelUnit] = []
    run: list[tuple[str, nn.Module]] = []
    direct = False

    def close() -> None:
        if run:
            units.append(_unit_of("+".join(name for name, _ in run), tuple(module for _, module in run)))
            run.clear()

    inside: set[int] = set()  # below a matched module
    seen: set[str] = set()
    for name, module in chunk.named_modules():
        if id(module) in matched:
            close()
            unit_name, modules = matched[id(module)]
            inside |= {id(child) for member in modules for child in member.modules()}
            if unit_name not in seen:
                seen.add(unit_name)
                units.append(_unit_of(unit_name, modules))
        elif id(module) in inside or not any(True for _ in module.parameters(recurse=False)):
            continue
        elif next(module.children(), None) is None and module is not chunk:
            run.append((name, module))
        else:
            direct = True  # a container's own: only the whole model's forward is known to enclose their use
    close()
    if direct and id(chunk) not in matched:
        units.insert(0, spanning)
    yield from units


def _owners(
    chunks: Sequence[nn.Module], parameters: Mapping[str, nn.Parameter], declared: Sequence[ModelUnit]
) -> dict[str, int]:
    """Parameter name -> place of its unit, the first chunk's where several hold it. Raises ModelError where a chunk has
    it in two units."""
    unit_of = {id(module): place for place, unit in enumerate(declared) for module in unit.modules}
    name_of = {id(parameter): name for name, parameter in parameters.items()}
    all_owners: dict[str, int] = {}

    def visit(module: nn.Module, unit: int | None, owners: dict[str, int]) -> None:
        unit = unit_of.get(id(module), unit)
        for parameter in module.parameters(recurse=False):
            name = name_of[id(parameter)]
            if unit is None:
                continue
            other = owners.setdefault(name, unit)
            if other != unit:
                first, second = declared[other].name, declared[unit].name
                raise ModelError(
                    f"parameter {name!r} is shared by the units {first!r} and {second!r}: declare them as one, with a "
                    f"tuple of the modules' names in fsdp_unit_modules"
                )
        for child in module.children():
            visit(child, unit, owners)

    for chunk in chunks:
        of_chunk: dict[str, int] = {}
        visit(chunk, None, of_chunk)
        all_owners = of_chunk | all_owners
    return all_owners
