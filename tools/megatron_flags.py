#!/usr/bin/env python3
"""Names of flags in a release of Megatron, and those of them that megatron_flags.csv and our fields have no verdict on.

A release is a wheel, or a folder with its files. Its flags are the `--words` in its strings, and the fields of its
configuration classes that hold plain values, from which its command line is generated: `--name VALUE`, or the switch
`--name`, `--no-name` where it is on by default. Nothing of it is imported or run. Exits 1 where a name has no verdict.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron.training.config.flag_table import spellings

CONFIGS = re.compile(
    r"((MLA|Heterogeneous)?Transformer|ModelParallel|(Adam|SGD)?Optimizer|(Torch)?(DistributedDataParallel|"
    r"FullyShardedDataParallel)|(GPT|BlendedMegatron)Dataset|Retro|RetroPreprocessing)Config"
)
PLAIN = re.compile(r"((Optional|List|Union|Literal|int|float|str|bool|None|list|'[^']*')[\[\], |]*)+")
FLAG = re.compile(r"(?<![\w-])--[a-z][a-z0-9]*(?:-[a-z0-9]+)*(?![\w*{-])")
NO_FLAGS = {"--global-option", "--config-settings", "--retro-index-ty"}  # pip's, and a word that is cut off


def sources(release: Path) -> Iterator[str]:
    """The texts of its Python files."""
    if release.is_dir():
        yield from (path.read_text(encoding="utf-8") for path in sorted(release.rglob("*.py")))
        return
    with zipfile.ZipFile(release) as wheel:
        yield from (wheel.read(name).decode() for name in sorted(wheel.namelist()) if name.endswith(".py"))


def flags_of(release: Path) -> dict[str, set[str]]:
    """Its flags -> the spellings of which one has to be known."""
    found: dict[str, set[str]] = {}
    for text in sources(release):
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found |= {flag: {flag} for flag in FLAG.findall(node.value) if flag not in NO_FLAGS}
            elif isinstance(node, ast.ClassDef) and CONFIGS.fullmatch(node.name):
                for name in _plain_fields(node):
                    words = name.replace("_", "-")
                    found[f"--{words}"] = {f"--{words}", f"--no-{words}", f"--disable-{words}"}
    return found


def _plain_fields(config: ast.ClassDef) -> Iterator[str]:
    for field in config.body:
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
            if not field.target.id.startswith("_") and PLAIN.fullmatch(ast.unparse(field.annotation)):
                yield field.target.id


def without_verdict(release: Path) -> list[str]:
    """Flags of a release that the table does not know."""
    known = spellings().keys() | {f"--{entry.name.replace('_', '-')}" for entry in spellings().values()}
    return sorted(flag for flag, spelled in flags_of(release).items() if spelled.isdisjoint(known))


def main() -> int:
    """0, or 1 where a flag has no verdict."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("release", type=Path, nargs="+", help="a wheel, or a folder with its files")
    missing = {release: without_verdict(release) for release in parser.parse_args().release}
    for release, flags in missing.items():
        print(
            f"{release.name}: {len(flags_of(release))} names, {len(flags)} without a verdict",
            *flags,
            sep="\n  ",
        )
    return 1 if any(missing.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
