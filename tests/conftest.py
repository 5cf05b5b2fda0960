"""Shared by every test: one thread in this process, so that forked ranks do not hang (facts: gloo and OpenMP)."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
torch.set_num_threads(1)
