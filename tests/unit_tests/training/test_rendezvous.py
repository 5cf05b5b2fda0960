"""Where ranks meet, and what else may be found there."""

import contextlib
import datetime
import itertools
import socket
import threading

import pytest

from megatron.core.transport.peer_loss import PeerLostError
from megatron.training.config.launch_env import LaunchEnv, LaunchEnvError
from megatron.training.guard import rendezvous
from megatron.training.guard.rendezvous import hosts_store, open_store
from tests.harness.launch import free_port

SOON = datetime.timedelta(seconds=0.2)


def env(rank, port, **more):
    return LaunchEnv(
        rank=rank,
        world_size=2,
        local_world_size=2,
        master_addr="127.0.0.1",
        master_port=port,
        **more,
    )


def test_ranks_find_the_store_of_rank_0_and_attempts_do_not_mix():
    port = free_port()
    host = open_store(env(0, port), SOON)
    open_store(env(1, port), SOON).set("key", "value")
    assert host.get("key") == b"value"
    again = open_store(env(1, port, restart_count=1), SOON)
    assert not again.check(["key"])


def test_a_launchers_store_is_hosted_by_no_rank(monkeypatch):
    assert hosts_store(env(0, 1))
    assert not hosts_store(env(1, 1))
    assert not hosts_store(env(0, 1, agent_store=True))
    # It was there before its ranks: where it is not, the launcher has been killed, and ten minutes bring nothing.
    monkeypatch.setattr(rendezvous, "LAUNCHER_S", 0.2)
    with pytest.raises(PeerLostError, match="the launcher, which hosts the store, is gone: nobody listens"):
        open_store(env(0, free_port(), agent_store=True), datetime.timedelta(minutes=10))


@pytest.mark.parametrize("answer", [b"", b"HTTP/1.1 400 Bad Request\r\n\r\n"])
def test_a_listener_that_is_no_store(monkeypatch, capfd, answer):
    monkeypatch.setattr(rendezvous, "ANSWER_S", 0.4)

    def serve():
        with contextlib.suppress(OSError):  # the listener is closed
            while True:
                connection, _ = listener.accept()
                connection.sendall(answer)
                connection.close()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=serve, daemon=True).start()
        with pytest.raises(
            LaunchEnvError, match=r"rank 1 finds no store of a launch at MASTER_ADDR=127.0.0.1"
        ):
            open_store(env(1, listener.getsockname()[1]), SOON)
    assert capfd.readouterr().err == "", "torch's own frames are kept back"


def test_waiting_grows_to_a_limit():
    found = list(itertools.islice(rendezvous.pauses(), 20))
    assert found == sorted(found)
    assert (found[0], found[-1]) == rendezvous.PAUSES_S
