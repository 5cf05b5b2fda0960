"""Of what balances experts a load compares whether sinkhorn chooses them: it makes their weights of other scores."""

import itertools

from megatron.training.config.saved_config import CHECKPOINT_FIELDS, weight_differences
from megatron.training.run.arguments import parse_config
from tests.harness.layouts import MODEL

NAME = "moe_router_load_balancing_type"
LOSSES = [
    "none",
    "aux_loss --moe-aux-loss-coeff 0.1",
    "seq_aux_loss global_aux_loss --moe-aux-loss-coeff 0.1 0.2",
]
SINKHORN = "sinkhorn"


def settings(words, experts="--num-experts 4"):
    words = f"--num-layers 2 --global-batch-size 1 {experts} --moe-router-load-balancing-type {words}"
    return parse_config([*MODEL, *words.split()]).flat()


def test_losses_may_change_and_sinkhorn_may_not():
    flat = {words: settings(words) for words in (*LOSSES, SINKHORN)}
    for one, other in itertools.product(LOSSES, LOSSES):
        assert weight_differences(flat[one], flat[other]) == []
    assert weight_differences(flat[SINKHORN], flat[SINKHORN]) == []
    for words in LOSSES:
        losses = words.split(" --")[0].split()
        told = weight_differences(flat[SINKHORN], flat[words])
        assert told == [f"{NAME}: checkpoint ['sinkhorn'], this run {losses}"]
        told = weight_differences(flat[words], flat[SINKHORN])
        assert told == [f"{NAME}: checkpoint {losses}, this run ['sinkhorn']"]


def test_models_without_experts_and_checkpoints_that_do_not_say():
    dense = settings("none", "--ffn-hidden-size 64")
    assert weight_differences(dense, settings(SINKHORN, "--ffn-hidden-size 64")) == []
    silent = {name: value for name, value in settings("none").items() if name != NAME}
    assert weight_differences(silent, settings(SINKHORN)) == []
    assert NAME not in CHECKPOINT_FIELDS, "losses are not taken over from a checkpoint"
