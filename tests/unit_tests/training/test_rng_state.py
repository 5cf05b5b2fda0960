"""Every generator continues where it was, through JSON."""

import json
import random

import numpy as np
import pytest
import torch

from megatron.core.device import current_device
from megatron.core.dist_checkpointing.files import CheckpointError
from megatron.training.run.rng_state import rng_state, set_rng_state


def draw():
    return [
        random.random(), random.gauss(0, 1), float(np.random.rand()), float(np.random.randn()),
        float(torch.rand(())), float(torch.randn(())),
    ]  # fmt: skip


@pytest.fixture(autouse=True)
def _restore():
    before = random.getstate(), np.random.get_state(), torch.get_rng_state()
    yield
    random.setstate(before[0])
    np.random.set_state(before[1])
    torch.set_rng_state(before[2])


def test_the_same_numbers_follow():
    device = current_device(kind="cpu")
    draw()  # both Gaussian generators hold a second number now
    saved = json.loads(json.dumps(rng_state(device)))
    expected = [draw() for _ in range(3)]
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    set_rng_state(saved, device)
    assert [draw() for _ in range(3)] == expected


@pytest.mark.parametrize("key", ["python", "numpy", "torch"])
@pytest.mark.parametrize("value", [{}, None, {"words": "!", "cpu": "AAAA", "key": 3}])
def test_a_state_that_is_none_is_refused(key, value):
    device = current_device(kind="cpu")
    with pytest.raises(CheckpointError, match="--no-load-rng"):
        set_rng_state(rng_state(device) | {key: value}, device)
