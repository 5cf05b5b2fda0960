"""A training step: this rank's row of F, B, W and BW, around Megatron's own forward and backward."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from zbpp_light import schedules
from zbpp_light.messages import Neighbour
from zbpp_light.schedules import BW, B, F, Rows, Timing, W
from zbpp_light.signatures import chosen
from zbpp_light.weights import WeightGradients


class Groups:
    """The process groups of a step: those that the caller gives, else Megatron's own."""

    def __init__(self, megatron: Any, call: Mapping[str, Any]) -> None:
        state, given = megatron.parallel_state, call.get("pg_collection")
        communicator = call.get("p2p_communicator")
        pipeline: Any = (
            communicator.pp_group if communicator is not None else state.get_pipeline_model_parallel_group()
        )
        if isinstance(pipeline, list):  # 0.12 has several where encoders have ranks of their own
            assert len(pipeline) == 1, f"{len(pipeline)} pipelines through a rank"
            pipeline = pipeline[0]
        self.pipeline: dist.ProcessGroup = pipeline
        self.tensor = given.tp if given is not None else state.get_tensor_model_parallel_group()
        self.context = given.cp if given is not None else state.get_context_parallel_group()
        self.stage, self.stages = dist.get_rank(pipeline), dist.get_world_size(pipeline)
        self.ranks = dist.get_process_group_ranks(pipeline)


class Step:
    """megatron: its module of schedules; call: what Megatron's function of that name was called with, by parameter."""

    def __init__(
        self,
        megatron: Any,
        groups: Groups,
        rows: Rows,
        timing: Timing,
        weights: WeightGradients,
        call: Mapping[str, Any],
    ) -> None:
        self._megatron, self._groups, self._weights, self._call = megatron, groups, weights, call
        self._model, self._data = only(call["model"]), only(call["data_iterator"])
        self._config = megatron.get_model_config(self._model)
        self._microbatches: int = call["num_microbatches"]
        self._rows, self._row = rows, rows[groups.stage]
        self._device = next(self._model.parameters()).device
        self._received_shape, self._sent_shape = self._shapes()
        self._before, self._behind = self._neighbours(timing)
        self._inputs: dict[int, Tensor | None] = {}
        self._outputs: dict[int, Tensor] = {}
        self._losses: list[Any] = []
        self._tokens = torch.zeros([], dtype=torch.int, device=self._device)

    def run(self) -> list[Any]:
        """All operations, then what Megatron does behind its last backward. Returns the losses, of the last stage."""
        config, timers = self._config, self._config.timers
        if timers is not None:
            timers("forward-backward", log_level=1).start(barrier=config.barrier_with_L1_time)
        sync = _GradSync(config, self._groups.stage)
        split = {microbatch for kind, microbatch in self._row if kind == B}
        run = {F: self._forward, B: self._backward, BW: self._backward, W: self._weights.run}
        for kind, microbatch in self._row:
            sync.set(kind != F and microbatch == self._microbatches - 1)
            if kind == W:
                self._weights.run(microbatch)
                continue
            with self._weights.during(microbatch, microbatch in split):
                run[kind](microbatch)
            if kind == BW:  # layers of Transformer Engine wait in any case
                self._weights.run(microbatch)
        for neighbour in (self._before, self._behind):
            if neighbour is not None:
                neighbour.finish()
        sync.finish(self._model)
        if config.finalize_model_grads_func is not None:
            words = {name: self._call[name] for name in _FINALIZE if name in self._call}
            tokens = self._tokens if config.calculate_per_token_loss else None
            config.finalize_model_grads_func([self._model], tokens, **words)
        if timers is not None:
            timers("forward-backward").stop()
        return self._losses

    def _forward(self, microbatch: int) -> None:
        received = None
        if self._before is not None:
            received = self._before.receive(microbatch).requires_grad_()
        values = {
            "forward_step_func": self._call["forward_step_func"],
            "data_iterator": self._data,
            "model": self._model,
            "num_microbatches": self._microbatches,
            "input_tensor": received,
            "forward_data_store": self._losses,
            "config": self._config,
            "cp_group_size": self._groups.context.size(),
            "collect_non_loss_data": self._call.get("collect_non_loss_data", False),
            "checkpoint_activations_microbatch": self._checkpoints(microbatch),
            "is_first_microbatch": microbatch == 0,
            "current_microbatch": microbatch,
            "is_last_stage": self._behind is None,
        }
        forward_step = self._megatron.forward_step
        output, tokens = forward_step(**chosen(forward_step, values))
        self._tokens += tokens
        if self._behind is not None:
            self._check_sent("activations", output, self._sent_shape)
            self._behind.send(microbatch, output)
        self._inputs[microbatch], self._outputs[microbatch] = received, output
        self._megatron.deallocate_output_tensor(output, self._config.deallocate_pipeline_outputs)

    def _backward(self, microbatch: int) -> None:
        values = {
            "input_tensor": self._inputs.pop(microbatch),
            "output_tensor": self._outputs.pop(microbatch),
            "output_tensor_grad": self._behind.receive(microbatch) if self._behind is not None else None,
            "model_type": self._megatron.get_model_type(self._model)
            if hasattr(self._megatron, "get_model_type")
            else None,
            "pipeline_model_parallel_size": self._groups.stages,
            "config": self._config,
        }
        backward_step = self._megatron.backward_step
        gradient = backward_step(**chosen(backward_step, values))
        if self._before is not None:
            self._check_sent("gradients", gradient, self._received_shape)
            self._before.send(microbatch, gradient)

    def _checkpoints(self, microbatch: int) -> bool | None:
        """Whether all layers of a microbatch are computed again, by Megatron's rule."""
        kept = self._config.num_microbatches_with_partial_activation_checkpoints
        return None if kept is None else microbatch % schedules.most_held(self._row) >= kept

    def _shapes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Of what comes from the stage before, and of what goes to the next."""
        function, both = self._megatron.get_tensor_shapes, []
        for rank in (self._groups.stage - 1, self._groups.stage):
            values = {
                **{
                    name: self._call.get(name)
                    for name in ("seq_length", "micro_batch_size", "decoder_seq_length")
                },
                "config": self._config,
                "rank": rank,
                "model_type": self._megatron.get_model_type(self._model)
                if hasattr(self._megatron, "get_model_type")
                else None,
                "encoder_decoder_xattn": False,
                "tp_group": self._groups.tensor,
                "cp_group": self._groups.context,
            }
            both.append(function(**chosen(function, values)))
        if self._call.get("adjust_tensor_shapes_fn") is not None:
            both = list(self._call["adjust_tensor_shapes_fn"](*both))
        shapes = []
        for several in both:
            if len(several) != 1 or several[0] is None:
                raise ValueError(f"zbpp_light: {several} between stages, where it sends one tensor")
            shapes.append(tuple(several[0]))
        return shapes[0], shapes[1]

    def _neighbours(self, timing: Timing) -> tuple[Neighbour | None, Neighbour | None]:
        groups, stage, rows = self._groups, self._groups.stage, self._rows
        before = behind = None
        if stage > 0:
            order = schedules.between(timing, stage - 1, self._microbatches)
            delivered = schedules.done_before(rows[stage - 1], B, F)
            before = Neighbour(
                groups.ranks[stage - 1],
                groups.pipeline,
                order,
                B,
                delivered,
                self._buffer(self._received_shape),
            )
        if stage < groups.stages - 1:
            order = schedules.between(timing, stage, self._microbatches)
            delivered = schedules.done_before(rows[stage + 1], F, B)
            behind = Neighbour(
                groups.ranks[stage + 1], groups.pipeline, order, F, delivered, self._buffer(self._sent_shape)
            )
        return before, behind

    def _buffer(self, shape: tuple[int, ...]) -> Callable[[], Tensor]:
        return lambda: torch.empty(shape, dtype=self._config.pipeline_dtype, device=self._device)

    def _check_sent(self, what: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
        if tuple(tensor.shape) != shape or tensor.dtype != self._config.pipeline_dtype:
            raise ValueError(
                f"zbpp_light: stage {self._groups.stage} has {what} of {tuple(tensor.shape)} in {tensor.dtype}, where "
                f"{shape} in {self._config.pipeline_dtype} (pipeline_dtype) is sent"
            )


_FINALIZE = ("grad_finalize_pgs", "pg_collection", "force_all_reduce")  # what Megatron's own loop hands on


class _GradSync:
    """Megatron's `no_sync`: gradients are reduced as they come only with what the last microbatch adds, in its B what B
    computes, in its W what W computes, so that no parameter is registered before its last W."""

    def __init__(self, config: Any, stage: int) -> None:
        self._config = config
        # with a grad_sync_func, later stages reduce behind their last operation
        self._early = config.grad_sync_func is None or stage == 0
        self._context: Any = None
        self.set(False)

    def set(self, on: bool) -> None:
        on = on and self._early
        if on and self._context is not None:
            self._context.__exit__(None, None, None)
            self._context = None
        elif not on and self._context is None:
            self._context = (self._config.no_sync_func or contextlib.nullcontext)()
            self._context.__enter__()

    def finish(self, model: torch.nn.Module) -> None:
        if self._context is None:
            return
        self._context.__exit__(None, None, None)
        self._context = None
        if self._config.grad_sync_func is not None:
            self._config.grad_sync_func(model.parameters())


def only(several: Any) -> Any:
    """The one of a list of one."""
    if isinstance(several, list):
        assert len(several) == 1, f"{len(several)} chunks"
        return several[0]
    return several
