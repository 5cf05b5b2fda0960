"""Rules on single settings: required ones, and ranges (floor 0)."""

from __future__ import annotations

from megatron.core.config_base import arg_info, bounds_of
from megatron.training.config.config import FIELDS
from megatron.training.config.rule_table import RuleContext, RuleTable, spelled
from megatron.training.config.values import BoundsError, check_bounds

RULES = RuleTable()
rule = RULES.rule


def _required(name: str) -> None:
    unless_skipping = name == "lr"

    def missing(s: RuleContext) -> str | None:
        if s.value(name) is not None or (unless_skipping and s.value("skip_train")):
            return None
        return f"{spelled(name)} is required"

    info = arg_info(FIELDS[name][1])
    assert info is not None
    rule(f"required-{name.replace('_', '-')}", spelled(name), f"give {spelled(name)}: {info.help}")(missing)


def _bounded(name: str) -> None:
    """What was given is checked where it is converted (`values`): this is about what follows from it, and about what a
    launcher says."""

    def fault(s: RuleContext) -> str | None:
        try:
            check_bounds(FIELDS[name][1], s.value(name))
        except BoundsError as error:
            return f"{spelled(name)} {error}"
        return None

    rule(f"bounds-{name.replace('_', '-')}", spelled(name), f"change what {spelled(name)} follows from")(
        fault
    )


for _name, (_, _field) in FIELDS.items():
    _info = arg_info(_field)
    if _info is not None and _info.required:
        _required(_name)
for _name, (_, _field) in FIELDS.items():
    if bounds_of(_field) is not None:
        _bounded(_name)
