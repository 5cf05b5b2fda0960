"""Where ranks meet: the store that all of them reach, before there is any process group.

torchrun hosts it, or rank 0 does, at MASTER_ADDR:MASTER_PORT. Whatever else is found there is told within seconds,
naming the variable: torch alone would wait for it without end, or print its own stack.
"""

from __future__ import annotations

import datetime
import functools
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator

import torch.distributed as dist

from megatron.core.transport import waiting
from megatron.core.transport.peer_loss import PeerLostError
from megatron.training.config.launch_env import LaunchEnv, LaunchEnvError
from megatron.training.guard.console import torch_quiet

RESOLVE_S = 10.0  # names of containers that have just been started come late
ANSWER_S = 10.0  # a store answers in milliseconds
NEIGHBOUR_S = 2.0  # one on this machine
MEETING = "meeting"  # the part of a store in which ranks say who they are
LAUNCHER_S = 60.0  # a launcher hosts its store before it starts ranks; of thousands, attempts may be refused
PAUSES_S = (0.002, 1.0)  # between two attempts: the first pause, and the longest


def open_store(env: LaunchEnv, timeout: datetime.timedelta) -> dist.Store:
    """The store of this launch; each attempt of a launcher has its own part of it, because the addresses that a dead
    attempt left there make the next one hang. A world of one has a local store.

    timeout: for rank 0 to come, and later for keys. Raises LaunchEnvError where MASTER_ADDR and MASTER_PORT are no
    place to meet, PeerLostError when nobody has come to host the store.
    """
    if env.world_size == 1:
        return dist.HashStore()
    env.check_meeting_place()
    address = functools.partial(socket.getaddrinfo, env.master_addr, env.master_port, type=socket.SOCK_STREAM)
    if unknown := _retried(address, RESOLVE_S):
        raise LaunchEnvError(
            f"MASTER_ADDR={env.master_addr!r} is no host that this machine knows ({unknown[0]}): name the host of rank "
            "0, or its address"
        )
    hosts = hosts_store(env)
    if not hosts:
        _await_listener(env, timeout)
    store = _connect(env, hosts)
    store.set_timeout(timeout)
    return dist.PrefixStore(f"attempt{env.restart_count}", store)


def hosts_store(env: LaunchEnv) -> bool:
    """Whether the store lives in this process, and ends with it."""
    return env.rank == 0 and not env.agent_store


def pauses() -> Iterator[float]:
    """Seconds to sleep between two looks: longer and longer, so that thousands of ranks do not keep a store busy."""
    pause, longest = PAUSES_S
    while True:
        yield pause
        pause = min(pause * 1.5, longest)


def _place(env: LaunchEnv) -> str:
    return f"MASTER_ADDR={env.master_addr} MASTER_PORT={env.master_port}"


def _retried(call: Callable[[], object], patience_s: float) -> tuple[Exception, float] | None:
    """Call until it succeeds, None; or the last error, and after how many seconds."""
    began, waits = time.monotonic(), pauses()
    while True:
        try:
            call()
            return None
        except (OSError, UnicodeError) as error:
            if (waited_s := time.monotonic() - began) > patience_s or isinstance(error, UnicodeError):
                return error, waited_s
        waiting.pause(next(waits))


def _await_listener(env: LaunchEnv, timeout: datetime.timedelta) -> None:
    """Wait until somebody listens; torch's own wait is loud. A launcher's store was there before this rank, so it is
    not waited for as rank 0 is."""
    place = env.master_addr, env.master_port or 0
    patience_s, host = timeout.total_seconds(), "rank 0 has not come"
    if env.agent_store:
        patience_s = min(patience_s, LAUNCHER_S)
        host = "the launcher, which hosts the store, is gone"
    if silent := _retried(lambda: socket.create_connection(place, timeout=ANSWER_S).close(), patience_s):
        error, waited_s = silent
        why, ranks = f"{host}: nobody listens at {_place(env)} ({error})", tuple(range(env.world_size))
        raise PeerLostError("rendezvous", "default", ranks, env.rank, waited_s, why) from None


def _connect(env: LaunchEnv, hosts: bool) -> dist.TCPStore:
    """The store itself. Raises LaunchEnvError where there is none."""
    found = _made(env, hosts)
    if hosts and isinstance(found, Exception) and "EADDRINUSE" in str(found):
        # Perhaps by another process of this launch that was told to be rank 0: the meeting names both.
        other = _made(env, hosts=False, answer_s=NEIGHBOUR_S)
        if isinstance(other, dist.TCPStore) and _is_met_at(other, env):
            return other
    if isinstance(found, dist.TCPStore):
        return found
    raise LaunchEnvError(_unusable(env, hosts, str(found) or type(found).__name__)) from None


def _is_met_at(store: dist.TCPStore, env: LaunchEnv) -> bool:
    """Whether a rank 0 says who it is in this store, or does so soon."""
    key = f"attempt{env.restart_count}/{MEETING}/came/0"
    return _retried(lambda: _there(store, key), ANSWER_S) is None


def _there(store: dist.TCPStore, key: str) -> None:
    if not store.check([key]):
        raise OSError(f"no {key}")


def _made(env: LaunchEnv, hosts: bool, answer_s: float = ANSWER_S) -> dist.TCPStore | Exception:
    """In a thread, because torch waits without end for a listener that does not answer."""
    made: list[dist.TCPStore | Exception] = []
    place = env.master_addr, env.master_port or 0, env.world_size, hosts, datetime.timedelta(seconds=answer_s)
    store = functools.partial(dist.TCPStore, *place, wait_for_workers=False, use_libuv=env.use_libuv)

    def make() -> None:
        try:
            made.append(store(multi_tenant=not env.agent_store))
        except Exception as error:
            made.append(error)

    thread = threading.Thread(target=make, name="store", daemon=True)
    with torch_quiet():  # pages of frames, for what the error says too
        thread.start()
        deadline = time.monotonic() + answer_s * 1.5
        while thread.is_alive() and time.monotonic() < deadline:
            thread.join(0.1)
            waiting.pause(0.0)
    return made[0] if made else TimeoutError(f"no answer within {answer_s * 1.5:g} s")


def _unusable(env: LaunchEnv, hosts: bool, why: str) -> str:
    why = why.splitlines()[0]
    refused = re.search(r"name: (\w+), message: (.*)", why)
    if hosts and refused is not None:
        state = "is taken by another process" if refused[1] == "EADDRINUSE" else "cannot be listened on"
        return f"MASTER_PORT={env.master_port} {state} on this machine ({refused[2]}): choose another port"
    who = "rank 0, which hosts the store," if hosts else f"rank {env.rank}"
    return (
        f"{who} finds no store of a launch at {_place(env)}: what listens there is something else, or answers too late "
        f"({why}); name the host of rank 0 and a free port of it"
    )
