#!/usr/bin/env bash
# GPT-3 style model of 345 million parameters on one machine. Every GPU (or CPU rank) is a data parallel rank, unless TP
# (ranks that share each layer) or PP (stages of the pipeline) say otherwise; both may change between resumes.
#   [TP=2] [PP=2] examples/gpt3/train_gpt3_345m.sh CORPUS_PREFIX CHECKPOINT_DIR [RANKS]
set -euo pipefail
CORPUS=${1:?prefix of a corpus made by tools/preprocess_data.py}
CHECKPOINTS=${2:?folder of checkpoints}
RANKS=${3:-8}
TP=${TP:-1} PP=${PP:-1}

MODEL=(
  --num-layers 24 --hidden-size 1024 --num-attention-heads 16
  --seq-length 2048 --max-position-embeddings 2048
)
PARALLEL=(
  --tensor-model-parallel-size "$TP" --pipeline-model-parallel-size "$PP"
)
[[ $TP == 1 ]] || PARALLEL+=(--sequence-parallel)
TRAINING=(
  --micro-batch-size 4 --global-batch-size 256 --train-iters 500000
  --lr 1.5e-4 --min-lr 1.0e-5 --lr-decay-style cosine --lr-warmup-fraction .01 --lr-decay-iters 430000
  --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.95 --clip-grad 1.0 --init-method-std 0.006 --bf16
)
DATA=(
  --data-path "$CORPUS" --split 949,50,1 --no-create-attention-mask-in-dataloader
  --tokenizer-type GPT2BPETokenizer --vocab-file gpt2-vocab.json --merge-file gpt2-merges.txt
)
RUN=(
  --overlap-grad-reduce --log-interval 100 --log-throughput --tensorboard-dir "$CHECKPOINTS/tensorboard"
  --save "$CHECKPOINTS" --load "$CHECKPOINTS" --save-interval 10000 --eval-interval 1000 --eval-iters 10
)
# torchrun, as clusters start it; python tools/launch.py takes the same flags, and -- before the trainer.
exec torchrun --nproc-per-node "$RANKS" pretrain_gpt.py \
  "${MODEL[@]}" "${PARALLEL[@]}" "${TRAINING[@]}" "${DATA[@]}" "${RUN[@]}"
