"""megatron-core on CPU: what has to answer otherwise so that its models, optimizers and pipelines run without a GPU.

Nothing of its arithmetic changes. Import it first: `import megatron_core_shims`.
"""

import contextlib
import queue

import torch
from torch.overrides import TorchFunctionMode


class _OnCpu(TorchFunctionMode):
    """Tensors that are made on 'cuda' (token counts, scratch buffers) are made on the CPU."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        device = kwargs.get("device")
        if device is not None and "cuda" in str(device):
            kwargs["device"] = "cpu"
        return function(*args, **kwargs)


_ON_CPU = _OnCpu()
_ON_CPU.__enter__()
torch.cuda.current_device = lambda: torch.device("cpu")
torch.cuda.synchronize = lambda device=None: None
torch.Tensor.cuda = lambda self, *args, **kwargs: self

from megatron.core.dist_checkpointing.strategies import filesystem_async  # noqa: E402

from megatron.core.tensor_parallel.random import CudaRNGStatesTracker  # noqa: E402

CudaRNGStatesTracker.fork = lambda self, name=None: contextlib.nullcontext()
# Its own is a process more, which outlives the ranks.
filesystem_async._results_queue = queue.SimpleQueue()

_NAMES = {torch.float32: "torch.cuda.FloatTensor", torch.bfloat16: "torch.cuda.BFloat16Tensor"}


def _type(self, dtype=None, *args, **kwargs):
    """Optimizers ask for the name of a tensor's type, and go by its 'cuda'."""
    return _NAMES[self.dtype] if dtype is None else self.to(dtype)


torch.Tensor.type = _type
