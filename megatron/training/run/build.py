"""Where a model meets its engines: the one visible order in which a run is put together.

model_provider, once a chunk -> data parallel engine (flat buffers) -> initial weights -> optimizer -> schedules
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import nn

from megatron.core.device import Device, DeviceKind
from megatron.core.distributed.custom_fsdp.data_parallel_config import DistributedDataParallelConfig
from megatron.core.distributed.data_parallel import DistributedDataParallel
from megatron.core.models.gpt.gpt import GPTModel
from megatron.core.module import MegatronModule, ModelContext, ModelError
from megatron.core.optimizer.flat_update import ParamGroup
from megatron.core.optimizer.grad_scaler import build_grad_scaler
from megatron.core.optimizer.mixed_precision import RollbackBy, build_optimizer
from megatron.core.optimizer.optimizer_param_scheduler import (
    OptimizerParamScheduler,
    build_scheduler,
    idle_scheduler,
)
from megatron.core.parallelism_config import describe_schedule
from megatron.core.param_meta import GradRoute, ParamMeta, infer_param_meta
from megatron.core.pipeline_parallel.plan.spec import ScheduleSpec
from megatron.core.tensor_parallel.expert_ranks import ExpertRanks
from megatron.core.tensor_parallel.mappings import TensorParallel
from megatron.core.tensor_parallel.random import fill
from megatron.core.transformer.experts.expert_bias import ExpertBiases
from megatron.core.transport import host_data
from megatron.core.transport.collectives import broadcast_weights, mean_over
from megatron.core.transport.fake import FakePeers
from megatron.core.transport.imagined import ImaginedWorld
from megatron.core.transport.parallel_state import ParallelState, imagined_state
from megatron.estimate.description import ModelDescription
from megatron.training.config.config import Config
from megatron.training.engine import Chunk, Engine
from megatron.training.planner import Planner

ModelProvider = Callable[..., nn.Module]


def build_gpt_model(
    config: Config,
    ps: ParallelState | None = None,
    *,
    pre_process: bool = True,
    post_process: bool = True,
    vp_stage: int | None = None,
) -> GPTModel:
    """The GPT that the flags describe, on torch's current default device: this rank's part, or with no ps all of it.

    vp_stage: which of the rank's chunks. pre_process, post_process: the chunk embeds, computes the loss. Raises
    ModelError where they are not those of the stage.
    """
    part: dict[str, Any] = {}
    if ps is not None:
        held_here = config.planner().spec.held_by(ps.pp_rank)
        if len(held_here) > 1 and vp_stage is None:
            raise ModelError(
                "interleaving builds several chunks a rank: pass the model provider's vp_stage on to build_gpt_model"
            )
        spec = held_here[vp_stage or 0]
        given, held = (pre_process, post_process), (spec.embedding, spec.loss)
        if given != held:
            raise ModelError(
                f"build_gpt_model: pre_process, post_process {given} for a stage of {held}: pass on what the model "
                "provider is given"
            )
        both_ends_here = sum(one.embedding or one.loss for one in held_here) == 2
        part = {
            "layers": spec.layers,
            "other_end_here": both_ends_here and (spec.embedding or spec.loss),
            "tp": TensorParallel.of(ps, config.parallel.sequence_parallel),
            "experts": ExpertRanks.of(ps, config.model.moe_token_dispatcher_type),
        }
    return part_of_model(config, pre_process=pre_process, post_process=post_process, **part)


def part_of_model(config: Config, **part: Any) -> GPTModel:
    """The GPT of a configuration, on torch's current default device. part: which layers, ends and tensor parallel rank
    of it, by the names of `GPTModel`'s arguments; all of it if not given."""
    padded_vocab_size = config.model.padded_vocab_size
    assert padded_vocab_size is not None, "padded_vocab_size is derived once the tokenizer is known"
    return GPTModel(
        config.model,
        padded_vocab_size=padded_vocab_size,
        seed=config.training.seed,
        params_dtype=params_dtype(config),
        device=torch.get_default_device(),
        **part,
    )


def params_dtype(config: Config) -> torch.dtype:
    """The dtype of model weights: --bf16, --fp16, --fp64, else fp32."""
    dtype = getattr(torch, config.params_dtype)
    assert isinstance(dtype, torch.dtype), f"{config.params_dtype} is no dtype"
    return dtype


def build_engine(
    config: Config, ps: ParallelState, model_provider: ModelProvider, planner: Planner | None = None
) -> Engine:
    """Build this rank's chunks and wrap them. planner: the run's; None: of the flags.

    Communicates over mp, and for models that are not ours over dp (their initial weights), and over the world for
    schedules that split backwards. Raises ModelError for what the model cannot do under these flags.
    """
    planner = planner or config.planner()
    ddp = planner.sharded(config.ddp)
    chunks, model, meta = build_chunks(config, ps, model_provider, planner.spec, ddp)
    if config.model.init_model_with_meta_device:  # built without memory: one whole parameter at a time
        for name, one in meta.items():
            whole = torch.empty(one.local_shape, dtype=params_dtype(config), device=ps.device.torch_device)
            fill(whole, one, config.training.seed)
            model.buffer.write_weight(name, whole)
        model.weights_changed()
    optimizer = build_optimizer(config.optimizer, model.buffer, ps, model.memory_tracker)
    model.memory_tracker.book({"moments": sum(optimizer.persistent_bytes().values())})
    model.release_gradients()
    scheduler, scaler = scheduler_of(config, optimizer.param_groups), build_grad_scaler(config.optimizer)
    biases = ExpertBiases(
        [chunk.module for chunk in chunks],
        config.model.moe_router_bias_update_rate,
        ps.dp_group,
        model.memory_tracker,
    )
    biases.materialise(ps.device.torch_device)
    optimizer.followers.append(biases)
    optimizer.rollback_by = RollbackBy(config.parallel.post_validation_rollback)
    return Engine(chunks, model, meta, optimizer, scheduler, scaler, biases, model_provider)


def build_chunks(
    config: Config,
    ps: ParallelState,
    model_provider: ModelProvider,
    spec: ScheduleSpec,
    ddp: DistributedDataParallelConfig,
) -> tuple[tuple[Chunk, ...], DistributedDataParallel, dict[str, ParamMeta]]:
    """The chunks, and what makes them data parallel, with facts about their parameters. spec, ddp: as the planner has
    decided. Communicates as `build_engine` does, but over mp. Raises ModelError."""
    chunks = tuple(
        build_chunk(config, ps, model_provider, chunk, spec) for chunk in range(spec.placement.num_chunks)
    )
    if spec.splits_backward:
        asked = describe_schedule(config.parallel, spec.schedule)
        told = host_data.all_gather_json(
            [unsplittable(one.module, asked) for one in chunks], ps.control_group
        )
        for why in (why for of_rank in told for why in of_rank if why is not None):
            raise UnsplittableError(why)
    modules, sinks = [chunk.module for chunk in chunks], [chunk.sink for chunk in chunks]
    _join_uses(modules)
    for chunk in chunks if ps.dp_size > 1 else ():
        chunk.context.counts.mean_over_dp = functools.partial(mean_over, group=ps.dp_group)
    meta: dict[str, ParamMeta] = {}
    for module in modules:
        meta.update(module.param_meta if isinstance(module, MegatronModule) else infer_param_meta(module))
    if None in sinks:
        broadcast_weights(modules, ps)
    stages = [chunk.stage for chunk in chunks]
    return chunks, DistributedDataParallel(modules, ps, ddp, meta, sinks=sinks, stages=stages), meta


def imagined_world(config: Config, rank: int = 0) -> ImaginedWorld:
    """All ranks of one copy of the model, that of `rank`, on devices of the flags' kind. Raises RankGridError."""
    kind: DeviceKind = "cuda" if config.parallel.distributed_backend == "nccl" else "cpu"
    return ImaginedWorld(config.world_part(), Device(kind, imagined=True), rank=rank)


def fake_state(config: Config, rank: int, device: Device) -> ParallelState:
    """Of a rank on a device that is there, whose peers are not (--fake-process-group). Raises RankGridError."""
    peers = FakePeers(imagined_world(config, rank), device)
    return imagined_state(config.world_part(), rank, device, peers)


def imagined_engines(config: Config, rank: int = 0) -> dict[int, Engine]:
    """What `build_engine` builds on each rank of `imagined_world`, on tensors without memory, by rank."""
    planner = config.planner()

    def build(ps: ParallelState) -> Engine:
        return build_engine(config, ps, functools.partial(build_gpt_model, config, ps), planner)

    return imagined_world(config, rank).run(build)


def scheduler_of(config: Config, param_groups: Sequence[ParamGroup]) -> OptimizerParamScheduler:
    """Of the flags, over an optimizer's groups."""
    if config.evaluation.skip_train:
        return idle_scheduler(param_groups)
    training = config.training
    return build_scheduler(
        config.optimizer,
        param_groups,
        train_iters=training.train_iters if training.train_samples is None else None,
        train_samples=training.train_samples,
        global_batch_size=training.global_batch_size,
    )


def build_chunk(
    config: Config, ps: ParallelState, model_provider: ModelProvider, chunk: int, schedule: ScheduleSpec
) -> Chunk:
    """Call the user's provider for one chunk of the schedule.

    Raises ModelError for what the model or provider cannot do.
    """
    stage = schedule.local_stages(ps.pp_rank)[chunk]
    spec, several = schedule.stages[stage], schedule.placement.num_chunks > 1
    arguments: dict[str, Any] = {"pre_process": spec.embedding, "post_process": spec.loss}
    if "vp_stage" in inspect.signature(model_provider).parameters:
        arguments["vp_stage"] = chunk if several else None
    elif several:
        raise ModelError(
            "interleaving builds several chunks a rank: give the model provider a third argument vp_stage, the "
            "number of the chunk that it is to build"
        )
    on_meta = config.model.init_model_with_meta_device
    with torch.device("meta") if on_meta else ps.device.torch_device:
        module = model_provider(**arguments)
    module.to(params_dtype(config))
    what, described = type(module).__name__, _is_described(module, config)
    limited = config.parallel.rank_memory_limit is not None and not described
    if limited and isinstance(config.description, ModelDescription):
        raise ModelError(
            f"--rank-memory-limit: stage {stage} is another model, {what}, than the GPT of the flags that it was "
            "planned as: let the model provider make the same model whenever, and on whichever rank, it is called"
        )
    if isinstance(module, MegatronModule):
        return Chunk(stage, spec, module, module.context, module.context.grads, described)
    if on_meta:
        raise ModelError(
            "--init-model-with-meta-device needs a model that says how its weights start (MegatronModule): leave the "
            f"flag out for {what}"
        )
    if ps.tp_size > 1:
        raise ModelError(
            "--tensor-model-parallel-size needs a model that says which part of each weight it holds "
            f"(MegatronModule): use 1 for {what}"
        )
    if not spec.embedding and not callable(getattr(module, "set_input_tensor", None)):
        raise ModelError(
            f"--pipeline-model-parallel-size: {what} has no set_input_tensor(tensor), which hands a stage what the "
            "one before has computed"
        )
    return Chunk(stage, spec, module, ModelContext(config.training.seed), None)


def _is_described(module: nn.Module, config: Config) -> bool:
    """Whether it is the GPT of the flags, all of it trained."""
    return (
        type(module) is GPTModel
        and module.config == config.model
        and all(parameter.requires_grad for parameter in module.parameters())
    )


class UnsplittableError(ModelError):
    """Raised on every rank alike, with the same message."""


def unsplittable(module: nn.Module, asked: str) -> str | None:
    """Why a backward cannot be split into B and W, naming the first such parameter; None where it can. asked: the flag
    that asks for the schedule.

    What goes to a sink can wait for W. Gradients of 1-D parameters may be computed in B, whoever does so: they wait for
    W to be added. A matrix that autograd accumulates would make of every B a whole backward.
    """
    facts = module.param_meta if isinstance(module, MegatronModule) else None
    for name, parameter in module.named_parameters():
        meta = None if facts is None else facts.get(name)
        if not parameter.requires_grad:
            continue
        if facts is not None and meta is None:
            why = "is declared in no param_meta"
        elif meta is None or (meta.route is GradRoute.AUTOGRAD and parameter.dim() > 1):
            why = "is accumulated by autograd, whose backward has no part that can wait"
        else:
            continue
        what = type(module.get_submodule(name.rpartition(".")[0])).__name__
        return (
            f"{asked} computes weight gradients apart from the rest of the backward (W, B), and parameter {name!r} of "
            f"{type(module).__name__} (a {what}) {why}: use --pipeline-schedule 1f1b, 1f1b-v, interleaved or gpipe "
            "instead, or layers that put their gradients into a sink (megatron.core.tensor_parallel.parallel_layers), "
            "with their param_meta"
        )
    return None


def _join_uses(modules: Sequence[nn.Module]) -> None:
    """A parameter that several chunks of this rank use is one tensor: that of the first chunk.

    Tied embeddings on a V, whose lookup is in one chunk and whose output layer in another: each use has its gradient
    key, and the sum needs no other rank.
    """
    first: dict[str, nn.Parameter] = {}
    for module in modules:
        if not isinstance(module, MegatronModule):
            continue
        for name in (name for name, meta in module.param_meta.items() if len(meta.uses) > 1):
            path, _, local = name.rpartition(".")
            owner = module.get_submodule(path)
            setattr(owner, local, first.setdefault(name, cast(nn.Parameter, getattr(owner, local))))
