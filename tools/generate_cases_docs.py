"""The table of functional cases in docs/functional_tests.md, made from their files; run by `make docs`. `--check` only
compares."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tools.cases.case import CASES, read_case
from tools.generated import ROOT, between, main

PAGE = ROOT / "docs" / "functional_tests.md"


def table() -> str:
    """A line a case: its name, ranks of each run, type, and what its first line says."""
    rows = ["| case | ranks | type | |", "|---|---|---|---|"]
    for case in map(read_case, sorted(CASES.glob("*.yaml"))):
        ranks = ", ".join(str(run.ranks) for run in case.runs)
        rows.append(f"| `{case.name}` | {ranks} | {case.type} | {case.about} |")
    return "\n".join(rows) + "\n"


def pages() -> dict[Path, str | None]:
    return {PAGE: between(PAGE.read_text(), "cases", "generate_cases_docs.py", table())}


if __name__ == "__main__":
    sys.exit(main(__doc__, pages))
