"""Words of a command line and settings of a YAML file, turned into values of fields within their bounds (floor 0).

`--yaml-cfg FILE` names settings by destination name, flat, dotted (`model.num_layers`) or in group sections. A file of
whatever content is read in a second or refused: its bytes, its values and their nesting are bounded, values that an
alias repeats count each time.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator, Sequence
from typing import Any

from megatron.core.config_base import bounds_of, flag_names
from megatron.core.list_expression import parse_list_expression, parse_pair
from megatron.core.safe_files import read_text
from megatron.core.words import printable
from megatron.training.config.config import FIELDS, GROUPS, MAX_GUESSES, closest_name
from megatron.training.config.flag_table import FlagEntry
from megatron.training.config.problems import Problem

MAX_WORDS = 1 << 14  # after one flag; longer lists of corpora belong into a file (--data-args-path)
MAX_WORD_BYTES = 4096  # of a path, where the system ends
MAX_BYTES = 1 << 20  # of a YAML file
MAX_VALUES = 1 << 16  # keys count too; a printed configuration has 500
MAX_DEPTH = 16  # settings in a section need 3
_MAX_DIGITS = 64
_MAX_SHOWN = 60
_MAX_BITS = 64
_MEANT = "write a value that can be meant"


class BoundsError(ValueError):
    """A number beyond its field's bounds. rule: `range` below them, `limit` above. fix: what to give."""

    def __init__(self, rule: str, message: str, fix: str) -> None:
        super().__init__(message)
        self.rule, self.fix = rule, fix


def shown(value: object) -> str:
    """A value as messages show it: no longer than a line."""
    return shortened(repr(value))


def shortened(text: str) -> str:
    """The start of a text that would fill the screen, and how long it is."""
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}... ({len(text)} characters)"


def listed(words: Sequence[str]) -> str:
    """Words as messages show them; of many their number."""
    return " ".join(words) if sum(map(len, words)) <= _MAX_SHOWN and words else f"{len(words) or 'none'}"


def check_bounds(field: dataclasses.Field[Any], value: Any) -> None:
    """Raises BoundsError for a number, or one of several, that is out of its field's bounds."""
    bounds = bounds_of(field)
    for number in value if isinstance(value, tuple) else (value,):
        if bounds is None or number is None or isinstance(number, str) or bounds.hold(number):
            continue
        rule, told, fix = "range", f"at least {bounds.least}", f"give {bounds.least} or more"
        if bounds.below:
            told, fix = f"{told} and below {bounds.most}", f"give a value in [{bounds.least}, {bounds.most})"
        elif number > bounds.most:
            rule, told, fix = "limit", f"at most {bounds.most}", f"give {bounds.most} or less"
        raise BoundsError(rule, f"{shown(value)}: must be {told}", fix)


def convert_words(entry: FlagEntry, words: Sequence[str]) -> Any:
    """The value of a field that the words after its flag spell. Raises ValueError saying what was expected."""
    info, kind = entry.info, entry.kind
    assert kind.kind is not bool, f"field {entry.name} takes no words"
    if not kind.many and len(words) != 1:
        raise ValueError(f"expects one value, got {listed(words)}")
    if not words:
        raise ValueError("expects at least one value")
    if isinstance(info.nargs, int) and len(words) != info.nargs:
        raise ValueError(f"expects {info.nargs} values, got {listed(words)}")
    check_words(words)
    values = tuple(map(info.parse or functools.partial(_value, entry), words))
    value = values if kind.many else values[0]
    check_bounds(entry.setting, value)
    return value


def check_words(words: Sequence[str]) -> None:
    """Raises ValueError for what is no text, and for more of it than any value has."""
    if len(words) > MAX_WORDS:
        raise ValueError(f"expects at most {MAX_WORDS} values, got {len(words)}")
    for word in words:
        try:
            length = len(word.encode())
        except UnicodeEncodeError:
            raise ValueError(f"expects UTF-8 text, got {shown(word)}") from None
        if "\0" in word:
            raise ValueError(f"expects a text without NUL bytes, got {shown(word)}")
        if printable(word) != word:  # it would come into log lines
            raise ValueError(f"expects a text without control characters, got {shown(word)}")
        if length > MAX_WORD_BYTES:
            raise ValueError(f"expects at most {MAX_WORD_BYTES} bytes, got {length}: {shown(word)}")


def _value(entry: FlagEntry, word: str) -> Any:
    """What one word says of a field without a parser of its own."""
    kind, choices = entry.kind.kind, entry.kind.choices
    if choices:
        if word in entry.elsewhere:
            why = f"{word} is not supported ({entry.elsewhere_why})"
            raise ValueError(f"{why}; supported: {', '.join(choices)}")
        if word not in choices:
            raise ValueError(f"expects one of {', '.join(choices)}, got {shown(word)}")
        return word
    if kind is str:
        if not word:
            raise ValueError("expects a text, got an empty one; leave the flag out")
        return word
    try:
        number = kind(word)
    except ValueError:
        expected = "an integer" if kind is int else "a number"
        raise ValueError(f"expects {expected}, got {shown(word)}") from None
    if kind is float and not math.isfinite(number):
        raise ValueError(f"expects a finite number, got {shown(word)}")
    return number


def convert_loaded(entry: FlagEntry, value: Any) -> Any:
    """A value read from a file: typed already, or a word as on the command line. Raises ValueError."""
    kind, default = entry.kind, entry.setting.default
    if value is None:
        return default
    if kind.kind is bool:
        if not isinstance(value, bool):
            raise ValueError(f"expects true or false, got {shown(value)}")
        return value
    if isinstance(value, list) and not kind.many:
        raise ValueError(f"expects one value, got a list of {len(value)}")
    if value == [] and default == ():
        return ()
    items = value if isinstance(value, list) else [value]
    for item in items:
        if isinstance(item, bool | dict | list):
            raise ValueError(f"expects {kind.kind.__name__}, got {type(item).__name__}")
        if isinstance(item, int) and item.bit_length() > _MAX_BITS:  # Python might not even print it
            raise ValueError(f"expects a number of at most {_MAX_BITS} bits, got one of {item.bit_length()}")
    words = [str(item) for item in items]
    return convert_words(entry, words[0].split() if kind.many and items is not value else words)


def check_shape(name: str, words: Sequence[str]) -> None:
    """Values of flags that are known but not fields, where their shape can be wrong. Raises ValueError."""
    if name in ("no_rope_freq", "linear_attention_freq") and words:
        parse_list_expression(words[0])
    if name == "window_size" and words:
        parse_pair(words[0])


@dataclasses.dataclass(frozen=True)
class YamlSetting:
    """One line of the file: destination name, plain value, FILE:LINE."""

    name: str
    value: Any
    origin: str


class _YamlError(ValueError):
    """args: what is wrong, and what to do."""


def read_yaml(path: str, known: frozenset[str]) -> tuple[list[YamlSetting], list[Problem]]:
    """Settings of a file, and what is wrong with it. `known` holds names beside the fields (user flags, the table)."""
    import yaml  # late: half of the start-up time, and only needed here

    try:
        text = read_text(path, max_bytes=MAX_BYTES, follow=True)
        # A composed document carries line numbers and builds nothing; only plain scalars and lists are constructed.
        root = yaml.compose(text, Loader=_bounded_loader(yaml))
        if root is not None and not isinstance(root, yaml.MappingNode):
            raise _YamlError("holds no mapping of settings", "write lines such as num_layers: 12")
    except OSError as error:
        told, fix = f"{path} cannot be read: {error.strerror}", "name an existing YAML file"
    except yaml.YAMLError as error:
        mark, why = getattr(error, "problem_mark", None), getattr(error, "problem", None)
        where = f"{path}:{mark.line + 1}" if mark is not None else path
        told, fix = f"{where} is no valid YAML: {why or 'cannot be parsed'}", "mend this line"
    except _YamlError as error:
        told, fix = f"{path} {error.args[0]}", error.args[1]
    except ValueError as error:  # no text, or a NUL byte in the name
        told, fix = str(error), "name a YAML file"
    else:
        return _settings(yaml, path, known, root)
    in_it = tuple(flag_names(field)[0] for _, field in FIELDS.values())
    return [], [Problem("yaml", ("--yaml-cfg",), told, fix, in_it)]


def _settings(
    yaml: Any, path: str, known: frozenset[str], root: Any
) -> tuple[list[YamlSetting], list[Problem]]:
    """Of a document, line by line."""
    settings: list[YamlSetting] = []
    problems: list[Problem] = []
    num_values = num_unknown = 0
    for section, key, node, number, again in _lines(yaml, root) if root is not None else ():
        where, name = f"{path}:{number}", key.replace("-", "_").rpartition(".")[2]
        num_unknown += name not in FIELDS and name not in known and not again
        try:
            if again:
                raise _YamlError(f"sets {shortened(key)} a second time", "keep one of the lines")
            if name not in FIELDS and name not in known:
                if num_unknown > MAX_GUESSES:  # told together
                    continue
                close = closest_name(shortened(name), [*FIELDS, *sorted(known - FIELDS.keys())])
                fix = f"did you mean {close}?" if close else "see docs/flags.md for the names"
                raise _YamlError(f"has an unknown setting {shortened(key) or '(no name)'}", fix)
            _check_section(section, key, known)
            if not _plain(yaml, node):
                raise _YamlError(f"{key} is no plain value or list", "write a value or a list")
            num_values += len(node.value) if isinstance(node, yaml.SequenceNode) else 1
            if num_values > MAX_VALUES:
                raise _YamlError(f"{key} is one value too many: {MAX_VALUES} are read", _MEANT)
            settings.append(YamlSetting(name, _constructed(yaml, key, node), where))
        except _YamlError as error:
            problems.append(Problem("yaml", ("--yaml-cfg",), f"{where} {error.args[0]}", error.args[1]))
    if num_unknown > MAX_GUESSES:
        told = f"{path} has {num_unknown - MAX_GUESSES} more unknown settings"
        problems.append(Problem("yaml", ("--yaml-cfg",), told, "see docs/flags.md for the names"))
    return settings, problems


def _lines(yaml: Any, mapping: Any, section: str = "") -> Iterator[tuple[str, str, Any, int, bool]]:
    """Section, key, value's node, line, and whether the key stands there a second time."""
    seen: set[str] = set()
    for key_node, node in mapping.value:
        key = str(key_node.value) if isinstance(key_node, yaml.ScalarNode) else ""
        opens = not section and key in (*GROUPS, "extra") and isinstance(node, yaml.MappingNode)
        if opens and key not in seen:
            yield from _lines(yaml, node, key)
        else:
            yield section, key, node, key_node.start_mark.line + 1, key in seen
        seen.add(key)


def _check_section(section: str, key: str, known: frozenset[str]) -> None:
    """Raises _YamlError for a known setting that stands in another section than its own."""
    dotted, _, name = key.replace("-", "_").rpartition(".")
    section, home = dotted or section, FIELDS[name][0] if name in FIELDS else "extra"
    if section not in ("", home) and not (section == "extra" and name in known):
        raise _YamlError(f"has no setting {key} in section {section}", f"{name} belongs to {home}")


def _constructed(yaml: Any, key: str, node: Any) -> Any:
    """What a scalar or a list of scalars says. Raises _YamlError."""
    for scalar in node.value if isinstance(node, yaml.SequenceNode) else [node]:
        if scalar.tag == "tag:yaml.org,2002:int" and len(scalar.value) > _MAX_DIGITS:
            raise _YamlError(f"{key} is a number of {len(scalar.value)} digits", _MEANT)
    try:
        return yaml.SafeLoader("").construct_object(node, deep=True)
    except (ValueError, KeyError, IndexError):  # `!!bool x`, `!!int ''`
        raise _YamlError(f"{key} is no {node.tag.rpartition(':')[2]}", _MEANT) from None


def _bounded_loader(yaml: Any) -> Any:
    """PyYAML's safe loader, which stops at too much and too deep."""

    class Loader(yaml.SafeLoader):  # type: ignore[misc]
        def __init__(self, text: str) -> None:
            super().__init__(text)
            self.num_nodes = self.depth = 0

        def compose_node(self, parent: Any, index: Any) -> Any:
            self.num_nodes += 1
            self.depth += 1
            deep = self.depth > MAX_DEPTH
            if deep or self.num_nodes > MAX_VALUES:
                told = "is nested too deeply" if deep else f"holds more than {MAX_VALUES} values"
                where = f"at line {self.peek_event().start_mark.line + 1}"
                raise _YamlError(f"{told} {where}", "write settings only, as --check-config prints them")
            node = super().compose_node(parent, index)
            self.depth -= 1
            return node

    return Loader


def _plain(yaml: Any, node: Any) -> bool:
    """A scalar with an ordinary tag, or a list of such scalars."""
    if isinstance(node, yaml.SequenceNode):
        return node.tag.startswith("tag:yaml.org,2002:seq") and all(
            isinstance(item, yaml.ScalarNode) and _plain(yaml, item) for item in node.value
        )
    tags = ("str", "int", "float", "bool", "null")
    return isinstance(node, yaml.ScalarNode) and node.tag in {f"tag:yaml.org,2002:{tag}" for tag in tags}
