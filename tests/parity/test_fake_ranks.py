"""A rank that runs by itself (--fake-process-group) holds what is planned of it behind every operation, to the byte."""

import pytest

import pretrain_gpt
from megatron.core.device import Device
from megatron.training.run.build import fake_state
from megatron.training.run.rehearse.comparison import (
    account_of,
    differences,
    parts_of,
    step_bytes,
    step_differences,
)
from megatron.training.run.rehearse.rehearsal import steps_of, tell_of_peers
from tests.parity.test_rehearsal import INSTANCES, LLAMA, PP, SENT, TP, ZERO_3, config_of, description_of

CHUNKS = "--num-layers-per-virtual-pipeline-stage 1"
VALIDATED = "--enable-optimizer-post-validation --clip-grad 0 --global-batch-size 16"  # no step is taken back
LAYOUTS = (
    (8, 2, f"{PP[:-1]}4 --num-layers 8 --enable-zero-bubble --use-distributed-optimizer {VALIDATED}"),
    (8, 5, f"{PP} {ZERO_3} --zero-bubble-v-schedule --bf16 {LLAMA}"),
    (8, 0, f"{PP} {TP} --sequence-parallel --enable-zero-bubble {LLAMA}"),
    (8, 7, f"{PP} {TP} {CHUNKS} --use-distributed-optimizer --bf16 {LLAMA}"),
    (8, 6, f"{ZERO_3} {INSTANCES} --outer-dp-sharding-strategy optim --micro-batch-size 1"),
    (8, 6, f"{PP} {SENT} {ZERO_3} --enable-zero-bubble"),
)


@pytest.mark.parametrize(("ranks", "rank", "words"), LAYOUTS)
def test_holds_what_is_planned(ranks, rank, words):
    config = config_of(words, ranks)
    ps, providers = (
        fake_state(config, rank, Device("cpu")),
        (pretrain_gpt.model_provider, pretrain_gpt.forward_step),
    )
    tell_of_peers(config, ps, *providers)
    mine = steps_of(config, ps, *providers)
    spec, engine = mine.runner.spec, mine.engine
    step = step_bytes(config, engine)
    account = account_of(
        mine.plan, spec, ps.pp_rank, parts_of(config, spec, description_of(config, spec), engine.model, step)
    )
    assert len(mine.seen) == len(account.row) + 1
    found = differences(account, mine.seen) + step_differences(ps.pp_rank, step, mine.parts)
    if config.model.num_experts:  # which are counted at even load
        found = [line for line in found if ": activations" not in line]
    assert found == []
    assert all(
        memory.main_weights is None or memory.main_weights.isfinite().all()
        for memory in engine.model.buffer.buckets
    )
