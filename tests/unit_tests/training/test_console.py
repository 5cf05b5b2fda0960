"""Streams that take everything, tried in processes of their own."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from megatron.training.guard.console import guard_console, terminal_width, wrapped

ROOT = Path(__file__).resolve().parents[3]


def shell(body, redirection, **variables):
    """(status, stdout, stderr) of a program that guards its console first; $PROGRAM stands for it."""
    code = "from megatron.training.guard.console import guard_console, lost_output\nguard_console()\n"
    program = f"{sys.executable} -c '{code}{textwrap.dedent(body)}'"
    done = subprocess.run(
        ["bash", "-c", redirection.replace("$PROGRAM", program)],
        capture_output=True,
        cwd=ROOT,
        env={**os.environ, **variables},
        check=False,
    )
    return done.returncode, done.stdout, done.stderr


TALK = """
import sys
for _ in range(2000): print("x" * 99)
sys.stderr.write(f"lost: {lost_output()}")
"""


@pytest.mark.parametrize(
    ("redirection", "lost"),
    [
        ("$PROGRAM > /dev/full", "stdout: No space left on device"),
        ("$PROGRAM >&-", "stdout: closed from the start"),
        ("set -o pipefail; $PROGRAM | head -1", "stdout: Broken pipe"),
    ],
)
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_users_print_never_fails_and_the_interpreter_ends_with_0(redirection, lost, unbuffered):
    status, _, told = shell(TALK, redirection, PYTHONUNBUFFERED=unbuffered)
    assert status == 0, told
    assert told.decode().endswith(f"lost: ['{lost}']")
    assert told.decode().count("WARNING: stdout cannot be written") == ("full" in redirection)
    assert b"Traceback" not in told
    assert b"Exception ignored" not in told


@pytest.mark.parametrize("width", [30, 40, 80])
def test_a_terminal_breaks_lines_between_words(width):
    words = "  > residency: zbv, optim_grads_params over 2 ranks, policy memory; see --check-config and docs/logging.md"
    rows = wrapped(f"{words}\n", width).splitlines()
    assert max(map(len, rows)) < width
    assert " ".join(row.strip() for row in rows) == words.strip()
    assert {row[: len(row) - len(row.lstrip())] for row in rows[1:]} == {"    "}
    assert wrapped("  as  it is\n", 20) == "  as  it is\n"


def test_a_terminal_of_one_column_ends_no_run(monkeypatch):
    monkeypatch.setenv("COLUMNS", "1")
    assert wrapped("two words\n" * 3, terminal_width())


def test_both_dead():
    assert shell(TALK, "$PROGRAM > /dev/full 2> /dev/full") == (0, b"", b"")


def test_what_arrives_is_whole_where_the_reader_is_slow_and_the_pipe_does_not_block():
    body = "import os\nos.set_blocking(1, False)\n" + TALK
    status, out, _ = shell(body, "$PROGRAM | (sleep 0.3; cat)")
    assert (status, len(out)) == (0, 200_000)


def test_letters_that_a_console_cannot_show_are_escaped():
    status, out, _ = shell(
        'print("a snowman \\u2603 and foreign bytes \\udc80")',
        "$PROGRAM",
        LC_ALL="C",
        PYTHONUTF8="0",
        PYTHONCOERCECLOCALE="0",
    )
    assert (status, out) == (0, b"a snowman \\u2603 and foreign bytes \\udc80\n")


def test_closed_descriptors_are_not_given_to_other_files():
    body = """
    import os
    with open("/dev/zero") as file:
        assert file.fileno() > 2, file.fileno()
    """
    assert shell(body, "$PROGRAM <&- >&- 2>&-")[0] == 0


def test_a_user_who_closes_stdout_silences_nobody():
    body = 'import sys\nsys.stdout.close()\nprint("still here")'
    assert shell(body, "$PROGRAM")[1] == b"still here\n"


def test_streams_of_somebody_else_stay(capsys):
    before = sys.stdout, sys.stderr
    guard_console()
    assert (sys.stdout, sys.stderr) == before


def test_a_disk_that_has_room_again_is_written_again():
    """The first loss is kept and told, and later lines arrive."""
    body = """
    import os
    print("lost", flush=True)
    os.dup2(2, 1)
    print("arrives")
    print(lost_output())
    """
    _, _, told = shell(body, "$PROGRAM > /dev/full")
    warning, *later = told.decode().splitlines()
    assert warning.startswith("WARNING: stdout cannot be written: No space left on device")
    assert later == ["arrives", "['stdout: No space left on device']"]
