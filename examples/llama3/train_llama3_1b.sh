#!/usr/bin/env bash
# Llama 3.2 1B's shape: grouped queries, RMSNorm, SwiGLU, rotary positions with Llama 3.1's scaling, tied embeddings.
# TP: ranks that share each layer, PP: stages of the pipeline, CHUNKS: parts of the model on each stage's rank (more than 1 is
# interleaving); what RANKS leaves is data parallel. All of them may change between resumes.
#   [TP=2] [PP=4 [CHUNKS=2]] examples/llama3/train_llama3_1b.sh CORPUS_PREFIX CHECKPOINT_DIR TOKENIZER_FOLDER [RANKS]
set -euo pipefail
CORPUS=${1:?prefix of a corpus made by tools/preprocess_data.py}
CHECKPOINTS=${2:?folder of checkpoints}
TOKENIZER=${3:?folder with tokenizer.json}
RANKS=${4:-8}
TP=${TP:-1} PP=${PP:-1} CHUNKS=${CHUNKS:-1}

MODEL=(
  --num-layers 16 --hidden-size 2048 --ffn-hidden-size 8192 --num-attention-heads 32
  --group-query-attention --num-query-groups 8 --kv-channels 64
  --normalization RMSNorm --norm-epsilon 1e-5 --swiglu --disable-bias-linear
  --position-embedding-type rope --rotary-base 500000 --use-rope-scaling --rope-scaling-factor 32
  --seq-length 8192 --max-position-embeddings 131072 --attention-dropout 0 --hidden-dropout 0
)
PARALLEL=(
  --tensor-model-parallel-size "$TP" --pipeline-model-parallel-size "$PP" --num-virtual-stages-per-pipeline-rank "$CHUNKS"
)
[[ $TP == 1 ]] || PARALLEL+=(--sequence-parallel)
TRAINING=(
  --micro-batch-size 1 --global-batch-size 128 --train-iters 100000 --bf16
  --lr 3e-4 --min-lr 3e-5 --lr-decay-style cosine --lr-warmup-iters 2000
  --weight-decay 0.1 --adam-beta2 0.95 --clip-grad 1.0
  --recompute-granularity full --recompute-method uniform --recompute-num-layers 1
)
DATA=(
  --data-path "$CORPUS" --split 99,1,0 --no-create-attention-mask-in-dataloader
  --tokenizer-type HuggingFaceTokenizer --tokenizer-model "$TOKENIZER"
)
RUN=(
  --overlap-grad-reduce --log-interval 10 --log-throughput
  --save "$CHECKPOINTS" --load "$CHECKPOINTS" --save-interval 1000 --async-save --eval-interval 1000 --eval-iters 10
)
# torchrun, as clusters start it; python tools/launch.py takes the same flags, and -- before the trainer.
exec torchrun --nproc-per-node "$RANKS" pretrain_gpt.py \
  "${MODEL[@]}" "${PARALLEL[@]}" "${TRAINING[@]}" "${DATA[@]}" "${RUN[@]}"
