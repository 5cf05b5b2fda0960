"""--fake-process-group: one rank of a world by itself, through the command line."""

import pytest

from megatron.training.config.launch_env import LaunchEnv, LaunchEnvError
from megatron.training.run.arguments import ConfigurationError, parse_config
from tests.harness import launch
from tests.harness.launch_lines import SMALL

FAKE = "--fake-process-group"


def refused(words, env):
    with pytest.raises(ConfigurationError) as error:
        parse_config([*SMALL, FAKE, *words.split()], env=env.alone())
    return {problem.rule: problem for problem in error.value.problems}


def test_a_rank_in_the_middle_of_a_pipeline_trains_alone(tmp_path):
    words = (
        "--num-layers 8 --pipeline-model-parallel-size 4 --use-custom-fsdp --zero-bubble-v-schedule "
        "--global-batch-size 32 --train-iters 3 --log-interval 1 "
        "--enable-optimizer-post-validation --post-validation-after 1 --eval-iters 1 --eval-interval 3"
    )
    place = {"WORLD_SIZE": "16", "RANK": "6"}
    run = launch.ok(launch.run_forked([*SMALL, FAKE, *words.split()], cwd=tmp_path, env=place))
    assert "rank 6 of 16 runs by itself" in run.output
    assert "losses, gradient norms and weights mean nothing" in run.output
    assert "Theoretical memory footprints of pipeline rank 1: " in run.output
    assert "memory of pipeline rank 1 by iteration 3, planned / measured: " in run.output
    assert run.output.count("iteration ") >= 3
    assert "nan" not in run.output.replace("nan iterations", "")


def test_its_bytes_stand_beside_those_of_the_account(tmp_path):
    words = (
        "--tensor-model-parallel-size 2 --sequence-parallel --use-distributed-optimizer --bf16 --eval-iters 0"
    )
    place = {"WORLD_SIZE": "8", "RANK": "7"}
    run = launch.ok(
        launch.run_forked([*SMALL, FAKE, *words.split(), "--train-iters", "3"], cwd=tmp_path, env=place)
    )
    line = next(line for line in run.output.splitlines() if "planned / measured" in line)
    both = dict(
        part.rsplit(" / ", 1) for part in line.partition("measured: ")[2].partition(";")[0].split(", ")
    )
    told = {name.split()[0]: (" ".join(name.split()[1:]), measured) for name, measured in both.items()}
    for kind in ("weights", "main_weights", "moments", "main_grads", "figures"):
        planned, measured = told[kind]
        assert planned == measured
    (folder,) = (tmp_path / "runs").iterdir()
    assert launch.exit_record(folder)["rank"] == 7


def test_what_does_not_go_with_it_is_said_at_once():
    words = "--save ck --save-interval 5 --load ck --profile --rehearse --log-pipeline-timeline tl"
    found = refused(words, LaunchEnv(rank=3, world_size=8))
    assert found["fake-state"].message.startswith(
        "--save, --load with --fake-process-group: the weights of a rank"
    )
    assert found["rehearse-flag"].fix == "leave one of them out"
    assert (
        refused("--profile", LaunchEnv(rank=3, world_size=8))["fake-profile"].fix == "give --profile-ranks 3"
    )
    assert "WORLD_SIZE and RANK are not set" in refused("", LaunchEnv())["fake-rank"].message
    under = refused("", LaunchEnv(rank=3, world_size=8, run_id="none"))
    assert "torchrun has started this one" in under["fake-rank"].message
    under = LaunchEnv(rank=3, world_size=8, run_id="none", local_rank=1, local_world_size=2)
    assert list(refused("", under)) == ["fake-rank"]
    with pytest.raises(LaunchEnvError, match="LOCAL_RANK=1 with --fake-process-group"):
        LaunchEnv(rank=3, world_size=8, local_rank=1, local_world_size=8).alone()
    with pytest.raises(LaunchEnvError, match="or one by itself with --fake-process-group"):
        LaunchEnv.read({"WORLD_SIZE": "8", "RANK": "8"})


def test_a_model_that_needs_values_is_measured_alone_and_that_is_said(tmp_path):
    """The provider of a user's own, which is described where somebody asks."""
    script = tmp_path / "own.py"
    script.write_text(OWN)
    words = ["--report-theoretical-memory", "--train-iters", "3", "--log-interval", "1", "--eval-iters", "0"]
    for needs_values in (False, True):
        env = {"NEEDS_VALUES": "1" if needs_values else ""}
        run = launch.ok(launch.run_forked([*SMALL, *words], script=str(script), cwd=tmp_path, env=env))
        assert run.output.count("one model") == 1
        said = "Theoretical memory footprints of pipeline rank 0: " in run.output
        assert said is not needs_values
        assert ("iteration 2, planned / measured: weights" in run.output) is not needs_values
        assert ("provider or forward step on tensors without memory raised (" in run.output) is needs_values
        assert ("iteration 2; in no plan: weights" in run.output) is needs_values


OWN = """
import os
from torch import nn
import pretrain_gpt
from megatron.core.enums import ModelType
from megatron.training import pretrain, print_rank_0

def provider(pre_process=True, post_process=True):
    print_rank_0("one model")
    return nn.Sequential(nn.Embedding(257, 16), nn.Linear(16, 257))

def step(data_iterator, model):
    batch = next(data_iterator)
    if os.environ["NEEDS_VALUES"]:
        assert int(batch["tokens"].max()) < 257
    out = model(batch["tokens"])
    def loss_func(out):
        loss = nn.functional.cross_entropy(out.flatten(0, 1), batch["labels"].flatten())
        return loss, {"lm loss": loss.detach()}
    return out, loss_func

pretrain(pretrain_gpt.train_valid_test_datasets_provider, provider, ModelType.encoder_or_decoder, step)
"""
