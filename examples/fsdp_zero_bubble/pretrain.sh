#!/usr/bin/env bash
# Weights, gradients and optimizer state cut over data parallel ranks, inside a pipeline without bubbles. Mock data.
#   CPU=1 examples/fsdp_zero_bubble/pretrain.sh [FLAGS]    toy size, 4 ranks on this CPU
#   examples/fsdp_zero_bubble/pretrain.sh [FLAGS]          6 billion parameters on the GPUs of this machine
#
# What is cut and what is kept:
#   STRATEGY    optim_grads_params, optim_grads, optim: what is cut over data parallel ranks
#   POLICY      memory, step, budget: how long units stay gathered and unreduced; BUDGET: bytes, of budget
#   MEM_SETUP   half, min: V schedules with about half and a third of the activations, instead of ZBV
# Ranks: PIPELINE_SIZE, TP_SIZE; what the others leave is data parallel. GPUS_PER_NODE (with CPU=1: ranks), and over
#   machines NUM_NODES, NODE_RANK, MASTER_ADDR, MASTER_PORT, the same line on each.
# Model and batch: LAYERS, HIDDEN_SIZE, ATTENTION_HEADS, SEQ_LENGTH, MICRO_BATCH_SIZE, GLOBAL_BATCH_SIZE, TRAIN_ITERS.
# RUN_DIR: where metrics go. DRY_RUN=1: only say the command. FLAGS of pretrain_gpt.py are passed on.
set -euo pipefail
cd "$(dirname "$0")/../.."

if [[ -n ${CPU:-} ]]; then
  export CUDA_VISIBLE_DEVICES=
  : "${PIPELINE_SIZE:=2}" "${GPUS_PER_NODE:=4}" "${LAYERS:=$((4 * PIPELINE_SIZE))}" "${HIDDEN_SIZE:=64}"
  : "${ATTENTION_HEADS:=4}" "${SEQ_LENGTH:=64}" "${GLOBAL_BATCH_SIZE:=16}" "${TRAIN_ITERS:=20}" "${LOG_INTERVAL:=5}"
  PRECISION=()
else
  : "${PIPELINE_SIZE:=4}" "${GPUS_PER_NODE:=$(nvidia-smi --list-gpus | wc -l)}" "${LAYERS:=32}" "${HIDDEN_SIZE:=4096}"
  : "${ATTENTION_HEADS:=32}" "${SEQ_LENGTH:=4096}" "${GLOBAL_BATCH_SIZE:=128}" "${TRAIN_ITERS:=1000}"
  : "${LOG_INTERVAL:=10}"
  PRECISION=(--bf16)
fi
TP_SIZE=${TP_SIZE:-1} STRATEGY=${STRATEGY:-optim_grads_params} POLICY=${POLICY:-memory}
RUN_DIR=${RUN_DIR:-runs/fsdp_zero_bubble}

LAUNCH=(--nproc-per-node "$GPUS_PER_NODE")
if [[ ${NUM_NODES:-1} == 1 ]]; then
  LAUNCH+=(--standalone)
else
  LAUNCH+=(
    --nnodes "$NUM_NODES" --node-rank "${NODE_RANK:?this machine is number ... of NUM_NODES}"
    --master-addr "${MASTER_ADDR:?the first machine}" --master-port "${MASTER_PORT:-6000}"
  )
fi

SHARDING=(--use-custom-fsdp --data-parallel-sharding-strategy "$STRATEGY")
[[ $POLICY == memory ]] || SHARDING+=(--fsdp-reshard-policy "$POLICY")
[[ -z ${BUDGET:-} ]] || SHARDING+=(--fsdp-memory-budget "$BUDGET")
# Layers need not divide over the V's stages: what is missing makes room for the embedding and the loss.
PARALLEL=(
  --pipeline-model-parallel-size "$PIPELINE_SIZE" --tensor-model-parallel-size "$TP_SIZE"
  --zero-bubble-v-schedule --allow-padding-num-layers
)
[[ -z ${MEM_SETUP:-} ]] || PARALLEL+=(--zero-bubble-v-schedule-mem-setup "$MEM_SETUP")
[[ $TP_SIZE == 1 ]] || PARALLEL+=(--sequence-parallel)
MODEL=(
  --num-layers "$LAYERS" --hidden-size "$HIDDEN_SIZE" --num-attention-heads "$ATTENTION_HEADS"
  --seq-length "$SEQ_LENGTH" --max-position-embeddings "$SEQ_LENGTH" --position-embedding-type rope
  --attention-dropout 0 --hidden-dropout 0 --untie-embeddings-and-output-weights --init-model-with-meta-device
)
TRAINING=(
  --micro-batch-size "${MICRO_BATCH_SIZE:-1}" --global-batch-size "$GLOBAL_BATCH_SIZE" --train-iters "$TRAIN_ITERS"
  --lr 3e-4 --lr-decay-style cosine --clip-grad 1.0 "${PRECISION[@]}"
)
RUN=(
  --mock-data --tokenizer-type ByteTokenizer --no-create-attention-mask-in-dataloader --num-workers 0
  --log-interval "$LOG_INTERVAL" --eval-iters 0 --metrics-file "$RUN_DIR/metrics.jsonl"
)

COMMAND=(
  "${PYTHON:-python3}" -m torch.distributed.run "${LAUNCH[@]}" pretrain_gpt.py
  "${SHARDING[@]}" "${PARALLEL[@]}" "${MODEL[@]}" "${TRAINING[@]}" "${RUN[@]}" "$@"
)
printf '%q ' "${COMMAND[@]}"
echo
[[ -n ${DRY_RUN:-} ]] || exec "${COMMAND[@]}"
