"""Run the CPU suite in parts, two at a time: `make test`. Most tests wait for other ranks or use one core.

Options are pytest's: `python tools/run_tests.py -m "not full" --durations=10`. What a part says is printed when it has
ended; the exit status is 1 if any failed.
"""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TESTS = ROOT / "tests"
AT_ONCE = 2
# The longest first, so that the last two end together; what no other names is the last.
LONGEST = (
    "functional_tests/test_*.py",
    "unit_tests/core",
    "parity",
    "unit_tests/training",
    "functional_tests/front_door",
)
SAID = re.compile(r"(\d+) (passed|failed|skipped|errors?|deselected)")


def parts(tests: Path = TESTS) -> list[list[Path]]:
    """Paths of each part: every test file is below exactly one of them."""
    made = [sorted(tests.glob(pattern)) for pattern in LONGEST]
    named = {file for part in made for path in part for file in files_of(path)}
    return [*made, sorted(set(files_of(tests)) - named)]


def files_of(path: Path) -> list[Path]:
    """Test files at or below a path."""
    return [path] if path.is_file() else sorted(path.rglob("test_*.py"))


def run(part: Sequence[Path], options: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """One part in a process of its own."""
    words = [sys.executable, "-m", "pytest", *map(str, part), *options]
    return subprocess.run(words, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def main(options: Sequence[str]) -> int:
    start, counts, failed = time.monotonic(), Counter[str](), False
    with ThreadPoolExecutor(AT_ONCE) as pool:
        under_way = [pool.submit(run, part, options) for part in parts()]
        for done in as_completed(under_way):
            result = done.result()
            print(result.stdout, flush=True)
            failed = failed or result.returncode != 0
            summary = result.stdout.rstrip().rpartition("\n")[2]
            counts.update({what: int(number) for number, what in SAID.findall(summary)})
    said = ", ".join(f"{number} {what}" for what, number in counts.items())
    print(f"{said} in {time.monotonic() - start:.0f} s")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
