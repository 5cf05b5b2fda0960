"""A rank that runs by itself (--fake-process-group) holds what is planned of it behind every operation, to the byte."""

import pytest

import pretrain_gpt
from megatron.core.device import Device
from megatron.training.config.launch_env import LaunchEnv
from megatron.training.run.arguments import parse_config
from megatron.training.run.build import fake_state
from megatron.training.run.rehearse.comparison import account_of, differences, parts_of, step_bytes, step_differences
from megatron.training.run.rehearse.rehearsal import steps_of, tell_of_peers
from tests.harness.launch_lines import SMALL
from tests.parity.test_rehearsal import INSTANCES, LLAMA, PP, SENT, TP, ZERO_3, config_of, description_of

# Ranks of the world, the one that runs, flags.
LAYOUTS = (
    (64, 3, f"{ZERO_3} --global-batch-size 128"),
    (8, 5, f"{PP} {ZERO_3} --zero-bubble-v-schedule --bf16 {LLAMA}"),
    (8, 0, f"{PP} {TP} --sequence-parallel --enable-zero-bubble {LLAMA}"),
    (8, 7, f"{PP} {TP} --num-layers-per-virtual-pipeline-stage 1 --use-distributed-optimizer --bf16 {LLAMA}"),
    (8, 6, f"{ZERO_3} {INSTANCES} --outer-dp-sharding-strategy optim --micro-batch-size 1"),
    (4, 1, f"{PP} {SENT} {ZERO_3} --enable-zero-bubble"),
)


@pytest.mark.parametrize(("ranks", "rank", "words"), LAYOUTS)
def test_holds_what_is_planned(ranks, rank, words):
    config = config_of(words, ranks)
    ps = fake_state(config, rank, Device("cpu"))
    providers = pretrain_gpt.model_provider, pretrain_gpt.forward_step
    tell_of_peers(config, ps, *providers)
    mine = steps_of(config, ps, *providers)
    spec = mine.runner.spec
    parts = parts_of(config, spec, description_of(config, spec), mine.engine.model, step_bytes(config, mine.engine))
    account = account_of(mine.plan, spec, ps.pp_rank, parts)
    assert len(mine.seen) == len(account.row) + 1
    assert differences(account, mine.seen) + step_differences(account, mine.parts) == []
