#!/usr/bin/env python3
"""pretrain_gpt.py whose rank R runs on a host of its own, as the folder SYSTEMS/R has it."""

import functools
import os
import runpy
import sys
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[3] / "pretrain_gpt.py"
sys.path.insert(0, str(SCRIPT.parent))


def main():
    from megatron.core import machine

    root = Path(os.environ["SYSTEMS"]) / os.environ.get("RANK", "0")
    machine.total_bytes = functools.partial(machine.total_bytes, root)
    runpy.run_path(str(SCRIPT), run_name="__main__")


if __name__ == "__main__":
    main()
