"""A training step: this rank's row of F, B, W and BW, around Megatron's own forward and backward."""

import contextlib
from collections.abc import Iterator, Mapping
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
    """The process groups of a step: those that the caller gives, else Megatron's own. megatron: its schedules."""

    def __init__(self, megatron: Any, given: Mapping[str, Any]) -> None:
        state, groups, messages = megatron.parallel_state, given.get("pg_collection"), given.get("p2p_communicator")
        if messages is not None and not isinstance(messages, megatron.P2PCommunicator):
            raise ValueError(f"zbpp_light: messages of a {type(messages).__name__} are of pipelines of several modules")
        pipeline: Any = messages.pp_group if messages is not None else state.get_pipeline_model_parallel_group()
        (pipeline,) = pipeline if isinstance(pipeline, list) else [pipeline]  # 0.12: several, for encoders' own ranks
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
        self._plan, self._row, self._microbatches = plan, plan.rows[groups.stage], given["num_microbatches"]
        self._losses: list[Any] = []
        # What Megatron's functions of any release may ask for, by their parameters.
        self._values: dict[str, Any] = {"decoder_seq_length": None, "collect_non_loss_data": False, **given}
        self._values |= {"model": model, "data_iterator": data, "config": self._config}
        self._values |= {"forward_data_store": self._losses, "model_type": checks.model_type(model)}
        self._values |= {"tp_group": groups.tensor, "cp_group": groups.context, "cp_group_size": groups.context.size()}
        self._values |= {"pipeline_model_parallel_size": groups.stages, "encoder_decoder_xattn": False}
        self._values["is_last_stage"] = groups.stage == groups.stages - 1
        self._device = next(model.parameters()).device
        self._tokens = torch.zeros([], dtype=torch.int, device=self._device)
        self._held: dict[int, tuple[Tensor | None, Tensor]] = {}  # input and output, until B
        self._before, self._behind = self._neighbours()

    def run(self) -> list[Any]:
        """All operations, then what Megatron does behind its last backward. Returns the losses, of the last stage."""
        config, timers = self._config, self._config.timers
        if timers is not None:
            timers("forward-backward", log_level=1).start(barrier=config.barrier_with_L1_time)
        stage, last = self._groups.stage, self._microbatches - 1
        # On the first stage nobody waits for a B: a W right behind it is computed with it, and nothing kept in between.
        pairs = zip(self._row, (*self._row[1:], None), strict=True)
        split = {microbatch for (kind, microbatch), then in pairs if kind == B and (stage or then != (W, microbatch))}
        # Gradients are reduced as they come only in B and W of the last microbatch: none before its weight's last W.
        no_sync = config.no_sync_func or contextlib.nullcontext
        early = config.grad_sync_func is None or stage == 0  # else later stages reduce behind their last operation
        neighbours = [neighbour for neighbour in (self._before, self._behind) if neighbour is not None]
        for kind, microbatch in self._row:
            for neighbour in neighbours:
                neighbour.expect(self._plan.ends[B if kind == BW else kind, stage, microbatch])
            with contextlib.nullcontext() if early and kind != F and microbatch == last else no_sync():
                if kind != W:
                    self._weights.begin(microbatch, microbatch in split)
                    (self._forward if kind == F else self._backward)(microbatch)
                if kind in (W, BW):  # of BW, layers of Transformer Engine wait in any case
                    self._weights.run(microbatch)
        for neighbour in neighbours:
            neighbour.finish()
        if not early:
            config.grad_sync_func(self._model.parameters())
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
        if self._behind is not None:
            self._behind.send(microbatch, output)
        self._held[microbatch] = input, output
        self._megatron.deallocate_output_tensor(output, self._config.deallocate_pipeline_outputs)

    def _backward(self, microbatch: int) -> None:
        gradient = self._behind.receive(microbatch) if self._behind is not None else None
        input, output = self._held.pop(microbatch)
        values = {"input_tensor": input, "output_tensor": output, "output_tensor_grad": gradient}
        input_gradient = call(self._megatron.backward_step, self._values | values)
        if self._before is not None:
            self._before.send(microbatch, input_gradient)

    def _neighbours(self) -> Iterator[Neighbour | None]:
        """The stage before and the next, if there are."""
        group, stage = self._groups.pipeline, self._groups.stage
        # Of what comes from the stage before, and of what goes to the next; gradients have the same, the other way.
        shapes = [call(self._megatron.get_tensor_shapes, self._values | {"rank": rank}) for rank in (stage - 1, stage)]
        if self._given.get("adjust_tensor_shapes_fn") is not None:
            shapes = list(self._given["adjust_tensor_shapes_fn"](*shapes))
        if any(len(several) != 1 or several[0] is None for several in shapes):
            raise ValueError(f"zbpp_light: shapes {shapes} between stages, where it sends one tensor")
        for other, sends, (shape,) in zip((stage - 1, stage + 1), (B, F), shapes, strict=True):
            if not 0 <= other < self._groups.stages:
                yield None
                continue
            order = schedules.between(self._plan, min(stage, other), self._microbatches)
            buffer = torch.Size(shape), self._config.pipeline_dtype, self._device
            yield Neighbour(dist.get_global_rank(group, other), group, sends, order, buffer)
