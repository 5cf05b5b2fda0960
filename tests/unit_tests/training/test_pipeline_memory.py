"""Limits of activations where the device decides."""

import dataclasses
import types

import pytest

from megatron.core.device import Device
from megatron.core.machine import MemoryFigures
from megatron.core.pipeline_parallel.plan.pipeline_summary import device_limits
from megatron.core.weight_grad import WeightGradAccumulator
from megatron.training.config.launch_env import LaunchEnv
from megatron.training.config.problems import ConfigurationError
from megatron.training.config.rules import plan_problems
from megatron.training.run.arguments import parse_config
from megatron.training.run.describe import described
from megatron.training.run.pipeline_memory import check_validated
from megatron.training.run.pipeline_memory import settle as settle_planner
from tests.harness import launch


class FakeGpu(Device):
    """A device of a given size with 10 MiB in use."""

    total = 0

    def total_bytes(self):
        return FakeGpu.total

    def memory(self):
        return MemoryFigures(10 * 2**20, 0, 0, 0)


@dataclasses.dataclass
class FakeSession:
    """Of rank 0 of two, whose other rank has 5 MiB more in use."""

    config: object
    device: Device
    lines: list[str] = dataclasses.field(default_factory=list)
    is_fake: bool = False

    @property
    def ps(self):
        return types.SimpleNamespace(pp_rank=0, pp_size=2, is_fake=self.is_fake)

    def print_rank_0(self, *texts, brief=None):
        self.lines.extend(texts)
        if texts and brief is not None:
            assert len(brief) < 80, "a terminal would break it"

    def gather(self, value):
        _, used, total = value
        return [value] if self.is_fake else [value, [1, used + 5 * 2**20, total]]


def engine():
    """With one chunk of ours, and one whose layers are not."""
    return types.SimpleNamespace(
        chunks=(
            types.SimpleNamespace(sink=WeightGradAccumulator()),
            types.SimpleNamespace(sink=None),
        ),
        persistent_bytes=lambda: 2**20,
        optimizer=types.SimpleNamespace(snapshot_bytes=lambda: 3 * 2**20),
    )


def settle(flags, device, world_size=2, held=None, is_fake=False):
    words = [*launch.TINY, *"--num-layers 4 --train-iters 4 --pipeline-model-parallel-size 2".split()]
    env = LaunchEnv(world_size=world_size, rank=0)
    config = described(parse_config([*words, *flags.split(), "--padded-vocab-size", "128"], env=env))
    session, planner = FakeSession(config, device, is_fake=is_fake), config.planner()
    settle_planner(session, planner, held or engine())
    return planner.spec, "\n".join(session.lines)


def test_the_least_that_is_left_on_any_replica_is_the_limit():
    told = [(0, 30, 100), (1, 50, 100), (0, 60, 100), (1, 90, 100)]
    assert device_limits(told, 80, 2) == (20.0, 0.0)


def test_a_snapshot_of_the_optimizer_is_not_left_for_activations():
    FakeGpu.total = 100 * 2**20
    words = "--enable-zero-bubble --zero-bubble-adaptive-memory-limit-percentile 50"
    spec, _ = settle(f"{words} --enable-optimizer-post-validation", FakeGpu("cpu"))
    assert spec.limits == (37.0 * 2**20, 32.0 * 2**20)


@pytest.mark.parametrize(("limit", "kept"), [("--pipeline-memory-limit 1G", True), ("", False)])
def test_layers_are_told_whether_they_keep_what_they_gathered(limit, kept):
    held = engine()
    words = "--tensor-model-parallel-size 2 --sequence-parallel --enable-zero-bubble"
    _, told = settle(f"{words} {limit}", Device("cpu"), world_size=4, held=held)
    assert held.chunks[0].sink.keeps_gathered == kept
    assert ("kept for W, not gathered again" in told) == kept


def test_a_rank_without_peers_takes_their_devices_to_be_as_full_as_its_own():
    FakeGpu.total = 100 * 2**20
    words = "--enable-zero-bubble --zero-bubble-adaptive-memory-limit-percentile 50"
    spec, told = settle(words, FakeGpu("cpu"), is_fake=True)
    assert spec.limits == (40.0 * 2**20, 40.0 * 2**20)
    assert "devices of other pipeline ranks are taken to be as full" in told


def test_a_device_limits_zero_bubble_by_what_is_left():
    FakeGpu.total = 100 * 2**20
    spec, told = settle(
        "--enable-zero-bubble --zero-bubble-adaptive-memory-limit-percentile 50", FakeGpu("cpu")
    )
    assert spec.limits == (40.0 * 2**20, 35.0 * 2**20)
    assert "by pipeline rank: 40 MiB, 35 MiB" in told
    for flags in (
        "",
        "--enable-zero-bubble --zero-bubble-max-pending-backward 1",
        "--zero-bubble-v-schedule",
    ):
        spec, _ = settle(flags, FakeGpu("cpu"))
        assert spec.limits != (40.0 * 2**20, 35.0 * 2**20)


def test_a_device_without_room_is_refused():
    FakeGpu.total = int(11.8 * 2**20)
    with pytest.raises(ConfigurationError, match="85 % of the device's memory leaves too little"):
        settle("--enable-zero-bubble", FakeGpu("cpu"))


def test_the_log_says_what_limits_on_cpu_and_why_auto_chose():
    spec, told = settle("--enable-zero-bubble", Device("cpu"))
    assert spec.limits is None
    assert "auto is the number of pipeline ranks on CPU, 2" in told
    spec, told = settle("--pipeline-schedule auto", Device("cpu"))
    assert all(f"auto: {line}" in told for line in spec.reasons)
    assert "limit of activations" in told
    _, told = settle("", Device("cpu"))
    assert told == ""


@pytest.mark.parametrize(
    ("copies", "grads", "step", "told"),
    [
        (6, 0, 0, "copies of main weights"),
        (0, 5, 0, "gradients until they are decided on"),
        (2, 1, 0, None),
        (2, 1, 1, None),
        (2, 1, 2, "what the optimizer's step takes (2 MiB)"),
    ],
)
def test_what_waits_for_a_decision_has_to_fit(copies, grads, step, told):
    """8 MiB are free, two ranks share them; activations are not known."""
    device = types.SimpleNamespace(kind="cpu", free_bytes=lambda: 8 * 2**20)
    session = types.SimpleNamespace(
        device=device,
        env=types.SimpleNamespace(local_world_size=2),
        ps=types.SimpleNamespace(pp_rank=0),
        gather=lambda value: [value],
        config=types.SimpleNamespace(logging=types.SimpleNamespace(log_num_zeros_in_grad=False)),
    )
    taken = {"grad-norm": {"figures": step * 2**20, "snapshot": copies * 2**20}}
    held = types.SimpleNamespace(
        optimizer=types.SimpleNamespace(snapshot_bytes=lambda: copies * 2**20, step_bytes=lambda **_: taken),
        model=types.SimpleNamespace(resting_grad_bytes=lambda: grads * 2**20),
    )
    planner = types.SimpleNamespace(spec=types.SimpleNamespace(estimated=False))
    if told is None:
        check_validated(session, planner, held)
        return
    with pytest.raises(ConfigurationError) as refused:
        check_validated(session, planner, held)
    message = str(refused.value)
    assert told in message
    assert "--enable-optimizer-post-validation" in message


@pytest.mark.parametrize(
    ("hidden", "more", "fits"),
    [
        (12288, "", False),
        (64, "", True),
        (12288, "--check-config", True),
        (2304, "", False),
        (2304, "--post-validation-rollback inverse", True),
        (2688, "--bf16 --grad-reduce-in-bf16 --megatron-fsdp-main-params-dtype auto", True),
    ],
)
def test_a_validated_run_that_no_memory_can_hold_is_refused_at_once(monkeypatch, hidden, more, fits):
    """On CPU, before ranks build: 12 layers of 2304 are 383 million parameters a stage, 28 bytes each, 16 without
    copies, 14 where all has 16 bits."""
    monkeypatch.setattr(LaunchEnv, "memory_bytes", staticmethod(lambda: 36 * 10**9))
    words = f"--num-layers 12 --hidden-size {hidden} --num-attention-heads 96 --padded-vocab-size 128 --train-iters 4"
    words = words.replace("96", "16") if hidden == 64 else words
    words += " --pipeline-model-parallel-size 2 --enable-zero-bubble --enable-optimizer-post-validation"
    env = LaunchEnv(world_size=4, local_world_size=4, rank=0)
    asked = [*launch.TINY, *words.split(), *more.split()]
    problems = plan_problems(described(parse_config(asked, env=env)), env)
    assert [problem.rule for problem in problems] == [] if fits else ["validated-memory"]
    assert all("gradients and copies that are kept" in problem.message for problem in problems)
