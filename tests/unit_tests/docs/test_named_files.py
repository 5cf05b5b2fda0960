"""Python files that pages and docstrings name are there: who reads of one can open it."""

import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
NAMED = re.compile(r"(?<![\w./{},*-])((?:[a-z_0-9]+/)*[a-z_0-9]+\.py)\b")
# What readers make themselves, and pages that say what was once: one decision a page, with its date in the roadmap.
OF_READERS = {
    "your_script.py",
    "my_trainer.py",
    "train_counting.py",
    "train_loop.py",
    "eager.py",
    "seed_oss.py",
}
HISTORY = ("CHANGELOG.md", "docs/design/")
OF_OTHERS = {"param_and_grad_buffer.py"}  # Megatron-LM's


def test_files_that_are_named_are_there():
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True
    )
    files = [f"/{name}" for name in listed.stdout.split() if (ROOT / name).exists()]
    pages = [
        name[1:]
        for name in files
        if name.endswith((".py", ".md")) and not name[1:].startswith(("tests/", "extras/", *HISTORY))
    ]
    assert len(pages) > 500
    lost = {
        f"{page}: {name}"
        for page in pages
        for name in NAMED.findall((ROOT / page).read_text())
        if not any(file.endswith(f"/{name}") for file in files)
        and name.rpartition("/")[2] not in OF_READERS | OF_OTHERS
    }
    assert not lost, sorted(lost)
