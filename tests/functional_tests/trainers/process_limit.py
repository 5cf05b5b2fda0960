#!/usr/bin/env python3
"""pretrain_gpt.py in a process that may have so much more data than now, and says how much more it has at the end.

MORE_BYTES: of data, beyond what the process has with torch (RLIMIT_DATA); empty: no limit. glibc gives what is freed
back at once, as by MALLOC_MMAP_THRESHOLD_ and MALLOC_TRIM_THRESHOLD_: else it keeps holes for later. Stacks of threads,
which count as data, are small: how many there are at the end of a run differs from one to the next.
"""

import ctypes
import os
import resource
import runpy
import sys
from pathlib import Path

import torch

SCRIPT = Path(__file__).resolve().parents[3] / "pretrain_gpt.py"
sys.path.insert(0, str(SCRIPT.parent))
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _BLOCK, _STACK = -1, -3, 65536, 1 << 20


def data_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmData"))


if __name__ == "__main__":
    library = ctypes.CDLL(None)
    for what in (_MMAP_THRESHOLD, _TRIM_THRESHOLD):
        library.mallopt(what, _BLOCK)
    attributes = ctypes.create_string_buffer(64)
    library.pthread_attr_init(attributes)
    assert not library.pthread_attr_setstacksize(attributes, ctypes.c_size_t(_STACK))
    assert not library.pthread_setattr_default_np(attributes)
    torch.ones(8, 8) @ torch.ones(8, 8)
    before = data_bytes()
    if os.environ["MORE_BYTES"]:
        limit = before + int(os.environ["MORE_BYTES"])
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    runpy.run_path(str(SCRIPT), run_name="__main__")
    print(f"data: {data_bytes() - before} bytes more")
