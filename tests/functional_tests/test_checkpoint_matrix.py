"""Checkpoints of every layout, loaded under every other: the same bits, and the same loss next.

Weights, main weights and moments are compared where the target loads, trains on nothing for an iteration, and saves
again. The loss of its next iteration is the one that a single process has there with these weights.
"""

import functools
import itertools
from typing import NamedTuple

import pytest

from tests.harness import launch
from tests.harness.runs import common_state, copy_checkpoint

FSDP = "--use-custom-fsdp --data-parallel-sharding-strategy optim_grads_params"
TP2, PP2 = "--tensor-model-parallel-size 2", "--pipeline-model-parallel-size 2"
ZBV2 = f"{PP2} --pipeline-schedule zbv"
LAYOUTS = {
    "DP1": (1, ""),
    "FSDP2": (2, FSDP),
    "TP2": (2, f"{TP2} --sequence-parallel"),
    "PP2 1F1B": (2, PP2),
    "FSDP2 x PP2": (4, f"{PP2} {FSDP}"),
    "PP2 interleaved": (2, f"{PP2} --num-virtual-stages-per-pipeline-rank 2"),
    "FSDP2 x ZBV2": (4, f"{ZBV2} {FSDP} --fsdp-reshard-policy step"),
    "ZBV2": (2, ZBV2),
    "HSDP x PP2": (8, f"{PP2} {FSDP} --num-distributed-optimizer-instances 2"),
    "DP4": (4, "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"),
    "TP2 x ZBV2": (4, f"{ZBV2} {TP2}"),
    "V-Half 2": (2, f"{PP2} --pipeline-schedule v-half"),
}
NO_DROPOUT = "--hidden-dropout 0 --attention-dropout 0".split()  # TP ranks have masks of their own
FLAGS = [
    *launch.TINY,
    *NO_DROPOUT,
    *"--num-layers 4 --padded-vocab-size 128 --train-iters 50 --override-opt_param-scheduler".split(),
    *"--save ck --load ck --save-interval 50".split(),
]
EXPERTS = [
    *FLAGS,
    *"--num-experts 4 --moe-ffn-hidden-size 48 --moe-router-score-function sigmoid "
    "--moe-router-enable-expert-bias --moe-router-bias-update-rate 0.05 "
    "--moe-layer-freq 2 --moe-token-dispatcher-type alltoall".split(),
]


def ep(experts, parts=1):
    return f"--expert-model-parallel-size {experts} --expert-tensor-parallel-size {parts}"


EXPERT_LAYOUTS = {
    "DP1": (1, ""),
    "EP2": (2, ep(2)),
    "EP2 in TP2": (2, f"{TP2} --sequence-parallel {ep(2)}"),
    "whole experts in TP2": (2, f"{TP2} --sequence-parallel {ep(1)} --use-distributed-optimizer"),
    "FSDP2": (2, f"{FSDP} --moe-grouped-gemm"),
    "EP2 x FSDP4": (4, f"{FSDP} {ep(2)} --moe-grouped-gemm"),
    "EP4 x FSDP4": (4, f"{FSDP} {ep(4)}"),
    "EP2 x ETP2": (4, f"{ep(2, 2)} --use-distributed-optimizer"),
    "EP2 x ZBV2 x FSDP2": (4, f"{ZBV2} {FSDP} {ep(2)}"),
    "EP2 x HSDP": (4, f"{FSDP} {ep(2)} --num-distributed-optimizer-instances 2"),
}


class Model(NamedTuple):
    """flags: of every run. layouts: ranks, and what says how they are laid out."""

    flags: list[str]
    layouts: dict[str, tuple[int, str]]


MODELS = {"dense": Model(FLAGS, LAYOUTS), "experts": Model(EXPERTS, EXPERT_LAYOUTS)}
SAVED = 3  # iterations that a source trains
PAIRS = [(name, *pair) for name, one in MODELS.items() for pair in itertools.permutations(one.layouts, 2)]


def run(folder, model, layout, *more):
    ranks, flags = model.layouts[layout]
    return launch.ok(launch.run_forked([*model.flags, *flags.split(), *more], ranks=ranks, cwd=folder))


def losses_of(folder):
    """iteration -> loss, all digits."""
    return {
        line["iteration"]: line["lm loss"]
        for line in launch.metrics_lines(folder / "ck")
        if "lm loss" in line
    }


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """model, layout -> folder of a run that saved its third iteration, and what each next one's loss is with these
    weights."""

    @functools.cache
    def one(name, layout):
        folder, model = tmp_path_factory.mktemp("trained"), MODELS[name]
        run(folder, model, layout, "--exit-interval", str(SAVED))
        frozen = tmp_path_factory.mktemp("frozen")
        copy_checkpoint(folder, frozen, SAVED)
        rates = "--lr 0 --min-lr 0 --moe-router-bias-update-rate 0".split()
        last = str(SAVED + len(model.layouts) + 1)
        run(frozen, model, "DP1", *rates, "--exit-interval", last)
        return folder, losses_of(frozen)

    return one


def load_and_save(folder, model, layout, iteration, digests, losses):
    """Load what is in the folder; its iteration + 1 is skipped and saved, iteration + 2 is trained."""
    skipped, next_one = str(iteration + 1), str(iteration + 2)
    more = ["--iterations-to-skip", skipped, "--save-interval", skipped, "--exit-interval", next_one]
    found = run(folder, model, layout, *more)
    assert f"loading checkpoint from ck at iteration {iteration}" in found.output
    assert launch.digests(folder / "ck", iteration + 1) == digests
    before, after = (common_state(folder, one) for one in (iteration, iteration + 1))
    assert after["optimizer"] == before["optimizer"]
    assert losses_of(folder)[iteration + 2] == pytest.approx(losses[iteration + 2], rel=0, abs=1e-6)


@pytest.mark.grid
@pytest.mark.parametrize("name", MODELS)
def test_a_checkpoint_goes_around_all_layouts(trained, tmp_path, name):
    """Each layout loads what the one before has saved."""
    model = MODELS[name]
    first, *others = model.layouts
    source, losses = trained(name, first)
    copy_checkpoint(source, tmp_path, SAVED)
    digests = launch.digests(tmp_path / "ck", SAVED)
    for iteration, layout in enumerate([*others, first], start=SAVED):
        load_and_save(tmp_path, model, layout, iteration, digests, losses)
        (tmp_path / "ck" / "latest_checkpointed_iteration.txt").write_text(str(iteration + 1))


@pytest.mark.full
@pytest.mark.parametrize(("name", "source", "target"), PAIRS)
def test_any_layout_loads_what_any_other_saved(trained, tmp_path, name, source, target):
    folder, losses = trained(name, source)
    copy_checkpoint(folder, tmp_path, SAVED)
    load_and_save(tmp_path, MODELS[name], target, SAVED, launch.digests(folder / "ck", SAVED), losses)
