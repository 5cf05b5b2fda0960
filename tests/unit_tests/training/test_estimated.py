"""What --check-config says of a long step, of which it looks at few microbatches, is what it says of all of them."""

import pytest

from megatron.training.config.check_config import with_vocabulary
from megatron.training.config.launch_env import LaunchEnv
from megatron.training.run.arguments import parse_config
from megatron.training.run.describe import described
from megatron.training.run.rehearse import estimated
from tests.harness.launch_lines import SMALL

STEP = "--fsdp-reshard-policy step"
ZERO_3 = "--use-custom-fsdp --data-parallel-sharding-strategy optim_grads_params"
CASES = (
    ("cpu", "--pipeline-schedule 1f1b"),
    ("cpu", f"--pipeline-schedule zb-h2 {ZERO_3}"),
    ("h100-80gb", f"--pipeline-schedule interleaved --num-virtual-stages-per-pipeline-rank 4 {ZERO_3}"),
    ("h100-80gb", f"--pipeline-schedule gis --num-virtual-stages-per-pipeline-rank 4 {ZERO_3} {STEP}"),
    ("h100-80gb", f"--pipeline-schedule dualpipe-v {ZERO_3} --num-distributed-optimizer-instances 2"),
)


@pytest.mark.parametrize(("device", "words"), CASES)
def test_the_rest_of_a_long_step_repeats_what_was_looked_at(monkeypatch, device, words):
    """On a CPU, where batches last for the step, those of what was left out count as if they had come first, and what
    is said is out by them at most."""
    flags = f"--num-layers 8 --pipeline-model-parallel-size 2 --global-batch-size 96 --bf16 {words}"
    backend = "gloo" if device == "cpu" else "nccl"
    checked = f"--check-config --device-profile {device} --distributed-backend {backend}"
    asked = [*SMALL, *flags.split(), *checked.split()]
    config = described(with_vocabulary(parse_config(asked, env=LaunchEnv(world_size=8))))
    part = estimated.estimated(config, config.planner())
    monkeypatch.setattr(estimated, "_ROUNDS", 1000)
    whole = estimated.estimated(config, config.planner())
    assert (part.microbatches, whole.microbatches) == (4, 12)
    batches = 8 * estimated.batch_bytes(config) if device == "cpu" else 0
    for few, every in zip(part.ranks, whole.ranks, strict=True):
        assert abs(few.peak.total - every.peak.total) <= batches
        assert few.at_rest == every.at_rest
