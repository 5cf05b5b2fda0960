"""Words of a command line and settings of a YAML file, turned into values of fields within their bounds (floor 0).

`--yaml-cfg FILE` names settings by destination name, flat, dotted (`model.num_layers`) or in group sections. A file of
whatever content is read in a second or refused: its bytes, its values and their nesting are bounded, values that an
alias repeats count each time.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Sequence
from typing import Any

from megatron.core.config_base import arg_info, bounds_of, value_type
from megatron.core.list_expression import parse_list_expression, parse_pair
from megatron.core.safe_files import read_text
from megatron.training.config.config import CLOSE_ENOUGH, FIELDS, GROUPS, MAX_GUESSES
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
    assert entry.field is not None, f"{entry.spelling} is no field"
    info, kind = arg_info(entry.field), value_type(entry.field.type)
    assert info is not None, f"field {entry.name} is no flag"
    assert kind.kind is not bool, f"field {entry.name} takes no words"
    if not kind.many and len(words) != 1:
        raise ValueError(f"expects one value, got {listed(words)}")
    if kind.many and not words:
        raise ValueError("expects at least one value")
    if isinstance(info.nargs, int) and len(words) != info.nargs:
        raise ValueError(f"expects {info.nargs} values, got {listed(words)}")
    check_words(words)
    values = tuple(info.parse(word) if info.parse is not None else _value(entry, word) for word in words)
    value = values if kind.many else values[0]
    check_bounds(entry.field, value)
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
        if length > MAX_WORD_BYTES:
            raise ValueError(f"expects at most {MAX_WORD_BYTES} bytes, got {length}: {shown(word)}")


def _value(entry: FlagEntry, word: str) -> Any:
    """What one word says of a field without a parser of its own."""
    assert entry.field is not None
    kind = value_type(entry.field.type)
    if kind.choices:
        if word in kind.choices:
            return word
        if word in entry.elsewhere:
            supported = ", ".join(kind.choices)
            raise ValueError(f"{word} is not supported ({entry.elsewhere_why}); supported: {supported}")
        raise ValueError(f"expects one of {', '.join(kind.choices)}, got {shown(word)}")
    if kind.kind is str:
        if not word:
            raise ValueError("expects a text, got an empty one; leave the flag out")
        return word
    try:
        number = kind.kind(word)
    except ValueError:
        expected = "an integer" if kind.kind is int else "a number"
        raise ValueError(f"expects {expected}, got {shown(word)}") from None
    if kind.kind is float and not math.isfinite(number):
        raise ValueError(f"expects a finite number, got {shown(word)}")
    return number


def convert_loaded(entry: FlagEntry, value: Any) -> Any:
    """A value read from a file: typed already, or a word as on the command line. Raises ValueError."""
    field = entry.field
    assert field is not None, f"{entry.spelling} is no field"
    kind = value_type(field.type)
    if value is None:
        return field.default
    if kind.kind is bool:
        if not isinstance(value, bool):
            raise ValueError(f"expects true or false, got {shown(value)}")
        return value
    if isinstance(value, list) and not kind.many:
        raise ValueError(f"expects one value, got a list of {len(value)}")
    if value == [] and field.default == ():
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
    if name in ("moe_layer_freq", "no_rope_freq", "linear_attention_freq") and words:
        parse_list_expression(words[0])
    if name == "window_size" and words:
        parse_pair(words[0])


@dataclasses.dataclass(frozen=True)
class YamlSetting:
    """One line of the file: destination name, plain value, FILE:LINE."""

    name: str
    value: Any
    origin: str


def read_yaml(path: str, known: frozenset[str]) -> tuple[list[YamlSetting], list[Problem]]:
    """Settings of a file, and what is wrong with it. `known` holds names beside the fields (user flags, the table)."""
    reader = _Reader(path, known)
    try:
        text = read_text(path, max_bytes=MAX_BYTES, follow=True)
    except OSError as error:
        reader.tell(path, f"cannot be read: {error.strerror}", "name an existing YAML file")
    except ValueError as error:  # no text, or a NUL byte in the name
        reader.problems.append(Problem("yaml", ("--yaml-cfg",), str(error), "name a YAML file"))
    else:
        reader.read(text)
    return reader.settings, reader.problems


class _Reader:
    def __init__(self, path: str, known: frozenset[str]) -> None:
        self.path, self.known = path, known
        self.settings: list[YamlSetting] = []
        self.problems: list[Problem] = []
        self.num_values = self.num_unknown = 0

    def tell(self, where: str, message: str, fix: str) -> None:
        self.problems.append(Problem("yaml", ("--yaml-cfg",), f"{where} {message}", fix))

    def read(self, text: str) -> None:
        """All settings; none, and one problem, of a text that is no YAML, or no settings."""
        import yaml  # late: half of the start-up time, and only needed here

        where, why, fix = self.path, None, "write settings only, as --check-config prints them"
        try:
            # A composed document carries line numbers and builds nothing; only plain scalars and lists are
            # constructed.
            root = yaml.compose(text, Loader=_bounded_loader(yaml))
            if isinstance(root, yaml.MappingNode):
                self._mapping(yaml, root, group=None)
            elif root is not None:
                why, fix = "holds no mapping of settings", "write lines such as num_layers: 12"
        except yaml.YAMLError as error:
            mark = getattr(error, "problem_mark", None)
            where = f"{self.path}:{mark.line + 1}" if mark is not None else self.path
            why = f"is no valid YAML: {getattr(error, 'problem', None) or 'cannot be parsed'}"
            fix = "mend this line"
        except ValueError as error:
            why = str(error)
        if why is not None:
            self.settings, self.problems = [], []
            self.tell(where, why, fix)
        elif self.num_unknown > MAX_GUESSES:
            told = f"has {self.num_unknown - MAX_GUESSES} more unknown settings"
            self.tell(self.path, told, "see docs/flags.md for the names")

    def _mapping(self, yaml: Any, node: Any, group: str | None) -> None:
        seen: set[str] = set()
        for key_node, value_node in node.value:
            where = f"{self.path}:{key_node.start_mark.line + 1}"
            key = str(key_node.value) if isinstance(key_node, yaml.ScalarNode) else ""
            if key in seen:
                self.tell(where, f"sets {shortened(key)} a second time", "keep one of the lines")
                continue
            seen.add(key)
            if group is None and key in (*GROUPS, "extra") and isinstance(value_node, yaml.MappingNode):
                self._mapping(yaml, value_node, group=key)
                continue
            name = self._name(key, group, where)
            if name is None:
                continue
            if not _plain(yaml, value_node):
                self.tell(where, f"{key} is no plain value or list", "write a value or a list")
                continue
            try:
                self.settings.append(YamlSetting(name, self._value(yaml, value_node), where))
            except ValueError as error:
                self.tell(where, f"{key} {error}", "write a value that can be meant")

    def _value(self, yaml: Any, node: Any) -> Any:
        """What a scalar or a list of scalars says. Raises ValueError."""
        scalars = node.value if isinstance(node, yaml.SequenceNode) else [node]
        self.num_values += len(scalars)
        if self.num_values > MAX_VALUES:
            raise ValueError(f"is one value too many: {MAX_VALUES} are read")
        for scalar in scalars:
            if scalar.tag == "tag:yaml.org,2002:int" and len(scalar.value) > _MAX_DIGITS:
                raise ValueError(f"is a number of {len(scalar.value)} digits")
        try:
            return yaml.SafeLoader("").construct_object(node, deep=True)
        except (ValueError, KeyError, IndexError):  # `!!bool x`, `!!int ''`
            raise ValueError(f"is no {node.tag.rpartition(':')[2]}") from None

    def _name(self, key: str, group: str | None, where: str) -> str | None:
        """The destination name that a key spells; None, and a problem, for one that spells none."""
        section, _, name = key.replace("-", "_").rpartition(".")
        section = section or group or ""
        home = FIELDS[name][0] if name in FIELDS else "extra"
        sections = ("", home, "extra") if name in self.known else ("", home)
        if (name in FIELDS or name in self.known) and section in sections:
            return name
        if name in FIELDS:
            self.tell(where, f"has no setting {key} in section {section}", f"{name} belongs to {home}")
            return None
        self.num_unknown += 1
        if self.num_unknown <= MAX_GUESSES:  # the others are told together
            names = [*FIELDS, *sorted(self.known - FIELDS.keys())]
            close = difflib.get_close_matches(shortened(name), names, n=1, cutoff=CLOSE_ENOUGH)
            fix = f"did you mean {close[0]}?" if close else "see docs/flags.md for the names"
            self.tell(where, f"has an unknown setting {shortened(key) or '(no name)'}", fix)
        return None


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
                raise ValueError(f"{told} at line {self.peek_event().start_mark.line + 1}")
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
