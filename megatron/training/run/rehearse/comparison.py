"""What an account is made of, from engines of an imagined world; and whether a rehearsal has held that."""

from __future__ import annotations

import dataclasses
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

import torch

from megatron.core.device import imagining
from megatron.core.distributed.custom_fsdp.flat_buffer import FlatBuffer
from megatron.core.distributed.custom_fsdp.reduction_bytes import exchange_bytes, finish_bytes
from megatron.core.distributed.data_parallel import DistributedDataParallel
from megatron.core.memory_tracker import PERSISTENT
from megatron.core.pipeline_parallel.plan.held.units import rank_units
from megatron.core.pipeline_parallel.plan.ir import Plan, op_text
from megatron.core.pipeline_parallel.plan.spec import PlanPurpose, ScheduleSpec
from megatron.core.words import counted, size_text
from megatron.estimate.description import ModelDescription, ModelPiece
from megatron.estimate.rank_account import rank_account
from megatron.estimate.rank_parts import SUMS, RankAccount, RankParts
from megatron.estimate.step_watch import Seen
from megatron.training.config.config import Config
from megatron.training.engine import Engine, largest_bytes, written_bytes
from megatron.training.planner import Planner
from megatron.training.run.describe import host_batch


def parts_of(
    config: Config,
    spec: ScheduleSpec,
    description: ModelDescription | Mapping[int, ModelPiece],
    model: DistributedDataParallel,
    step: Mapping[str, Mapping[str, int]] | None = None,
    *,
    drawn: int = 0,
) -> RankParts:
    """Of a rank whose engine is there, on tensors with or without memory. description: of the model of the flags, or of
    a model of one's own its stages as one piece each. step: what its optimizer's step takes. drawn: see `RankParts`."""
    ps, stages = model.ps, dict[int, Sequence[ModelPiece]]()
    filed: dict[int, Sequence[tuple[frozenset[int], int]]] = {}
    for stage, unit_of in zip(spec.local_stages(ps.pp_rank), model.unit_of_key(), strict=True):
        if not isinstance(description, ModelDescription):
            stages[stage] = [piece := description[stage]]
            filed[stage] = [
                (frozenset(unit_of[key] for key in keys if key in unit_of), size)
                for keys, size in piece.filed_for.items()
            ]
            continue
        one = spec.stages[stage]
        chunks = config.model.recompute_chunks(len(one.layers))
        stages[stage] = description.stage_pieces(one.layers, chunks, embeds=one.embedding, ends=one.loss)
    reductions, names = model.reductions, [unit.name for unit in model.units]
    exchange = {
        (unit.name, outer, again): exchange_bytes(unit, outer=outer, again=again)
        for unit in reductions.units
        for outer, again in ((False, False), (False, True), (True, False))
    }
    resting = {name: reductions.resting_bytes(number) for number, name in enumerate(names)}
    at_rest = {kind: model.memory_tracker.live(kind) for kind in PERSISTENT}
    at_rest["main_grads"] = model.buffer.persistent_bytes()["main_grads"]
    reads = spec.reads_data(ps.pp_rank) and ps.device.kind == "cpu"
    own_batch = batch_bytes(config) if reads else 0
    if config.parallel.enable_optimizer_post_validation:  # those of the step before may be read again
        drawn += config.last_num_microbatches
    return RankParts(
        at_rest, stages, own_batch, exchange, resting, model.slot_of_unit, drawn, step or {}, filed
    )


def step_bytes(config: Config, engine: Engine) -> dict[str, dict[str, int]]:
    """What ends a step: sums that wait for its end, and the optimizer's step."""
    counts, device = config.logging.log_num_zeros_in_grad, engine.model.ps.device
    snapshot = config.parallel.enable_optimizer_post_validation
    with imagining(device):
        sums = {SUMS: finish_bytes(engine.model.reductions)}
        return sums | engine.optimizer.step_bytes(count_zero_grads=counts, snapshot=snapshot)


def step_differences(
    rank: int, step: Mapping[str, Mapping[str, int]], seen: Mapping[str, Mapping[str, int]]
) -> list[str]:
    """A line for each kind of bytes of which a part of what ends a step took something else. step: `step_bytes`.
    seen: what a watch has seen of the parts; of validated steps "rollback" only where one was taken back."""
    lines, parts = [], [name for name in step if name != "rollback" or name in seen]
    for name in parts:
        mine, its = Counter(step[name]), Counter(seen.get(name, {}))
        del its["temporaries"]
        for kind in (kind for kind in sorted(mine.keys() | its.keys()) if mine[kind] != its[kind]):
            figures = f"planned {_exact(mine[kind])}, seen {_exact(its[kind])}"
            lines.append(f"pipeline rank {rank}, in {name}: {kind}: {figures}")
    return lines


def step_purpose(config: Config) -> PlanPurpose:
    """Of a run's steps."""
    validated = config.parallel.enable_optimizer_post_validation
    return PlanPurpose.TRAIN_AND_STEP if validated else PlanPurpose.TRAIN


def batch_bytes(config: Config) -> int:
    """Of a microbatch's batch, as the loader gives it."""
    return sum(tensor.nbytes for tensor in host_batch(config, torch.device("meta")).values())


def account_of(plan: Plan, spec: ScheduleSpec, rank: int, parts: RankParts) -> RankAccount:
    """Of a pipeline rank."""
    units = None if spec.stages_units is None else rank_units(plan.placement, spec.stages_units)[rank]
    return rank_account(plan, rank, units, spec.residency, parts)


def evaluation_account(
    config: Config, plan: Plan, spec: ScheduleSpec, rank: int, parts: RankParts
) -> RankAccount:
    """Of an evaluation by a plan of forwards. parts: of the rank in a step, whose batches are still there, and, but for
    steps that are validated, all gradients."""
    drawn = parts.drawn + config.last_num_microbatches
    resting = parts.resting if config.parallel.enable_optimizer_post_validation else {}
    return account_of(plan, spec, rank, dataclasses.replace(parts, drawn=drawn, resting=resting, step={}))


def full_account(
    config: Config, planner: Planner, num_microbatches: int, rank: int, parts: RankParts, buffer: FlatBuffer
) -> RankAccount:
    """With what runs between the steps of a run. num_microbatches: of a step, that are looked at. Raises PlanError."""
    spec, flags = planner.spec, config.checkpoint
    account = account_of(planner.plan(num_microbatches, step_purpose(config)), spec, rank, parts)
    evaluation, rounded = None, buffer.rounded_bytes
    if config.evaluation.eval_iters:
        plan = planner.plan(num_microbatches, PlanPurpose.EVALUATE)
        evaluation = evaluation_account(config, plan, spec, rank, parts)
    taken = {"save": {"casts": rounded}} if flags.save is not None else {}
    if flags.load is not None:
        taken["load"] = {"casts": rounded, "read": largest_bytes(buffer)}
    on_device = config.parallel.distributed_backend == "gloo"
    return account.with_beside(taken, evaluation, saved_bytes(config, parts, buffer) if on_device else 0)


def saved_bytes(config: Config, parts: RankParts, buffer: FlatBuffer) -> int:
    """What --async-save keeps of a rank in host memory."""
    flags = config.checkpoint
    if not flags.async_save or flags.save is None:
        return 0
    return written_bytes(buffer, 0 if flags.no_save_optim else parts.at_rest["moments"])


def differences(account: RankAccount, seen: Sequence[Seen]) -> list[str]:
    """A line for each kind of bytes and operation behind which a rehearsal, or a run, held something else, and for each
    operation of the row that it has not come to."""
    places: defaultdict[str, list[int]] = defaultdict(list)
    for place, op in enumerate(account.row):
        places[op_text(op)].append(place)
    behind, met, lines = account.behind(), Counter[str](), []
    for one in seen:
        at = places.get(one.operation, ())
        number = met[one.operation]
        met[one.operation] += 1
        if number >= len(at) or (planned := behind.get(at[number])) is None:
            continue
        mine, its = _comparable(planned), _comparable(one.held)
        for kind in (kind for kind in sorted(mine.keys() | its.keys()) if mine[kind] != its[kind]):
            told = f"planned {_exact(mine[kind])}, seen {_exact(its[kind])}"
            lines.append(f"pipeline rank {account.rank}, behind {one.operation}: {kind}: {told}")
    for text, at in places.items():
        if met[text] != len(at):
            often = f"planned {counted(len(at), 'time')}, seen {met[text]}"
            lines.append(f"pipeline rank {account.rank}, {text}: {often}")
    return lines


def _comparable(held: Mapping[str, int]) -> Counter[str]:
    """Who looks on knows who has made a hidden state, an account who has it: so these two are one kind. What the engine
    makes for itself, such as the flag that tells whether weights are finite, is in no account between operations."""
    kinds = Counter(held)
    del kinds["temporaries"]
    kinds["activations and messages"] = kinds.pop("activations", 0) + kinds.pop("messages", 0)
    return kinds


def _exact(size: int) -> str:
    return f"{size:,} bytes ({size_text(size)})"
