"""What a folder or file is that is no checkpoint of ours, told by names alone (floor 0; no file is opened)."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from fnmatch import fnmatchcase
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from megatron.core.safe_files import kind_of, read_rows

CONVERSION = "converting other formats is planned, see docs/roadmap.md, 'checkpoint conversion'"
MAX_NAMES = 10_000  # looked at in one folder
HUGGING_FACE, MEGATRON = "hf", "megatron"


class Format(NamedTuple):
    """A row of the table. patterns: of names in a checkpoint's directory, each of which has a match. under: of
    the directory's own name, or "" for the folder that was named itself, where it has to be one of a kind. read_as: the
    flag with which `tools/checkpoint.py import` reads it, as a run's --load does; "" for what is not read."""

    name: str
    patterns: tuple[str, ...]
    under: str
    read_as: str


class Recognised(NamedTuple):
    """What a folder is. directory: that of the checkpoint, below the folder; "": the folder. shown: names that tell."""

    form: Format
    directory: str
    shown: str

    def __str__(self) -> str:
        return f"{self.form.name} ({self.shown})"

    @property
    def fix(self) -> str:
        """What to do with it."""
        if self.form.read_as:
            how = f"tools/checkpoint.py import --{self.form.read_as} makes it one of ours"
            return f"a run's --load reads it, and {how}"
        return CONVERSION


# The first that matches counts, so the most telling come first. One without a name is ours, without its manifest:
# damaged.
FORMATS = [
    Format(row["name"], tuple(row["patterns"].split()), row["under"], row["read_as"])
    for row in read_rows(Path(__file__).with_name("foreign_formats.csv"))
]
# Where formats keep checkpoints below the folder that is named, and what they keep below a checkpoint's directory.
_STEPS = ("iter_*", "release", "step-*", "global_step*", "checkpoint-*", "snapshots/*", "?" * 40)
_INSIDE = ("mp_rank_*", "context", "weights", "model_weights")
_LOOKED_INTO = 4  # directories of each kind
_FILES = {
    ".safetensors": "a safetensors file, as Hugging Face models are made of",
    ".bin": "a file of PyTorch weights, as older Hugging Face models are made of",
    ".distcp": "a part of a checkpoint of torch.distributed.checkpoint",
    ".nemo": "a NeMo archive",
    ".gguf": "a GGUF model",
    ".ckpt": "a Lightning checkpoint",
    ".pt": "a PyTorch file",
    ".pth": "a PyTorch file",
}


def names_in(folder: Path) -> list[str]:
    """The names in a folder, sorted; of a huge one some of them. Raises OSError."""
    with os.scandir(folder) as entries:
        return sorted(entry.name for entry in islice(entries, MAX_NAMES))


def recognise(folder: Path) -> Recognised | None:
    """`a Hugging Face model (config.json, model.safetensors)`, or None. Raises OSError where it cannot be listed."""
    top = names_in(folder)
    for directory in ("", *_below(folder, top, _STEPS)):
        names = _names(folder / directory) if directory else top
        inside = _below(folder, names, _INSIDE)
        paths = names + [f"{inner}/{name}" for inner in inside for name in _names(folder / directory / inner)]
        for form in FORMATS:
            if not fnmatchcase(directory, form.under):
                continue
            evidence = [next((p for p in paths if fnmatchcase(p, one)), "") for one in form.patterns]
            if all(evidence):
                shown = ", ".join(os.path.join(directory, path) for path in evidence)
                return None if not form.name else Recognised(form, directory, shown)
    return None


def _below(folder: Path, names: list[str], patterns: tuple[str, ...]) -> Iterator[str]:
    """The directories that are worth a look: the first few of each pattern."""
    for pattern in patterns:
        parent, _, last = pattern.rpartition("/")
        there = names if not parent else _names(folder / parent) if parent in names else []
        matching = (name for name in there if fnmatchcase(name, last))
        yield from (os.path.join(parent, name) for name in islice(matching, _LOOKED_INTO))


def _names(path: Path) -> list[str]:
    """None in what is no directory or may not be read."""
    try:
        return names_in(path)
    except OSError:
        return []


def describe_file(path: Path, mode: int) -> str:
    """What stands where a folder was expected. mode: st_mode."""
    if not stat.S_ISREG(mode):
        return kind_of(mode)
    return f"{_FILES[path.suffix]}; {CONVERSION}" if path.suffix in _FILES else "a file"
