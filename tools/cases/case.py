"""A functional case: a YAML file in Megatron-LM's shape, with a few keys of ours (docs/functional_tests.md)."""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from megatron.core import safe_files
from megatron.training.config.flag_table import closest_flags, flag_table

ROOT = Path(__file__).resolve().parents[2]
CASES = ROOT / "tests" / "functional_tests" / "cases"
TYPES = ("regular", "ckpt-resume", "frozen-resume", "checkpoint-consistency")
OTHER_TYPES = ("frozen-start", "release")  # Megatron's
KEYS = ("ENV_VARS", "MODEL_ARGS", "TEST_TYPE", "METRICS", "RANKS", "EXTENDS", "TRAINING_SCRIPT_PATH")
NUMBERED = ("MODEL_ARGS", "RANKS", "CONVERT")  # MODEL_ARGS_2: of the second run
NO_MEANING = ("MODE", "LAUNCHER", "N_REPEAT", "SKIP_PYTEST")  # Megatron's, of its own CI
SCRIPTS = ("BEFORE_SCRIPT", "AFTER_SCRIPT")
SIZES = ("--tensor-model-parallel-size", "--pipeline-model-parallel-size", "--context-parallel-size")
_VARIABLE = re.compile(r"\$\{(\w+)\}")
_MANY = 64  # runs of a case
MOST_BYTES = 1 << 24  # of a case, and of its golden values


class CaseError(ValueError):
    """What is wrong with a case, its golden values or its launcher."""


class RunFailedError(Exception):
    """A run has not ended with status 0."""


class Line(NamedTuple):
    """A value of a case: its words, and where it stands."""

    words: tuple[str, ...]
    number: int
    path: Path


@dataclasses.dataclass(frozen=True)
class Run:
    """flags: of the trainer, with their words; () is a switch. convert: words of tools/checkpoint.py, before it."""

    ranks: int
    flags: Mapping[str, Line]
    convert: Line | None = None

    def words(self, variables: Mapping[str, str]) -> list[str]:
        """The command line. Raises CaseError for a variable that is not there."""
        return [word for flag, line in self.flags.items() for word in (flag, *filled(line, variables))]


@dataclasses.dataclass(frozen=True)
class Case:
    """about: its first line, a comment. metrics: None for all that are judged. ignored: keys without a meaning here."""

    path: Path
    about: str
    type: str
    script: str
    env: Mapping[str, Line]
    metrics: tuple[str, ...] | None
    runs: tuple[Run, ...]
    ignored: tuple[str, ...]

    @property
    def name(self) -> str:
        return self.path.parent.name if self.path.name == "model_config.yaml" else self.path.stem

    @property
    def golden(self) -> Path:
        return self.path.with_suffix(".golden.json")

    @property
    def compares_its_runs(self) -> bool:
        """Whether there is something to compare without golden values."""
        resumes = self.type == "ckpt-resume" and self.runs[0] == self.runs[1]
        return resumes or self.type == "checkpoint-consistency"

    @property
    def frozen(self) -> Path:
        """The checkpoints that frozen-resume begins with."""
        return self.path.with_suffix(".checkpoints")


def find(word: str) -> Path:
    """A file, a folder with a model_config.yaml, or the name of a case here. Raises CaseError."""
    for path in (Path(word), Path(word) / "model_config.yaml", CASES / f"{word}.yaml"):
        if path.is_file():
            return path.resolve()
    names = [path.stem for path in CASES.glob("*.yaml")]
    raise CaseError(f"no case {word!r}: neither a file nor a name in {CASES}{_near(word, names)}")


def read_case(path: Path) -> Case:
    """Raises CaseError, naming file and line."""
    entries = _entries(path)
    one = {key: entries[key] for key in KEYS if key in entries}
    kind = " ".join(one["TEST_TYPE"].words) if "TEST_TYPE" in one else TYPES[0]
    if kind not in TYPES:
        known = (
            f"{kind} is not built" if kind in OTHER_TYPES else f"no test type {kind!r}{_near(kind, TYPES)}"
        )
        raise _error(one["TEST_TYPE"], f"TEST_TYPE: {known}; {', '.join(TYPES)} are")
    if "MODEL_ARGS" not in one:
        raise CaseError(f"{path}: no MODEL_ARGS")
    numbers = sorted({int(key.rpartition("_")[2]) for key in entries if _numbered(key)})
    if numbers != list(range(2, 2 + len(numbers))) or len(numbers) > _MANY:
        raise CaseError(f"{path}: runs behind the first are 2, 3 ... without a gap, found {numbers}")
    if kind == "ckpt-resume":
        numbers = numbers or [2]
    runs = [_run(entries, "", path)]
    for number in numbers:
        runs.append(_run(entries, f"_{number}", path, runs[0]))
    script = one.get("TRAINING_SCRIPT_PATH")
    first = safe_files.read_text(path, max_bytes=MOST_BYTES).partition("\n")[0]
    return Case(
        path,
        first[1:].strip() if first.startswith("#") else "",
        kind,
        script.words[0] if script else "pretrain_gpt.py",
        one.get("ENV_VARS", {}),
        tuple(one["METRICS"].words) if "METRICS" in one else None,
        tuple(runs),
        tuple(key for key in entries if key in NO_MEANING),
    )


def filled(line: Line, variables: Mapping[str, str]) -> list[str]:
    """The words with the variables' values. Raises CaseError for one that has none."""

    def value(found: re.Match[str]) -> str:
        if found[1] not in variables:
            raise _error(line, f"${{{found[1]}}} has no value{_near(found[1], variables)}")
        return variables[found[1]]

    return [_VARIABLE.sub(value, word) for word in line.words]


def _run(entries: Mapping[str, Any], suffix: str, path: Path, first: Run | None = None) -> Run:
    """The run of MODEL_ARGS and RANKS with this suffix, whose values are the first run's where they are not there."""
    flags = entries.get(f"MODEL_ARGS{suffix}", None if first is None else first.flags)
    if first is not None and "EXTENDS" in entries:
        flags = {**first.flags, **flags}
    kept = {flag: line for flag, line in flags.items() if line.words not in (("false",), ("null",))}
    kept = {
        flag: line._replace(words=line.words if line.words != ("true",) else ())
        for flag, line in kept.items()
    }
    ranks = entries.get(f"RANKS{suffix}")
    if ranks is not None and not (len(ranks.words) == 1 and ranks.words[0].isdigit() and int(ranks.words[0])):
        raise _error(ranks, f"RANKS{suffix}: expected a number of ranks, found {' '.join(ranks.words)!r}")
    least = 1
    for size in SIZES:
        if (line := kept.get(size)) and line.words[0].isdigit():
            least *= int(line.words[0])
    count = int(ranks.words[0]) if ranks else max(least, first.ranks if first else 1)
    return Run(count, kept, entries.get(f"CONVERT{suffix}"))


# --- the file


def _entries(path: Path, seen: tuple[Path, ...] = ()) -> dict[str, Any]:
    """Key -> Line, or flag -> Line of what has names below it; laid over what the file EXTENDS."""
    try:
        loader = yaml.SafeLoader(safe_files.read_text(path, max_bytes=MOST_BYTES))
        root = loader.get_single_node()
    except (OSError, safe_files.FileContentError, yaml.YAMLError, RecursionError) as error:
        raise CaseError(f"{path}: {' '.join(str(error).split())}") from None
    entries: dict[str, Any] = {}
    for key, (line, node) in _pairs(loader, root, path).items():
        if key in SCRIPTS:
            raise CaseError(f"{path}, line {line}: {key} is not run: do its work before, and leave it out")
        if key not in (*KEYS, *NO_MEANING) and not _numbered(key):
            raise CaseError(
                f"{path}, line {line}: no key {key!r} of a case{_near(key, (*KEYS, *NO_MEANING))}"
            )
        if key.startswith(("ENV_VARS", "MODEL_ARGS")):
            pairs = _pairs(loader, node, path)
            entries[key] = {name: Line(_separate(value), at, path) for name, (at, value) in pairs.items()}
        else:
            entries[key] = Line(_words(node), line, path)
    for key, flags in entries.items():
        if key.startswith("MODEL_ARGS") and "TRAINING_SCRIPT_PATH" not in entries:
            _check_flags(flags)
    if "EXTENDS" not in entries:
        return entries
    word = " ".join(entries["EXTENDS"].words)
    base = next((base for base in (path.parent / word, CASES / f"{word}.yaml") if base.is_file()), None)
    if base is None or base in seen:
        why = "extends itself" if base else f"is neither a file beside this one nor a name in {CASES}"
        raise _error(entries["EXTENDS"], f"EXTENDS: {word} {why}")
    below = _entries(base, (*seen, path, base))
    for key in ("ENV_VARS", "MODEL_ARGS"):
        entries[key] = {**below.get(key, {}), **entries.get(key, {})}
    return {**below, **entries}


def _pairs(loader: yaml.SafeLoader, node: Any, path: Path) -> dict[str, tuple[int, yaml.Node]]:
    """Name -> line and value. Raises CaseError for what has no names, or one twice."""
    if not isinstance(node, yaml.MappingNode):
        line = f", line {node.start_mark.line + 1}" if node else ""
        raise CaseError(f"{path}{line}: expected names with values")
    keys = [key.value for key, _ in node.value]
    for at, (key, _) in enumerate(node.value):
        if key.value in keys[:at]:
            raise CaseError(f"{path}, line {key.start_mark.line + 1}: {key.value} stands there twice")
    loader.flatten_mapping(node)
    return {str(key.value): (key.start_mark.line + 1, value) for key, value in node.value}


def _words(node: yaml.Node) -> tuple[str, ...]:
    """Of a value as it is written: 1e-2 stays 1e-2. A list is several words."""
    if isinstance(node, yaml.SequenceNode):
        return tuple(word for part in node.value for word in _words(part))
    if node.tag == "tag:yaml.org,2002:bool":
        return ("true" if yaml.SafeLoader.bool_values[node.value.lower()] else "false",)
    return ("null",) if node.tag == "tag:yaml.org,2002:null" else (str(node.value),)


def _separate(node: yaml.Node) -> tuple[str, ...]:
    """Of a flag or variable: [a b] is two words, as Megatron's shell has it; "a b" is one."""
    words = _words(node)
    many = isinstance(node, yaml.SequenceNode)
    return tuple(word for part in words for word in part.split()) if many else words


def _check_flags(flags: Mapping[str, Line]) -> None:
    known = {word for entry in flag_table().values() for word in (*entry.flags, *entry.negations)}
    for flag, line in flags.items():
        if flag not in known:
            near = "".join(f": did you mean {flag}?" for flag in closest_flags(flag, count=1))
            raise _error(line, f"no flag {flag}{near}")


def _numbered(key: str) -> bool:
    return bool(re.fullmatch(rf"({'|'.join(NUMBERED)})_\d+", key))


def _near(word: str, words: Iterable[str]) -> str:
    near = difflib.get_close_matches(word, list(words), n=1)
    return f": did you mean {near[0]}?" if near else ""


def _error(line: Line, text: str) -> CaseError:
    return CaseError(f"{line.path}, line {line.number}: {text}")
