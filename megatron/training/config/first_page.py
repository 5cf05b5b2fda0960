"""What a launch without any flag prints: what this is, and lines that train when they are pasted (floor 0)."""

from __future__ import annotations

import os
import shlex
import shutil
from collections.abc import Sequence
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[2]
_WIDTH = 80
_SHAPE = (
    "--num-layers 2",
    "--hidden-size 64",
    "--num-attention-heads 4",
    "--seq-length 64",
    "--micro-batch-size 4",
    "--lr 1e-2",
    "--train-iters 20",
    "--log-interval 5",
    "--eval-iters 2",
)
_FSDP = ("--use-custom-fsdp", "--data-parallel-sharding-strategy optim_grads_params")
_ZERO_BUBBLE = ("--pipeline-model-parallel-size 2", "--enable-zero-bubble", "--global-batch-size 32")


def first_page(python: str, program: str, more: Sequence[str] = ()) -> str:
    """The page. python, program: as typed. more: flags that this program needs beside the others."""
    run, script = shlex.quote(python), shlex.quote(program)
    tool = shlex.quote(os.path.relpath(_ROOT / "tools" / "preprocess_data.py"))
    byte = "--tokenizer-type ByteTokenizer"
    mock, own = ("--mock-data", *_SHAPE, *more), ("--data-path my_text_document", "--split 1", byte, *_SHAPE)
    torchrun = os.path.join(os.path.dirname(python), "torchrun")
    launcher = shlex.quote(torchrun) if shutil.which(torchrun) else f"{run} -m torch.distributed.run"
    both = f"{launcher} --standalone --nproc-per-node 2"
    corpus = (run, tool, "--input my.txt", "--output-prefix my", "--append-eod", byte)
    return f"""\
Megatron-Zero pre-trains GPT models by Megatron-LM's command line, on CPUs and
GPUs, with fully sharded data parallelism and zero-bubble pipeline schedules.

Train now, with nothing prepared:
{_command(run, script, *mock)}
On your own text, my.txt:
{_command(*corpus)}
{_command(run, script, *own)}
On 2 ranks, each with half of the weights, gradients and optimizer state:
{_command(both, script, *_FSDP, *mock)}
On 2 ranks, each with half of the layers:
{_command(both, script, *_ZERO_BUBBLE, *mock)}
Most often added next:
  --save DIR --save-interval N --load DIR   checkpoints; the same line goes on
  --global-batch-size N                     samples of one optimizer step
  --bf16                                    16-bit weights, 32-bit main weights
Where to look:
  --help            every flag, also in docs/flags.md
  --check-config    what a line means: checked, told, not run
  make quickstart   from a corpus to a sample in two minutes; docs/quickstart.md
"""


def _command(*parts: str) -> str:
    """A shell command over as many lines as it needs; a part stays in one piece."""
    lines = [""]
    for part in parts:
        if lines[-1] and len(lines[-1]) + len(part) + 5 > _WIDTH:
            lines.append("  ")
        lines[-1] += f" {part}" if lines[-1].strip() else part
    return "\n".join("  " + line for line in " \\\n".join(lines).split("\n"))
