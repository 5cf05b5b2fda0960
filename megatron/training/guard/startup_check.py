"""Before there is any group: do all ranks run the same configuration, code, torch, Python and backend?

A rank with an old checkout or another flag trains silently wrong, or makes other groups than the others and hangs in
the first; here it is named within a second. Ranks talk through the store (`meeting.Meeting`).
"""

from __future__ import annotations

import hashlib
import json
import platform
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron.training.guard.meeting import Meeting, ranks_have

PACKAGE_DIR = Path(__file__).resolve().parent.parent
MAX_NAMED = 8  # differences in one message


class StartupMismatchError(ValueError):
    """Ranks disagree on configuration, code or versions (exit status 2)."""


def config_text(config: Mapping[str, Any]) -> str:
    """The resolved flat configuration, each value as it is shown."""
    return json.dumps({name: repr(value) for name, value in config.items()}, sort_keys=True)


def code_digest(package_dir: Path = PACKAGE_DIR) -> str:
    """SHA-256 over names and contents of the package's Python files."""
    digest = hashlib.sha256()
    for path in sorted(package_dir.rglob("*.py"), key=lambda p: p.relative_to(package_dir).as_posix()):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(package_dir).as_posix()}\0{len(content)}\0".encode())
        digest.update(content)
    return digest.hexdigest()


def compare_across_ranks(
    meeting: Meeting,
    config: Mapping[str, Any],
    *,
    backend: str,
    torch_version: str,
    ignore: Collection[str] = (),
    package_dir: Path = PACKAGE_DIR,
) -> dict[str, str]:
    """Compare all ranks; returns what they have in common. Every rank calls it and every rank raises alike.

    config: `Config.flat()`. ignore: configuration names that may differ between ranks.
    Raises StartupMismatchError naming rank and field (for the configuration also the values), and what `decide` raises.
    """
    text = config_text({name: value for name, value in config.items() if name not in ignore})
    mine = {
        "configuration": hashlib.sha256(text.encode()).hexdigest(),
        "code": code_digest(package_dir),
        "backend": backend,
        "torch version": torch_version,
        "Python version": platform.python_version(),
    }
    if unlike := meeting.decide(mine, {mine["configuration"]: text}, differences):
        raise StartupMismatchError(unlike)
    return mine


def differences(ranks: Sequence[Mapping[str, str]], config_of: Callable[[str], str]) -> str:
    """What to tell of ranks that were not started alike; empty where all were. config_of: from a digest to
    `config_text`."""
    problems = mismatches(ranks)
    if "configuration" in {field for field, _, _ in problems}:
        # Only now: the digests are small, whole configurations of thousands of ranks are not.
        whole = {
            digest: json.loads(config_of(digest)) for digest in {facts["configuration"] for facts in ranks}
        }
        flags = mismatches([whole[facts["configuration"]] for facts in ranks])
        problems = flags + [problem for problem in problems if problem[0] != "configuration"]
    if not problems:
        return ""
    lines = [f"  {field}: {ranks_have(who)} {text}" for field, who, text in problems[:MAX_NAMED]]
    more = len(problems) - MAX_NAMED
    lines += [f"  and {more} more differences"] if more > 0 else []
    return (
        "the ranks were not started alike:\n" + "\n".join(lines) + "\n"
        "Start every rank with the same flags, code and environment."
    )


def mismatches(ranks: Sequence[Mapping[str, Any]]) -> list[tuple[str, list[int], str]]:
    """(field, ranks that differ, what they have) against the most common value; ties go to rank 0's."""
    found = []
    for field in dict.fromkeys(name for values in ranks for name in values):
        values = [values.get(field) for values in ranks]
        counts = Counter(values)
        reference = max(counts, key=lambda value: (counts[value], value == values[0]))
        others = dict.fromkeys(value for value in values if value != reference)
        witness = values.index(reference)
        for other in others:
            odd = [rank for rank, value in enumerate(values) if value == other]
            found.append((field, odd, f"{_shown(other)}, rank {witness} {_shown(reference)}"))
    return found


def _shown(value: Any) -> str:
    text = "no value" if value is None else str(value)
    is_digest = len(text) == 64 and all(c in "0123456789abcdef" for c in text)
    return f"digest {text[:12]}" if is_digest else text
