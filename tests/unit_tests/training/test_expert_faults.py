"""What is not finite in one expert is named with the expert's number in the model, whoever holds it; norms and zeros
are of all experts, those without tokens too."""

from unittest import mock

import numpy as np
import pytest

from megatron.core.optimizer.mixed_precision import MixedPrecisionOptimizer
from megatron.core.param_meta import region_slices
from megatron.core.transformer.experts.experts import ExpertLinear
from megatron.training.guard.nan_policy import NanPolicy, NonFiniteError
from megatron.training.guard.weight_check import NonFiniteWeightsError, first_nonfinite
from megatron.training.run.data import StepBatches
from megatron.training.run.step import StepRunner
from megatron.training.state import StepTask
from tests.harness.layouts import NO_DROPOUT, Layout, assembled, train_run
from tests.harness.ranks import run_ranks
from tests.harness.validated_steps import parts_of
from tests.parity.test_moe_layouts import CountingRun

WORDS = [
    *"--num-layers 2 --num-experts 4 --moe-ffn-hidden-size 24 --moe-layer-freq [0,1] --swiglu".split(),
    *"--disable-bias-linear --position-embedding-type rope".split(),
    *NO_DROPOUT,
]
MANY = ["--num-experts", "32", "--moe-router-topk", "1", "--moe-router-pre-softmax", "--fp64"]
ZERO3 = "--use-custom-fsdp --data-parallel-sharding-strategy optim_grads_params".split()
EP = "--expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall".split()
LAYOUTS = [
    Layout(dp=2),
    Layout(dp=2, more=("--use-distributed-optimizer",)),
    Layout(dp=2, more=tuple(ZERO3)),
    Layout(tp=2, sp=True),
    Layout(dp=2, more=tuple(EP)),
    Layout(dp=2, more=(*EP, *ZERO3)),
]
FC1, FC2 = (f"decoder.layers.1.mlp.experts.linear_fc{number}.weight" for number in (1, 2))
BAD = 3  # the expert
PUT, STEP = ExpertLinear.put_weight, MixedPrecisionOptimizer.step


def put_weight(self, x, dy, ends):
    """The gradient of expert `BAD` is not finite on the ranks that have it."""
    place = BAD - self.meta[self.keys[0]].parts[0].offset[0]
    if 0 <= place < len(ends):
        dy[(0, *ends)[place] : ends[place]] = float("nan")
    PUT(self, x, dy, ends)


def step(self, *args):
    """The update makes an element of expert `BAD` infinite."""
    STEP(self, *args)
    meta, part = self.buffer.param_meta[FC2], self.buffer.main_weight_part(FC2)
    start, end = self.buffer.part(FC2, self.buffer.sharding.optimizer)
    for region in meta.summed_parts:
        if region.offset[0] == BAD:
            for held in region_slices(region, meta.local_shape, part, start, end):
                held.view(-1)[-1:] = float("inf")


def said(run, error):
    parts = parts_of(run.config, run.ps, run.engine, run.runner, NanPolicy("abort", 3))
    try:
        list(StepRunner(parts).step(StepBatches(run.microbatches(1)), StepTask(1, run.num_microbatches)))
    except error as raised:
        return str(raised)
    return "nothing was said"


def faults(ctx):
    """By layout: what is said of a gradient, of a weight that a step makes, before a save, and before a step."""
    by_layout = []
    for layout in LAYOUTS:
        run = CountingRun(ctx, layout, WORDS)
        with mock.patch.object(ExpertLinear, "put_weight", put_weight):
            gradient = said(run, NonFiniteError)
        with mock.patch.object(MixedPrecisionOptimizer, "step", step):
            update = said(run, NonFiniteWeightsError)
        run.engine.model.buffer.copy_main_to_weights()
        run.engine.model.weights_changed()
        save = first_nonfinite(run.engine.model_pieces(), run.ps)
        by_layout.append((gradient, update, save, said(run, NonFiniteError)))
    return by_layout


@pytest.mark.grid
def test_what_is_not_finite_in_one_expert_is_named():
    for rank in run_ranks(faults, 2):
        for layout, (gradient, update, save, weight) in zip(LAYOUTS, rank, strict=True):
            assert f"the gradient of expert {BAD} of {FC1} is not finite on rank" in gradient, layout
            assert f"the weight of expert {BAD} of {FC2} is infinite on rank" in update, layout
            assert save.startswith(f"expert {BAD} of model.{FC2} is infinite on rank"), layout
            assert f"weight of expert {BAD} of {FC2} are not finite on rank" in weight, layout


def trained(ctx):
    outcomes = []
    for layout in LAYOUTS if ctx.world_size > 1 else [Layout()]:
        run = CountingRun(ctx, layout, [*WORDS, *MANY], global_batch=2)
        outcome = train_run(run, 1)
        outcomes.append((outcome, run.engine.optimizer.params_norm(), run.counts))
    return outcomes


@pytest.mark.grid
def test_zeros_of_gradients_and_the_norm_of_weights_count_every_expert():
    """An expert without tokens has a gradient of zeros alone, and others none."""
    (((alone, _, (counts,)),),) = run_ranks(trained, 1)
    tokens = np.array(counts[1, "tokens"])
    assert tokens.sum() == 2 * 16
    assert 0 < np.count_nonzero(tokens) < len(tokens)
    grads = assembled([alone.grads])
    for name in (FC1, FC2):
        zeros = (grads[name] == 0).reshape(32, -1)
        assert zeros.all(1).tolist() == zeros.any(1).tolist() == (tokens == 0).tolist()
    expected = sum(int((one == 0).sum()) for one in grads.values())
    assert alone.zeros == [expected]
    by_rank = run_ranks(trained, 2)
    for ranks in zip(*by_rank, strict=True):
        weights = assembled([outcome.weights for outcome, _, _ in ranks])
        norm = np.sqrt(sum((one**2).sum() for one in weights.values()))
        assert [outcome.zeros for outcome, _, _ in ranks] == [[expected]] * 2
        assert [abs(told / norm - 1) < 1e-14 for _, told, _ in ranks] == [True] * 2
