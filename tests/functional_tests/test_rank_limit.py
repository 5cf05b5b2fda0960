"""A run of which one limit in bytes decides on everything: it keeps to it, and computes what others do."""

import json
import re

import pytest

from tests.harness import launch
from tests.harness.runs import assert_same_but_for_rounding, runs_of

SIZE = "--num-layers 4 --padded-vocab-size 128 --train-iters 3 --save ck --save-interval 3 --global-batch-size 16"
BASE = [*launch.TINY, *SIZE.split(), "--log-interval", "1"]
EXPERTS = "--num-experts 4 --moe-ffn-hidden-size 32 --expert-model-parallel-size 2 --disable-bias-linear"
AUTO = "--pipeline-model-parallel-size 2 --use-custom-fsdp --data-parallel-sharding-strategy auto"


@pytest.mark.grid
@pytest.mark.parametrize("more", ["", EXPERTS])
def test_a_run_keeps_to_its_limit(more, tmp_path_factory):
    run = runs_of([*BASE, *more.split()], tmp_path_factory.mktemp)
    limit = 1_000_000
    limited = run(4, f"{AUTO} --rank-memory-limit {limit}")
    assert_same_but_for_rounding(run(4, "--pipeline-model-parallel-size 2"), limited)
    chosen = re.search(
        rf"^ > --rank-memory-limit {limit}: (\S+), .*?(optim\w*): chosen$", limited.output, re.MULTILINE
    )
    assert chosen, limited.output
    assert limited.plan["sharding"] == chosen[2]
    at_once = re.search(
        r"^ > at once pipeline rank \d holds at most ([\d.]+) KiB of the 976.6 KiB",
        limited.output,
        re.MULTILINE,
    )
    assert at_once, limited.output
    assert float(at_once[1]) * 1024 <= limit
    assert limited.output.count("planned for 0.05 TFLOP/s, 1 GB/s") == 1
    exceeds = (
        rf"WARNING: --rank-memory-limit {limit}: on pipeline rank (\d) grad-norm of the optimizer's step holds "
        r"\d\.\d+ MiB"
    )
    assert re.findall(exceeds, limited.output) == ["0", "1"]  # sums of squares take 2 MiB on a CPU


def test_a_limit_that_nothing_fits_is_refused_before_torch(tmp_path):
    words = [
        *BASE,
        *AUTO.split(),
        "--rank-memory-limit",
        "10K",
        "--check-config",
        "--world-size",
        "4",
        "--json",
    ]
    run = launch.ended(launch.run_forked(words, ranks=1, cwd=tmp_path), 2)
    (problem,) = json.loads(run.output[run.output.index("{") :])["problems"]
    assert "nothing fits; the least is that of" in json.dumps(problem)
