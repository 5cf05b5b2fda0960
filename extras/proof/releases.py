#!/usr/bin/env python3
"""Wheels of megatron-core that the proof runs under, fetched and unpacked beside `.venv`.

    python extras/proof/releases.py            # every release of the table
    python extras/proof/releases.py 0.16.1     # one

A wheel is unpacked, not installed: its folder goes on the path of a process that borrows torch from the Python that
runs this. That is how releases whose wheels ask for a newer Python train here, and how they stand side by side.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CACHE = ROOT / ".wheels"
# The newest patch release of each minor from 0.12 on.
RELEASES = ("0.12.3", "0.13.1", "0.14.0", "0.15.3", "0.16.1", "0.17.1", "0.18.2", "0.19.2")
NEWEST = RELEASES[-1]
AT_EACH_CI = ("0.12.3", "0.16.1")
# These import triton as soon as megatron.core is imported: 286 MB, for them alone.
TRITON = "triton==3.8.0"
NEEDS_TRITON: tuple[str, ...] = ("0.17.1", "0.18.2", "0.19.2")
# The Python whose wheels are fetched: 0.12 and 0.13 have none for 3.12, 0.17 and later none for 3.11. Their files
# compile under either; what is compiled in them already (a helper of data sets) is not used.
PYTHON_OF_WHEELS = {release: "3.11" if release in RELEASES[:5] else "3.12" for release in RELEASES}


def path_of(release: str) -> list[str]:
    """What goes before site-packages on the path of a process under this release; fetched where it is not here yet."""
    assert release in RELEASES, f"{release} is not in the table: {', '.join(RELEASES)}"
    asked_for = [f"megatron-core=={release}", *([TRITON] if release in NEEDS_TRITON else [])]
    return [str(unpacked(requirement)) for requirement in asked_for]


def unpacked(requirement: str, cache: Path = CACHE) -> Path:
    """The folder that one wheel is unpacked in. `NAME==VERSION` is its name there: another version is another folder.

    Raises SystemExit with pip's words where the wheel cannot be had.
    """
    folder = cache / requirement
    if folder.is_dir():
        return folder
    cache.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache, prefix="fetching-") as scratch:
        (wheel,) = _fetched(requirement, Path(scratch))
        content = Path(scratch) / "content"
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(content)
        try:
            os.rename(content, folder)  # complete or not there
        except OSError:
            if not folder.is_dir():  # else another process was first
                raise
    return folder


def _fetched(requirement: str, folder: Path) -> list[Path]:
    # Triton's wheel has to be of the Python that runs.
    version = (
        []
        if requirement == TRITON
        else ["--python-version", PYTHON_OF_WHEELS[requirement.partition("==")[2]]]
    )
    words = [sys.executable, "-m", "pip", "download", "-q", "--disable-pip-version-check", "--no-deps"]
    words += ["--only-binary", ":all:", *version, "--dest", str(folder), requirement]
    result = subprocess.run(words, capture_output=True, text=True)
    if result.returncode != 0:
        raise SystemExit(f"{requirement} cannot be fetched, and is not in {CACHE}:\n{result.stderr.strip()}")
    return list(folder.glob("*.whl"))


def drop_others(cache: Path = CACHE) -> list[str]:
    """Remove what the table does not name (any more); returns the folders' names."""
    named = {f"megatron-core=={release}" for release in RELEASES} | {TRITON}
    others = [folder for folder in cache.glob("*==*") if folder.name not in named]
    for folder in others:
        shutil.rmtree(folder)
    return [folder.name for folder in others]


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0], allow_abbrev=False)
    parser.add_argument("release", nargs="*", help=f"of {', '.join(RELEASES)}; none: all")
    chosen = parser.parse_args(words).release or RELEASES
    if unknown := [release for release in chosen if release not in RELEASES]:
        parser.error(f"{', '.join(unknown)} not in the table: {', '.join(RELEASES)}")
    for name in drop_others():
        print(f"dropped {name}")
    for release in chosen:
        print(release, os.pathsep.join(path_of(release)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
