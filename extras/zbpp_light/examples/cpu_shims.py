"""Lets megatron-core train where there is no CUDA device. For trials and tests: zbpp_light itself needs none of this.

    import cpu_shims; cpu_shims.install()     # once, before the model is built

Megatron asks CUDA for devices by name in a handful of places. Each shim answers one of them with the CPU.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

CPU = torch.device("cpu")


class OnlyStream:
    """The CPU's one stream: always the current one, and equal to any other that is made."""

    def __init__(self, *device: Any, **words: Any) -> None: ...

    def __eq__(self, other: object) -> bool:
        return isinstance(other, OnlyStream)

    __hash__ = None  # type: ignore[assignment]

    def wait_stream(self, *other: Any) -> None:
        """Nothing runs beside it."""

    synchronize = wait_event = wait_stream

    def record_event(self, *event: Any) -> OnlyStream:
        """Whatever came before is done: who waits for the event may as well ask the stream."""
        return self


class CudaMeansCpu(TorchFunctionMode):
    """Torch's functions and methods, `device="cuda"` among their arguments read as the CPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        words = {name: _on_cpu(value) for name, value in (kwargs or {}).items()}
        result = func(*map(_on_cpu, args), **words)
        if func is torch.Tensor.type and isinstance(result, str):
            return result.replace("torch.", "torch.cuda.")  # optimizers compare the name of the type
        return result


def _on_cpu(value: Any) -> Any:
    if isinstance(value, str) and value.partition(":")[0] == "cuda":
        return CPU
    return CPU if isinstance(value, torch.device) and value.type == "cuda" else value


def _as_list(sizes: Any) -> Any:
    """Of the tokens of each expert: Megatron makes a list of what comes from a GPU, and leaves a CPU's tensor."""
    return sizes.tolist() if isinstance(sizes, torch.Tensor) else sizes


def install() -> None:
    """From here on, and in processes forked from this one."""
    CudaMeansCpu().__enter__()
    torch.cuda.current_device = lambda: CPU
    torch.cuda.synchronize = lambda *device: None
    torch.cuda.Stream, torch.cuda.current_stream = OnlyStream, OnlyStream
    torch.cuda.stream = lambda stream: contextlib.nullcontext()
    torch.Tensor.cuda = lambda tensor, *device, **words: tensor
    exchange = torch.distributed.all_to_all_single

    def all_to_all(output: Any, tensor: Any, to: Any = None, back: Any = None, *others: Any, **words: Any) -> Any:
        sizes = [words.pop(f"{end}_split_sizes", given) for end, given in (("output", to), ("input", back))]
        return exchange(output, tensor, *map(_as_list, sizes), *others, **words)

    torch.distributed.all_to_all_single = all_to_all
    torch.cuda.get_rng_state = torch.cuda.random.get_rng_state = lambda *device, **words: torch.empty(0)
    from megatron.core.tensor_parallel import random

    # One stream of random numbers a rank, the CPU's, instead of one for each kind of parallelism.
    random.CudaRNGStatesTracker.fork = lambda tracker, *name: contextlib.nullcontext()
    random._set_cuda_rng_state = lambda *state, **words: None
