"""`--yaml-cfg FILE`: settings by destination name, flat, dotted (`model.num_layers`) or in group sections (floor 0).

A file of whatever content is read in a second or refused: its bytes, its values and their nesting are bounded, values
that an alias repeats count each time.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from megatron.core.safe_files import read_text
from megatron.training.config.config import FIELDS, GROUPS, MAX_GUESSES, closest_names
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
    try:
        text = read_text(path, max_bytes=MAX_BYTES, follow=True)
    except OSError as error:
        return [], [_problem(path, f"cannot be read: {error.strerror}", "name an existing YAML file")]
    except ValueError as error:  # no text, or a NUL byte in the name
        return [], [Problem("yaml", ("--yaml-cfg",), str(error), "name a YAML file")]
    return _Reader(path, known).read(text)


def _problem(where: str, message: str, fix: str) -> Problem:
    return Problem("yaml", ("--yaml-cfg",), f"{where} {message}", fix)


class _Reader:
    def __init__(self, path: str, known: frozenset[str]) -> None:
        self.path, self.known = path, known
        self.settings: list[YamlSetting] = []
        self.problems: list[Problem] = []
        self.num_values = self.num_unknown = 0

    def read(self, text: str) -> tuple[list[YamlSetting], list[Problem]]:
        import yaml  # late: half of the start-up time, and only needed here

        try:
            # A composed document carries line numbers and builds nothing; only plain scalars and lists are
            # constructed.
            root = yaml.compose(text, Loader=_bounded_loader(yaml))
            if root is None:
                return [], []
            if not isinstance(root, yaml.MappingNode):
                return [], [
                    _problem(self.path, "holds no mapping of settings", "write lines such as num_layers: 12")
                ]
            self._mapping(yaml, root, group=None)
        except yaml.YAMLError as error:
            mark = getattr(error, "problem_mark", None)
            where = f"{self.path}:{mark.line + 1}" if mark is not None else self.path
            why = getattr(error, "problem", None) or "cannot be parsed"
            return [], [_problem(where, f"is no valid YAML: {why}", "mend this line")]
        except ValueError as error:
            return [], [_problem(self.path, str(error), "write settings only, as --check-config prints them")]
        if self.num_unknown > MAX_GUESSES:
            told = f"has {self.num_unknown - MAX_GUESSES} more unknown settings"
            self.problems.append(_problem(self.path, told, "see docs/flags.md for the names"))
        return self.settings, self.problems

    def _mapping(self, yaml: Any, node: Any, group: str | None) -> None:
        seen: set[str] = set()
        for key_node, value_node in node.value:
            where = f"{self.path}:{key_node.start_mark.line + 1}"
            key = str(key_node.value) if isinstance(key_node, yaml.ScalarNode) else ""
            if key in seen:
                told = f"sets {shortened(key)} a second time"
                self.problems.append(_problem(where, told, "keep one of the lines"))
                continue
            seen.add(key)
            if group is None and key in (*GROUPS, "extra") and isinstance(value_node, yaml.MappingNode):
                self._mapping(yaml, value_node, group=key)
                continue
            name = self._name(key, group, where)
            if name is None:
                continue
            if not _plain(yaml, value_node):
                self.problems.append(
                    _problem(where, f"{key} is no plain value or list", "write a value or a list")
                )
                continue
            try:
                value = self._value(yaml, value_node)
            except ValueError as error:
                self.problems.append(_problem(where, f"{key} {error}", "write a value that can be meant"))
                continue
            self.settings.append(YamlSetting(name, value, where))

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
        section, _, name = key.replace("-", "_").rpartition(".")
        section = section or group or ""
        if name in FIELDS and section in ("", FIELDS[name][0]):
            return name
        if name in self.known and section in ("", "extra"):
            return name
        if name in FIELDS:
            message, fix = (
                f"has no setting {key} in section {section}",
                f"{name} belongs to {FIELDS[name][0]}",
            )
        else:
            self.num_unknown += 1
            if self.num_unknown > MAX_GUESSES:
                return None  # told together
            key, name = shortened(key), shortened(name)
            close = closest_names(name, [*FIELDS, *sorted(self.known - FIELDS.keys())])
            message = f"has an unknown setting {key or '(no name)'}"
            fix = f"did you mean {close[0]}?" if close else "see docs/flags.md for the names"
        self.problems.append(_problem(where, message, fix))
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
            if self.num_nodes > MAX_VALUES or self.depth > MAX_DEPTH:
                told = (
                    "is nested too deeply"
                    if self.depth > MAX_DEPTH
                    else f"holds more than {MAX_VALUES} values"
                )
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
