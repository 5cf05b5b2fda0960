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
    with pytest.raises(LaunchEnvError, match="LOCAL_RANK=1 with --fake-process-group"):
        LaunchEnv(rank=3, world_size=8, local_rank=1, local_world_size=8).alone()
    with pytest.raises(LaunchEnvError, match="or one by itself with --fake-process-group"):
        LaunchEnv.read({"WORLD_SIZE": "8", "RANK": "8"})
