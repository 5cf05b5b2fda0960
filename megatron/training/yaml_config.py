"""`--yaml-cfg FILE`: settings by destination name, flat, dotted (`model.num_layers`) or in group sections (floor 0)."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from megatron.training.config import FIELDS, GROUPS, closest_names
from megatron.training.problems import Problem

MAX_BYTES = 1 << 20


@dataclasses.dataclass(frozen=True)
class YamlSetting:
    """One line of the file: destination name, plain value, FILE:LINE."""

    name: str
    value: Any
    origin: str


def read_yaml(path: str, known: frozenset[str]) -> tuple[list[YamlSetting], list[Problem]]:
    """Settings of a file, and what is wrong with it. `known` holds names beside the fields (user flags, the table)."""
    try:
        raw = Path(path).read_bytes()
        if len(raw) > MAX_BYTES:
            return [], [_problem(path, f"is {len(raw)} bytes long; at most {MAX_BYTES} are read", "split it")]
        return _Reader(path, known).read(raw.decode())
    except OSError as error:
        return [], [_problem(path, f"cannot be read: {error.strerror}", "name an existing YAML file")]
    except UnicodeDecodeError:
        return [], [_problem(path, "is not UTF-8 text", "name a YAML file")]


def _problem(where: str, message: str, fix: str) -> Problem:
    return Problem("yaml", ("--yaml-cfg",), f"{where} {message}", fix)


class _Reader:
    def __init__(self, path: str, known: frozenset[str]) -> None:
        self.path, self.known = path, known
        self.settings: list[YamlSetting] = []
        self.problems: list[Problem] = []

    def read(self, text: str) -> tuple[list[YamlSetting], list[Problem]]:
        import yaml  # late: half of the start-up time, and only needed here

        try:
            # A composed document carries line numbers and builds nothing; only plain scalars and lists are
            # constructed.
            root = yaml.compose(text, Loader=yaml.SafeLoader)
            if root is None:
                return [], []
            if not isinstance(root, yaml.MappingNode):
                return [], [
                    _problem(self.path, "holds no mapping of settings", "write lines such as num_layers: 12")
                ]
            self._mapping(yaml, root, group=None)
        except (yaml.YAMLError, RecursionError) as error:
            mark = getattr(error, "problem_mark", None)
            where = f"{self.path}:{mark.line + 1}" if mark is not None else self.path
            why = getattr(error, "problem", None) or "cannot be parsed"
            return [], [_problem(where, f"is no valid YAML: {why}", "mend this line")]
        return self.settings, self.problems

    def _mapping(self, yaml: Any, node: Any, group: str | None) -> None:
        seen: set[str] = set()
        for key_node, value_node in node.value:
            where = f"{self.path}:{key_node.start_mark.line + 1}"
            key = str(key_node.value) if isinstance(key_node, yaml.ScalarNode) else ""
            if key in seen:
                self.problems.append(_problem(where, f"sets {key} a second time", "keep one of the lines"))
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
            value = yaml.SafeLoader("").construct_object(value_node, deep=True)
            self.settings.append(YamlSetting(name, value, where))

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
            close = closest_names(name, [*FIELDS, *sorted(self.known - FIELDS.keys())])
            message = f"has an unknown setting {key or '(no name)'}"
            fix = f"did you mean {close[0]}?" if close else "see docs/flags.md for the names"
        self.problems.append(_problem(where, message, fix))
        return None


def _plain(yaml: Any, node: Any) -> bool:
    """A scalar with an ordinary tag, or a list of such scalars."""
    if isinstance(node, yaml.SequenceNode):
        return node.tag.startswith("tag:yaml.org,2002:seq") and all(
            isinstance(item, yaml.ScalarNode) and _plain(yaml, item) for item in node.value
        )
    tags = ("str", "int", "float", "bool", "null")
    return isinstance(node, yaml.ScalarNode) and node.tag in {f"tag:yaml.org,2002:{tag}" for tag in tags}
