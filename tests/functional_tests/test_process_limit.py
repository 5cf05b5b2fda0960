"""What a plan says that a rank holds is what a process needs beside the interpreter: with a tenth more a run trains,
with 15 % less it ends, and says what it held and what was planned.

What the interpreter takes (modules, threads' stacks, kernels' own memory) is measured: the same launch line with a
model of next to nothing.
"""

import json
import re

import pytest

from tests.harness import launch

SCRIPT = "tests/functional_tests/trainers/process_limit.py"
SMALL = [*launch.TINY, "--num-layers", "8", "--train-iters", "3"]
LARGE = [
    *SMALL,
    *"--hidden-size 512 --num-attention-heads 8 --seq-length 256 --max-position-embeddings 256".split(),
]
ZERO_3 = "--use-custom-fsdp --data-parallel-sharding-strategy optim_grads_params"
PIPELINE = "--pipeline-model-parallel-size 2"
RECOMPUTED = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
LAYOUTS = (
    (2, ZERO_3),
    (2, "--use-custom-fsdp --data-parallel-sharding-strategy optim --bf16"),
    (2, f"{RECOMPUTED} --micro-batch-size 8 --global-batch-size 16"),
    (2, f"{PIPELINE} --zero-bubble-v-schedule"),
    (2, f"{PIPELINE} --enable-zero-bubble --bf16"),
    (4, f"{PIPELINE} --enable-zero-bubble {ZERO_3} --fsdp-reshard-policy step"),
    (4, "--tensor-model-parallel-size 2 --sequence-parallel --use-distributed-optimizer"),
    (4, f"{ZERO_3} --num-distributed-optimizer-instances 2 --bf16"),
)


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("ranks", "words"), LAYOUTS)
def test_a_process_needs_what_was_planned_and_the_interpreter(ranks, words, tmp_path):
    more = words.split()

    def run(flags, more_bytes=""):
        env = {"MORE_BYTES": str(more_bytes)}
        return launch.run_forked(
            [*flags, *more], ranks=ranks, script=SCRIPT, cwd=tmp_path, env=env, timeout_s=180
        )

    small, large = (
        planned_bytes([*SMALL, *more], ranks, tmp_path),
        planned_bytes([*LARGE, *more], ranks, tmp_path),
    )
    assert large > 64 * small
    at_end = max(map(int, re.findall(r"data: (\d+) bytes more", launch.ok(run(SMALL)).output)))
    interpreter = at_end - small
    launch.ok(run(LARGE, interpreter + large * 11 // 10))
    less = run(LARGE, interpreter + large * 85 // 100)
    assert set(less.statuses) in ({2}, {2, 6}), less.output  # the others have lost a peer
    assert re.search(r"it holds \d+.* MiB, of which the engine \w+ [\d.]+ MiB", less.output), less.output
    assert re.search(r"planned: pipeline rank \d holds the most in \d\w+.*: \d+.* MiB", less.output), (
        less.output
    )
    assert re.search(r"^ +\d.* MiB activations of decoder", less.output, re.MULTILINE), less.output


def planned_bytes(flags, ranks, folder) -> int:
    """Of the rank that holds the most."""
    asked = [*flags, "--check-config", "--world-size", str(ranks), "--json"]
    output = launch.ok(launch.run_forked(asked, ranks=1, cwd=folder)).output
    return max(rank["allocated_peak_bytes"] for rank in json.loads(output)["estimate"]["ranks"])
