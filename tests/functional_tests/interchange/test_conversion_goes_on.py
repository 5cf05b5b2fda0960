"""Conversions that are killed, run out of space, or lose what they read: what was finished stays, no half is shown."""

import errno
import json
import os
import shutil
import sys
from collections import namedtuple

import pytest
import torch

from tests.harness import launch
from tests.harness.hugging_face import saved_toy
from tests.harness.stored_values import stored_values
from tools.checkpoint import main
from tools.conversion import progress, stream
from tools.conversion.compare import differences, open_source
from tools.conversion.progress import WriteProgress
from tools.conversion.source_reader import SourceReader


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A Hugging Face folder, and what it is imported as."""
    root = tmp_path_factory.mktemp("model")
    saved_toy("qwen3", root / "theirs", torch.bfloat16)
    assert main(["import", "--hf", str(root / "theirs"), "--save", str(root / "ours")]) == 0
    return root


def commands(folders, made):
    small = ["--max-shard-size", "4KB"]
    return {
        "import": ["import", "--hf", str(folders / "theirs"), "--save", str(made), *small],
        "export": ["export", "--load", str(folders / "ours"), "--hf", str(made), *small],
    }


def killed_at(call, number, words):
    """The status of a fork that ends without a word when it calls `os.<call>` for so manyeth time."""
    pid = os.fork()
    if pid == 0:
        torch.set_num_threads(1)
        real, left = getattr(os, call), [number]

        def counted(*args, **more):
            left[0] -= 1
            if not left[0]:
                os._exit(99)
            return real(*args, **more)

        setattr(os, call, counted)
        with open(os.devnull, "w") as sys.stdout, open(os.devnull, "w") as sys.stderr:
            os._exit(main(words))
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def finished(root):
    """Which files are whole, as the file system knows them."""
    return {
        path.name: path.stat().st_ino for path in root.rglob("*.safetensors") if not path.name.startswith(".")
    }


@pytest.mark.parametrize("command", ["import", "export"])
def test_finished_files_survive_a_kill_and_are_not_written_again(command, folders, tmp_path):
    made, before, kills = tmp_path / "made", {}, 0
    words = commands(folders, made)[command]
    for call, number in [("write", 9), ("rename", 2), ("fsync", 4), ("write", 5), ("write", 6)]:
        status = killed_at(call, number, words)
        now = finished(tmp_path)
        assert before.items() <= now.items()
        assert not (made / "iter_0000000").exists()
        assert command == "import" or not made.exists()
        before, kills = now, kills + (status == 99)
    assert kills == 5
    assert len(before) > 3
    assert main(words) == 0
    assert before.items() <= finished(made).items()
    assert not differences(open_source(folders / "theirs"), open_source(made))
    assert not list(tmp_path.rglob("*.part")) + list(tmp_path.rglob("*tmp*"))


def test_a_kill_behind_the_rename_is_an_end(folders, tmp_path, capsys):
    """Between the directory's name and the tracker's."""
    words = commands(folders, tmp_path)["import"]
    assert main(words) == 0
    (tmp_path / "latest_checkpointed_iteration.txt").unlink()
    assert main(words) == 0
    assert "finished by an earlier call" in capsys.readouterr().err
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "0"
    assert main([*words, "--dtype", "float32"]) == 3  # another one
    assert "there already" in capsys.readouterr().err


def test_other_weights_are_not_mixed_with_what_is_finished(folders, tmp_path):
    """A folder that is written anew between two calls, of the same names and sizes."""
    theirs = tmp_path / "theirs"
    shutil.copytree(folders / "theirs", theirs)
    words = ["import", "--hf", str(theirs), "--save", str(tmp_path / "ours"), "--max-shard-size", "9KB"]
    assert killed_at("write", 20, words) == 99
    data = bytearray((theirs / "model.safetensors").read_bytes())
    data[-9000:] = bytes(9000)
    (theirs / "model.safetensors").write_bytes(data)
    assert main(words) == 0
    assert not differences(open_source(theirs), open_source(tmp_path / "ours"))


@pytest.mark.parametrize("command", ["import", "export"])
def test_space_is_looked_at_before(command, folders, tmp_path, monkeypatch, capsys):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(stream.shutil, "disk_usage", lambda path: usage(0, 0, 10 << 10))
    assert main(commands(folders, tmp_path / "made")[command]) == 3
    error = capsys.readouterr().err
    assert "KiB needed, 10 KiB free" in error
    assert not list(tmp_path.iterdir())


def test_a_disk_that_fills_up_keeps_what_is_finished(folders, tmp_path, monkeypatch, capsys):
    words, real, left = commands(folders, tmp_path / "made")["export"], os.write, [12]

    def write(fd, data):
        left[0] -= 1
        if left[0] < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(fd, data)

    monkeypatch.setattr(os, "write", write)
    assert main(words) == 3
    monkeypatch.undo()
    assert "No space left on device; " in capsys.readouterr().err
    before = finished(tmp_path)
    assert before
    assert not (tmp_path / "made").exists()
    assert main(words) == 0
    assert before.items() <= finished(tmp_path / "made").items()


@pytest.mark.parametrize("by", ["retention", "another save"])
def test_a_checkpoint_that_goes_while_it_is_exported(by, folders, tmp_path, monkeypatch, capsys):
    ours, calls = tmp_path / "ours", []
    shutil.copytree(folders / "ours", ours)
    real = SourceReader.read

    def read(reader, *args):
        calls.append(args)
        if len(calls) == 3 and by == "retention":
            shutil.rmtree(ours / "iter_0000000")
            reader._readers.clear()  # as if its other files were opened now
        if len(calls) == 3 and by == "another save":
            edited = ours / "iter_0000000" / "manifest.json"
            edited.write_text(json.dumps(json.loads(edited.read_text()) | {"code_version": "2"}))
        return real(reader, *args)

    monkeypatch.setattr(SourceReader, "read", read)
    assert main(["export", "--load", str(ours), "--hf", str(tmp_path / "back")]) == 3
    error = capsys.readouterr().err
    assert error.count("removed or replaced while it was read, as a run does that goes on") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["ours"]


def test_a_flipped_bit_is_not_exported(folders, tmp_path, capsys):
    ours = tmp_path / "ours"
    shutil.copytree(folders / "ours", ours)
    path = ours / "iter_0000000" / "shard_00000.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert main(["export", "--load", str(ours), "--hf", str(tmp_path / "back")]) == 3
    assert "SHA-256 is" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["ours"]


def test_lines_are_sparse_in_a_log_and_one_on_a_terminal(monkeypatch, capsys):
    now, lines = [0.0], []
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])

    def written(is_terminal):
        monkeypatch.setattr(sys.stderr, "isatty", lambda: is_terminal)
        shown = WriteProgress(100 << 20, 2, lines.append)
        shown.begin_file("a.safetensors", 1)
        for _ in range(100):
            now[0] += 1
            shown.add(1 << 20)
        shown.end()

    written(is_terminal=False)
    assert lines[0] == "a.safetensors (1 of 2): 30% of 100 MiB, 1 MiB/s, 70 s left"
    assert [line.partition("% of")[0][-2:] for line in lines[:-1]] == ["30", "60", "90"]
    assert lines[-1].startswith("100 MiB written in ")
    assert not capsys.readouterr().err
    written(is_terminal=True)
    assert len(lines) == 5
    assert capsys.readouterr().err.count("\r") == 102


def test_fp32_comes_from_main_weights(tmp_path):
    """Of a run in bf16, whose weights are rounded from them."""
    words = [
        *launch.TINY,
        "--bf16",
        "--save",
        str(tmp_path / "ck"),
        "--train-iters",
        "1",
        "--save-interval",
        "1",
    ]
    launch.ok(launch.run_forked(words, cwd=tmp_path))
    for dtype in ("float32", "bfloat16"):
        assert (
            main(["export", "--load", str(tmp_path / "ck"), "--hf", str(tmp_path / dtype), "--dtype", dtype])
            == 0
        )
    run = open_source(tmp_path / "ck")
    main_names = {name for name in run.tensors if name.startswith("optimizer.main_weight.")}
    assert main_names
    exported = {dtype: open_source(tmp_path / dtype) for dtype in ("float32", "bfloat16")}
    ours, theirs = stored_values(run), stored_values(exported["float32"])
    differing = 0
    for name in main_names:
        kept = theirs["model." + name.removeprefix("optimizer.main_weight.")]
        value = ours[name][: kept.shape[0]]
        assert torch.equal(kept, value), name
        differing += not torch.equal(value, value.bfloat16().float())
    assert differing
    assert {entry.dtype for entry in exported["bfloat16"].tensors.values()} == {"BF16"}
    assert json.loads((tmp_path / "float32" / "config.json").read_text())["torch_dtype"] == "float32"
