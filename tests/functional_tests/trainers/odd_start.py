#!/usr/bin/env python3
"""pretrain_gpt.py under conditions that a user's shell makes, each by a variable of the environment.

MORE_FLAGS: flags of this rank alone. FILES, SOFT_FILES: limits on open files, hard and soft. CLOSED: descriptors that
are closed from the start. FULL, UNREAD: that are a full disk, or a pipe whose reader has left. TERMINAL: both
are a terminal that is gone once this text was seen. NOHUP: SIGHUP is ignored. PORT_OF: what
listens at MASTER_PORT before rank 0 comes, "silence" (accepts and never answers) or "words" (answers something else).
WAITS_FOR_PORT: this rank comes once that is there. ANSWER_S: how long an answer of the store is waited for.
"""

import contextlib
import os
import resource
import runpy
import signal
import socket
import sys
import threading
import time
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[3] / "pretrain_gpt.py"
sys.path.insert(0, str(SCRIPT.parent))


def answer(listener):
    while True:
        connection, _ = listener.accept()
        connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n" * 4)
        connection.close()


def listen(kind):
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(("127.0.0.1", int(os.environ["MASTER_PORT"])))
    listener.listen(64)
    if kind == "words":
        threading.Thread(target=answer, args=(listener,), daemon=True).start()
    return listener


def taken():
    with (
        contextlib.suppress(OSError),
        socket.create_connection(("127.0.0.1", int(os.environ["MASTER_PORT"]))),
    ):
        return True
    return False


def become_terminal(text):
    """Nobody reads any more once `text` has come."""
    master, slave = os.openpty()
    for fd in (1, 2):
        os.dup2(slave, fd)
    os.close(slave)

    def read():
        seen = b""
        while text not in seen:
            seen += os.read(master, 4096)
        os.close(master)

    threading.Thread(target=read, daemon=True).start()


def main():
    from megatron.training.guard import rendezvous

    variables = os.environ
    sys.argv += variables.get("MORE_FLAGS", "").split()
    rendezvous.ANSWER_S = float(variables.get("ANSWER_S", rendezvous.ANSWER_S))
    rendezvous.RESOLVE_S = float(variables.get("ANSWER_S", rendezvous.RESOLVE_S))
    listener = listen(variables["PORT_OF"]) if "PORT_OF" in variables else None
    while "WAITS_FOR_PORT" in variables and not taken():
        time.sleep(0.01)
    if "FILES" in variables:
        resource.setrlimit(resource.RLIMIT_NOFILE, (int(variables["FILES"]), int(variables["FILES"])))
    if "SOFT_FILES" in variables:
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (int(variables["SOFT_FILES"]), hard))
    if "NOHUP" in variables:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
    for fd in map(int, variables.get("FULL", "").split()):
        os.dup2(os.open("/dev/full", os.O_WRONLY), fd)
    for fd in map(int, variables.get("UNREAD", "").split()):
        reading, writing = os.pipe()
        os.dup2(writing, fd)
        os.close(writing)
        os.close(reading)
    if "TERMINAL" in variables:
        become_terminal(variables["TERMINAL"].encode())
    for fd in map(int, variables.get("CLOSED", "").split()):
        os.close(fd)
        if fd:
            setattr(sys, {1: "stdout", 2: "stderr"}[fd], None)
    try:
        runpy.run_path(str(SCRIPT), run_name="__main__")
    finally:
        del listener


if __name__ == "__main__":
    main()
