"""What the launcher says."""

import pytest

from megatron.training.launch_env import LaunchEnv, LaunchEnvError

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "GROUP_RANK": "1",
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RESTART_COUNT": "2",
}


def test_without_a_launcher_this_is_a_world_of_one():
    env = LaunchEnv.read({})
    assert (env.launched, env.rank, env.world_size, env.local_world_size) == (False, 0, 1, 1)


def test_torchrun():
    env = LaunchEnv.read(TORCHRUN)
    assert (env.launched, env.rank, env.world_size, env.local_rank, env.local_world_size) == (
        True,
        5,
        8,
        1,
        4,
    )
    assert (env.master_addr, env.master_port, env.restart_count) == ("node0", 29500, 2)


@pytest.mark.parametrize("bad", [{"RANK": "x"}, {"RANK": "8"}, {"LOCAL_RANK": "-1"}, {"MASTER_PORT": "no"}])
def test_nonsense_is_refused_naming_the_variable(bad):
    with pytest.raises(LaunchEnvError, match=next(iter(bad))):
        LaunchEnv.read(TORCHRUN | bad)


def test_a_gpu_is_seen_by_its_device_file_unless_hidden(tmp_path):
    assert not LaunchEnv().gpu_present(tmp_path)
    (tmp_path / "nvidiactl").touch()
    assert not LaunchEnv().gpu_present(tmp_path)
    (tmp_path / "nvidia0").touch()
    assert LaunchEnv().gpu_present(tmp_path)
    assert not LaunchEnv.read({"CUDA_VISIBLE_DEVICES": ""}).gpu_present(tmp_path)
    assert LaunchEnv.read({"CUDA_VISIBLE_DEVICES": "0"}).gpu_present(tmp_path)
