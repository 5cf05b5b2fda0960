"""A training step: this rank's row of F, B, W and BW, around Megatron's own forward and backward."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from zbpp_light import checks, schedules
from zbpp_light.messages import Neighbour
from zbpp_light.schedules import BW, B, F, Plan, W
from zbpp_light.signatures import call
from zbpp_light.weights import WeightGradients

_FINALIZE = ("grad_finalize_pgs", "pg_collection", "force_all_reduce")  # what Megatron's own loop hands on


class Groups:
    """The process groups of a step: those that the caller gives, else Megatron's own."""

    def __init__(self, state: Any, given: Mapping[str, Any]) -> None:
        groups, messages = given.get("pg_collection"), given.get("p2p_communicator")
        if messages is not None and not hasattr(messages, "pp_group"):
            raise ValueError(f"zbpp_light: messages of a {type(messages).__name__} are of pipelines of several modules")
        pipeline: Any = messages.pp_group if messages is not None else state.get_pipeline_model_parallel_group()
        if isinstance(pipeline, list):  # 0.12 has several where encoders have ranks of their own
            assert len(pipeline) == 1, f"{len(pipeline)} pipelines through a rank"
            pipeline = pipeline[0]
        self.pipeline: dist.ProcessGroup = pipeline
        self.tensor = groups.tp if groups is not None else state.get_tensor_model_parallel_group()
        self.context = groups.cp if groups is not None else state.get_context_parallel_group()
        self.stage, self.stages = dist.get_rank(pipeline), dist.get_world_size(pipeline)


class Step:
    """megatron: its module of schedules; given: what its function was called with, by parameter."""

    def __init__(
        self, megatron: Any, groups: Groups, plan: Plan, weights: WeightGradients, given: Mapping[str, Any]
    ) -> None:
        self._megatron, self._groups, self._weights, self._given = megatron, groups, weights, given
        model, data = (only[0] if isinstance(only, list) else only for only in (given["model"], given["data_iterator"]))
        self._model, self._config = model, megatron.get_model_config(model)
        self._row, self._microbatches = plan.rows[groups.stage], given["num_microbatches"]
        self._losses: list[Any] = []
        # What Megatron's functions of any release may ask for, by their parameters.
        self._values: dict[str, Any] = {"decoder_seq_length": None, "collect_non_loss_data": False, **given}
        self._values |= {"model": model, "data_iterator": data, "config": self._config}
        self._values |= {"forward_data_store": self._losses, "model_type": checks.model_type(model)}
        self._values |= {"tp_group": groups.tensor, "cp_group": groups.context, "cp_group_size": groups.context.size()}
        self._values |= {"pipeline_model_parallel_size": groups.stages, "encoder_decoder_xattn": False}
        self._values |= {"is_last_stage": groups.stage == groups.stages - 1}
        self._device = next(model.parameters()).device
        self._tokens = torch.zeros([], dtype=torch.int, device=self._device)
        self._held: dict[int, tuple[Tensor | None, Tensor]] = {}  # input and output, until B
        # Of what comes from the stage before, and of what goes to the next; gradients have the same, the other way.
        self._shapes = self._tensor_shapes()
        self._before, self._behind = (self._neighbour(plan, side) for side in (0, 1))

    def run(self) -> list[Any]:
        """All operations, then what Megatron does behind its last backward. Returns the losses, of the last stage."""
        config, timers = self._config, self._config.timers
        if timers is not None:
            timers("forward-backward", log_level=1).start(barrier=config.barrier_with_L1_time)
        sync = _GradSync(config, self._groups.stage)
        split = {microbatch for kind, microbatch in self._row if kind == B}
        for kind, microbatch in self._row:
            sync.set(kind != F and microbatch == self._microbatches - 1)
            if kind != W:
                with self._weights.during(microbatch, microbatch in split):
                    (self._forward if kind == F else self._backward)(microbatch)
            if kind in (W, BW):  # of BW, layers of Transformer Engine wait in any case
                self._weights.run(microbatch)
        for neighbour in (self._before, self._behind):
            if neighbour is not None:
                neighbour.finish()
        sync.finish(self._model)
        if config.finalize_model_grads_func is not None:
            words = {name: self._given[name] for name in _FINALIZE if name in self._given}
            tokens = self._tokens if config.calculate_per_token_loss else None
            config.finalize_model_grads_func([self._model], tokens, **words)
        if timers is not None:
            timers("forward-backward").stop()
        return self._losses

    def _forward(self, microbatch: int) -> None:
        input = self._before.receive(microbatch).requires_grad_() if self._before is not None else None
        kept = self._config.num_microbatches_with_partial_activation_checkpoints
        again = None if kept is None else microbatch % schedules.most(self._row, F, B, BW) >= kept
        values = {"input_tensor": input, "checkpoint_activations_microbatch": again}
        values |= {"is_first_microbatch": microbatch == 0, "current_microbatch": microbatch}
        output, tokens = call(self._megatron.forward_step, self._values | values)
        self._tokens += tokens
        self._send(self._behind, microbatch, output, self._shapes[1])
        self._held[microbatch] = input, output
        self._megatron.deallocate_output_tensor(output, self._config.deallocate_pipeline_outputs)

    def _backward(self, microbatch: int) -> None:
        gradient = self._behind.receive(microbatch) if self._behind is not None else None
        input, output = self._held.pop(microbatch)
        values = {"input_tensor": input, "output_tensor": output, "output_tensor_grad": gradient}
        self._send(self._before, microbatch, call(self._megatron.backward_step, self._values | values), self._shapes[0])

    def _send(self, to: Neighbour | None, microbatch: int, tensor: Tensor, shape: tuple[int, ...]) -> None:
        if to is None:
            return
        if tuple(tensor.shape) != shape or tensor.dtype != self._config.pipeline_dtype:
            raise ValueError(
                f"zbpp_light: stage {self._groups.stage} has {tuple(tensor.shape)} of {tensor.dtype} for the one beside"
                f" it, which receives {shape} of {self._config.pipeline_dtype} (pipeline_dtype)"
            )
        to.send(microbatch, tensor)

    def _tensor_shapes(self) -> list[tuple[int, ...]]:
        function, stage = self._megatron.get_tensor_shapes, self._groups.stage
        both = [call(function, self._values | {"rank": rank}) for rank in (stage - 1, stage)]
        if self._given.get("adjust_tensor_shapes_fn") is not None:
            both = list(self._given["adjust_tensor_shapes_fn"](*both))
        if any(len(shapes) != 1 or shapes[0] is None for shapes in both):
            raise ValueError(f"zbpp_light: shapes {both} between stages, where it sends one tensor")
        return [tuple(shapes[0]) for shapes in both]

    def _neighbour(self, plan: Plan, side: int) -> Neighbour | None:
        """side: 0, the stage before, or 1, the next."""
        group, stage = self._groups.pipeline, self._groups.stage
        other, sends, receives = ((stage - 1, B, F), (stage + 1, F, B))[side]
        if not 0 <= other < len(plan.rows):
            return None
        order = schedules.between(plan, min(stage, other), self._microbatches)
        delivered = schedules.done_before(plan.rows[other], sends, receives)
        words = {"dtype": self._config.pipeline_dtype, "device": self._device}
        buffer = functools.partial(torch.empty, self._shapes[side], **words)
        return Neighbour(dist.get_global_rank(group, other), group, sends, order, delivered, buffer)


class _GradSync:
    """Megatron's `no_sync`: gradients are reduced as they come only with what the last microbatch adds, in its B what B
    computes, in its W what W computes, so that no parameter is registered before its last W."""

    def __init__(self, config: Any, stage: int) -> None:
        self._no_sync, self._sync = config.no_sync_func or contextlib.nullcontext, config.grad_sync_func
        self._early = self._sync is None or stage == 0  # else later stages reduce behind their last operation
        self._context: Any = None
        self.set(False)

    def set(self, on: bool) -> None:
        if (on and self._early) == (self._context is None):
            return
        if self._context is not None:
            self._context.__exit__(None, None, None)
        self._context = self._no_sync() if self._context is None else None
        if self._context is not None:
            self._context.__enter__()

    def finish(self, model: torch.nn.Module) -> None:
        """Reduces what has not been, as Megatron's own loop does behind its last backward."""
        if self._context is not None:
            self._context.__exit__(None, None, None)
            if self._sync is not None:
                self._sync(model.parameters())
