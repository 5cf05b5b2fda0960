"""What a model provider must pass on to `build_gpt_model`."""

import pytest

from megatron.core.device import Device
from megatron.core.module import ModelError
from megatron.core.parallel_state import single_process
from megatron.training.arguments import parse_config
from megatron.training.build import build_gpt_model
from megatron.training.launch_env import LaunchEnv
from tests.harness.launch_lines import SMALL

PS = single_process(Device("cpu"))  # pipeline rank 0
INTERLEAVED = (
    "--num-layers 4 --pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2".split()
)


def config_of(words, ranks):
    words = [*SMALL, "--global-batch-size", "8", *words, "--padded-vocab-size", "384"]
    return parse_config(words, env=LaunchEnv(launched=True, world_size=ranks, local_world_size=ranks))


def layers(model):
    return {
        int(name.split(".")[name.split(".").index("layers") + 1])
        for name in model.param_meta
        if "layers" in name
    }


def test_each_chunk_holds_its_own_layers():
    config = config_of(INTERLEAVED, 2)
    assert layers(build_gpt_model(config, PS, post_process=False, vp_stage=0)) == {0}
    assert layers(build_gpt_model(config, PS, pre_process=False, post_process=False, vp_stage=1)) == {2}


def test_a_chunk_without_its_number_is_refused():
    with pytest.raises(ModelError, match="pass the model provider's vp_stage on to build_gpt_model"):
        build_gpt_model(config_of(INTERLEAVED, 2), PS, post_process=False)


def test_ends_that_are_not_the_stages_are_refused():
    config = config_of(["--pipeline-model-parallel-size", "2"], 2)
    with pytest.raises(
        ModelError, match=r"\(True, True\) for a stage of \(True, False\): pass on what the model"
    ):
        build_gpt_model(config, PS)
