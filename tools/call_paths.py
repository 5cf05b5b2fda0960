#!/usr/bin/env python3
"""Which files a debugger goes through, from the training loop to the first layer and on four more paths.

    python tools/call_paths.py            # the table of docs/tour.md
    python tools/call_paths.py --files    # and the files of each path, in order, with the functions

Four ranks of a tiny run (two pipeline stages under a searched schedule, two shards of each) train, save, and a second
run loads what the first has saved. On rank 0 every call is looked at. A path has legs, each from a function to one that
is called below it, directly or not; its files are those of `megatron/` on the call stack between them, each counted
once. Calls that have returned before are not on the stack: what computes a value on the way is not on the path.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import runpy
import socket
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
PACKAGE = f"{ROOT / 'megatron'}{os.sep}"

RANKS = 4
RUN = (
    "--num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32 "
    "--micro-batch-size 1 --global-batch-size 8 --lr 1e-2 --tokenizer-type NullTokenizer --vocab-size 127 --mock-data "
    "--num-workers 0 --eval-iters 0 --train-iters 1 --save checkpoint --save-interval 1 "
    "--pipeline-model-parallel-size 2 --enable-zero-bubble "
    "--use-custom-fsdp --data-parallel-sharding-strategy optim_grads_params"
).split()
RESUMED = (*RUN, "--load", "checkpoint", "--train-iters", "2", "--override-opt_param-scheduler")


class Function(NamedTuple):
    """A function of `megatron/`: its file and its name."""

    file: str
    name: str


class Leg(NamedTuple):
    """begin and end: from the entry of a function to the first entry of one below it."""

    begin: Function
    end: Function


class CallPath(NamedTuple):
    """most: files that it may have."""

    name: str
    most: int
    legs: tuple[Leg, ...]


_LOOP = Function("training/run/loop.py", "_iteration")
_ROW = Function("core/pipeline_parallel/runtime/executor.py", "run")
_LANE = Function("core/pipeline_parallel/runtime/data_parallel_lane.py", "_perform")
_W = Function("core/weight_grad.py", "flush")
_REDUCED = Function("core/distributed/custom_fsdp/grad_reduce_pipeline.py", "_launch")
_ARRIVED = Function("core/transport/shm_transport.py", "_go_on")
_LOADED = Function("core/dist_checkpointing/loading.py", "load_pieces")
PATHS = (
    CallPath(
        "from the training loop to the first layer",
        7,
        (Leg(_LOOP, Function("core/transformer/decoder.py", "forward")),),
    ),
    CallPath(
        "a sharded weight, from its shards to the layer that reads it",
        8,
        (
            Leg(_LANE, Function("core/transport/shm_transport.py", "_start")),
            Leg(_LANE, Function("core/distributed/custom_fsdp/all_gather_pipeline.py", "wait")),
        ),
    ),
    CallPath(
        "the gradient of a sharded weight, from its layer to its shard",
        8,
        (
            Leg(
                Function("core/transformer/layer_halves.py", "backward"),
                Function("core/weight_grad.py", "put"),
            ),
            Leg(_W, Function("core/distributed/custom_fsdp/grad_reduce_pipeline.py", "grad_begins")),
            Leg(_W, Function("core/weight_grad.py", "accumulate_wgrad")),
            Leg(_LANE, _REDUCED),
            Leg(_REDUCED, Function("core/transport/shm_transport.py", "_start")),
            # where the last rank's part comes: in the start or in a wait
            Leg(_ARRIVED, Function("core/transport/gloo_pairs.py", "add_in_rank_order")),
        ),
    ),
    CallPath(
        "a parameter to a checkpoint and back",
        22,
        (
            Leg(
                Function("training/run/run_checkpoints.py", "save"),
                Function("core/dist_checkpointing/state.py", "part_pieces"),
            ),
            Leg(
                Function("training/run/run_checkpoints.py", "save"),
                Function("core/dist_checkpointing/storage.py", "write_shard"),
            ),
            Leg(
                Function("training/run/run_checkpoints.py", "save"),
                Function("core/dist_checkpointing/shard_files.py", "lay_out"),
            ),
            Leg(Function("training/run/run_checkpoints.py", "load"), _LOADED),
            Leg(_LOADED, Function("core/dist_checkpointing/chunk_reader.py", "read")),
            Leg(_LOADED, Function("core/dist_checkpointing/files.py", "read_into")),
        ),
    ),
    CallPath(
        "a searched schedule under ZeRO-3, from the flags to the executor",
        30,
        (
            Leg(
                Function("training/run/arguments.py", "launch_config"),
                Function("training/config/config.py", "from_flat"),
            ),
            Leg(Function("training/run/training.py", "pretrain"), Function("training/planner.py", "_chosen")),
            *(
                Leg(
                    Function("training/planner.py", "plan"),
                    Function(f"core/pipeline_parallel/plan/{file}", name),
                )
                for file, name in (
                    ("search/clock.py", "__init__"),
                    ("passes/residency_rows.py", "written"),
                    ("passes/lower.py", "add_comm"),
                    ("held/verify_residency.py", "verify_residency"),
                )
            ),
            Leg(_LOOP, _ROW),
        ),
    ),
)


class Watched:
    """What `sys.setprofile` calls. seen: by leg, the functions on the stack at its end, the outermost first."""

    def __init__(self) -> None:
        self.seen: dict[Leg, list[Function]] = {}
        self._ends: dict[Function, list[Leg]] = {}
        for path in PATHS:
            for leg in path.legs:
                self._ends.setdefault(leg.end, []).append(leg)

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        if event != "call" or (end := _function(frame)) not in self._ends:
            return
        for leg in self._ends[end]:
            if leg not in self.seen and (between := _between(frame, leg.begin)):
                self.seen[leg] = between


def _function(frame: FrameType) -> Function:
    return Function(frame.f_code.co_filename.removeprefix(PACKAGE), frame.f_code.co_name)


def _between(frame: FrameType | None, begin: Function) -> list[Function]:
    """The package's functions from `begin` to this frame; none where it is not above it."""
    between: list[Function] = []
    while frame is not None:
        if frame.f_code.co_filename.startswith(PACKAGE):
            between.append(_function(frame))
            if between[-1] == begin:
                return between[::-1]
        frame = frame.f_back
    return []


def watch(flags: Sequence[str], out: str) -> None:
    """Run pretrain_gpt.py as this rank in the folder of `out`, which rank 0 writes what it has seen to."""
    os.chdir(Path(out).parent)
    watched = Watched()
    if os.environ["RANK"] == "0":
        threading.setprofile(watched)
        sys.setprofile(watched)
    sys.argv = ["pretrain_gpt.py", *flags]
    try:
        runpy.run_path(str(ROOT / "pretrain_gpt.py"), run_name="__main__")
    finally:
        sys.setprofile(None)
        if watched.seen:
            Path(out).write_text(json.dumps([[leg, functions] for leg, functions in watched.seen.items()]))


def traced() -> dict[Leg, list[Function]]:
    """Both runs, as forks of this process. Raises RuntimeError with their words where one fails."""
    from tools.forked_ranks import TRAINER, ForkedRank

    importlib.import_module(TRAINER)
    seen: dict[Leg, list[Function]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for number, flags in enumerate((RUN, RESUMED)):
            out, log = Path(folder, f"{number}.json"), Path(folder, f"{number}.log")
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                port = free.getsockname()[1]
            with log.open("w") as words:
                line = [__file__, "--watch", str(out), *flags]
                ranks = [ForkedRank(line, _variables(rank, port), (words, words)) for rank in range(RANKS)]
                statuses = [rank.wait() for rank in ranks]
            if any(statuses):
                raise RuntimeError(f"ranks ended with {statuses}:\n{log.read_text()}")
            for leg, functions in json.loads(out.read_text()):
                begin, end = leg
                key = Leg(Function(*begin), Function(*end))
                seen.setdefault(key, [Function(*function) for function in functions])
    return seen


def _variables(rank: int, port: int) -> dict[str, str]:
    own = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": RANKS,
        "LOCAL_WORLD_SIZE": RANKS,
        "MASTER_PORT": port,
    }
    named = {name: str(value) for name, value in own.items()}
    return {**os.environ, **named, "MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1"}


def files_of(path: CallPath, seen: Mapping[Leg, Sequence[Function]]) -> list[str]:
    """Raises LookupError naming a leg that no call took: one of its functions has another name or another caller."""
    for leg in path.legs:
        if leg not in seen:
            raise LookupError(f"no call of {leg.end} below {leg.begin}: mend {Path(__file__).name}")
    return list(dict.fromkeys(function.file for leg in path.legs for function in seen[leg]))


def table(seen: Mapping[Leg, Sequence[Function]]) -> str:
    """Of Markdown, a row a path."""
    rows = [f"| {path.name} | {len(files_of(path, seen))} | {path.most} |" for path in PATHS]
    return "\n".join(["| path | files | at most |", "|---|---|---|", *rows, ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0], allow_abbrev=False)
    parser.add_argument("--files", action="store_true", help="print each path's files and functions too")
    with_files = parser.parse_args().files
    seen = traced()
    print(table(seen), end="")
    for path in PATHS if with_files else ():
        print(f"\n{path.name}:")
        for leg in path.legs:
            print(*(f"    {function.file}: {function.name}" for function in seen[leg]), "", sep="\n")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--watch"]:
        watch(sys.argv[3:], sys.argv[2])
    else:
        main()
