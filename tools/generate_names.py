"""Writes the table of Megatron's Python names in docs/megatron_compat.md from megatron/compat/names.csv."""

import importlib
import itertools
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs" / "megatron_compat.md"
BEGIN, END = "<!-- names: tools/generate_names.py -->\n", "<!-- end of names -->\n"


def names_table() -> str:
    """Markdown, a line a path."""
    from megatron.compat.names import table

    lines = ["| import path | names | not here |", "|---|---|---|"]
    for path, rows in itertools.groupby(table(), key=lambda row: row["path"]):
        here, refused = [], []
        for row in rows:
            if row["instead"]:
                refused.append(f"`{row['name']}`: {row['instead']}" if row["name"] else row["instead"])
            else:
                here += [row["name"]] if row["name"] != "*" else importlib.import_module(row["home"]).__all__
        lines.append(
            f"| `{path}` | {', '.join(f'`{name}`' for name in sorted(here))} | {'; '.join(refused)} |"
        )
    return "\n".join(lines) + "\n"


def with_table(text: str) -> str:
    """The page with the table as it is now."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return before + BEGIN + names_table() + END + after


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    DOCS.write_text(with_table(DOCS.read_text()))
