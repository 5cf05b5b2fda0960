"""What must hold between settings: a table of rules, all of them looked at, every broken one told (floor 0).

A rule is a function of the situation that returns what is wrong, or None; the tables are in the rules_*.py
files beside this one. Sources of the combinations: Megatron's own checks, and those that users break most
often.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from megatron.training.config import (
    rules_batch,
    rules_model,
    rules_parallel,
    rules_pipeline,
    rules_pipeline_plan,
    rules_ranges,
    rules_run,
    rules_schedule,
    rules_sharding,
)
from megatron.training.config.command_line import UsedFlag
from megatron.training.config.flag_table import FlagState, flag_table
from megatron.training.config.problems import Problem
from megatron.training.config.rule_table import Rule, RuleContext

RULES: tuple[Rule, ...] = (
    *rules_ranges.RULES,
    *rules_batch.RULES,
    *rules_schedule.RULES,
    *rules_model.RULES,
    *rules_parallel.RULES,
    *rules_pipeline.RULES,
    *rules_pipeline_plan.RULES,
    *rules_sharding.RULES,
    *rules_run.RULES,
)
assert len({rule.id for rule in RULES}) == len(RULES), "two rules share an id"


def broken_rules(situation: RuleContext) -> list[Problem]:
    """Every rule that the situation breaks, in table order, after unsupported flags."""
    problems = unsupported_flags(situation)
    for one in RULES:
        message = one.broken(situation)
        if message is not None:
            problems.append(Problem(one.id, one.flags, message, one.fix))
    return problems


def unsupported_flags(situation: RuleContext) -> list[Problem]:
    """Flags of Megatron's (or of later issues) that ask for something we do not do, all of them."""
    problems = []
    asked = _asked(situation.used)
    for used in asked:
        if not _idle(used, asked):
            problems.append(
                _unsupported(" ".join((used.spelling, *used.words)), used.spelling, used.entry.why)
            )
    for name, entry in flag_table().items():
        if entry.allowed is not None and situation.value(name) not in entry.allowed:
            value = situation.value(name)
            if name == "expert_tensor_parallel_size" and value == situation.value(
                "tensor_model_parallel_size"
            ):
                continue  # what it is without being asked for
            if (name, value) == ("transformer_impl", "transformer_engine"):
                continue  # has a rule of its own
            shown = entry.spelling if value is True else f"{entry.spelling} {value}"
            problems.append(_unsupported(shown, entry.spelling, entry.why))
    return problems


def _unsupported(shown: str, flag: str, why: str) -> Problem:
    planned = why.startswith("roadmap: ")
    fix = f"leave it out for now; planned, see docs/roadmap.md, {why[9:]!r}" if planned else why
    return Problem("not-supported", (flag,), f"{shown} is not supported", fix)


def _asked(used: Iterable[UsedFlag]) -> list[UsedFlag]:
    """Of flags that are not supported, those that ask for something."""
    return [
        u for u in used if u.entry.state is FlagState.UNSUPPORTED and not u.entry.asks_for_nothing(u.words)
    ]


def _idle(used: UsedFlag, asked: Iterable[UsedFlag]) -> bool:
    """Whether it is a setting of a feature that nobody asks for."""
    of = used.entry.setting_of
    return bool(of) and not any(other.entry.spelling in of for other in asked)


def inert_flags(used: Sequence[UsedFlag]) -> list[str]:
    """A warning for each accepted flag without effect, with why."""
    told = {u.spelling: u.entry.why for u in used if u.entry.state is FlagState.INERT}
    asked = _asked(used)
    told |= {
        u.spelling: f"it is a setting of {' or '.join(u.entry.setting_of)}, which is not given"
        for u in asked
        if _idle(u, asked)
    }
    return [f"{flag} has no effect here: {why}" for flag, why in told.items()]
