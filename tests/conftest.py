"""Shared by every test: one thread in this process, as forked ranks hang on OpenMP threads of their parent."""

import gc
import importlib
import os
import signal
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
torch.set_num_threads(1)
# Torch's optimizers import their compiler (a second) at their first step: once before ranks are forked, and not in
# every rank.
os.register_at_fork(before=lambda: importlib.import_module("torch._dynamo"))
# What a rank inherits from this process, all modules and tests, is not to be walked by its collections of garbage.
os.register_at_fork(after_in_child=gc.freeze)


def pytest_collection_finish():
    """Thousands of collected tests stay until the end: no collection of garbage has to walk them."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def signals_are_as_before():
    """A launch's flags read in this process leave handlers that end it, and what is forked later would inherit them."""
    yield
    signals = importlib.import_module("megatron.training.guard.signals")
    while signals._before:
        signal.signal(*signals._before.popitem())
