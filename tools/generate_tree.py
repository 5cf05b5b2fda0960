#!/usr/bin/env python3
"""Writes the tree in docs/architecture.md from the modules' first docstring sentences; `--check` only compares."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tools import generated
from tools.generated import ROOT

PAGE = ROOT / "docs" / "architecture.md"
ROOMS = ("megatron", "tools", "benchmarks", "extras")


def tree() -> str:
    """A heading a folder, a line a module: what it is, as its docstring says in its first sentence."""
    return "```\n" + "\n".join(_lines()) + "\n```\n"


def _lines() -> Iterator[str]:
    yield f"{'pretrain_gpt.py':<28} {_first_sentence(ROOT / 'pretrain_gpt.py')}"
    folders = sorted({path.parent for room in ROOMS for path in (ROOT / room).rglob("*.py")})
    for folder in folders:
        modules = [path for path in sorted(folder.glob("*.py")) if path.stat().st_size]
        if modules:
            yield f"{folder.relative_to(ROOT)}/"
            yield from (f"  {path.name:<26} {_first_sentence(path)}" for path in modules)


def _first_sentence(path: Path) -> str:
    docstring = ast.get_docstring(ast.parse(path.read_text()))
    assert docstring, f"{path}: a module's docstring says in its first sentence what it is"
    return " ".join(docstring.partition("\n\n")[0].split()).partition(". ")[0].removesuffix(".")


def page(text: str) -> str:
    """The page with its tree as it should be."""
    return generated.between(text, "tree", "generate_tree.py", tree())


def main() -> int:
    """0, or 1 with --check when the page is not what it should be."""
    return generated.main(__doc__, lambda: {PAGE: page(PAGE.read_text())})


if __name__ == "__main__":
    sys.exit(main())
