"""`--yaml-cfg FILE`: settings by destination name, flat, dotted (`model.num_layers`) or in group sections (floor 0).

A file of whatever content is read in a second or refused: its bytes, its values and their nesting are bounded, values
that an alias repeats count each time.
"""

from __future__ import annotations

import dataclasses
import difflib
from typing import Any

from megatron.core.safe_files import read_text
from megatron.training.config.config import CLOSE_ENOUGH, FIELDS, GROUPS, MAX_GUESSES
from megatron.training.config.problems import Problem
from megatron.training.config.values import shortened

MAX_BYTES = 1 << 20
MAX_VALUES = 1 << 16  # keys count too; a printed configuration has 500
MAX_DEPTH = 16  # settings in a section need 3
_MAX_DIGITS = 64


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
