#!/usr/bin/env bash
# From nothing to a trained byte-level GPT on this machine's CPU: corpus, training on 2 ranks, resume, report, sample.
# `make quickstart` runs it in the project's own environment. RUN_DIR names the folder for everything it writes.
set -euo pipefail
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
  --num-layers 4 --hidden-size 128 --num-attention-heads 4
  --seq-length 256 --max-position-embeddings 256 --position-embedding-type rope
  --normalization RMSNorm --swiglu --disable-bias-linear
  --attention-dropout 0 --hidden-dropout 0
  --micro-batch-size 4 --global-batch-size 8 --train-iters 300
  --lr 3e-3 --min-lr 3e-4 --lr-decay-style cosine --lr-warmup-iters 20 --weight-decay 0.1 --adam-beta2 0.95
  --data-path "$RUN_DIR/stdlib_text_document" --split 96,4,0 --tokenizer-type ByteTokenizer
  --no-create-attention-mask-in-dataloader --num-workers 0
  --save "$RUN_DIR/checkpoints" --load "$RUN_DIR/checkpoints" --save-interval 100
  --eval-interval 100 --eval-iters 5 --log-interval 10 --log-throughput --overlap-grad-reduce
)
train() { "$PYTHON" -m torch.distributed.run --standalone --nproc-per-node 2 pretrain_gpt.py "${FLAGS[@]}" "$@"; }

echo "== training on 2 data parallel ranks, up to iteration 200"
train --exit-interval 200
echo "== resuming from the checkpoint"
train
echo "== report"
"$PYTHON" tools/report.py "$RUN_DIR/checkpoints" --out "$RUN_DIR/report.html"
echo "== a sample from the checkpoint"
"$PYTHON" tools/generate.py --load "$RUN_DIR/checkpoints" --prompt "def main(" --max-new-tokens 160 --temperature 0.7 --seed 1
