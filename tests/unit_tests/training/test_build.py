"""What a model provider must pass on to `build_gpt_model`, and what schedules ask of a model."""

import re

import pytest
import torch
from torch import nn

from megatron.core.device import Device
from megatron.core.module import MegatronModule, ModelError
from megatron.core.param_meta import infer_param_meta
from megatron.core.transport.parallel_state import single_process
from megatron.training.config.launch_env import LaunchEnv
from megatron.training.run.arguments import parse_config
from megatron.training.run.build import UnsplittableError, build_engine, build_gpt_model, unsplittable
from megatron.training.run.training import RAISED_ALIKE
from tests.harness.launch_lines import SMALL
from tests.harness.ranks import run_ranks

PS = single_process(Device("cpu"))  # pipeline rank 0
INTERLEAVED = (
    "--num-layers 4 --pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2".split()
)


def config_of(words, ranks):
    words = [*SMALL, "--global-batch-size", "8", *words, "--padded-vocab-size", "384"]
    return parse_config(words, env=LaunchEnv(world_size=ranks, local_world_size=ranks))


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


V = "--num-layers 5 --pipeline-model-parallel-size 2 --allow-padding-num-layers --zero-bubble-v-schedule".split()


def test_on_a_v_both_ends_are_on_the_first_rank_and_tied_weights_are_two_uses_of_one():
    config = config_of(V, 2)
    first = build_gpt_model(config, PS, post_process=False, vp_stage=0)
    last = build_gpt_model(config, PS, pre_process=False, vp_stage=1)
    assert (layers(first), layers(last)) == ({0}, {4})
    name = "embedding.word_embeddings.weight"
    assert first.param_meta[name] == last.param_meta[name]
    assert not first.param_meta[name].shared
    assert len(first.param_meta[name].uses) == 2
    names = [unit.name for unit in (*first.units(), *last.units())]
    assert names == ["embedding", "decoder.layers.0", "decoder.layers.4", "head"]
    _, head = last.units()
    assert first.embedding not in head.modules
    assert last.embedding not in head.modules


class OwnModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(2, 2), nn.ReLU())


class OwnMegatronModel(MegatronModule):
    def __init__(self, matrix, declared=True):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(2))
        self.matrix = nn.Parameter(torch.ones(2, 2), requires_grad=matrix)
        meta = infer_param_meta(self)
        self.param_meta = meta if declared else {"scale": meta["scale"]}


def test_what_cannot_be_split_is_refused_with_module_and_parameter():
    told = (
        r"^--enable-zero-bubble \(schedule zb-1p\) computes .* 'body.0.weight' of OwnModel \(a Linear\)"
        r".*use --pipeline-schedule 1f1b"
    )
    assert re.search(told, unsplittable(OwnModel(), "--enable-zero-bubble (schedule zb-1p)"))
    why = unsplittable(OwnMegatronModel(matrix=True), "zb-h1")
    assert re.search(r"'matrix' of OwnMegatronModel .* accumulated by autograd", why)
    why = unsplittable(OwnMegatronModel(matrix=True, declared=False), "zb-h1")
    assert re.search(r"'matrix'.*declared in no param_meta", why)


class OwnLastStage(OwnModel):
    def set_input_tensor(self, hidden):
        self.hidden = hidden


def build_with_own_last_stage(ctx, words):
    """What a rank is told whose pipeline's last rank has layers of its own."""
    torch.set_num_threads(1)
    config, ps = config_of(words, 2), ctx.make_ps(pp=2)

    def provider(pre_process, post_process, vp_stage=None):
        if ps.pp_rank == 1:
            return OwnLastStage()
        return build_gpt_model(
            config, ps, pre_process=pre_process, post_process=post_process, vp_stage=vp_stage
        )

    with pytest.raises(UnsplittableError) as refused:
        build_engine(config, ps, provider)
    return isinstance(refused.value, RAISED_ALIKE), str(refused.value)


@pytest.mark.parametrize(
    ("words", "asked"),
    [
        ("--zero-bubble-v-schedule", "--zero-bubble-v-schedule (schedule zbv)"),
        ("--pipeline-schedule auto", "--pipeline-schedule auto (which has chosen "),
    ],
)
def test_what_one_rank_cannot_split_all_ranks_refuse_alike(words, asked):
    words = [*"--pipeline-model-parallel-size 2 --num-layers 4".split(), *words.split()]
    first, last = run_ranks(build_with_own_last_stage, 2, words)
    assert first == last
    alike, told = last
    assert alike  # one rank of a machine prints it
    assert told.startswith(asked)
    assert "'body.0.weight' of OwnLastStage" in told


def test_one_dimensional_parameters_are_computed_in_b():
    assert unsplittable(OwnMegatronModel(matrix=False), "zbv") is None
    assert unsplittable(build_gpt_model(config_of([], 1), PS), "zbv") is None
