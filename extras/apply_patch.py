#!/usr/bin/env python3
"""Applies zb_h1.patch to a copy of megatron-core's wheel, and trains both to compare.

    python extras/apply_patch.py                  # fetch, unpack, patch, prove
    python extras/apply_patch.py --folder DIR     # patch a Megatron of your own: DIR has megatron/core

The patch gives Megatron's own 1F1B the order of ZB-H1: W, the gradient of the weights of column and row parallel linear
layers, waits until the pipeline would stand still. It was made against the release that PATCHED_RELEASE names.

What it does not do, and zbpp_light does:

- Megatron's calls that send to a neighbour and receive from it at once still wait for both, so W fills only a part of
  the bubble (extras/proof/bubble.py measures it).
- It needs Megatron's DDP without `--overlap-grad-reduce` (asserted), and no interleaved stages.
- One schedule: no plan files, no zb-2p. Nothing says what runs. With `main_grad` in half precision the weights'
  gradients go through torch, not through apex's kernel.
"""

from __future__ import annotations

import argparse
import hashlib
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE / "proof"))

import releases  # noqa: E402

PATCH = HERE / "zb_h1.patch"
PATCHED_RELEASE = releases.NEWEST


def apply(folder: Path) -> None:
    """Patch the Megatron in a folder. Where it does not fit nothing is changed: SystemExit with patch's words."""
    words = ["patch", "-p1", "--batch", "--forward", "--directory", str(folder), "--input", str(PATCH)]
    for last in (["--dry-run"], []):
        result = subprocess.run([*words, *last], capture_output=True, text=True)
        if result.returncode != 0:
            raise SystemExit(
                f"{PATCH.name} does not fit {folder}, nothing is changed:\n{result.stdout}{result.stderr}"
            )


def patched() -> Path:
    """A patched copy of the release's wheel, kept while wheel and patch are the same."""
    (wheel, *_) = releases.path_of(PATCHED_RELEASE)
    mark = hashlib.sha256(PATCH.read_bytes()).hexdigest()[:12]
    folder = releases.CACHE / f"zb_h1-{PATCHED_RELEASE}-{mark}"
    if not folder.is_dir():
        for old in releases.CACHE.glob("zb_h1-*"):
            shutil.rmtree(old)
        scratch = folder.with_name(f"patching-{mark}")
        shutil.rmtree(scratch, ignore_errors=True)
        shutil.copytree(wheel, scratch)
        apply(scratch)
        scratch.rename(folder)
    return folder


def main(words: Sequence[str] | None = None) -> int:
    """0 where patched and unpatched agree to the last bit, else 1."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0], allow_abbrev=False)
    parser.add_argument(
        "--folder", type=Path, help="a Megatron of your own, which is changed; without it nothing of yours is"
    )
    folder = parser.parse_args(words).folder
    if folder is not None:
        apply(folder)
        print(f"{folder} is patched")
        return 0
    import prove

    return prove.main(["--patch"])


if __name__ == "__main__":
    sys.exit(main())
