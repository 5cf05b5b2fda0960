"""What only a GPU can show. Skipped where there is none; `pytest tests/gpu` on a machine that has one."""

from __future__ import annotations

import pytest
import torch

from tests.harness.launch import TINY, ok, run

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def loss(text: str) -> float:
    return float(text.split()[0])


def test_gpu_run_follows_the_cpu_run(tmp_path):
    """The same flags on both devices: weights, samples and dropout-free arithmetic agree to fp32 rounding."""
    flags = [
        *TINY,
        "--eval-iters",
        "0",
        "--train-iters",
        "10",
        "--hidden-dropout",
        "0",
        "--attention-dropout",
        "0",
    ]
    (tmp_path / "gpu").mkdir()
    (tmp_path / "cpu").mkdir()
    on_gpu = ok(run(flags, cwd=tmp_path / "gpu", timeout_s=120)).losses()
    on_cpu = ok(run([*flags, "--distributed-backend", "gloo"], cwd=tmp_path / "cpu", timeout_s=120)).losses()
    assert on_gpu.keys() == on_cpu.keys() == set(range(1, 11))
    for iteration in on_cpu:
        assert loss(on_gpu[iteration]) == pytest.approx(loss(on_cpu[iteration]), rel=1e-4), iteration


def test_the_gpus_work_and_memory_are_profiled(tmp_path):
    window = (
        "--train-iters 4 --profile --use-pytorch-profiler --profile-step-start 1 --profile-step-end 3".split()
    )
    memory = "--record-memory-history --log-memory-interval 2 --log-device-memory-used".split()
    output = ok(run([*TINY, *window, *memory], cwd=tmp_path, timeout_s=120)).output
    (trace,) = tmp_path.glob("runs/*/profile/rank-0-iterations-2-to-3.pt.trace.json")
    assert '"cat": "kernel"' in trace.read_text()
    assert next(tmp_path.glob("runs/*/snapshot.pickle")).stat().st_size > 0
    assert "| total device memory used: " in output
    ok(
        run(
            [*TINY, *window[:3], "--profile-step-start", "1", "--profile-step-end", "3"],
            cwd=tmp_path,
            timeout_s=120,
        )
    )


@pytest.mark.parametrize("precision", ["--bf16", "--fp16"])
def test_gpu_resume_is_bit_for_bit(tmp_path, precision):
    flags = [*TINY, "--eval-iters", "0", precision, "--save-interval", "5", "--deterministic-mode"]
    flags += ["--initial-loss-scale", "65536"] if precision == "--fp16" else []
    env = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "NCCL_ALGO": "Ring"}
    straight, resumed = tmp_path / "straight", tmp_path / "resumed"
    whole = ok(run([*flags, "--train-iters", "10", "--save", straight], cwd=tmp_path, env=env, timeout_s=120))
    again = [*flags, "--train-iters", "10", "--save", resumed, "--load", resumed]
    ok(run([*again, "--exit-interval", "5"], cwd=tmp_path, env=env, timeout_s=120))
    second = ok(run(again, cwd=tmp_path, env=env, timeout_s=120)).losses()
    assert {i: text for i, text in whole.losses().items() if i > 5} == second
