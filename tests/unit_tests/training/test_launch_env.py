"""What the launcher says."""

import os

import pytest

from megatron.training.config.launch_env import LaunchEnv, LaunchEnvError

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
    assert (env.rank, env.world_size, env.local_world_size) == (0, 1, 1)


def test_torchrun():
    env = LaunchEnv.read(TORCHRUN)
    assert (env.rank, env.world_size) == (5, 8)
    assert (env.local_rank, env.local_world_size) == (1, 4)
    assert (env.master_addr, env.master_port, env.restart_count) == ("node0", 29500, 2)


@pytest.mark.parametrize("bad", [{"RANK": "x"}, {"RANK": "8"}, {"LOCAL_RANK": "-1"}, {"MASTER_PORT": "no"}])
def test_nonsense_is_refused_naming_the_variable(bad):
    with pytest.raises(LaunchEnvError, match=next(iter(bad))):
        LaunchEnv.read(TORCHRUN | bad)


@pytest.mark.parametrize(
    ("bad", "told"),
    [
        ({"MASTER_PORT": ""}, "MASTER_PORT is not set, or empty"),
        ({"MASTER_PORT": "0"}, "MASTER_PORT=0: expected a free port"),
        ({"MASTER_PORT": "65536"}, "MASTER_PORT=65536: expected"),
        ({"MASTER_ADDR": " "}, "MASTER_ADDR is empty"),
        ({"WORLD_SIZE": str(1 << 40)}, "at most 262144 ranks"),
        ({"RANK": ""}, "RANK is not set, or empty"),
        ({"OMP_NUM_THREADS": "0"}, "OMP_NUM_THREADS='0': expected a number"),
        ({"OMP_NUM_THREADS": "many"}, "OMP_NUM_THREADS='many': expected a number"),
        ({"OMP_NUM_THREADS": "9999"}, "1 to 1024"),
    ],
)
def test_what_cannot_be_meant_is_told(bad, told):
    with pytest.raises(LaunchEnvError, match=told):
        LaunchEnv.read(TORCHRUN | bad).check_meeting_place()


def test_half_a_launcher_is_none():
    """Each rank would train by itself, into the same folder."""
    for name in ("RANK", "WORLD_SIZE"):
        with pytest.raises(LaunchEnvError, match="sets RANK and WORLD_SIZE together"):
            LaunchEnv.read({name: "1"})


def test_a_world_of_one_meets_nobody():
    LaunchEnv.read({"RANK": "0", "WORLD_SIZE": "1", "MASTER_PORT": ""}).check_meeting_place()


def test_who_hosts_the_store():
    assert not LaunchEnv.read(TORCHRUN).agent_store
    assert LaunchEnv.read(TORCHRUN | {"TORCHELASTIC_USE_AGENT_STORE": "True"}).agent_store


def test_threads_that_the_user_asks_for():
    assert LaunchEnv.read({}).threads_of_user is None
    assert LaunchEnv.read({"OMP_NUM_THREADS": "1"}).threads_of_user == 1
    assert LaunchEnv.read({"OMP_NUM_THREADS": "4, 2"}).threads_of_user == 4
    torchrun = TORCHRUN | {"TORCHELASTIC_RUN_ID": "x"}
    assert LaunchEnv.read(torchrun | {"OMP_NUM_THREADS": "1"}).threads_of_user is None, "torchrun's own"
    assert LaunchEnv.read(torchrun | {"OMP_NUM_THREADS": "2"}).threads_of_user == 2
    alone = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "TORCHELASTIC_RUN_ID": "x"}
    assert LaunchEnv.read(alone | {"OMP_NUM_THREADS": "1"}).threads_of_user == 1, (
        "torchrun leaves one rank alone"
    )


def test_a_gpu_is_seen_by_its_device_file_unless_hidden(tmp_path):
    assert not LaunchEnv().gpu_present(tmp_path)
    (tmp_path / "nvidiactl").touch()
    assert not LaunchEnv().gpu_present(tmp_path)
    (tmp_path / "nvidia0").touch()
    assert LaunchEnv().gpu_present(tmp_path)
    assert not LaunchEnv.read({"CUDA_VISIBLE_DEVICES": ""}).gpu_present(tmp_path)
    assert LaunchEnv.read({"CUDA_VISIBLE_DEVICES": "0"}).gpu_present(tmp_path)


def test_torchruns_pid_is_that_of_the_parent_as_first_asked(monkeypatch):
    """A launcher that dies while torch is imported is missed all the same."""
    under_torchrun = TORCHRUN | {"TORCHELASTIC_RUN_ID": "none"}
    parent = LaunchEnv.read(under_torchrun).launcher_pid
    assert parent == os.getppid()
    monkeypatch.setattr(os, "getppid", lambda: 1)
    assert LaunchEnv.read(under_torchrun).launcher_pid == parent
    assert LaunchEnv.read(TORCHRUN).launcher_pid is None, "srun, mpirun and shells may end before their ranks"
