#!/usr/bin/env python3
"""pretrain_gpt.py beside packages of trackers that are those of the folder PACKAGES; WAIT: seconds for their close."""

import os
import runpy
import sys
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[3] / "pretrain_gpt.py"
sys.path[:0] = [os.environ["PACKAGES"], str(SCRIPT.parent)]


def main():
    from megatron.training.report import writers

    writers.CLOSE_S = float(os.environ["WAIT"])
    runpy.run_path(str(SCRIPT), run_name="__main__")


if __name__ == "__main__":
    main()
