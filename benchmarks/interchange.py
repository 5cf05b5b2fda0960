"""Import and export of made-up weights beside `cp`, SHA-256 and transformers: bytes a second, and what stays resident.

    python benchmarks/interchange.py --gigabytes 8 --work DIR

Every contestant is a process of its own that begins with cold files (their pages are dropped from the cache) and ends
once all it has written is on the disk; they take turns, --rounds times, and the fastest round counts. Then an import is
killed at random as often as --kills says, called again until it ends, and compared with what it was made of, tensor by
tensor. DIR has to have three times the size free.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron.core.words import plain, size_text, time_text
from megatron.interchange.known import read_config

ROOT = Path(__file__).resolve().parent.parent
BLOCK = 8 << 20
LLAMA = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 4096, "intermediate_size": 11008,
    "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 32000, "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
}  # fmt: skip
SHARD_BYTES = 2 * 10**9
COPY = 'cp -r "$0" "$1" && sync -f "$1"'
HASH = """
import hashlib, sys
block = bytearray(8 << 20)
for name in sys.argv[1:]:
    digest = hashlib.sha256()
    with open(name, "rb", buffering=0) as file:
        while count := file.readinto(block):
            digest.update(memoryview(block)[:count])
"""
TRANSFORMERS = """
import sys, torch, transformers
model = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.bfloat16)
model.save_pretrained(sys.argv[2])
import os; os.sync()
"""


def make_weights(folder: Path, num_bytes: int) -> int:
    """A folder of Llama's tensors in bf16 with as many layers as make up `num_bytes`; its size."""

    def tensors(layers: int) -> dict[str, tuple[int, ...]]:
        model = read_config({**LLAMA, "num_hidden_layers": layers})
        return model.architecture.catalogue(model.config(), model.vocab_size, model.vocab_size).theirs

    def size(shapes: dict[str, tuple[int, ...]]) -> int:
        return sum(2 * count(shape) for shape in shapes.values())

    layers = 1
    while size(tensors(layers + 1)) <= num_bytes:
        layers += 1
    files: list[dict[str, tuple[int, ...]]] = [{}]
    for name, shape in tensors(layers).items():
        if files[-1] and size(files[-1] | {name: shape}) > SHARD_BYTES:
            files.append({})
        files[-1][name] = shape
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({**LLAMA, "num_hidden_layers": layers}))
    weights: dict[str, str] = {}
    for number, held in enumerate(files, 1):
        name = f"model-{number:05d}-of-{len(files):05d}.safetensors"
        write_file(folder / name, held)
        weights |= dict.fromkeys(held, name)
    index = {"metadata": {"total_size": size(tensors(layers))}, "weight_map": weights}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return sum(path.stat().st_size for path in folder.iterdir())


def count(shape: tuple[int, ...]) -> int:
    total = 1
    for extent in shape:
        total *= extent
    return total


def write_file(path: Path, held: dict[str, tuple[int, ...]]) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    place = 0
    for name, shape in held.items():
        end = place + 2 * count(shape)
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [place, end]}
        place = end
    text = json.dumps(header).encode()
    noise = (
        random.Random(path.name).randbytes(BLOCK).replace(b"\x7f", b"\x3f").replace(b"\xff", b"\xbf")
    )  # finite
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for begin in range(0, place, BLOCK):
            file.write(noise[: place - begin])
        os.fsync(file.fileno())


def make_cold(*folders: Path) -> None:
    os.sync()
    for path in (path for folder in folders for path in folder.rglob("*") if path.is_file()):
        fd = os.open(path, os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def run(words: Sequence[str], kill_after_s: float | None = None) -> tuple[float, float, int, int]:
    """Seconds, those of processors, the most bytes resident (mapped files among them), and the exit status."""
    started = time.monotonic()
    child = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, cwd=ROOT, text=True)
    if kill_after_s is not None:
        time.sleep(kill_after_s)
        os.kill(
            child.pid, signal.SIGKILL
        )  # not by Popen, which would take the status of a child that has ended
    assert child.stderr is not None
    errors = child.stderr.read()
    _, status, usage = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode not in (0, -signal.SIGKILL):
        print(errors[-2000:], file=sys.stderr)
    processors_s = usage.ru_utime + usage.ru_stime
    return time.monotonic() - started, processors_s, usage.ru_maxrss << 10, child.returncode


def tool(*words: object) -> list[str]:
    return [sys.executable, str(ROOT / "tools" / "checkpoint.py"), *map(str, words)]


def contestants(
    work: Path, theirs: Path, ours: Path, back: Path
) -> dict[str, tuple[list[str], Path | None, Path]]:
    """By name: the command, what it makes that is in the way of the next, and what it reads."""
    files = [str(path) for path in sorted(theirs.glob("*.safetensors"))]
    return {
        "cp, sync": (["sh", "-c", COPY, str(theirs), str(work / "copy")], work / "copy", theirs),
        "SHA-256 alone": ([sys.executable, "-c", HASH, *files], None, theirs),
        "import --hf": (tool("import", "--hf", theirs, "--save", ours), None, theirs),
        "export --hf": (tool("export", "--load", ours, "--hf", back), back, ours),
        "transformers, load and save": (
            [sys.executable, "-c", TRANSFORMERS, str(theirs), str(work / "saved")],
            work / "saved",
            theirs,
        ),
    }


def measure(args: argparse.Namespace, work: Path, num_bytes: int) -> dict[str, float]:
    """Print the table; seconds by name, of the fastest round."""
    theirs, ours, back = work / "theirs", work / "ours", work / "back"
    rounds: dict[str, list[tuple[float, float, int, int]]] = {}
    for _ in range(args.rounds):
        shutil.rmtree(ours, ignore_errors=True)
        for name, (words, made, read) in contestants(work, theirs, ours, back).items():
            if name.startswith("transformers") and args.without_transformers:
                continue
            make_cold(read)
            rounds.setdefault(name, []).append(run(words))
            print(f"{name}: {time_text(rounds[name][-1][0], 3)}", file=sys.stderr)
            if made is not None:
                shutil.rmtree(made, ignore_errors=True)
    print("| what | time | of processors | bytes a second | most resident |\n|---|---|---|---|---|")
    fastest = {}
    for name, results in rounds.items():
        resident = size_text(max(result[2] for result in results), digits=3)
        ended = [result[:2] for result in results if not result[3]]
        if not ended:
            print(f"| {name} | status {results[-1][3]} | | | {resident} |")
            continue
        fastest[name], processors_s = min(ended)
        speed = size_text(num_bytes / fastest[name], digits=3)
        times = f"{time_text(fastest[name], 3)} | {time_text(processors_s, 3)}"
        print(f"| {name} | {times} | {speed}/s | {resident} |", flush=True)
    return fastest


def killed(args: argparse.Namespace, work: Path, usual_s: float) -> None:
    """Import again with kills, then say whether every tensor is the same."""
    draws, most, kills = random.Random(args.seed), 0, []
    again = work / "again"
    words = tool("import", "--hf", work / "theirs", "--save", again, "--max-shard-size", "1GB")
    for _ in range(args.kills):
        after = draws.uniform(2.0, max(3.0, 1.2 * usual_s / args.kills))
        _, _, resident, status = run(words, kill_after_s=after)
        whole = len([path for path in again.rglob("*.safetensors") if not path.name.startswith(".")])
        kills.append(f"{after:.1f} s ({whole} finished)" if status else f"{after:.1f} s (ended before)")
        most = max(most, resident)
    taken, _, resident, status = run(words)
    _, _, _, compared = run(tool("compare", work / "theirs", again))
    print(f"killed after {', '.join(kills)}; the last call took {time_text(taken, 3)}, status {status}")
    same = "every tensor is the same" if compared == 0 else f"compare ends with {compared}"
    print(f"most resident {size_text(max(most, resident), digits=3)}; {same}")
    shutil.rmtree(again)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gigabytes", type=float, default=8.0)
    parser.add_argument(
        "--work", type=Path, required=True, metavar="DIR", help="a folder to be made, and removed"
    )
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=1, help="of which the fastest counts")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--without-transformers", action="store_true", help="it needs all of the model in memory"
    )
    args = parser.parse_args(argv)
    args.work.mkdir()
    try:
        num_bytes = make_weights(args.work / "theirs", int(args.gigabytes * 10**9))
        print(
            f"{size_text(num_bytes)} of bf16 weights; {os.cpu_count()} cores, load average {os.getloadavg()[0]:.0f}"
        )
        seconds = measure(args, args.work, num_bytes)
        for name in ("import --hf", "export --hf"):
            if name in seconds and "cp, sync" in seconds:
                print(f"{name}: {plain(seconds['cp, sync'] / seconds[name], 2)} of cp's bytes a second")
        shutil.rmtree(args.work / "ours", ignore_errors=True)
        if args.kills:
            killed(args, args.work, seconds.get("import --hf", 20.0))
    finally:
        shutil.rmtree(args.work)
    return 0


if __name__ == "__main__":
    sys.exit(main())
