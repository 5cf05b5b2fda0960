"""The contestants of `fsdp_vs_peers.py` that are not ours, each as its own documentation has it.

`single` is one process over everybody's microbatches while the other ranks wait; `alone` trains on every rank its own
microbatches without talking to others: what a rank would take if communication were free.

bf16: `single`, `alone` and DDP keep fp32 weights and run under autocast; FSDP2 keeps fp32 shards and gathers bf16
weights, gradients reduced in fp32 (`fsdp2-bf16wire`: in bf16); DeepSpeed and Megatron-FSDP hold bf16 weights with fp32
main weights.
"""

from __future__ import annotations

import contextlib
import importlib
import os
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from benchmarks.fsdp_workload import Batches, Trainer, Work, plain_adam, plain_model
from benchmarks.plain_gpt import Block
from megatron.core.optional import available
from megatron.core.transport.mesh import device_mesh


class PlainLoop:
    """Forward and backward of each microbatch, then Adam. `last_only`: a context for all but the last backward."""

    def __init__(self, work: Work, model: nn.Module, batches: Batches, *, autocast: bool) -> None:
        self.model: Any = model  # some have methods of their own
        self.batches = batches
        self.optimizer = plain_adam(model)
        self.kind = work.device.kind
        self.autocast = autocast and work.dtype != torch.float32

    def before(self, microbatch: int, *, last: bool) -> contextlib.AbstractContextManager[object]:
        """Around the forward and backward of a microbatch."""
        return contextlib.nullcontext()

    def step(self) -> float | None:
        if not self.batches:
            return None
        total, count = 0.0, len(self.batches)
        for microbatch, (tokens, labels) in enumerate(self.batches):
            with self.before(microbatch, last=microbatch == count - 1):
                with torch.autocast(self.kind, torch.bfloat16, enabled=self.autocast):
                    loss = self.model(tokens, labels)
                (loss / count).backward()
            total += loss.item() / count
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return total


class DataParallelLoop(PlainLoop):
    """torch's DDP: gradients are all-reduced in the last microbatch's backward."""

    def __init__(self, work: Work, **options: Any) -> None:
        group = work.ps.dp_group.process_group
        assert group is not None, "DDP in a world of one"
        model = DistributedDataParallel(plain_model(work), process_group=group, **options)
        super().__init__(work, model, work.mine, autocast=True)

    def before(self, microbatch: int, *, last: bool) -> contextlib.AbstractContextManager[object]:
        return contextlib.nullcontext() if last else self.model.no_sync()


class Fsdp2Loop(PlainLoop):
    """torch's fully_shard over each block, then over the whole.

    keep: weights stay gathered from forward to backward. sync_last: gradients are reduced, and weights resharded, with
    the last microbatch only.
    """

    def __init__(
        self, work: Work, *, keep: bool = False, sync_last: bool = False, wire: torch.dtype = torch.float32
    ) -> None:
        bf16 = work.dtype == torch.bfloat16
        policy = (
            MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=wire)
            if bf16
            else MixedPrecisionPolicy()
        )
        mesh, model = device_mesh(work.ps, "dp"), plain_model(work)
        for block in model.blocks:
            fully_shard(block, mesh=mesh, reshard_after_forward=not keep, mp_policy=policy)
        # The root's backward follows its forward at once: its own default keeps it gathered between them.
        root = fully_shard(model, mesh=mesh, reshard_after_forward=False if keep else None, mp_policy=policy)
        assert isinstance(root, FSDPModule)
        self.root, self.sync_last = root, sync_last
        super().__init__(work, model, work.mine, autocast=False)

    def before(self, microbatch: int, *, last: bool) -> contextlib.AbstractContextManager[object]:
        if self.sync_last:
            self.root.set_requires_gradient_sync(last)
            self.root.set_reshard_after_backward(last)
            self.root.set_is_last_backward(last)
        return contextlib.nullcontext()


class DeepSpeedLoop:
    """DeepSpeed's ZeRO with a fused torch Adam. Its clipping is on unless switched off."""

    def __init__(self, work: Work, stage: int) -> None:
        deepspeed = importlib.import_module("deepspeed")
        self.batches = work.mine
        # DeepSpeed learns its device from this variable only, at any time; torchrun would have set it, these ranks are
        # forked. Our own code reads its environment in launch_env alone, which nothing here calls.
        os.environ["LOCAL_RANK"] = str(work.ps.rank)
        deepspeed.init_distributed(dist_backend=work.device.backend, auto_mpi_discovery=False, verbose=False)
        bf16 = work.dtype == torch.bfloat16
        model = plain_model(work)
        self.engine, *_ = deepspeed.initialize(
            model=model.to(torch.bfloat16) if bf16 else model,
            optimizer=plain_adam(model),
            dist_init_required=False,
            config={
                "train_micro_batch_size_per_gpu": 1,
                "gradient_accumulation_steps": len(work.mine),
                "gradient_clipping": 0.0,
                "zero_optimization": {"stage": stage},
                "zero_allow_untested_optimizer": True,
                "bf16": {"enabled": bf16},
                "steps_per_print": 1 << 30,
            },
        )

    def step(self) -> float | None:
        total = 0.0
        for tokens, labels in self.batches:
            loss = self.engine(tokens, labels)
            self.engine.backward(loss)  # divides by the number of microbatches
            self.engine.step()  # acts with the last one
            total += loss.item() / len(self.batches)
        return total


class MegatronFsdpLoop(PlainLoop):
    """The package megatron-fsdp, everything sharded. It needs CUDA."""

    def __init__(self, work: Work) -> None:
        package = importlib.import_module("megatron_fsdp")
        bf16 = work.dtype == torch.bfloat16
        model = plain_model(work)
        sharded = package.fully_shard_model(
            module=model.to(torch.bfloat16) if bf16 else model,
            fsdp_unit_modules=[Block],
            zero_dp_strategy="optim_grads_params",
        )
        super().__init__(work, sharded, work.mine, autocast=False)
        self.optimizer = package.fully_shard_optimizer(optimizer=self.optimizer)

    def before(self, microbatch: int, *, last: bool) -> contextlib.AbstractContextManager[object]:
        return contextlib.nullcontext() if last else self.model.no_sync()


def single(work: Work) -> Trainer:
    first = work.ps.rank == 0
    model: nn.Module = plain_model(work) if first else nn.Linear(1, 1)
    return PlainLoop(work, model, work.everyones if first else [], autocast=True)


def alone(work: Work) -> Trainer:
    return PlainLoop(work, plain_model(work), work.mine, autocast=True)


PEERS: Mapping[str, Callable[[Work], Trainer]] = MappingProxyType(
    {
        "single": single,
        "alone": alone,
        "ddp": DataParallelLoop,
        "ddp-view": lambda work: DataParallelLoop(work, gradient_as_bucket_view=True),
        "fsdp2": Fsdp2Loop,
        "fsdp2-bf16wire": lambda work: Fsdp2Loop(work, wire=torch.bfloat16),
        "fsdp2-keep": lambda work: Fsdp2Loop(work, keep=True),
        "fsdp2-keep-synclast": lambda work: Fsdp2Loop(work, keep=True, sync_last=True),
        "deepspeed-z1": lambda work: DeepSpeedLoop(work, 1),
        "deepspeed-z2": lambda work: DeepSpeedLoop(work, 2),
        "deepspeed-z3": lambda work: DeepSpeedLoop(work, 3),
        "megatron-fsdp": MegatronFsdpLoop,
    }
)


def import_packages(name: str) -> None:
    """What a contestant's package brings along is not memory that its training takes: import it before measuring."""
    if name.startswith("deepspeed"):
        importlib.import_module("deepspeed")
    if name == "megatron-fsdp":
        importlib.import_module("megatron_fsdp")


def why_not(name: str, kind: str, dtype: str, num_ranks: int) -> str | None:
    """Why a contestant cannot take part here, None if it can."""
    if name.startswith("deepspeed") and not available("deepspeed"):
        return "DeepSpeed is not installed"
    if name == "megatron-fsdp":
        if not available("megatron_fsdp"):
            return "megatron-fsdp is not installed"
        if kind != "cuda":
            return "megatron-fsdp needs CUDA"
    if name.endswith("bf16wire") and dtype != "bf16":
        return "its wire differs in bf16 only"
    if num_ranks == 1 and name not in ("single", "alone", "ours-alone"):
        return "a world of one communicates nothing"
    return None
