"""Signals are sent to real child processes, and to this one where nothing can die of it."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from megatron.training.guard import signals as signals_module
from megatron.training.guard.signals import SignalHandler

ROOT = Path(__file__).resolve().parents[3]


def wait_for(condition, seconds=10.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.005)


def start(body, **kw):
    """A child that runs `body` with `signals` and prints 'ready' first."""
    code = (
        "import os, signal, sys, time\nfrom megatron.training.guard.signals import SignalHandler\n"
        + textwrap.dedent(body)
    )
    child = subprocess.Popen(
        [sys.executable, "-u", "-c", code], stdout=subprocess.PIPE, text=True, cwd=ROOT, **kw
    )
    assert child.stdout.readline() == "ready\n"
    return child


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_first_signal_only_sets_the_flag_and_handlers_come_back(number, monkeypatch):
    monkeypatch.setattr(signals_module, "_before", {})  # of a launch in this process
    before = {n: signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT)}
    with SignalHandler(echo_s=60) as signals:
        assert signals.requested() is None
        os.kill(os.getpid(), number)
        wait_for(lambda: signals.requested() is not None)
        assert signals.requested() == number.name
        os.kill(os.getpid(), number)  # within the echo time: the same request
    assert {n: signal.getsignal(n) for n in before} == before
    assert signal.set_wakeup_fd(-1) == -1
    signals.close()  # a second time does nothing


def test_second_signal_stops_at_once_with_the_callers_status():
    child = start("""
        def last_words(signum):
            print("second", signum)
            return 75
        with SignalHandler(last_words) as signals:
            print("ready")
            while signals.requested() is None:
                time.sleep(0.01)
            print("saving after", signals.requested())
            time.sleep(60)
    """)
    child.send_signal(signal.SIGTERM)
    assert child.stdout.readline() == "saving after SIGTERM\n"
    time.sleep(0.4)
    child.send_signal(signal.SIGTERM)
    assert child.wait(10) == 75
    assert child.stdout.read() == f"second {int(signal.SIGTERM)}\n"


def test_second_signal_works_while_the_main_thread_is_stuck_in_native_code():
    """A lock of the C library, waited for with the GIL released, as a collective waits for its peer."""
    child = start("""
        import ctypes
        with SignalHandler() as signals:
            libc = ctypes.CDLL(None)
            mutex = ctypes.create_string_buffer(64)
            libc.pthread_mutex_lock(mutex)
            print("ready")
            libc.pthread_mutex_lock(mutex)  # for ever
    """)
    child.send_signal(signal.SIGTERM)
    time.sleep(0.5)
    assert child.poll() is None
    child.send_signal(signal.SIGINT)
    assert child.wait(10) == 128 + signal.SIGINT


def test_echo_of_the_launcher_is_the_same_request():
    child = start("""
        with SignalHandler() as signals:
            print("ready")
            while signals.requested() is None:
                time.sleep(0.01)
            time.sleep(0.5)
            print("saved")
    """)
    for _ in range(3):
        child.send_signal(signal.SIGTERM)
    assert child.wait(10) == 0
    assert child.stdout.read() == "saved\n"


def test_last_words_that_fail_still_stop():
    child = start(
        """
        def last_words(signum):
            raise OSError("disk full")
        with SignalHandler(last_words, echo_s=0.0) as signals:
            print("ready")
            time.sleep(60)
    """,
        stderr=subprocess.DEVNULL,
    )
    child.send_signal(signal.SIGTERM)
    time.sleep(0.2)
    child.send_signal(signal.SIGTERM)
    assert child.wait(10) == 128 + signal.SIGTERM


def test_forked_worker_dies_by_sigterm_and_tells_us_nothing():
    """A loader's worker is ended by SIGTERM; that is no request to end the training."""
    with SignalHandler(echo_s=60) as signals:
        read_end, write_end = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.write(write_end, b"x")
            time.sleep(60)
            os._exit(0)
        os.read(read_end, 1)
        os.kill(pid, signal.SIGTERM)
        _, status = os.waitpid(pid, 0)
        assert os.WIFSIGNALED(status)
        assert os.WTERMSIG(status) == signal.SIGTERM
        time.sleep(0.1)
        assert signals.requested() is None
        os.kill(os.getpid(), signal.SIGTERM)
        wait_for(lambda: signals.requested() == "SIGTERM")
        os.close(read_end)
        os.close(write_end)
