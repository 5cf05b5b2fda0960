"""The CPU/CUDA seam: the only module that knows one from the other.

Everything else asks a `Device`: where tensors live, which backend ranks talk over, how much memory is in use,
how to wait. Where CUDA queues work, CPU has nothing to wait for: the same calls do nothing there, so that engines
are written once.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from typing import Any, Literal

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from megatron.core import machine


def _has_instructions(dtype: torch.dtype) -> bool:
    """Whether this CPU multiplies such 16-bit numbers; kernels for them may be there without (AVX-512 alone)."""
    kernels = torch.ops.mkldnn
    if not torch.backends.mkldnn.is_available():
        return False
    if dtype == torch.float16:
        return bool(kernels._is_mkldnn_fp16_supported())
    known = torch.cpu.get_capabilities()
    emulated = known["architecture"] == "x86_64" and not (known["avx512_bf16"] or known["amx_bf16"])
    return not emulated and bool(kernels._is_mkldnn_bf16_supported())


# Products of 16-bit numbers of at most so many multiplications are computed in fp32 by a CPU and rounded once, as
# kernels for 16 bits do; None: all of them. With instructions for a dtype a call of its kernel costs 25 us before it
# computes, in which a core does 2^19 multiplications in fp32 with their casts. Without them torch's kernels take 277 us
# for 32 x 192 times 192 x 64, which is 36 in fp32, and for large ones 40 times as long as fp32 (AVX2) or 4.4 (AVX-512).
SHORT = {dtype: 1 << 19 if _has_instructions(dtype) else None for dtype in (torch.bfloat16, torch.float16)}

DeviceKind = Literal["cpu", "cuda"]
MEMORY_HISTORY = 100_000  # allocations that torch remembers, as many as Megatron has it do


@dataclasses.dataclass(frozen=True)
class Device:
    """What this rank computes on. `index` is the CUDA device's number on this machine, 0 on CPU.

    imagined: one of this kind that need not be here: its tensors have shapes and no memory (torch's meta device).
    """

    kind: DeviceKind
    index: int = 0
    imagined: bool = False

    @property
    def torch_device(self) -> torch.device:
        if self.imagined:
            return torch.device("meta")
        return torch.device("cuda", self.index) if self.kind == "cuda" else torch.device("cpu")

    @property
    def _is_cuda(self) -> bool:
        return self.kind == "cuda" and not self.imagined

    @property
    def backend(self) -> str:
        """The torch.distributed backend of tensors that live here."""
        return "nccl" if self.kind == "cuda" else "gloo"

    @property
    def queues_work(self) -> bool:
        """Whether calls return before their kernels have run, so that measuring one means waiting for it."""
        return self.kind == "cuda"

    def synchronize(self) -> None:
        """Wait for everything queued on the device. Does nothing on CPU, where nothing is queued."""
        if self._is_cuda:
            torch.cuda.synchronize(self.index)

    def record_use(self, tensor: Tensor) -> None:
        """`tensor`'s memory is not given to others before what is queued on the current stream now is done.

        For a tensor made on one stream and used on another. Does nothing on CPU.
        """
        if self._is_cuda:
            tensor.record_stream(torch.cuda.current_stream(self.index))

    def memory(self) -> machine.MemoryFigures:
        if self._is_cuda:
            return machine.MemoryFigures(
                torch.cuda.memory_allocated(self.index),
                torch.cuda.max_memory_allocated(self.index),
                torch.cuda.memory_reserved(self.index),
                torch.cuda.max_memory_reserved(self.index),
            )
        resident, peak = machine.resident_bytes()
        heap = machine.heap_bytes()
        allocated = resident if heap is None else heap
        return machine.MemoryFigures(allocated, max(peak, allocated), resident, peak)

    def total_bytes(self) -> int | None:
        """Of the device's memory; None on CPU, whose memory is not this process's alone."""
        if self._is_cuda:
            return int(torch.cuda.get_device_properties(self.index).total_memory)
        return None

    def free_bytes(self) -> int | None:
        """Of the device's memory, what nobody holds and what torch has put by; on CPU of the machine's, None where the
        system does not say, or where it is imagined."""
        if self.imagined:
            return None
        if self._is_cuda:
            free, _ = torch.cuda.mem_get_info(self.index)
            kept = torch.cuda.memory_reserved(self.index) - torch.cuda.memory_allocated(self.index)
            return int(free) + kept
        return machine.available_bytes()

    def used_bytes(self) -> int | None:
        """Of the device's memory, by all processes, as nvidia-smi says; None on CPU."""
        if self._is_cuda:
            free, total = torch.cuda.mem_get_info(self.index)
            return int(total - free)
        return None

    def image(self) -> dict[str, Any]:
        """What the bits of a computation depend on beside its inputs: torch, processors, threads."""
        name = torch.cuda.get_device_name(self.index) if self._is_cuda else self.kind
        capability = torch.backends.cpu.get_cpu_capability()
        processor = f"{capability}, {machine.processor_name()}"
        return {
            "torch": torch.__version__,
            "processor": processor,
            "threads": torch.get_num_threads(),
            "device": name,
        }

    # --- for profilers

    def activities(self) -> list[torch.profiler.ProfilerActivity]:
        """What torch's profiler records here."""
        every = torch.profiler.ProfilerActivity
        return [every.CPU, every.CUDA] if self._is_cuda else [every.CPU]

    @contextlib.contextmanager
    def captured(self) -> Iterator[None]:
        """What nsys captures between cudaProfilerStart and cudaProfilerStop, with torch's operations and the shapes of
        their inputs as ranges of NVTX. Does nothing on CPU."""
        if not self._is_cuda:
            yield
            return
        torch.cuda.profiler.start()
        try:
            with torch.autograd.profiler.emit_nvtx(record_shapes=True):
                yield
        finally:
            torch.cuda.profiler.stop()

    def nvtx_range(self, name: str) -> contextlib.AbstractContextManager[Any]:
        """A range of what nsys captures. Nothing on CPU."""
        return torch.cuda.nvtx.range(name) if self._is_cuda else contextlib.nullcontext()

    def record_memory_history(self) -> bool:
        """From now on torch remembers each allocation on the device. False on CPU, where there is no such history."""
        if self._is_cuda:
            torch.cuda.memory._record_memory_history(max_entries=MEMORY_HISTORY)
        return self._is_cuda

    def write_memory_snapshot(self, path: str) -> None:
        """The history so far, in the format of pytorch.org/memory_viz. Raises OSError. Not on CPU."""
        assert self._is_cuda, "a snapshot of no device"
        torch.cuda.memory._dump_snapshot(path)

    def rng_states(self) -> dict[str, Tensor]:
        """The states of torch's default generators, as byte tensors [n]: what a checkpoint keeps."""
        own = {"cuda": torch.cuda.get_rng_state(self.index)} if self._is_cuda else {}
        return {"cpu": torch.get_rng_state(), **own}

    def set_rng_states(self, states: dict[str, Tensor]) -> None:
        """Put `rng_states` back; states of a kind of device that is not here are passed over."""
        torch.set_rng_state(states["cpu"])
        if self._is_cuda and "cuda" in states:
            torch.cuda.set_rng_state(states["cuda"], self.index)

    def allow_tf32(self, allowed: bool) -> None:
        """Whether fp32 matrix products may round their inputs to TF32 (CUDA; nothing to choose on CPU)."""
        if self._is_cuda:
            torch.backends.cuda.matmul.allow_tf32 = allowed
            torch.backends.cudnn.allow_tf32 = allowed


def _best_kind() -> DeviceKind:
    return "cuda" if torch.cuda.is_available() else "cpu"


def current_device(local_rank: int = 0, *, kind: DeviceKind | None = None) -> Device:
    """This rank's device: CUDA when there is one, else CPU; `kind` decides otherwise.

    Raises ValueError when more ranks run on this machine than it has CUDA devices.
    """
    if (kind or _best_kind()) == "cpu":
        return Device("cpu")
    count = torch.cuda.device_count()
    if local_rank >= count:
        raise ValueError(
            f"local rank {local_rank} needs CUDA device {local_rank}, this machine has {count}: "
            f"start no more ranks than that on a machine (torchrun --nproc-per-node {count})"
        )
    torch.cuda.set_device(local_rank)
    return Device("cuda", local_rank)


def device_in_use(kind: str | None = None) -> Device:
    """The device that torch computes on in this process as it is: CUDA's current one where there is one, else CPU.

    For a process that somebody else has set up. kind: "cpu" or "cuda"; ValueError for any other.
    """
    kind = kind or _best_kind()
    if kind not in ("cpu", "cuda"):
        raise ValueError(f"device {kind!r} is not supported; use 'cpu' or 'cuda'")
    return Device("cpu") if kind == "cpu" else Device("cuda", torch.cuda.current_device())


_imagined_kind: ContextVar[DeviceKind] = ContextVar("what torch's meta device stands for", default="cpu")


@contextlib.contextmanager
def imagining(device: Device) -> Iterator[None]:
    """Inside, in this thread, tensors of torch's meta device are those of `device`."""
    before = _imagined_kind.set(device.kind)
    try:
        yield
    finally:
        _imagined_kind.reset(before)


def kind_of(where: torch.device) -> DeviceKind:
    """What a tensor's device is, or what it stands for: for whoever computes in another way on another kind."""
    if where.type == "meta":
        return _imagined_kind.get()
    return "cuda" if where.type == "cuda" else "cpu"


_stands_for: ContextVar[int] = ContextVar("how many operations an operation without memory is", default=1)


def stands_for() -> int:
    """How many operations one that runs now, in this thread, is: see `alike`."""
    return _stands_for.get()


def alike(parts: Sequence[tuple[Any, ...]]) -> Iterator[tuple[Any, ...]]:
    """Parts that are worked on one after the other, all of one shape but the last. Of tensors without memory there may
    be thousands: the first then stands for all of its shape. Loops within loops too."""
    if len(parts) < 3 or not parts[0][0].is_meta:
        yield from parts
        return
    before = _stands_for.set(_stands_for.get() * (len(parts) - 1))
    try:
        yield parts[0]
    finally:
        _stands_for.reset(before)
    yield parts[-1]


def default_generator(where: torch.device) -> torch.Generator:
    """What kernels there draw from that take no generator."""
    if where.type == "cuda":
        index = torch.cuda.current_device() if where.index is None else where.index
        return torch.cuda.default_generators[index]
    return torch.default_generator


def new_generator(where: torch.device, seed: int) -> torch.Generator | None:
    """One of its own, from a seed, for draws on a device; None where nothing is drawn."""
    return None if where.type == "meta" else torch.Generator(device=where).manual_seed(seed)


LAUNCHES_WORTH = 16
_EVEN = 64  # rows of which `even_rows` makes a multiple
_SIDE = 512  # rows and columns of a product that are in fp32 at a time


def product(a: Tensor, b: Tensor, out: Tensor | None = None) -> Tensor:
    """a [..., n, k] times b [k, m], in their dtype; see `SHORT`. out: [n, m], for a [n, k]."""
    if a.dtype in SHORT and goes_by_fp32(a, b):
        return _by_fp32(a, b, None, out)
    return torch.mm(a, b, out=out) if a.dim() == 2 else a @ b


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [..., k] times weight [m, k] transposed, and bias [m], in their dtype; see `SHORT`."""
    if x.dtype in SHORT and goes_by_fp32(x, weight):
        return _by_fp32(x, weight.t(), bias)
    return F.linear(x, weight, bias)


def goes_by_fp32(a: Tensor, b: Tensor | None = None) -> bool:
    """Whether `product` takes 16-bit numbers in 32 bits; see `SHORT`. Without b: of any size."""
    most = SHORT.get(a.dtype, -1)
    if most is not None and (b is None or a.numel() * b.numel() > most * a.shape[-1]):
        return False
    return kind_of(a.device) == "cpu"


def even_rows(x: Tensor, columns: int) -> Tensor:
    """x [n, k], of which n is another one each time, for its product with so many columns: with rows of zeros behind it
    where a kernel would be compiled for n (16 bits on CPU: for 512 x 512 times 512 x 2048 6 to 14 ms, run in 2)."""
    rows, most = -(-len(x) // _EVEN) * _EVEN, SHORT.get(x.dtype)
    if rows == len(x) or most is None or x.numel() * columns <= most or kind_of(x.device) != "cpu":
        return x
    even = x.new_empty(rows, x.shape[1])
    even[: len(x)].copy_(x)
    even[len(x) :].zero_()
    return even


def _by_fp32(a: Tensor, b: Tensor, bias: Tensor | None, out: Tensor | None = None) -> Tensor:
    """Copies in fp32 are of `_SIDE` rows and columns at a time, so that they are a small part of large operands."""
    if a.dim() > 2:
        return _by_fp32(a.flatten(0, -2), b, bias).unflatten(0, a.shape[:-1])
    if len(a) <= _SIDE >= b.shape[1]:
        matrix = b.float()
        wide = a.float() @ matrix if bias is None else torch.addmm(bias.float(), a.float(), matrix)
        return wide.to(a.dtype) if out is None else out.copy_(wide)
    out = a.new_empty(len(a), b.shape[1]) if out is None else out
    for rows, of_rows in alike([*zip(a.split(_SIDE), out.split(_SIDE), strict=True)]):
        wide = rows.float()
        addends = [None] * -(-b.shape[1] // _SIDE) if bias is None else bias.split(_SIDE)
        for part, matrix, addend in alike(
            [*zip(of_rows.split(_SIDE, 1), b.split(_SIDE, 1), addends, strict=True)]
        ):
            if addend is None:
                part.copy_(wide @ matrix.float())
            else:
                part.copy_(torch.addmm(addend.float(), wide, matrix.float()))
    return out


def elements_at_a_time(tensor: Tensor, in_cache: int) -> int:
    """How many elements a loop of small kernels over `tensor` takes at a time.

    in_cache: on CPU, so many that the loop's temporaries stay in a core's cache. On CUDA no cache holds them and every
    kernel costs a launch, so it is LAUNCHES_WORTH times as many, which still bounds the temporaries.
    """
    return in_cache * LAUNCHES_WORTH if kind_of(tensor.device) == "cuda" else in_cache


def set_threads(local_world_size: int, cores: int | None = None, *, threads: int | None = None) -> int:
    """Share the machine's cores between its ranks, or take `threads`; returns the threads this rank computes with.

    The number decides the bits of sums that threads share out, so runs to be compared need the same one. One rank
    too many threads slows everybody: two ranks of two threads on two cores run 2.6 to 6.4 times slower than of one
    thread (spinning barriers). What OMP_NUM_THREADS says is replaced: the caller knows whether it was asked for.
    """
    if threads is None:
        threads = max(1, (machine.available_cores() if cores is None else cores) // local_world_size)
    torch.set_num_threads(threads)
    return threads
