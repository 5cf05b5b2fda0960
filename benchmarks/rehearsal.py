"""What rehearsals of Llama3.1-405B cost, and whether they hold what was planned: seconds of CPU a pipeline rank.

    python benchmarks/rehearsal.py            # on 512 and on 16,384 ranks
    python benchmarks/rehearsal.py 1024

8 tensor and 16 pipeline parallel ranks, 8,192 tokens a microbatch, the optimizer sharded; a step of 32 microbatches.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import pretrain_gpt
from megatron.core.words import size_text
from megatron.training.config.launch_env import LaunchEnv
from megatron.training.run.arguments import parse_config
from megatron.training.run.rehearse.rehearsal import compared, rehearsed

WAYS, MICROBATCHES = 8 * 16, 32
FLAGS = (
    "--num-layers 126 --hidden-size 16384 --ffn-hidden-size 53248 --num-attention-heads 128 "
    "--group-query-attention --num-query-groups 8 --seq-length 8192 --max-position-embeddings 8192 "
    "--position-embedding-type rope --swiglu --normalization RMSNorm --disable-bias-linear "
    "--untie-embeddings-and-output-weights --micro-batch-size 1 --bf16 --mock-data --lr 1e-4 --train-iters 2 "
    "--tokenizer-type NullTokenizer --vocab-size 128255 --padded-vocab-size 128256 "
    "--tensor-model-parallel-size 8 --sequence-parallel --pipeline-model-parallel-size 16 "
    "--account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split "
    "--use-distributed-optimizer --rehearse --device-profile h100-80gb"
)


def main(argv: Sequence[str] | None = None) -> int:
    """A line a world; 1 where a rank held something else than planned."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("worlds", nargs="*", type=int, default=[512, 16384])
    wrong = 0
    for world in parser.parse_args(argv).worlds:
        words = [*FLAGS.split(), "--global-batch-size", str(world // WAYS * MICROBATCHES)]
        config, began = parse_config(words, env=LaunchEnv(world_size=world)), time.process_time()
        ranks = rehearsed(config, pretrain_gpt.model_provider, pretrain_gpt.forward_step)
        ran = time.process_time()
        found, fullest = compared(config, ranks), max(ranks, key=lambda one: one.peak.total)
        wrong += len(found)
        each, steps = (ran - began) / len(ranks), max(one.cpu_s for one in ranks)
        print(
            f"{world:,} ranks: {each:.1f} s of CPU a pipeline rank, at most {steps:.1f} of it in two steps; account "
            f"{time.process_time() - ran:.1f} s; {sum(len(one.seen) for one in ranks):,} operations, {len(found)} "
            f"differences; rank {fullest.pp_rank} holds {size_text(fullest.peak.total)} in {fullest.peak.operation}",
            flush=True,
        )
        for line in found[:5]:
            print(f"  {line}", flush=True)
    return int(wrong > 0)


if __name__ == "__main__":
    raise SystemExit(main())
