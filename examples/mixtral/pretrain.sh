#!/usr/bin/env bash
# Mixtral: 8 experts in each layer, of which a token meets two.
#   CPU=1 examples/mixtral/pretrain.sh [FLAGS]    toy size, 4 ranks on this CPU
#   examples/mixtral/pretrain.sh [FLAGS]          8x7B, 46.7 billion parameters, 12.9 active, on 32 GPUs or more
#
# Ranks: PIPELINE_SIZE, TP_SIZE; what the others leave is data parallel, over which weights are cut. EP_SIZE: ranks of
#   a stage that have other experts. GPUS_PER_NODE (with CPU=1: ranks), and over machines NUM_NODES, NODE_RANK,
#   MASTER_ADDR, MASTER_PORT, the same line on each.
# TRAIN_ITERS, GLOBAL_BATCH_SIZE. RUN_DIR: where metrics go. DRY_RUN=1: only say the command. FLAGS of pretrain_gpt.py
#   are passed on; later ones count, so --data-path, a tokenizer, --save and --load take the place of mock data.
set -euo pipefail
cd "$(dirname "$0")/../.."

if [[ -n ${CPU:-} ]]; then
  export CUDA_VISIBLE_DEVICES=
  : "${PIPELINE_SIZE:=1}" "${GPUS_PER_NODE:=4}" "${GLOBAL_BATCH_SIZE:=8}" "${TRAIN_ITERS:=20}" "${LOG_INTERVAL:=5}"
  : "${EP_SIZE:=2}"
  SHAPE=(
    --num-layers 2 --hidden-size 64 --ffn-hidden-size 96 --num-attention-heads 4 --num-query-groups 2
    --num-experts 8 --moe-router-topk 2 --seq-length 64 --max-position-embeddings 64
  )
  PRECISION=()
else
  : "${PIPELINE_SIZE:=4}" "${GPUS_PER_NODE:=$(nvidia-smi --list-gpus | wc -l)}" "${GLOBAL_BATCH_SIZE:=256}"
  : "${TRAIN_ITERS:=10000}" "${LOG_INTERVAL:=10}" "${EP_SIZE:=8}"
  SHAPE=(
    --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 --num-query-groups 8
    --num-experts 8 --moe-router-topk 2 --seq-length 4096 --max-position-embeddings 32768
  )
  PRECISION=(--bf16)
fi
TP_SIZE=${TP_SIZE:-1} RUN_DIR=${RUN_DIR:-runs/mixtral}

LAUNCH=(--nproc-per-node "$GPUS_PER_NODE")
if [[ ${NUM_NODES:-1} == 1 ]]; then
  LAUNCH+=(--standalone)
else
  LAUNCH+=(
    --nnodes "$NUM_NODES" --node-rank "${NODE_RANK:?this machine is number ... of NUM_NODES}"
    --master-addr "${MASTER_ADDR:?the first machine}" --master-port "${MASTER_PORT:-6000}"
  )
fi
PARALLEL=(
  --use-custom-fsdp --data-parallel-sharding-strategy optim_grads_params --init-model-with-meta-device
  --pipeline-model-parallel-size "$PIPELINE_SIZE" --tensor-model-parallel-size "$TP_SIZE"
  --expert-model-parallel-size "$EP_SIZE" --expert-tensor-parallel-size 1 --moe-token-dispatcher-type alltoall
)
# Every rank would route the same tokens without sequence parallelism.
[[ $TP_SIZE == 1 ]] || PARALLEL+=(--sequence-parallel)
[[ $PIPELINE_SIZE == 1 ]] || PARALLEL+=(--enable-zero-bubble)
MODEL=(
  --swiglu --disable-bias-linear --normalization RMSNorm --untie-embeddings-and-output-weights
  --position-embedding-type rope --rotary-base 1000000 --attention-dropout 0 --hidden-dropout 0
  --group-query-attention
)
EXPERTS=(
  --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 0.02 --moe-router-dtype fp32 --moe-grouped-gemm
)
TRAINING=(
  --micro-batch-size 1 --global-batch-size "$GLOBAL_BATCH_SIZE" --train-iters "$TRAIN_ITERS"
  --lr 3e-4 --lr-decay-style cosine --clip-grad 1.0 "${PRECISION[@]}"
)
RUN=(
  --mock-data --tokenizer-type ByteTokenizer --no-create-attention-mask-in-dataloader --num-workers 0
  --log-interval "$LOG_INTERVAL" --eval-iters 0 --metrics-file "$RUN_DIR/metrics.jsonl"
)

COMMAND=(
  "${PYTHON:-python3}" -m torch.distributed.run "${LAUNCH[@]}" pretrain_gpt.py
  "${PARALLEL[@]}" "${SHAPE[@]}" "${MODEL[@]}" "${EXPERTS[@]}" "${TRAINING[@]}" "${RUN[@]}" "$@"
)
printf '%q ' "${COMMAND[@]}"
echo
[[ -n ${DRY_RUN:-} ]] || exec "${COMMAND[@]}"
