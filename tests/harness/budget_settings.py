"""Settings of large models that one budget is tried on: Llama shapes on H100s by their published sizes.

450 TFLOP/s while computing, sequences of 8192, one a microbatch, sequence parallel; 45 GB/s to data parallel peers of a
machine of 8 GPUs, shared by its tensor parallel groups; weights in bf16, main weights, gradients and moments in fp32;
18 bytes a parameter at rest over the ranks that cut it, as the study has it, though engines need 16 where weights are
cut (they keep no bf16 ones).
Messages between stages, collectives of tensor parallelism and all that is no product are next to free.

`python -m tests.harness.budget_settings S3 70 80` prints what is chosen under so many GB.
"""

import dataclasses
import functools
import sys

from megatron.core.pipeline_parallel.plan.budget_search import named
from megatron.core.pipeline_parallel.plan.build import plan_for
from megatron.core.pipeline_parallel.plan.held.state_bytes import RankBudget, StateBytes
from megatron.core.pipeline_parallel.plan.held.units import RankUnits, Share, StageUnits, UnitCosts
from megatron.core.pipeline_parallel.plan.held.verify_residency import verify_residency
from megatron.core.pipeline_parallel.plan.ir import REDUCE, UNSHARD
from megatron.core.pipeline_parallel.plan.residency import Residency
from megatron.core.pipeline_parallel.plan.simulate import simulate
from megatron.core.pipeline_parallel.plan.spec import PlanPurpose
from megatron.core.sharding_table import STRATEGIES as ROWS
from megatron.core.sharding_table import ShardPlace
from megatron.estimate.own_description import costs_of
from megatron.estimate.unit_work import DeviceRates
from megatron.training.config.launch_env import LaunchEnv
from megatron.training.planner import within
from megatron.training.run.arguments import parse_config
from megatron.training.run.describe import described

FLOPS, MACHINE = 450e12, 8  # of a GPU, GPUs
RATES = DeviceRates(0, 0, 50, 0)
STRATEGIES = ("optim", "optim_grads", "optim_grads_params")
_SHAPES = {  # layers, hidden size, ffn, heads
    "70B": (80, 8192, 28672, 64),
    "405B": (126, 16384, 53248, 128),
}
_SAME = (
    "--num-query-groups 8 --group-query-attention --kv-channels 128 --seq-length 8192 --max-position-embeddings 8192 "
    "--swiglu --normalization RMSNorm --position-embedding-type rope --untie-embeddings-and-output-weights "
    "--disable-bias-linear --attention-dropout 0 --hidden-dropout 0 --bf16 --micro-batch-size 1 --sequence-parallel "
    "--train-iters 1 --lr 1e-4 --mock-data --tokenizer-type NullTokenizer --vocab-size 128255 "
    "--account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split --allow-padding-num-layers"
)


@dataclasses.dataclass(frozen=True)
class Setting:
    """model: of the shapes. wire: bytes a second between machines. grad: bytes of an element that is reduced.
    recomputes: SwiGLU and norms are computed again in the backward."""

    model: str
    tp: int
    pp: int
    dp: int
    num_microbatches: int
    wire: float = 45e9
    grad: int = 4
    recomputes: bool = False

    @property
    def staged(self):
        """The model's stages."""
        layers, hidden, ffn, heads = _SHAPES[self.model]
        words = (
            f"{_SAME} --num-layers {layers} --hidden-size {hidden} --ffn-hidden-size {ffn} "
            f"--num-attention-heads {heads} "
            f"--global-batch-size {self.num_microbatches * self.dp} --tensor-model-parallel-size {self.tp} "
            f"--pipeline-model-parallel-size {self.pp} --pipeline-schedule auto --distributed-backend gloo"
        )
        world = self.tp * self.pp * self.dp
        staged = _described(words, world).staged_model
        seen = staged.costs.description
        if self.recomputes:
            kinds = {kind: _without_norms(layer) for kind, layer in seen.kinds.items()}
            seen = dataclasses.replace(seen, kinds=kinds)
        return dataclasses.replace(staged, costs=costs_of(seen, staged.costs.config, RATES))

    def budget(self, limit, strategies=STRATEGIES):
        """Of a limit in bytes, the same on all ranks."""
        rows, place = [], ShardPlace(inner_size=self.dp)
        for one in strategies:
            sizes = StateBytes(ROWS[one], place, 128 * self.dp, 2, self.grad, 4, optimizer=12)
            asked = Residency(one, policy="budget", limit=(float(limit),) * self.pp)
            rows.append((asked, sizes))
        return RankBudget(tuple(rows), FLOPS, self.wire * MACHINE / self.tp)

    def seconds(self, cost):
        """Of a time in layers."""
        return cost * self.staged.costs.unit_flops / FLOPS

    def chosen(self, limit, strategies=STRATEGIES):
        """The choice under a limit, and its simulation."""
        staged = self.staged
        spec = within(staged, self.budget(limit, strategies), staged.costs)
        return spec, timed(spec, plan_for(spec, self.num_microbatches, PlanPurpose.TRAIN))

    def torch_zbv(self):
        """FSDP2 under torch's ZBVZeroBubble, as its passes would have it of our order: at most 3 stages are active, and
        a rank has 2, so both are gathered before their first F and kept to the end; whole gradients from the first W;
        one reduction a stage behind its last W. Its time and the bytes of its fullest rank."""
        staged, strategy = self.staged, "optim_grads_params"
        spec, costs = staged.spec("zbv"), staged.costs
        asked, sizes = self.budget(1, (strategy,)).rows[0]
        asked = dataclasses.replace(asked, policy="step", limit=None, overlap_reduce=False)
        spec = dataclasses.replace(
            spec,
            limits=spec.costs.left_by_forwards(spec.placement, self.pp),
            stages_units=tuple(map(_one_unit, costs.stage_units(spec.stages, spec.placement, sizes))),
            residency=asked,
        )
        plan = plan_for(spec, self.num_microbatches, PlanPurpose.TRAIN)  # no lanes: nothing is chosen by them
        lanes = self.budget(1).lanes(costs.unit_flops)
        walks = verify_residency(plan, spec.stages_units, asked, spec.costs)
        rests = (RankUnits(rank, plan.placement, spec.stages_units).bytes_at_rest for rank in range(self.pp))
        peak = max(rest + walk.peak.total for rest, walk in zip(rests, walks, strict=True))
        return timed(dataclasses.replace(spec, lanes=lanes), plan), peak


def timed(spec, plan):
    """A plan on the clock."""
    return simulate(plan, spec.costs, spec.with_lanes(spec.lanes))


def _one_unit(stage):
    """All that a stage has is gathered and reduced together."""
    times = [sum(getattr(unit, name) for unit in stage.units) for name in ("f", "b", "w")]
    weights, grads, rest = (
        sum(getattr(unit, name) for unit in stage.units)
        for name in ("weight_bytes", "grad_bytes", "bytes_at_rest")
    )
    together = Share(stage.units[0].shares[0].group, weights, grads, rest)
    return StageUnits((UnitCosts(stage.units[0].name, *times, shares=(together,)),), ((0,),), ((0,),))


@functools.cache
def _described(words, world):
    budget = "--rank-memory-limit 70G --achieved-tflops 450 --dp-bandwidth-gb-per-s 45"  # more splits are possible then
    asked = parse_config([*words.split(), *budget.split()], env=LaunchEnv(world_size=world))
    return dataclasses.replace(
        parse_config(words.split(), env=LaunchEnv(world_size=world)), description=described(asked).description
    )


def _without_norms(layer):
    """A layer that keeps nothing of what its norms make."""
    modules = {
        path: dataclasses.replace(one, kept_bytes=0) if path.endswith("layernorm") else one
        for path, one in layer.modules.items()
    }
    return dataclasses.replace(layer, modules=modules)


SETTINGS = {
    "S1": Setting("70B", 4, 4, 4, 16),
    "S3": Setting("405B", 8, 8, 8, 16),
    "S3 bf16 reductions": Setting("405B", 8, 8, 8, 16, grad=2),
    "S4": Setting("405B", 8, 16, 4, 32),
    "S5": Setting("70B", 8, 4, 4, 16, wire=12e9),
    "S6": Setting("405B", 8, 8, 8, 16, recomputes=True),
    "S1 without a pipeline": Setting("70B", 4, 1, 16, 4),
    "S3 without a pipeline": Setting("405B", 8, 1, 64, 2),
}

if __name__ == "__main__":
    asked = SETTINGS[sys.argv[1]]
    for size in sys.argv[2:]:
        chosen, its = asked.chosen(float(size) * 1e9)
        moved = [max(sum(op[0] == kind for op in row) for row in its.plan.rows) for kind in (UNSHARD, REDUCE)]
        print(
            f"{size} GB: {asked.seconds(its.cost):.3f} s, {its.work / its.cost:.3f}, {named(chosen)}, {moved}"
        )
