"""docs/flags.md is what the flag table says."""

import subprocess
import sys
from pathlib import Path

from megatron.training.config.flag_table import flag_table

ROOT = Path(__file__).resolve().parents[3]


def test_the_page_is_fresh_and_holds_every_flag():
    done = subprocess.run(
        [sys.executable, str(ROOT / "tools" / "generate_flags_docs.py"), "--check"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    page = (ROOT / "docs" / "flags.md").read_text()
    missing = [flag for entry in flag_table().values() for flag in entry.flags if f"`{flag}`" not in page]
    assert not missing
