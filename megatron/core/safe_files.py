"""Files in folders where others may write: opened without following or waiting, published whole (floor 0).

[Note: planted files] Who may write into a folder can put a link, a pipe or a device where we look for a file. So: what
is read has to be a regular file of a size that we accept, and opening never waits for a writer; what is written gets a
temporary name that nobody can guess, has to be new (O_EXCL) and is readable by its owner alone until it is complete.
Files that the user names on the command line may be links (`follow=True`); files whose names we make up may not.

Every system call goes through `os`, so that the tests can stop the process, or fill the disk, at each one.
"""

from __future__ import annotations

import contextlib
import csv
import errno
import fcntl
import json
import os
import re
import secrets
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

from megatron.core.transport.waiting import pause
from megatron.core.words import time_text

FILE_MODE = 0o640  # outputs on shared clusters are not for everybody
PRIVATE_MODE = 0o600
SHARED_MODE = 0o666  # corpora, indices of them, reports: the umask alone says who may read them
DEVICES = "/dev"
SAY_AFTER_S = 5.0  # of waiting for a lock
# With who fills a cache, and may have been stopped: then what is missing is made without it.
CACHE_PATIENCE_S = 60.0
StrPath = str | os.PathLike[str]

_UMASK = os.umask(0o077)  # asked once, before there are threads: asking sets it for a moment
os.umask(_UMASK)
_KINDS = {stat.S_IFLNK: "a symbolic link", stat.S_IFDIR: "a folder", stat.S_IFIFO: "a pipe"}
_KINDS |= {stat.S_IFSOCK: "a socket", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device"}


class UnsafeFileError(OSError):
    """Something that is not to be read or written as a file of ours; `strerror` says why, `filename` which."""

    def __init__(self, path: StrPath, why: str) -> None:
        super().__init__(errno.EINVAL, why, os.fspath(path))

    def __str__(self) -> str:
        return f"{self.filename}: {self.strerror}"


class FileContentError(ValueError):
    """What is in a file is not what is read there; the message names it."""


def kind_of(mode: int) -> str:
    """What something that is no regular file is. mode: st_mode."""
    return _KINDS.get(stat.S_IFMT(mode), "no file")


def _check_regular(path: StrPath, mode: int) -> None:
    if not stat.S_ISREG(mode):
        raise UnsafeFileError(path, f"is {kind_of(mode)}, not a regular file")


def _open_checked(path: StrPath, flags: int, *, mode: int = FILE_MODE, follow: bool = False) -> int:
    """Open a regular file without waiting: a device is refused before it is opened, a pipe is not waited for."""
    try:
        _check_regular(path, (os.stat if follow else os.lstat)(path).st_mode)
    except FileNotFoundError:
        pass  # the flags say what becomes of that
    except ValueError as error:  # a NUL, or half a surrogate pair
        raise UnsafeFileError(path, f"is no file name: {error}") from None
    fd = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC | (0 if follow else os.O_NOFOLLOW), mode)
    try:
        _check_regular(path, os.fstat(fd).st_mode)
    except BaseException:
        os.close(fd)
        raise
    return fd


# --- reading


@contextlib.contextmanager
def open_regular(path: StrPath, *, follow: bool = False) -> Iterator[int]:
    """A descriptor for reading a regular file. follow: a link is taken for what it leads to.

    Raises FileNotFoundError, UnsafeFileError and other OSErrors.
    """
    fd = _open_checked(path, os.O_RDONLY, follow=follow)
    try:
        yield fd
    finally:
        os.close(fd)


@contextlib.contextmanager
def opened(path: StrPath, *, follow: bool = False) -> Iterator[IO[bytes]]:
    """A regular file for reading, buffered. Raises OSError."""
    with open_regular(path, follow=follow) as fd, open(fd, "rb", buffering=1 << 20, closefd=False) as file:
        yield file


def read_bytes(path: StrPath, *, max_bytes: int, follow: bool = False) -> bytes:
    """The content of a regular file that is no longer than `max_bytes`. Raises OSError."""
    with opened(path, follow=follow) as file:
        if (size := os.fstat(file.fileno()).st_size) > max_bytes:
            raise UnsafeFileError(path, f"is {size} bytes long; at most {max_bytes} are read")
        return file.read(size)


def read_text(path: StrPath, *, max_bytes: int, follow: bool = False) -> str:
    """The same, as UTF-8. Raises OSError, and FileContentError naming a file that is no text."""
    try:
        return read_bytes(path, max_bytes=max_bytes, follow=follow).decode()
    except UnicodeDecodeError as error:
        raise FileContentError(f"{path}: not UTF-8 text: {error.reason} at byte {error.start}") from None


def read_json(path: StrPath, *, max_bytes: int, follow: bool = False) -> Any:
    """The value in a JSON file. Raises OSError, and FileContentError naming one that is none or nested too deeply."""
    text = read_text(path, max_bytes=max_bytes, follow=follow)
    try:
        return json.loads(text)
    except ValueError as error:
        raise FileContentError(f"{path}: not JSON: {error}") from None
    except RecursionError:
        raise FileContentError(f"{path}: not JSON of ours: nested too deeply") from None


def read_rows(path: StrPath) -> list[dict[str, str]]:
    """A table of ours, by the names of its columns. Raises OSError."""
    return list(csv.DictReader(read_text(path, max_bytes=1 << 20, follow=True).splitlines()))


# --- writing


def _no_device(path: StrPath) -> Path:
    """Root would replace /dev/null, or what /dev/stdout leads to."""
    target = Path(path)
    if os.path.realpath(target.parent) == DEVICES:
        raise UnsafeFileError(path, "is the place of a device, where no file is made")
    return target


@contextlib.contextmanager
def published(path: StrPath, *, mode: int = FILE_MODE, replace: bool = True) -> Iterator[IO[bytes]]:
    """A file that appears under its name only when completely written and durable; after an error it does not.

    mode: its permissions, less the umask, once published. replace: False keeps a file that is there already.
    A link under that name is replaced, not followed. Nothing is made in /dev. Raises OSError.
    """
    target = _no_device(path)
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(8)}.tmp")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    fd = os.open(temporary, flags, PRIVATE_MODE)
    try:
        with open(fd, "wb") as file:
            yield file
            file.flush()
            os.fchmod(fd, mode & ~_UMASK)
            os.fsync(fd)
        if not replace:
            try:
                os.link(temporary, target, follow_symlinks=False)
            except FileExistsError:
                return
            except OSError:  # a file system without hard links: who makes the name has it, content follows
                try:
                    os.close(os.open(target, flags, PRIVATE_MODE))
                except FileExistsError:
                    return
                replace = True
        if replace:
            os.replace(temporary, target)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)


def publish_text(path: StrPath, text: str, *, mode: int = FILE_MODE, replace: bool = True) -> None:
    """`published` for a text that is there already."""
    with published(path, mode=mode, replace=replace) as file:
        file.write(text.encode())


def publish_by(path: StrPath, write: Callable[[str], Any]) -> None:
    """`published` for a file that other code writes, which wants a path: it gets one in a folder of this process's own.
    Raises what that code raises, and OSError."""
    target = _no_device(path)
    with tempfile.TemporaryDirectory(prefix=f".{target.name}.", dir=target.parent) as folder:
        made = Path(folder) / target.name  # by whose ending it may choose a format
        write(str(made))
        os.replace(made, target)


def remove_leftovers(path: StrPath) -> None:
    """Remove what processes that were killed left of files to be published as `path`.

    Call it where nobody else may be writing that file: while its lock is held. Raises OSError.
    """
    target = Path(path)
    # Also as they were named before: with a number, no dot.
    ours = re.compile(rf"\.?{re.escape(target.name)}\.[0-9a-f]+\.tmp")
    for name in filter(ours.fullmatch, os.listdir(target.parent)):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(target.with_name(name))


def open_for_append(path: StrPath, *, mode: int = FILE_MODE) -> int:
    """A descriptor that appends to a regular file, which is made if need be; a link is refused. Raises OSError."""
    return _open_checked(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, mode=mode)


@contextlib.contextmanager
def locked(
    path: StrPath, *, patience_s: float, say: Callable[[str], None] = lambda line: None
) -> Iterator[None]:
    """Hold the lock file at `path`, which is made if need be; the system frees the lock of a process that dies.

    patience_s: raises BlockingIOError where another process still holds it after so long; 0 waits for nobody. say: gets
    a line once waiting takes long. Raises OSError, and what `waiting.pause` raises.
    """
    began = time.monotonic()
    while True:
        fd = _open_checked(path, os.O_RDWR | os.O_CREAT)
        try:
            _lock(fd, path, began, patience_s, say)
            try:
                is_there = os.path.samestat(os.fstat(fd), os.lstat(path))
            except FileNotFoundError:
                is_there = False
            if is_there:  # else its last holder removed it, and others lock the next one
                yield
                return
        finally:
            os.close(fd)


def _lock(fd: int, path: StrPath, began: float, patience_s: float, say: Callable[[str], None]) -> None:
    pause_s, is_told = 0.002, False
    while True:
        try:
            return fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            waited_s = time.monotonic() - began
            if waited_s >= patience_s:
                why = "another process holds this lock" + (
                    f" for {time_text(waited_s, 2)} now" if patience_s else ""
                )
                raise BlockingIOError(errno.EWOULDBLOCK, why, os.fspath(path)) from None
        if not is_told and waited_s >= SAY_AFTER_S:
            is_told = True
            say(f"waiting for {path}, which another process has locked; at most {time_text(patience_s)}")
        pause(pause_s)
        pause_s = min(2 * pause_s, 0.25)


def sync_directory(path: StrPath) -> None:
    """Make the names in a directory durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
