"""Biases of routers are taken back as they were, and their copies are counted."""

from types import SimpleNamespace

import torch

from megatron.core.memory_tracker import MemoryTracker
from megatron.core.transformer.experts.expert_bias import ExpertBiases
from tests.harness.tiny_models import backward_microbatch, tiny_batch, tiny_model

FLAGS = {
    "num_experts": 4,
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
}


def test_a_step_that_is_taken_back():
    model, tracker = tiny_model(**FLAGS), MemoryTracker()
    biases = ExpertBiases([model], 0.25, SimpleNamespace(size=1), tracker)
    backward_microbatch(model, tiny_batch())
    biases.gather()
    biases.snapshot()
    assert tracker.live("snapshot") == 2 * 4 * 4  # two layers of four experts, fp32
    biases.step(1.0)
    assert all(bias.any() for bias in biases.tensors)
    biases.rollback()
    assert not any(bias.any() for bias in biases.tensors)
    biases.commit()
    assert (tracker.live("snapshot"), tracker.peak("snapshot")) == (0, 32)
    assert all(bias.dtype == torch.float32 for bias in biases.tensors)
