"""What must hold between settings: a table of rules, all of them looked at, every broken one told (floor 0).

rules.csv has a row for each, in the order in which they are told: its id, the flags concerned, what is wrong (where it
can be said beforehand: `{name}` stands for the flag of a setting and its value), and what to do about it. Predicates
are in the rules_*.py files beside this one, under the same ids. Sources of the combinations: Megatron's own checks, and
those that users break most often.
"""

from __future__ import annotations

import csv
import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path

from megatron.core.config_base import arg_info, bounds_of
from megatron.core.safe_files import read_text
from megatron.training.config import rules_model, rules_pipeline, rules_training
from megatron.training.config.command_line import UsedFlag
from megatron.training.config.config import FIELDS
from megatron.training.config.flag_table import FlagState, flag_table
from megatron.training.config.problems import Problem
from megatron.training.config.rule_table import Predicate, RuleContext, refusal, spelled
from megatron.training.config.values import BoundsError, check_bounds

TABLE = Path(__file__).with_name("rules.csv")


class _Words(dict[str, str]):
    """What `{name}` in a message stands for."""

    def __init__(self, c: RuleContext) -> None:
        super().__init__()
        self.c = c

    def __missing__(self, name: str) -> str:
        return self.c.told(name)


@dataclasses.dataclass(frozen=True)
class Rule:
    """One row, and the predicate under its id."""

    id: str
    flags: tuple[str, ...]
    message: str
    fix: str
    predicate: Predicate

    def broken(self, c: RuleContext) -> str | None:
        """What is wrong, or None."""
        found = self.predicate(c)
        if isinstance(found, str):
            return found or None
        return self.message.format_map(_Words(c)) if found else None


def _required(name: str) -> Rule:
    flag, info = spelled(name), arg_info(FIELDS[name][1])
    assert info is not None

    def missing(c: RuleContext) -> bool:
        return getattr(c, name) is None and not (name == "lr" and c.skip_train)

    id = f"required-{name.replace('_', '-')}"
    return Rule(id, (flag,), f"{flag} is required", f"give {flag}: {info.help}", missing)


def _bounded(name: str) -> Rule:
    """What was given is checked where it is converted (`values`): this is about what follows from it, and about what a
    launcher says."""
    flag = spelled(name)

    def fault(c: RuleContext) -> str | None:
        told = refusal(lambda: check_bounds(FIELDS[name][1], getattr(c, name)), BoundsError)
        return told and f"{flag} {told}"

    return Rule(f"bounds-{name.replace('_', '-')}", (flag,), "", f"change what {flag} follows from", fault)


def _rules() -> Iterator[Rule]:
    """Those of single settings, then the table's."""
    infos = {name: arg_info(field) for name, (_, field) in FIELDS.items()}
    yield from (_required(name) for name, info in infos.items() if info is not None and info.required)
    yield from (_bounded(name) for name, (_, field) in FIELDS.items() if bounds_of(field) is not None)
    predicates = rules_training.BROKEN | rules_model.BROKEN | rules_pipeline.BROKEN
    text = read_text(TABLE, max_bytes=1 << 20, follow=True)
    for id, flags, message, fix in list(csv.reader(text.splitlines()))[1:]:
        yield Rule(id, tuple(flags.split()), message, fix, predicates.pop(id))
    assert not predicates, f"rules without a row: {sorted(predicates)}"


RULES = tuple(_rules())


def broken_rules(context: RuleContext) -> list[Problem]:
    """Every rule that the configuration breaks, in table order, after unsupported flags."""
    found = ((rule, rule.broken(context)) for rule in RULES)
    broken = [
        Problem(rule.id, rule.flags, message, rule.fix) for rule, message in found if message is not None
    ]
    return unsupported_flags(context) + broken


def unsupported_flags(context: RuleContext) -> list[Problem]:
    """Flags of Megatron's (or of later issues) that ask for something we do not do, all of them."""
    asked, _ = _asked_and_idle(context.used)
    problems = [_unsupported(" ".join((u.spelling, *u.words)), u.spelling, u.entry.fix) for u in asked]
    for name, entry in flag_table().items():
        value = getattr(context, name) if entry.allowed is not None else None
        if entry.allowed is None or str(value) in entry.allowed:
            continue
        if name == "expert_tensor_parallel_size" and value == context.tensor_model_parallel_size:
            continue  # what it is without being asked for
        if (name, value) == ("transformer_impl", "transformer_engine"):
            continue  # has a rule of its own
        shown = entry.spelling if value is True else f"{entry.spelling} {value}"
        problems.append(_unsupported(shown, entry.spelling, entry.fix))
    return problems


def _unsupported(shown: str, flag: str, fix: str) -> Problem:
    return Problem("not-supported", (flag,), f"{shown} is not supported", fix)


def _asked_and_idle(used: Sequence[UsedFlag]) -> tuple[list[UsedFlag], list[UsedFlag]]:
    """Of flags that are not supported, those that ask for something, and settings of features that nobody asks for."""
    unsupported = (u for u in used if u.entry.state is FlagState.UNSUPPORTED)
    asking = [u for u in unsupported if not u.entry.asks_for_nothing(u.words)]
    spelled = {u.entry.spelling for u in asking}
    idle = [u for u in asking if u.entry.setting_of and spelled.isdisjoint(u.entry.setting_of)]
    return [u for u in asking if u not in idle], idle


def inert_flags(used: Sequence[UsedFlag]) -> list[str]:
    """A warning for each accepted flag without effect, with why."""
    told = {u.spelling: u.entry.why for u in used if u.entry.state is FlagState.INERT}
    for u in _asked_and_idle(used)[1]:
        told[u.spelling] = f"it is a setting of {' or '.join(u.entry.setting_of)}, which is not given"
    return [f"{flag} has no effect here: {why}" for flag, why in told.items()]
