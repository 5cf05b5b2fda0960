"""The device seam, on CPU."""

from __future__ import annotations

import types

import pytest
import torch

from megatron.core import device as device_module
from megatron.core import machine
from megatron.core.device import (
    Device,
    current_device,
    device_in_use,
    elements_at_a_time,
    set_threads,
)
from megatron.core.machine import available_cores, heap_bytes
from tests.harness.live_peak import reset_peak
from tests.harness.ranks import run_ranks

CPU = Device("cpu")


def test_cpu_device_is_gloo_and_queues_nothing():
    assert current_device(kind="cpu") == CPU
    assert CPU.torch_device == torch.device("cpu")
    assert CPU.backend == "gloo"
    assert Device("cuda", 3).backend == "nccl"
    assert Device("cuda", 3).torch_device == torch.device("cuda", 3)
    assert not CPU.queues_work
    CPU.synchronize()
    CPU.record_use(torch.ones(3))


def test_memory_figures_see_an_allocation_and_its_peak():
    def body(ctx):  # in a process of its own: the peak is the process's
        reset_peak(CPU)
        before = CPU.memory()
        block = torch.ones(64 * 2**20 // 4)
        during = CPU.memory()
        del block
        after = CPU.memory()
        return before, during, after

    before, during, after = run_ranks(body, 1)[0]
    block_bytes = 64 * 2**20
    assert during.reserved_bytes - before.reserved_bytes == pytest.approx(block_bytes, rel=0.1)
    assert during.allocated_bytes - before.allocated_bytes == pytest.approx(block_bytes, rel=0.1)
    assert after.allocated_bytes - before.allocated_bytes < 0.1 * block_bytes
    assert after.max_reserved_bytes >= during.reserved_bytes - 2**20
    assert after.max_allocated_bytes >= after.allocated_bytes


def test_memory_without_mallinfo_falls_back_to_the_resident_set(monkeypatch):
    monkeypatch.setattr(machine, "heap_bytes", lambda: None)
    figures = CPU.memory()
    assert figures.allocated_bytes == figures.reserved_bytes > 0


def test_heap_bytes_counts_small_blocks():
    before = heap_bytes()
    assert before is not None
    blocks = [torch.zeros(1000) for _ in range(100)]
    assert heap_bytes() - before > 0.9 * len(blocks) * 4000


@pytest.mark.parametrize(("cores", "ranks", "threads"), [(8, 2, 4), (2, 2, 1), (2, 4, 1), (7, 2, 3)])
def test_threads_are_shared_between_ranks(cores, ranks, threads):
    try:
        assert set_threads(ranks, cores) == threads
        assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(1)


def test_threads_default_to_the_cores_there_are():
    try:
        assert set_threads(1) == available_cores()
    finally:
        torch.set_num_threads(1)


def test_threads_that_were_asked_for_are_taken_whatever_the_cores():
    try:
        for threads in (3, 1):
            assert set_threads(2, 8, threads=threads) == threads
            assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(1)


def test_rng_states_replay():
    states = CPU.rng_states()
    first = torch.randn(4)
    CPU.set_rng_states(states)
    assert torch.equal(torch.randn(4), first)


def test_too_many_ranks_for_the_gpus_of_a_machine(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ValueError, match=r"local rank 2 needs CUDA device 2, this machine has 2.*nproc"):
        current_device(2, kind="cuda")


def test_the_device_in_use_is_the_process_s_own(monkeypatch):
    assert device_in_use("cpu") == CPU
    with pytest.raises(ValueError, match="device 'xpu' is not supported; use 'cpu' or 'cuda'"):
        device_in_use("xpu")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    for available, found in ((True, Device("cuda", 3)), (False, CPU)):
        monkeypatch.setattr(torch.cuda, "is_available", lambda available=available: available)
        assert device_in_use() == found
    assert device_in_use("cuda") == Device("cuda", 3)


def test_free_memory_is_some_of_the_machine():
    free = Device("cpu").free_bytes()
    assert free is None or 0 < free < 2**50


def test_blocks_fit_the_cache_on_cpu_and_are_worth_a_launch_on_cuda():
    on_gpu = types.SimpleNamespace(device=torch.device("cuda"))
    assert elements_at_a_time(torch.empty(0), 1 << 18) == 1 << 18
    assert elements_at_a_time(on_gpu, 1 << 18) == 1 << 22


@pytest.mark.parametrize(("rows", "columns"), [((7,), 9), ((3, 400), 9), ((600,), 1100)])
def test_products_by_fp32_are_rounded_once(monkeypatch, rows, columns):
    """Of one part, of several rows, of several rows and columns."""
    monkeypatch.setitem(device_module.SHORT, torch.bfloat16, None)
    torch.manual_seed(0)
    x, weight = torch.randn(*rows, 40).bfloat16(), torch.randn(columns, 40).bfloat16()
    bias = torch.randn(columns).bfloat16()
    exact = x.double() @ weight.double().t()
    bound = 2.0**-8  # half of a step between neighbours, and what fp32 leaves

    def check(out, expected):
        assert out.shape == expected.shape
        assert ((out.double() - expected).abs() <= bound * expected.abs() + 1e-5).all()

    check(device_module.product(x, weight.t()), exact)
    check(device_module.linear(x, weight, bias), exact + bias.double())
    if len(rows) == 1:
        into = x.new_empty(exact.shape)
        assert device_module.product(x, weight.t(), into) is into
        check(into, exact)
