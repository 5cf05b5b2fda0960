"""The argparse parser generated from the groups and the flag table, and what a command line says (floor 0)."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from megatron.command import program
from megatron.training.config import values
from megatron.training.config.config import MAX_GUESSES, closest_name
from megatron.training.config.flag_table import Arity, FlagEntry, FlagState, closest_flags, flag_table
from megatron.training.config.problems import ConfigurationError, Problem

GROUP_TITLES: Mapping[str, str] = {
    "model": "model",
    "parallel": "parallelism",
    "ddp": "data parallel engine",
    "optimizer": "precision, optimizer, schedules",
    "data": "data",
    "tokenizer": "tokenizer",
    "training": "training",
    "evaluation": "evaluation",
    "checkpoint": "checkpoints",
    "logging": "logging",
    "profiling": "profiling",
    "reliability": "reliability",
}
MAX_FLAGS = 4096  # on one line; argparse looks through all of them for each
_NEGATIVE_NUMBER = re.compile(r"-(\.?\d.*|inf|nan)")


@dataclasses.dataclass(frozen=True)
class UsedFlag:
    """A known flag that is no implemented field, as the user gave it."""

    entry: FlagEntry
    spelling: str
    words: tuple[str, ...]


@dataclasses.dataclass
class CommandLine:
    """What the user said: values by destination name with their origin, other known flags, the user's own flags."""

    values: dict[str, Any] = dataclasses.field(default_factory=dict)
    origin: dict[str, str] = dataclasses.field(default_factory=dict)
    used: list[UsedFlag] = dataclasses.field(default_factory=list)
    extra: dict[str, Any] = dataclasses.field(default_factory=dict)
    problems: list[Problem] = dataclasses.field(default_factory=list)
    complete: bool = True  # False: it is not read

    def set(self, name: str, value: Any, origin: str) -> None:
        self.values[name], self.origin[name] = value, origin

    def stop(self, message: str, fix: str) -> CommandLine:
        """What is left of a line that is not read."""
        self.problems.append(Problem("flag", (), message, fix))
        self.complete = False
        return self


_Recorded = list[tuple[FlagEntry, str, list[str]]]
ExtraArgsProvider = Callable[[argparse.ArgumentParser], argparse.ArgumentParser | None]


class _Help(argparse.HelpFormatter):
    """Shows how many words a flag really takes (the parser itself accepts any number, to report all mistakes)."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=32, width=110)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        if isinstance(action, _Record):
            return f"{', '.join(action.option_strings)} {_words(action.entry)}".rstrip()
        return super()._format_action_invocation(action)


class _Parser(argparse.ArgumentParser):
    """argparse without abbreviations, whose errors are exceptions."""

    def error(self, message: str) -> Any:
        raise argparse.ArgumentError(None, message)


class _Record(argparse.Action):
    """Notes the words after a flag; they are converted, all mistakes at once, after the whole line was read."""

    def __init__(
        self, option_strings: Sequence[str], dest: str, *, entry: FlagEntry, recorded: _Recorded, help: str
    ) -> None:
        self.entry, self.recorded = entry, recorded
        super().__init__(option_strings, dest, nargs="*", default=argparse.SUPPRESS, help=help)

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        self.recorded.append((self.entry, option_string or self.entry.spelling, list(values)))


def _words(entry: FlagEntry) -> str:
    """What follows a flag, in words of the help."""
    if entry.arity is Arity.SWITCH:
        return ""
    word, kind = "VALUE", None if entry.field is None else entry.kind
    if kind is not None:
        word = {int: "N", float: "X"}.get(kind.kind, "TEXT")
        if kind.choices:
            word = "{" + ",".join(kind.choices if kind.kind is str else (word, *kind.choices)) + "}"
    return word if entry.arity is Arity.ONE else f"{word} ..."


def help_text(entry: FlagEntry) -> str:
    """One line: what the flag does, its unit, its default, and limits."""
    unit, limit = entry.info.unit, limit_text(entry) if entry.why else ""
    notes = filter(None, (f"unit: {unit}" if unit else "", default_text(entry), limit))
    return f"{entry.info.help} ({'; '.join(notes)})".replace("%", "%%")


def default_text(entry: FlagEntry) -> str:
    """ "required", "default: 12" or how the value is derived."""
    info, default = entry.info, entry.setting.default
    if default is None and not info.derived and info.required:
        return "required"
    if default is None:
        shown = info.derived or "unset"
    elif isinstance(default, bool):
        shown = "true, the flag sets false" if default else "off"
    else:
        shown = (" ".join(map(str, default)) or "none") if isinstance(default, tuple) else str(default)
    return f"default: {shown}"


def limit_text(entry: FlagEntry) -> str:
    """What of a field is not supported, or has no effect."""
    if entry.state is FlagState.INERT:
        return f"accepted, no effect: {entry.why}"
    allowed = (value for value in entry.allowed or () if value != "None")
    return f"only {', '.join(allowed)} supported so far, {entry.why}"


def _build(recorded: _Recorded, extra_args_provider: ExtraArgsProvider | None) -> argparse.ArgumentParser:
    """Fields first, then the user's own flags, then the flags that are only known: user flags win over those."""
    parser: argparse.ArgumentParser = _Parser(
        prog=program(sys.argv[0]),
        description="Train a GPT. docs/flags.md lists every flag Megatron-LM users know with its state.",
        allow_abbrev=False,
        formatter_class=_Help,
        usage="%(prog)s [--yaml-cfg FILE] [flags]",
    )
    sections = {group: parser.add_argument_group(title) for group, title in GROUP_TITLES.items()}
    for entry in flag_table().values():
        if entry.group is not None:
            _add(sections[entry.group], entry, recorded, help_text(entry))
    if extra_args_provider is not None:
        parser = extra_args_provider(parser) or parser
    known = parser.add_argument_group()  # a parser would make a page of help for each
    for entry in flag_table().values():
        if entry.group is None:
            # An ArgumentError here means that the user's own flag has this name, and theirs counts.
            with contextlib.suppress(argparse.ArgumentError):
                _add(known, entry, recorded, argparse.SUPPRESS)
    return parser


def _add(section: argparse._ActionsContainer, entry: FlagEntry, recorded: _Recorded, help: str) -> None:
    for flags, told in ((entry.flags, help), (entry.negations, argparse.SUPPRESS)):
        if flags:
            section.add_argument(
                *flags, dest=f"_{entry.name}", action=_Record, entry=entry, recorded=recorded, help=told
            )


def read_command_line(
    argv: Sequence[str],
    extra_args_provider: ExtraArgsProvider | None = None,
    args_defaults: Mapping[str, Any] | None = None,
) -> CommandLine:
    """Parse `argv`, with the YAML file it may name below it and `args_defaults` below that.

    Never raises for what a user typed: mistakes are in `.problems`. `--help` exits.
    """
    line, recorded = CommandLine(), _Recorded()
    try:
        parser = _build(recorded, extra_args_provider)
    except argparse.ArgumentError as error:
        told, fix = f"extra_args_provider: {error}", "give your own flag another name"
        raise ConfigurationError([Problem("extra-flag", (), told, fix)]) from error
    words = _joined_negatives(argv)
    if (count := sum(word.startswith("-") for word in words)) > MAX_FLAGS:
        told = f"the command line has {count} flags; at most {MAX_FLAGS} are read"
        return line.stop(told, "put settings into a file: --yaml-cfg FILE")
    namespace, unknown = _parsed(parser, words, line, recorded)
    line.extra = dict(vars(namespace))
    given = (name for name, value in line.extra.items() if value != parser.get_default(name))
    line.origin.update(dict.fromkeys(given, "flag"))
    overrides: dict[str, Any] = {}
    for name, value in (args_defaults or {}).items():
        _load(line, overrides, name, list(value) if isinstance(value, tuple) else value, "args_defaults")
    if (path := last_value(words, "--yaml-cfg")) is not None:
        settings, problems = values.read_yaml(path, frozenset(line.extra) | frozenset(flag_table()))
        line.problems += problems
        for setting in settings:
            _load(line, overrides, setting.name, setting.value, setting.origin)
    if overrides:
        # Once more over these values: what the command line says replaces them, the rest stays.
        namespace, unknown = _parsed(parser, words, line, recorded, argparse.Namespace(**overrides))
        line.extra = dict(vars(namespace))
        line.origin.update({n: "flag" for n in overrides if line.extra[n] is not overrides[n]})
    own = tuple("--" + name.replace("_", "-") for name in line.extra)
    line.problems += _unknown_problems(unknown, own)
    for entry, spelling, after in recorded:
        _record(line, entry, spelling, after)
    return line


def _parsed(
    parser: argparse.ArgumentParser,
    words: Sequence[str],
    line: CommandLine,
    recorded: _Recorded,
    namespace: argparse.Namespace | None = None,
) -> tuple[argparse.Namespace, list[str]]:
    """What the parser makes of the words. What it has against the user's own flags is a problem, after which these may
    hold anything: all that is wrong with the others is told too."""
    recorded.clear()
    try:
        return parser.parse_known_args(words, namespace)
    except argparse.ArgumentError as error:
        line.problems.append(Problem("flag", (), str(error), "see --help"))
    recorded.clear()
    for group in parser._mutually_exclusive_groups:
        group.required = False
    for action in parser._actions:
        action.required = False
        if not isinstance(action, _Record):
            action.type = action.choices = None
        for spelled in () if isinstance(action, _Record) else action.option_strings:
            parser._option_string_actions[spelled] = argparse._StoreAction([spelled], action.dest, nargs="*")
    return parser.parse_known_args(words, namespace)


def _joined_negatives(argv: Sequence[str]) -> list[str]:
    """`--lr -1e-5` as `--lr=-1e-5`, `--window-size -1,-1` likewise: argparse would take these values for flags."""
    words: list[str] = []
    for word in argv:
        if _NEGATIVE_NUMBER.fullmatch(word) and words and words[-1].startswith("--") and "=" not in words[-1]:
            words[-1] = f"{words[-1]}={word}"
        else:
            words.append(word)
    return words


def last_value(words: Sequence[str], flag: str) -> str | None:
    """A flag's value on a command line that was not parsed; None where it is not given, or without a value."""
    value = None
    for word, after in zip(words, [*words, "--"][1:], strict=True):
        if word.startswith(f"{flag}="):
            value = word.partition("=")[2]
        elif word == flag and not after.startswith("--"):
            value = after
    return value


def _load(line: CommandLine, overrides: dict[str, Any], name: str, value: Any, origin: str) -> None:
    """One setting of the file, or of `args_defaults`: of the user's own flags, a field, or another known flag."""
    entry = flag_table().get(name)
    if name in line.extra:
        overrides[name], line.origin[name] = value, origin
    elif entry is None:
        close = closest_flags("--" + name.replace("_", "-"), count=1)
        hint = f"did you mean {close[0][2:].replace('-', '_')}?" if close else "use a destination name"
        line.problems.append(Problem("args-defaults", (), f"{origin} has an unknown name {name}", hint))
    elif entry.field is not None:
        try:
            line.set(name, values.convert_loaded(entry, value), origin)
        except ValueError as error:
            fix = "give a value of this kind"
            line.problems.append(_value_problem(entry, entry.spelling, f"{origin}: {name}", error, fix))
    elif origin != "args_defaults" and value is not None and value is not False:
        given = value if isinstance(value, list) else [value]
        line.used.append(UsedFlag(entry, name, () if value is True else tuple(map(str, given))))


def _record(line: CommandLine, entry: FlagEntry, spelling: str, words: Sequence[str]) -> None:
    """One flag of the command line."""
    switch = entry.arity is Arity.SWITCH
    try:
        if switch and words:
            raise ValueError(f"takes no value, got {values.listed(words)}")
        if entry.field is None:
            if entry.arity is Arity.ONE and len(words) != 1:
                raise ValueError(f"expects one value, got {values.listed(words)}")
            values.check_words(words)
            values.check_shape(entry.name, words)
            line.used.append(UsedFlag(entry, spelling, tuple(words)))
        elif switch:
            line.set(entry.name, (spelling in entry.flags) != entry.field.default, "flag")
        else:
            line.set(entry.name, values.convert_words(entry, words), "flag")
    except ValueError as error:
        choices = None if entry.field is None else entry.kind.choices
        near = closest_name(words[0], choices) if choices and words else None
        given = "leave the value out" if switch else "give a value of this kind"
        fix = f"did you mean {near}?" if near else given
        if words and words[0] in entry.elsewhere:
            fix = entry.fix_of_elsewhere
        line.problems.append(_value_problem(entry, spelling, spelling, error, fix))


def _value_problem(entry: FlagEntry, flag: str, told: str, error: ValueError, fix: str) -> Problem:
    """What is wrong with a value. told: whose it is, in words. fix: where the value is not one of its kind."""
    if isinstance(error, values.BoundsError):
        return Problem(f"{error.rule}-{entry.name.replace('_', '-')}", (flag,), f"{told} {error}", error.fix)
    return Problem("value", (flag,), f"{told} {error}", fix)


def _unknown_problems(words: Sequence[str], own: tuple[str, ...]) -> list[Problem]:
    """Words that no flag took: unknown flags (their values belong to them) and strays."""
    problems: list[Problem] = []
    stray, more = True, 0
    for word in words:
        unknown = re.match(r"--.|-[a-z]", word) is not None
        if not unknown and not stray:
            continue
        stray = not unknown
        if len(problems) == MAX_GUESSES:
            more += 1
        elif unknown:
            flag = values.shortened(word.partition("=")[0])
            close = closest_flags(f"--{flag.lstrip('-')}", own)
            fix = f"did you mean {', '.join(close)}?" if close else "see docs/flags.md for every known flag"
            problems.append(Problem("unknown-flag", (flag,), f"unknown flag {flag}", fix, close))
        else:
            told = f"{values.shown(word)} belongs to no flag"
            problems.append(Problem("stray-word", (), told, "put it behind its flag"))
    if more:
        told = f"{more} more words are unknown flags, or belong to none"
        problems.append(Problem("unknown-flag", (), told, "mend those above first"))
    return problems
