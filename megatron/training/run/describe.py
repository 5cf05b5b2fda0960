"""The model of a launch line as plain data: its pieces, run on tensors without memory and looked at."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron.core.device import imagining, kind_of
from megatron.core.distributed.custom_fsdp.bucket_memory import grad_comm_dtype, main_grad_dtype
from megatron.core.models.gpt.batch import empty_batch, stage_batch
from megatron.core.models.gpt.gpt import GPTModel
from megatron.core.models.gpt.loss import gpt_loss
from megatron.core.models.gpt.stage_layers import StageSpec
from megatron.core.sharding_table import ShardOver
from megatron.core.tensor_parallel.expert_ranks import ExpertRanks
from megatron.core.tensor_parallel.mappings import TensorParallel
from megatron.core.transformer.layer_table import layer_table
from megatron.core.transport.parallel_state import ParallelState
from megatron.estimate.description import ModelDescription, ModelPiece, renumbered
from megatron.estimate.observe import ObservedPart, observe
from megatron.training.config.config import GROUPS, Config
from megatron.training.config.problems import Problem
from megatron.training.planner import possible_specs
from megatron.training.report.step_metrics import evaluate_loss, loss_to_differentiate
from megatron.training.run.build import imagined_world, params_dtype, part_of_model

# Settings that decide on nothing of what is described, and differ between launches of one model.
_ELSEWHERE = ("checkpoint", "logging", "profiling", "reliability", "evaluation", "tokenizer")


def asks_for_costs(config: Config) -> bool:
    """Whether plans, rules or reports of a run depend on what its model takes."""
    reports = config.logging.report_theoretical_memory or config.training.fake_process_group
    validates = config.parallel.enable_optimizer_post_validation
    return config.staged_model.reads_costs or validates or reports


def limit_fault(config: Config, undescribed: str) -> Problem | None:
    """That limits in bytes cannot be kept to. undescribed: why nobody knows what the model takes."""
    names = [
        name for name in ("rank_memory_limit", "pipeline_memory_limit") if getattr(config.parallel, name)
    ]
    if not names or not undescribed:
        return None
    flags = tuple(f"--{name.replace('_', '-')}" for name in names)
    fix = (
        "mend it, if that is a mistake; a model can be looked at where it is built and its forward step run without "
        "reading values of tensors (.item(), .tolist(), branches on them). Or leave the limit out; "
        "--fsdp-reshard-policy budget --fsdp-memory-budget BYTES bounds gathered weights and gradients alone"
    )
    return Problem("own-model", flags, f"{flags[0]}: {undescribed}", fix)


def described(config: Config) -> Config:
    """With the description of its model on a rank of an imagined world; as it is where the flags do not say enough.
    Equal flags are looked at once."""
    if config.description is not None or not config.is_complete:
        return config
    key = tuple(repr(getattr(config, name)) for name in GROUPS if name not in _ELSEWHERE)
    return dataclasses.replace(config, description=_described(_Asked(key, config)))


@dataclasses.dataclass(frozen=True)
class _Asked:
    """key: by which they are equal."""

    key: tuple[str, ...]
    config: Config = dataclasses.field(compare=False)


@functools.lru_cache(maxsize=32)
def _described(asked: _Asked) -> ModelDescription:
    config = asked.config
    specs = possible_specs(config.staged_model, config.rank_budget)
    stages = tuple(dict.fromkeys(stage for spec in specs for stage in spec.stages))
    ps = imagined_world(config).state(0)
    with _without_compiler():
        plain = described_model(config, ps, stages)
        if not (config.parallel.sequence_parallel and config.staged_model.may_keep_gathered):
            return plain
        gathered = described_model(config, ps, stages, keeps_gathered=True)
    return dataclasses.replace(plain, gathered=gathered)


def described_model(
    config: Config, ps: ParallelState, stages: Sequence[StageSpec], *, keeps_gathered: bool = False
) -> ModelDescription:
    """The GPT of the flags on a rank, one that is there or one of an imagined world. stages: that it will be asked for.
    keeps_gathered: F keeps what sequence parallel has gathered. Communicates over tp."""
    with imagining(ps.device), torch.device(ps.device.torch_device):
        return ModelParts(config, ps, keeps_gathered).of_stages(stages)


@contextlib.contextmanager
def _without_compiler() -> Iterator[None]:
    """torch asks its compiler to leave kernels of tensors without memory alone, and imports it for that, which takes as
    long as torch itself. Where nobody has imported it, nobody compiles."""
    name = "torch._dynamo"
    if name in sys.modules:
        yield
        return
    stand_in: Any = types.ModuleType(name)
    stand_in.disable = lambda function, *_, **__: function
    sys.modules[name] = torch._dynamo = stand_in
    try:
        yield
    finally:
        del sys.modules[name], torch._dynamo


class ModelParts:
    """Builds parts of the model on torch's default device, and observes them."""

    def __init__(self, config: Config, ps: ParallelState, keeps_gathered: bool) -> None:
        self._config, self._groups, self._keeps_gathered = config, ps.groups.values(), keeps_gathered
        self._tp = TensorParallel.of(ps, config.parallel.sequence_parallel)
        self._experts = ExpertRanks.of(ps, config.model.moe_token_dispatcher_type)
        self._main_grads = summed_in(config)
        # One of everything that a stage is handed.
        with torch.no_grad():
            states = _forward(config, self._built(config, pre_process=True))(None)
        self._hidden = states.shape, states.dtype

    def of_stages(self, stages: Sequence[StageSpec]) -> ModelDescription:
        config = self._config
        model, table = config.model, layer_table(config.model)
        kinds = tuple(map(repr, table))
        # A layer by itself keeps all, whatever is recomputed.
        alone = (
            config if model.recompute_granularity != "full" else config.replace(recompute_granularity=None)
        )
        runs: dict[tuple[str, ...], Sequence[int]] = {}
        for spec in stages:
            for first, end, recomputed in model.recompute_chunks(len(spec.layers)):
                held = spec.layers[first:end]
                if recomputed:
                    runs.setdefault(tuple(kinds[number] for number in held), held)
        return ModelDescription(
            self.piece(config, pre_process=True),
            self.piece(config, post_process=True),
            kinds,
            {kind: self.piece(alone, layers=[kinds.index(kind)]) for kind in dict.fromkeys(kinds)},
            {held: self.piece(config, layers=layers) for held, layers in runs.items()},
        )

    def _built(self, config: Config, **part: Any) -> GPTModel:
        given = {"layers": (), "pre_process": False, "post_process": False} | part
        return part_of_model(config, tp=self._tp, experts=self._experts, **given)

    def piece(self, config: Config, **part: Any) -> ModelPiece:
        """What is observed of a part of the model, its layers numbered from 0. part: as in `part_of_model`."""
        model = self._built(config, **part)
        model.context.grads.keeps_gathered = self._keeps_gathered
        hidden = None if model.pre_process else self._hidden
        ends, groups = model.post_process, self._groups
        seen = observe(ObservedPart(model, _forward(config, model), hidden, ends, self._main_grads, groups))
        layers = [int(number) for number in model.decoder.layers]
        return renumbered(seen, layers, range(len(layers)))


def summed_in(config: Config) -> torch.dtype:
    """What a rank adds up its microbatches' gradients in."""
    sharding = config.sharding
    of_wire = sharding is not None and sharding.main_grads is not ShardOver.NONE
    return (grad_comm_dtype if of_wire else main_grad_dtype)(params_dtype(config), config.ddp)


def host_batch(config: Config, device: torch.device) -> dict[str, Tensor]:
    """A microbatch as the loader of the flags gives it, without values: on the host, whose memory CPUs compute in."""
    data, length = config.data, config.model.seq_length
    assert length is not None, "a model without a sequence length"
    masked = data.create_attention_mask_in_dataloader and data.reset_attention_mask
    where = device if kind_of(device) == "cpu" else torch.device("cpu")
    return empty_batch(config.training.micro_batch_size, length, where, masked=masked)


def _forward(config: Config, model: GPTModel) -> Callable[[Tensor | None], Tensor]:
    """One microbatch of a part of the model. Its batch is there before; what of it goes to another device is part of
    what it takes."""
    where = torch.get_default_device()
    host = host_batch(config, where)

    def forward(hidden: Tensor | None) -> Tensor:
        model.context.begin_microbatch(1, 0, 0)
        if hidden is not None:
            model.set_input_tensor(hidden)
        batch = stage_batch(host, where, embeds=model.pre_process, ends=model.post_process)
        out: Tensor = model(
            batch["tokens"], batch["position_ids"], batch["attention_mask"], labels=batch["labels"]
        )
        if not model.post_process:
            return out
        loss_mask = batch["loss_mask"]
        assert loss_mask is not None, "a batch without a mask of its loss"
        loss = evaluate_loss(out, functools.partial(gpt_loss, loss_mask))
        return loss_to_differentiate(loss, config.model.calculate_per_token_loss)

    return forward
