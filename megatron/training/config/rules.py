"""What must hold between settings: a table of rules, all of them looked at, every broken one told (floor 0).

rules.csv has them in the order in which they are told: its id, the flags concerned, when it is broken, what is wrong
(where that is empty, the condition says it), and what to do about it (where that is empty, the condition says it too,
behind its last semicolon). A row without an id is another way to break the rule above. `expressions` says how
conditions and messages are read; the functions in them are those of resolve.py and of the rules_*.py files beside this
one, and what `RuleContext` has. Sources of the combinations: Megatron's own checks, and those that users break most
often.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

from megatron.command import as_called
from megatron.core.config_base import arg_info, bounds_of
from megatron.training.config import resolve, rules_model, rules_pipeline, rules_training
from megatron.training.config.command_line import UsedFlag
from megatron.training.config.config import FIELDS, Config
from megatron.training.config.expressions import filled, parsed, rows, value_of
from megatron.training.config.flag_table import FlagState, flag_table
from megatron.training.config.launch_env import LaunchEnv
from megatron.training.config.problems import NOT_SUPPORTED, REQUIRED, Problem
from megatron.training.config.rule_table import RuleContext, refusal, spelled
from megatron.training.config.values import BoundsError, check_bounds

# Without a plan for a configuration that breaks one of these.
_BEFORE_PLANS = (
    "schedule-flags schedule-ranks interleaving-chunks pipeline-schedule microbatch-group interleave-group "
    "interleaving-microbatches dualpipe-v-microbatches pipeline-limits rank-memory-limit plan-size expert-layers"
).split()

# Looked at once the model is described.
_WITH_PLANS = ("validated-memory", "pipeline-plan")

_GIVE = "give a value, here or in the file of --yaml-cfg"


@dataclasses.dataclass(frozen=True)
class Rule:
    """fault: what is wrong with a configuration, or None."""

    id: str
    flags: tuple[str, ...]
    fix: str
    fault: Callable[[RuleContext], str | None]


def can_plan(c: RuleContext) -> bool:
    """Whether the flags say all that a plan needs, and none of them breaks a rule of its own."""
    complete = c.config.batch_schedule_or_none() is not None and c.num_layers is not None
    if not complete or rules_pipeline.chunks(c) is None:
        return False
    return all(rule.fault(c) is None for rule in RULES if rule.id in _BEFORE_PLANS)


FUNCTIONS: dict[str, Callable[..., Any]] = {"can_plan": can_plan} | {
    name: function
    for module in (resolve, rules_training, rules_model, rules_pipeline)
    for name, function in vars(module).items()
    if inspect.isfunction(function) and function.__module__ == module.__name__
}


def _fault(ways: Sequence[tuple[ast.expr, str]], c: RuleContext) -> str | None:
    """Of the first way that the configuration goes."""
    names = c.named(FUNCTIONS)
    for when, message in ways:
        if found := value_of(when, names):
            return filled(message, names, c.told, found) if message else str(found)
    return None


def _missing(name: str, about: str, c: RuleContext) -> str | None:
    missing = getattr(c, name) is None and not (name == "lr" and c.skip_train)
    return f"{spelled(name)} ({about}){REQUIRED}" if missing else None


def _out_of_bounds(name: str, c: RuleContext) -> str | None:
    """What was given is checked where it is converted (`values`): this is about what follows from it, and about what a
    launcher says."""
    told = refusal(lambda: check_bounds(FIELDS[name][1], getattr(c, name)), BoundsError)
    return told and f"{spelled(name)} {told}"


def _rules() -> Iterator[Rule]:
    """Those of single settings, then the table's."""
    partial = functools.partial
    for name, (_, field) in FIELDS.items():
        flag, info = spelled(name), arg_info(field)
        if info is not None and info.required:
            id = f"required-{name.replace('_', '-')}"
            yield Rule(id, (flag,), _GIVE, partial(_missing, name, info.help))
    for name, (_, field) in FIELDS.items():
        if bounds_of(field) is not None:
            id, fix = f"bounds-{name.replace('_', '-')}", f"change what {spelled(name)} follows from"
            yield Rule(id, (spelled(name),), fix, partial(_out_of_bounds, name))
    ways: list[tuple[ast.expr, str]] = []
    for row in rows("rules.csv"):
        if row["id"]:
            ways = []
            yield Rule(row["id"], tuple(row["flags"].split()), row["fix"], partial(_fault, ways))
        ways.append((parsed(row["when"]), row["message"]))


RULES = tuple(_rules())


def broken_rules(context: RuleContext, about: Collection[str] | None = None) -> list[Problem]:
    """Every rule that the configuration breaks without a plan, in table order, after unsupported flags.

    about: only rules of these flags alone, for callers who know of no others.
    """
    rules = [rule for rule in RULES if rule.id not in _WITH_PLANS]
    if about is not None:
        rules = [rule for rule in rules if set(rule.flags) <= set(about)]
    return unsupported_flags(context) + _broken(rules, context)


def plan_problems(config: Config, env: LaunchEnv) -> list[Problem]:
    """The rules that a described configuration breaks which has broken none without a plan."""
    context = RuleContext(
        config,
        env,
        has_gpu=env.gpu_present(),
        check_only=config.training.check_config,
        memory_bytes=env.memory_bytes(),
    )
    return _broken([rule for rule in RULES if rule.id in _WITH_PLANS], context)


def _broken(rules: Sequence[Rule], context: RuleContext) -> list[Problem]:
    broken, names = list[Problem](), context.named(FUNCTIONS)
    for rule in rules:
        if (told := rule.fault(context)) is not None:
            message, fix = told, as_called(filled(rule.fix, names, context.told))
            if not fix:
                message, _, fix = told.rpartition("; ")
            broken.append(Problem(rule.id, rule.flags, message or told, fix))
    return broken


def unsupported_flags(context: RuleContext) -> list[Problem]:
    """Flags of Megatron's (or of later issues) that ask for something we do not do, all of them."""
    asked, _ = asked_and_idle(context.used, vars(context.config.model))
    refused = [(" ".join((u.spelling, *u.words)), u.spelling, u.entry.fix) for u in asked]
    for name, entry in flag_table().items():
        value = getattr(context, name) if entry.allowed is not None else None
        if entry.allowed is None or str(value) in entry.allowed:
            continue
        shown = entry.spelling if value is True else f"{entry.spelling} {value}"
        refused.append((shown, entry.spelling, entry.fix))
    return [Problem("not-supported", (flag,), f"{shown}{NOT_SUPPORTED}", fix) for shown, flag, fix in refused]


def asked_and_idle(
    used: Sequence[UsedFlag], values: Mapping[str, Any]
) -> tuple[list[UsedFlag], list[UsedFlag]]:
    """Of flags that are not supported, those that ask for something, and settings of features that nobody asks for.
    values: of fields, which may be such features."""
    unsupported = (u for u in used if u.entry.state is FlagState.UNSUPPORTED)
    asking = [u for u in unsupported if not u.entry.asks_for_nothing(u.words)]
    there = {u.entry.spelling for u in asking} | {spelled(name) for name in FIELDS if values.get(name)}
    idle = [u for u in asking if u.entry.setting_of and there.isdisjoint(u.entry.setting_of)]
    return [u for u in asking if u not in idle], idle


def without_effect(used: Sequence[UsedFlag], values: Mapping[str, Any]) -> dict[str, str]:
    """Why, by spelling: flags that are accepted without effect, and settings of features that nobody asks for. values:
    of fields."""
    told = {u.spelling: u.entry.why for u in used if u.entry.state is FlagState.INERT}
    for u in asked_and_idle(used, values)[1]:
        told[u.spelling] = f"it is a setting of {' or '.join(u.entry.setting_of)}, which is not given"
    return told


def inert_flags(used: Sequence[UsedFlag], values: Mapping[str, Any]) -> list[str]:
    """A warning for each accepted flag without effect, with why. values: of fields that something was said of."""
    told = without_effect(used, values)
    for entry in flag_table().values():
        if entry.state is FlagState.INERT and entry.field is not None:
            default = entry.field.default
            if values.get(entry.name, default) != default:
                told[entry.spelling] = entry.why
    return [f"{flag} has no effect here: {why}" for flag, why in told.items()]
