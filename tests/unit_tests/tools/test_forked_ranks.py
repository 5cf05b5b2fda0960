"""A rank that is a fork of its launcher is as a new Python: it keeps modules, and nothing else."""

import atexit
import json
import signal
import socket
import subprocess

import pytest

from tools.forked_ranks import ForkedRank

SCRIPT = """
import atexit, json, os, signal, sys
atexit.register(lambda: print("registered here", flush=True))
files = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
sockets = [file for file in files if os.path.exists(file) and "socket" in os.readlink(file)]
handlers = [int(n) for n in signal.valid_signals() if callable(signal.getsignal(n)) and n != signal.SIGINT]
has_session = os.getsid(0) == os.getpid()
facts = [sys.argv[1:], sockets, handlers, dict(os.environ), has_session, "torch" in sys.modules]
print(json.dumps(facts))
{end}
"""


def ended(folder, end="", words=("--flag", "1")):
    """(status, output, errors) of a rank that ends so."""
    script = folder / "script.py"
    script.write_text(SCRIPT.replace("{end}", end))
    with (folder / "out").open("w") as out, (folder / "err").open("w") as err:
        status = ForkedRank([str(script), *words], {"RANK": "1"}, (out, err)).wait(60)
    return status, (folder / "out").read_text().splitlines(), (folder / "err").read_text()


def test_it_keeps_modules_and_nothing_else(tmp_path):
    left = tmp_path / "left by the launcher"
    before = signal.signal(signal.SIGUSR2, lambda *_: None)
    atexit.register(left.touch)
    try:
        with socket.create_server(("127.0.0.1", 0)):
            status, (facts, last), errors = ended(tmp_path)
    finally:
        signal.signal(signal.SIGUSR2, before)
        atexit.unregister(left.touch)
    assert (status, errors) == (0, "")
    assert json.loads(facts) == [["--flag", "1"], [], [], {"RANK": "1"}, True, True]
    assert last == "registered here"
    assert not left.exists()


@pytest.mark.parametrize(
    ("end", "status", "said"),
    [
        ("sys.exit(75)", 75, ""),
        ("raise ValueError('of the script')", 1, "ValueError: of the script"),
        ("os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL, ""),
    ],
    ids=["status", "error", "killed"],
)
def test_it_ends_with_its_own_status(tmp_path, end, status, said):
    found, _, errors = ended(tmp_path, end)
    assert found == status
    assert said in errors


def test_waiting_has_a_limit(tmp_path):
    script = tmp_path / "script.py"
    begun = tmp_path / "begun"  # by then it has closed what it had of its launcher
    script.write_text(f"import pathlib, signal; pathlib.Path({str(begun)!r}).touch(); signal.pause()")
    rank = ForkedRank([str(script)], {}, (None, None))
    while not begun.exists():
        with pytest.raises(subprocess.TimeoutExpired):
            rank.wait(0.01)
    with pytest.raises(subprocess.TimeoutExpired):
        rank.wait(0.01)
    assert rank.poll() is None
    rank._rank.kill()
    assert rank.wait() == -signal.SIGKILL
