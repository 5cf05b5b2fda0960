"""What Megatron's own training script is made of, for trainers that call its parts: model, optimizer, schedule and
step."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from megatron.compat import loop, model
from megatron.compat.checkpoints import load_checkpoint
from megatron.compat.fields import check_fields, config_of, in_fields
from megatron.compat.parallel_state import current
from megatron.compat.tensor_parallel import broadcast_tensors
from megatron.core.enums import ModelType
from megatron.core.models.gpt.vocabulary_size import padded_vocabulary
from megatron.core.optimizer import optimizer_param_scheduler
from megatron.core.optimizer.optimization_config import OptimizerConfig as OptimizerFlags
from megatron.core.optimizer.optimizer_param_scheduler import ScheduleError, build_schedule
from megatron.core.tokenizers.build import build_from_config
from megatron.core.tokenizers.tokenizer import Tokenizer
from megatron.core.transport import collectives
from megatron.training import global_vars
from megatron.training.report.step_metrics import ForwardStep, MicrobatchLoss, StepMetrics, agreed_names
from megatron.training.run.build import ModelProvider, build_chunk, scheduler_of
from megatron.training.run.describe import described


def get_model(
    model_provider_func: ModelProvider,
    model_type: ModelType = ModelType.encoder_or_decoder,
    wrap_with_ddp: bool = True,
    config: Any = None,
    pg_collection: Any = None,
) -> list[nn.Module]:
    """This rank's part of the model, in a list, wrapped in `DistributedDataParallel` unless told otherwise.

    config: of the wrapper, where the model has none. Communicates over dp. Raises ModelError as `pretrain`; ValueError
    for groups of one's own and other types.
    """
    if model_type is not ModelType.encoder_or_decoder or pg_collection is not None:
        raise ValueError("get_model(model_type, pg_collection): decoders, over the groups of parallel_state")
    args = global_vars.get_args()
    flags = config_of(args)
    if flags.staged_model.reads_costs:
        flags = described(flags)
    module = build_chunk(flags, current(), model_provider_func, 0, flags.planner().spec).module
    if not wrap_with_ddp:
        return [module]
    own = vars(module).get("config") or config or model.core_transformer_config_from_args(args)
    given = model.DistributedDataParallelConfig(**dataclasses.asdict(flags.ddp))
    return [loop.DataParallelModel(own, given, module)]


def setup_model_and_optimizer(
    model_provider_func: ModelProvider,
    model_type: ModelType,
    no_wd_decay_cond: Any = None,
    scale_lr_cond: Any = None,
    lr_mult: float = 1.0,
    checkpointing_context: Any = None,
) -> tuple[list[nn.Module], Any, OptimizerParamScheduler]:
    """Model, optimizer and schedule of the flags, with what --load holds. Communicates over the world. Raises as
    `get_model`, `get_megatron_optimizer` and `load_checkpoint`."""
    chunks, args = get_model(model_provider_func, model_type), global_vars.get_args()
    config = config_of(args)
    counts = {"log_num_zeros_in_grad": config.logging.log_num_zeros_in_grad}
    flags = model.OptimizerConfig(**dataclasses.asdict(config.optimizer), **counts)
    optimizer = loop.get_megatron_optimizer(flags, chunks, no_wd_decay_cond, scale_lr_cond, lr_mult)
    schedule = get_optimizer_param_scheduler(optimizer)
    args.iteration, args.num_floating_point_operations_so_far = load_checkpoint(chunks, optimizer, schedule)
    return chunks, optimizer, schedule


class StepScheduler(optimizer_param_scheduler.OptimizerParamScheduler):
    """Learning rate and weight decay by Megatron's arguments, over an optimizer's `param_groups`, ours or torch's.

    Steps are whatever `step` counts: Megatron's trainer counts samples. Raises ValueError.
    """

    def __init__(
        self,
        optimizer: Any,
        init_lr: float,
        max_lr: float,
        min_lr: float,
        lr_warmup_steps: float,
        lr_decay_steps: int,
        lr_decay_style: str,
        start_wd: float,
        end_wd: float,
        wd_incr_steps: int,
        wd_incr_style: str,
        use_checkpoint_opt_param_scheduler: bool = True,
        override_opt_param_scheduler: bool = False,
        wsd_decay_steps: int | None = None,
        lr_wsd_decay_style: str | None = None,
    ) -> None:
        called = {"lr": "max_lr", "lr_warmup_init": "init_lr", "start_weight_decay": "start_wd"}
        called |= {"end_weight_decay": "end_wd", "weight_decay_incr_style": "wd_incr_style"}
        given: dict[str, Any] = {
            "lr": max_lr,
            "min_lr": min_lr,
            "lr_warmup_init": init_lr,
            "lr_decay_samples": lr_decay_steps,
            "lr_decay_style": lr_decay_style,
            "start_weight_decay": start_wd,
            "end_weight_decay": end_wd,
            "weight_decay_incr_style": wd_incr_style,
            "lr_wsd_decay_samples": wsd_decay_steps,
            "lr_wsd_decay_style": lr_wsd_decay_style,
        }
        given = {name: value for name, value in given.items() if value is not None}
        found = check_fields("OptimizerParamScheduler", given, ("decoupled_lr", "decoupled_min_lr"), called)
        needed = {"max_lr": max_lr, "min_lr": min_lr, "wd_mult": 1.0, "decoupled": False}
        for group in optimizer.param_groups:
            group.update(needed | group)  # torch's have none of these
        override = override_opt_param_scheduler
        lengths: dict[str, Any] = {"train_iters": None, "global_batch_size": 1}
        use = use_checkpoint_opt_param_scheduler and not override
        try:
            made = build_schedule(OptimizerFlags(**found), train_samples=wd_incr_steps, **lengths)
            made = dataclasses.replace(made, warmup_samples=lr_warmup_steps)  # which may be a fraction
        except ScheduleError as error:
            raise ValueError(f"OptimizerParamScheduler: {in_fields(str(error), called)}") from None
        super().__init__(optimizer.param_groups, made, override=override, use_checkpoint=use)

    def step(self, increment: int) -> None:
        """Move the clock on, and set the rates of the next step."""
        super().step(increment)

    def state_dict(self) -> dict[str, Any]:
        """The schedule and its clock."""
        return self.state()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Raises ScheduleError where schedules differ and no argument says which to take."""
        if (told := self.load_state(state_dict)) is not None:
            global_vars.print_rank_0(told)


OptimizerParamScheduler = StepScheduler  # Megatron's name


def get_optimizer_param_scheduler(optimizer: Any) -> OptimizerParamScheduler:
    """Of the flags."""
    made = scheduler_of(config_of(global_vars.get_args()), optimizer.param_groups)
    scheduler = StepScheduler.__new__(StepScheduler)
    vars(scheduler).update(vars(made))  # the same, with Megatron's methods
    return scheduler


def train_step(
    forward_step_func: ForwardStep,
    data_iterator: Any,
    model: Sequence[Any],
    optimizer: Any,
    opt_param_scheduler: Any,
    config: Any,
    forward_backward_func: Callable[..., list[Any]] | None = None,
    iteration: int | None = None,
) -> tuple[dict[str, Tensor], int, bool, bool, int, float | None, int | None]:
    """One step of `get_num_microbatches()` microbatches: (losses by name, of the whole batch, on the ranks that compute
    them; 1 where the step was skipped; whether to save; whether to end; with which status; the gradient's norm; zeros).

    Communicates over the world. Raises NonFiniteWeightsError.
    """
    ps, args, num_microbatches = current(), global_vars.get_args(), global_vars.get_num_microbatches()
    for one in model:
        one.zero_grad_buffer()
    optimizer.zero_grad()
    config.grad_scale_func = (
        config.grad_scale_func or optimizer.scale_loss
    )  # as Megatron's loop does before it
    reports = (forward_backward_func or loop.get_forward_backward_func())(
        forward_step_func=forward_step_func,
        data_iterator=data_iterator,
        model=model,
        num_microbatches=num_microbatches,
        forward_only=False,
    )
    if config.finalize_model_grads_func is None:
        loop.finalize_model_grads(model)
    updated, norm, zeros = optimizer.step()
    if updated:
        opt_param_scheduler.step(increment=num_microbatches * args.micro_batch_size * ps.dp_size)
    numbers, zero = StepMetrics(ps.device.torch_device), torch.zeros((), device=ps.device.torch_device)
    for report in reports:
        numbers.add(MicrobatchLoss(zero, None, report))
    numbers.agree(agreed_names(numbers.names, ps))
    sums = numbers.reduce(ps).losses.items()
    losses = {name: torch.tensor(total / count) for name, (total, count) in sums if reports}
    return losses, int(not updated), False, False, 0, norm, zeros


def get_batch_on_this_tp_rank(
    data_iterator: Iterator[Mapping[str, Tensor]] | None,
    mtp_on_this_rank: bool = False,
    vp_stage: int | None = None,
) -> dict[str, Tensor | None]:
    """The next batch of the first tensor parallel rank, on all of them: what this pipeline stage reads, None for the
    rest and for what the data lacks. Communicates over tp."""
    if mtp_on_this_rank:
        raise ValueError(
            "get_batch_on_this_tp_rank(mtp_on_this_rank): docs/roadmap.md#multi-token-prediction"
        )
    ps = current()
    first, last = ps.pp_rank == 0, ps.pp_rank == ps.pp_size - 1
    reads = {"tokens": first, "labels": last, "loss_mask": last, "attention_mask": first or last}
    reads["position_ids"] = first
    mine: Mapping[str, Any] = {}
    if (first or last) and ps.tp_rank == 0:
        if data_iterator is None:
            raise ValueError(
                "get_batch_on_this_tp_rank(data_iterator=None): tensor parallel rank 0 reads data"
            )
        mine = next(data_iterator)
    found = broadcast_tensors(
        {name: one for name, one in mine.items() if reads.get(name) and one is not None}
    )
    return {name: found.get(name) for name in reads}


def average_losses_across_data_parallel_group(losses: Sequence[Tensor]) -> Tensor:
    """[n]: each the mean over data parallel ranks. Communicates over dp."""
    ps, told = current(), torch.cat([loss.detach().clone().view(1) for loss in losses])
    collectives.all_reduce(told, ps.dp_group)
    return told / ps.dp_size


def build_tokenizer(args: Any, **kwargs: Any) -> Tokenizer:
    """Of the flags; sets `args.padded_vocab_size` where it is None. Raises TokenizerError, and ValueError for arguments
    of the library behind it."""
    if kwargs:
        raise ValueError(f"build_tokenizer({', '.join(kwargs)}): leave them out, flags say all")
    tokenizer = build_from_config(config_of(args).tokenizer)
    if args.padded_vocab_size is None:
        divisor, tp = args.make_vocab_size_divisible_by, args.tensor_model_parallel_size
        args.padded_vocab_size = padded_vocabulary(tokenizer.vocab_size, divisor, tp)
    return tokenizer
