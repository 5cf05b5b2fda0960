"""Links, pipes, devices and other people's names where a file of ours is looked for."""

import os
import stat
import threading

import pytest

from megatron.core.safe_files import (
    UnsafeFileError,
    locked,
    open_for_append,
    open_regular,
    opened,
    publish_text,
    published,
    read_bytes,
    read_json,
    read_text,
    remove_leftovers,
)


def _plant(tmp_path, kind):
    path = tmp_path / kind
    match kind:
        case "link":
            (tmp_path / "elsewhere").write_text("theirs")
            path.symlink_to(tmp_path / "elsewhere")
        case "dangling":
            path.symlink_to(tmp_path / "nowhere")
        case "pipe":
            os.mkfifo(path)
        case "folder":
            path.mkdir()
        case "device":
            path = "/dev/zero"
    return path


@pytest.mark.timeout(5)
@pytest.mark.parametrize("kind", ["link", "dangling", "pipe", "folder", "device"])
def test_what_is_no_regular_file_is_neither_read_nor_appended_to_nor_waited_for(tmp_path, kind):
    path = _plant(tmp_path, kind)
    with pytest.raises(UnsafeFileError, match="not a regular file"):
        read_bytes(path, max_bytes=10)
    with pytest.raises(UnsafeFileError, match="not a regular file"):
        open_for_append(path)
    with pytest.raises(UnsafeFileError), locked(path, patience_s=10):
        pass
    assert not (tmp_path / "nowhere").exists()


@pytest.mark.timeout(5)
@pytest.mark.parametrize("kind", ["pipe", "folder", "device"])
def test_a_link_that_is_followed_leads_to_a_regular_file(tmp_path, kind):
    link = tmp_path / "to"
    link.symlink_to(_plant(tmp_path, kind))
    with pytest.raises(UnsafeFileError), open_regular(link, follow=True):
        pass
    link.unlink()
    link.symlink_to(_plant(tmp_path, "link"))
    assert read_text(link, max_bytes=6, follow=True) == "theirs"


def test_size_is_checked_before_reading(tmp_path):
    path = tmp_path / "long"
    with open(path, "wb") as file:
        file.truncate(1 << 40)  # sparse: reading it would take all memory
    with pytest.raises(UnsafeFileError, match="1099511627776 bytes long; at most 100"):
        read_bytes(path, max_bytes=100)


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"\xff", "not UTF-8"), (b"{", "not JSON"), (b"[" * 100_000, "not JSON"), (b"1" * 9999, "not JSON")],
)
def test_what_is_no_json_names_its_file(tmp_path, content, message):
    path = tmp_path / "file.json"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=f"file.json: {message}"):
        read_json(path, max_bytes=1 << 20)


def test_publishing_replaces_a_planted_link_and_leaves_its_target(tmp_path):
    path = _plant(tmp_path, "link")
    publish_text(path, "ours", mode=0o640)
    assert not path.is_symlink()
    assert path.read_text() == "ours"
    assert (tmp_path / "elsewhere").read_text() == "theirs"
    assert stat.S_IMODE(path.stat().st_mode) & 0o137 == 0


def test_a_file_is_private_and_under_no_name_of_its_own_until_it_is_complete(tmp_path):
    with published(tmp_path / "file") as file:
        file.write(b"half")
        file.flush()
        (temporary,) = tmp_path.iterdir()
        assert stat.S_IMODE(temporary.stat().st_mode) == 0o600
        name = temporary.name
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    with published(tmp_path / "file"):
        names = {path.name for path in tmp_path.iterdir()}
        assert name not in names
        assert not any(str(os.getpid()) == part for one in names for part in one.split("."))


def test_an_error_leaves_what_was_there(tmp_path):
    path = tmp_path / "file"
    path.write_text("old")

    def write_half():
        with published(path) as file:
            file.write(b"new")
            raise KeyError

    with pytest.raises(KeyError):
        write_half()
    assert [(one.name, one.read_text()) for one in tmp_path.iterdir()] == [("file", "old")]


def test_a_first_word_is_kept(tmp_path):
    publish_text(tmp_path / "file", "first", replace=False)
    publish_text(tmp_path / "file", "second", replace=False)
    assert [(one.name, one.read_text()) for one in tmp_path.iterdir()] == [("file", "first")]


def test_one_process_at_a_time(tmp_path):
    with locked(tmp_path / "lock", patience_s=0):
        refused = []

        def other():
            try:
                with locked(tmp_path / "lock", patience_s=0):
                    pass
            except BlockingIOError:
                refused.append(True)

        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        assert refused
    with locked(tmp_path / "lock", patience_s=0):
        pass


def test_lines_of_a_file(tmp_path):
    (tmp_path / "file").write_bytes(b"one\ntwo")
    with opened(tmp_path / "file") as file:
        assert [file.readline(100), file.readline(2), file.readline(100), file.readline(100)] == [
            b"one\n",
            b"tw",
            b"o",
            b"",
        ]


@pytest.mark.parametrize("name", ["a\0b", "a\ud800b"])
def test_a_name_that_no_file_has(name):
    with pytest.raises(UnsafeFileError, match="is no file name"):
        read_bytes(name, max_bytes=1)


def test_an_error_names_the_file_first(tmp_path):
    with pytest.raises(UnsafeFileError) as error:
        read_bytes(tmp_path, max_bytes=1)
    assert str(error.value) == f"{tmp_path}: is a folder, not a regular file"


def test_no_file_takes_the_place_of_a_device():
    for name in ("null", "stdout", "no-such-device"):
        with pytest.raises(UnsafeFileError, match="place of a device"), published(f"/dev/{name}"):
            pass
    assert not os.path.isfile("/dev/null")


def test_leftovers_are_those_of_one_file(tmp_path):
    kept = {"file", "other.tmp", ".file.tmp", ".files.00ff.tmp", ".file.zz.tmp", "a.file.00ff.tmp"}
    for name in kept | {".file.00ff.tmp", "file.4242.tmp"}:
        (tmp_path / name).touch()
    remove_leftovers(tmp_path / "file")
    assert {path.name for path in tmp_path.iterdir()} == kept


def test_a_lock_that_its_holder_removed_is_not_held_by_two(tmp_path):
    """Who waited for it finds it gone, and takes the next one."""
    path = tmp_path / "lock"
    waits, done = threading.Event(), threading.Event()

    def other():
        waits.set()
        with locked(path, patience_s=10):
            found.append(path.exists())
            with pytest.raises(BlockingIOError), locked(path, patience_s=0):
                pass
        done.set()

    found = []
    thread = threading.Thread(target=other)
    with locked(path, patience_s=10):
        thread.start()
        assert waits.wait(10)
        path.unlink()
    assert done.wait(10)
    thread.join()
    assert found == [True]
