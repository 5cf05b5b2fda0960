"""The pipeline plans of a run, one for each number of microbatches that it meets."""

from __future__ import annotations

import dataclasses
import functools

from megatron.core.models.gpt.stage_layers import StageSpec, split_stages
from megatron.core.pipeline_parallel.plan.costs import CostModel
from megatron.core.pipeline_parallel.plan.ir import Plan
from megatron.core.pipeline_parallel.plan.passes.forward_only import forward_only
from megatron.core.pipeline_parallel.plan.passes.lower import lower
from megatron.core.pipeline_parallel.plan.placement import LINEAR, LOOPED, Placement
from megatron.core.pipeline_parallel.plan.registry import build_plan
from megatron.core.pipeline_parallel.plan.request import Request
from megatron.training.config import Config


class Plans:
    """What every rank of the pipeline does in a step, by the flags of a run (pure).

    stages: by global stage. group_size: microbatches that interleaving takes in turn, None without. costs: equal
    ranks, F = B = W. Raises StageLayersError where layers do not divide over stages.
    """

    def __init__(self, config: Config) -> None:
        parallel = config.parallel
        num_layers = config.model.num_layers
        assert num_layers is not None, "the rules ask for --num-layers"
        self.stages: tuple[StageSpec, ...] = split_stages(parallel, num_layers)
        num_ranks = parallel.pipeline_model_parallel_size
        num_chunks = len(self.stages) // num_ranks
        self.schedule = parallel.pipeline_schedule
        self.placement = Placement(LINEAR if num_chunks == 1 else LOOPED, num_ranks, num_chunks)
        self.group_size = parallel.microbatch_group_size_per_vp_stage if num_chunks > 1 else None
        self.costs = CostModel.of_ranks(self.placement)
        self._masked = config.data.reset_attention_mask
        self._train = functools.lru_cache(maxsize=None)(self._build)
        self._evaluate = functools.lru_cache(maxsize=None)(self._build_forward_only)

    def computations(self, num_microbatches: int) -> Plan:
        """Without transfers. Raises PlanError."""
        request = Request(
            self.placement.num_ranks, num_microbatches, self.placement.num_chunks, self.group_size
        )
        return build_plan(self.schedule, request)

    def train(self, num_microbatches: int) -> Plan:
        """With transfers, verified. Raises PlanError."""
        return self._train(num_microbatches)

    def evaluate(self, num_microbatches: int) -> Plan:
        """The same order of forwards, without backwards. Raises PlanError."""
        return self._evaluate(num_microbatches)

    def local_stages(self, pp_rank: int) -> tuple[int, ...]:
        """Global stages of a pipeline rank, by chunk."""
        return tuple(self.placement.stage_of(pp_rank, chunk) for chunk in range(self.placement.num_chunks))

    def reads_data(self, pp_rank: int) -> bool:
        """Whether a pipeline rank needs batches: for the embedding, the loss, or the masks that all its layers need."""
        mine = (self.stages[stage] for stage in self.local_stages(pp_rank))
        return self._masked or any(spec.embedding or spec.loss for spec in mine)

    def _build(self, num_microbatches: int) -> Plan:
        return lower(self.computations(num_microbatches), self.costs)

    def _build_forward_only(self, num_microbatches: int) -> Plan:
        # A whole validation set may end with fewer microbatches than interleaving's group: of a larger plan, those that
        # there are.
        chunks = self.placement.num_chunks
        least = (self.group_size or self.placement.num_ranks) if chunks > 1 else 1
        plan = forward_only(self.computations(max(num_microbatches, least)))
        rows = tuple(tuple(op for op in row if op[2] < num_microbatches) for row in plan.rows)
        return lower(dataclasses.replace(plan, num_microbatches=num_microbatches, rows=rows), self.costs)
