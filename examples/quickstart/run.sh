#!/usr/bin/env bash
# From nothing to a trained byte-level GPT on this machine's CPU: corpus, training on 4 ranks (2 pipeline ranks, each of
# them 2 data parallel ranks that share weights, gradients and optimizer states), resume, report, sample.
# `make quickstart` runs it in the project's own environment. RUN_DIR names the folder for everything it writes.
set -euo pipefail
export OMP_NUM_THREADS=1  # one thread a rank: four ranks share the cores
cd "$(dirname "$0")/../.."
PYTHON=${PYTHON:-python3}
RUN_DIR=${RUN_DIR:-runs/quickstart}
if [ -e "$RUN_DIR" ] && [ ! -e "$RUN_DIR/.quickstart" ]; then
  echo "$RUN_DIR is there and was not made by this script: name another folder in RUN_DIR" >&2
  exit 2
fi
rm -rf "$RUN_DIR"
mkdir -p "$RUN_DIR"
touch "$RUN_DIR/.quickstart"

echo "== corpus: the Python standard library's own source files"
STDLIB=$("$PYTHON" -c 'import sysconfig; print(sysconfig.get_path("stdlib"))')
"$PYTHON" tools/preprocess_data.py --input "$STDLIB" --suffix .py --exclude site-packages --exclude test \
  --tokenizer-type ByteTokenizer --append-eod --workers 2 --output-prefix "$RUN_DIR/stdlib"

FLAGS=(
  --pipeline-model-parallel-size 2 --zero-bubble-v-schedule --enable-optimizer-post-validation
  --use-custom-fsdp --data-parallel-sharding-strategy optim_grads_params
  --num-layers 4 --hidden-size 128 --num-attention-heads 4
  --seq-length 256 --max-position-embeddings 256 --position-embedding-type rope
  --normalization RMSNorm --swiglu --disable-bias-linear --untie-embeddings-and-output-weights
  --attention-dropout 0 --hidden-dropout 0
  --micro-batch-size 1 --global-batch-size 8 --train-iters 200
  --lr 3e-3 --min-lr 3e-4 --lr-decay-style cosine --lr-warmup-iters 20 --weight-decay 0.1 --adam-beta2 0.95
  --data-path "$RUN_DIR/stdlib_text_document" --split 96,4,0 --tokenizer-type ByteTokenizer
  --no-create-attention-mask-in-dataloader --num-workers 0
  --save "$RUN_DIR/checkpoints" --load "$RUN_DIR/checkpoints" --save-interval 100
  --eval-interval 100 --eval-iters 5 --log-interval 10 --log-throughput
  --log-pipeline-timeline "$RUN_DIR/timeline"
)
train() { "$PYTHON" tools/launch.py --nproc-per-node 4 -- pretrain_gpt.py "${FLAGS[@]}" "$@"; }

echo "== training on 4 ranks, 2 pipeline x 2 data parallel, up to iteration 120"
CORES=$("$PYTHON" -c 'import os; print(len(os.sched_getaffinity(0)))')
if [ "$CORES" -lt 4 ]; then
  echo "   (4 ranks share $CORES cores: the measured bubble, the share of a step in which"
  echo "   ranks wait, is mostly waiting for a core, and far above the plan's)"
fi
train --exit-interval 120
echo "== resuming from the checkpoint"
train
echo "== report"
"$PYTHON" tools/report.py "$RUN_DIR/checkpoints" --out "$RUN_DIR/report.html" --timeline "$RUN_DIR/timeline"
echo "== a sample: what the model writes after the prompt \"def main(\" (200 steps teach the look of code, not more)"
"$PYTHON" tools/generate.py --load "$RUN_DIR/checkpoints" --prompt "def main(" --max-new-tokens 160 --temperature 0.7 --seed 1
echo "== done: open $RUN_DIR/report.html"
