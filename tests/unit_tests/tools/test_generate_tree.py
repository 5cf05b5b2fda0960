"""docs/architecture.md names every module, and no other."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]


def test_the_tree_is_fresh_and_names_each_module_once():
    done = subprocess.run(
        [sys.executable, str(ROOT / "tools" / "generate_tree.py"), "--check"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    page = (ROOT / "docs" / "architecture.md").read_text()
    block = page.partition("## Tree")[2].partition("```\n")[2].partition("```")[0]
    folder, named = "", []
    for line in block.splitlines():
        if found := re.match(r"  (\w+\.py) ", line):
            named.append(folder + found[1])
        elif line.endswith("/"):
            folder = line
    there = [
        path.relative_to(ROOT).as_posix()
        for room in ("megatron", "tools", "benchmarks", "extras")
        for path in (ROOT / room).rglob("*.py")
        if path.stat().st_size
    ]
    assert sorted(named) == sorted(there)
