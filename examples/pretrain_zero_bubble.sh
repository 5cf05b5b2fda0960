#!/usr/bin/env bash
# GPT in a pipeline without bubbles, by the variables of the zero-bubble fork of Megatron-LM. Flags are passed on.
#   CPU=1 ZERO_BUBBLE_V_SCHEDULE=1 examples/pretrain_zero_bubble.sh                     toy size, ranks on this CPU
#   PIPELINE_SIZE=4 LAYERS=30 ENABLE_ZERO_BUBBLE=1 examples/pretrain_zero_bubble.sh     GPUs
#
# Schedule, 1F1B without any of these:
#   ZERO_BUBBLE_V_SCHEDULE=1     zbv; ZERO_BUBBLE_MEM_SETUP=half|min: v-half, v-min
#   ENABLE_ZERO_BUBBLE=1         zb-1p to zb-2p
#   ENABLE_1F1B_V=1              1F1B on the V
#   INTERLEAVED_1F1B=1           interleaved, one layer a chunk; with PIPELINE_SCHEDULE=gis the chunks of that
#   PIPELINE_SCHEDULE=NAME|auto  any schedule by its name
#   ZERO_BUBBLE_MEM_LIMIT        whole-stage activations that a rank may hold, of schedules that are searched
#                                (ENABLE_ZERO_BUBBLE, PIPELINE_SCHEDULE of zb-1p, zb-2p, zbv, v-half, v-min, auto)
#   ZERO_BUBBLE_TIMER_START, ZERO_BUBBLE_TIMER_END    iterations that are measured, for solving the schedule again;
#                                without the end ten
#   SYNC_OPTIMIZER=1             all ranks agree before they step. Without it the steps of every zero-bubble run on 2
#                                ranks or more (ZERO_BUBBLE_V_SCHEDULE, ENABLE_ZERO_BUBBLE, PIPELINE_SCHEDULE of auto or
#                                any but gpipe, 1f1b, 1f1b-v and interleaved) are validated afterwards
# Every variable that is set is passed on: what contradicts itself is refused, what has no effect beside the others is told.
# Model and batch: PIPELINE_SIZE, TP_SIZE, LAYERS, HIDDEN_SIZE, ATTENTION_HEADS, SEQ_LENGTH, MICRO_BATCH_SIZE,
#   GLOBAL_BATCH_SIZE, FP32=1 or BF16=1 instead of fp16, ENABLE_EXACTLY_NUMERIC_MATCH=1 (no dropout)
# Run: TRAIN_ITERS, EXIT_INTERVAL, EVAL_INTERVAL, PROFILED=1 (a trace: what each rank did and when, for
#   tools/show_schedule.py --measured RUN_DIR/timeline), DATASET (prefix of a corpus made by
#   tools/preprocess_data.py) with TOKENIZER_MODEL (SentencePiece), else mock data; RUN_DIR (where metrics go)
# Machines: WORLD_SIZE (machines), RANK (which one), MASTER_ADDR, MASTER_PORT, GPUS_PER_NODE (ranks of a machine)
# DRY_RUN=1: only say the command.
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python3}

if [[ -n ${CPU:-} ]]; then
  export CUDA_VISIBLE_DEVICES=
  FP32=1
  : "${PIPELINE_SIZE:=2}" "${TP_SIZE:=1}" "${LAYERS:=$((2 * PIPELINE_SIZE))}" "${HIDDEN_SIZE:=64}"
  : "${ATTENTION_HEADS:=4}" "${SEQ_LENGTH:=64}" "${GLOBAL_BATCH_SIZE:=$((4 * PIPELINE_SIZE))}" "${TRAIN_ITERS:=20}"
  : "${VOCAB_SIZE:=255}" "${GPUS_PER_NODE:=$((PIPELINE_SIZE * TP_SIZE))}" "${LOG_INTERVAL:=1}"
  : "${EVAL_ITERS:=0}"
fi
: "${PIPELINE_SIZE:=2}" "${TP_SIZE:=2}" "${LAYERS:=8}" "${HIDDEN_SIZE:=8192}" "${ATTENTION_HEADS:=64}"
: "${SEQ_LENGTH:=4096}" "${MICRO_BATCH_SIZE:=1}" "${GLOBAL_BATCH_SIZE:=8}" "${TRAIN_ITERS:=100000}"
: "${VOCAB_SIZE:=50257}" "${LOG_INTERVAL:=10}" "${EVAL_INTERVAL:=10000}" "${EVAL_ITERS:=40}"
RUN_DIR=${RUN_DIR:-runs/pretrain_zero_bubble}
GPUS_PER_NODE=${GPUS_PER_NODE:-$(nvidia-smi --list-gpus | wc -l)}

LAUNCH=(--nproc-per-node "$GPUS_PER_NODE")
if [[ ${WORLD_SIZE:-1} == 1 ]]; then
  LAUNCH+=(--standalone)
else
  LAUNCH+=(
    --nnodes "$WORLD_SIZE" --node-rank "${RANK:?this machine is number ... of WORLD_SIZE}"
    --master-addr "${MASTER_ADDR:?the first machine}" --master-port "${MASTER_PORT:-10086}"
  )
fi
# torchrun's workers have their own; what these say of machines must not reach them.
unset WORLD_SIZE RANK MASTER_ADDR MASTER_PORT

MODEL=(
  --num-layers "$LAYERS" --hidden-size "$HIDDEN_SIZE" --num-attention-heads "$ATTENTION_HEADS"
  --seq-length "$SEQ_LENGTH" --max-position-embeddings "$SEQ_LENGTH" --init-method-std 0.006
  --untie-embeddings-and-output-weights
)
TRAINING=(
  --micro-batch-size "$MICRO_BATCH_SIZE" --global-batch-size "$GLOBAL_BATCH_SIZE" --train-iters "$TRAIN_ITERS"
  --lr 6.0e-5 --min-lr 6.0e-6 --lr-decay-style cosine --lr-warmup-fraction 0.001
  --clip-grad 8.0 --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.95
)
PARALLEL=(--pipeline-model-parallel-size "$PIPELINE_SIZE" --tensor-model-parallel-size "$TP_SIZE")
[[ $TP_SIZE == 1 ]] || PARALLEL+=(--sequence-parallel)
(( GPUS_PER_NODE == PIPELINE_SIZE * TP_SIZE )) || PARALLEL+=(--use-distributed-optimizer)
RUN=(
  --log-interval "$LOG_INTERVAL" --eval-interval "$EVAL_INTERVAL" --eval-iters "$EVAL_ITERS"
  --no-create-attention-mask-in-dataloader --metrics-file "$RUN_DIR/metrics.jsonl"
)
[[ -z ${EXIT_INTERVAL:-} ]] || RUN+=(--exit-interval "$EXIT_INTERVAL")
[[ -z ${PROFILED:-} ]] || RUN+=(--log-pipeline-timeline "$RUN_DIR/timeline")

if [[ -n ${BF16:-} ]]; then
  TRAINING+=(--bf16)
elif [[ -z ${FP32:-} ]]; then
  TRAINING+=(--fp16)
fi
[[ -z ${ENABLE_EXACTLY_NUMERIC_MATCH:-} ]] ||
  MODEL+=(--enable-exactly-numeric-match --attention-dropout 0.0 --hidden-dropout 0.0)

if [[ -n ${DATASET:-} ]]; then
  DATA=(--data-path "$DATASET" --split 98,2,0)
  DATA+=(--tokenizer-type GPTSentencePieceTokenizer --tokenizer-model "${TOKENIZER_MODEL:?of DATASET}")
else
  DATA=(--mock-data --num-workers 0 --tokenizer-type NullTokenizer --vocab-size "$VOCAB_SIZE")
fi

# Chunks of one layer may happen to be as many as those of a V: the trainer could not tell that both were asked for.
INTERLEAVED=${INTERLEAVED_1F1B:+${PIPELINE_SCHEDULE:-interleaved}}
if [[ -n ${INTERLEAVED:-} ]]; then
  OTHER=${ZERO_BUBBLE_V_SCHEDULE:+ZERO_BUBBLE_V_SCHEDULE}
  OTHER=${OTHER:-${ENABLE_1F1B_V:+ENABLE_1F1B_V}}
  case $INTERLEAVED in
    interleaved) OTHER=${OTHER:-${ENABLE_ZERO_BUBBLE:+ENABLE_ZERO_BUBBLE}} ;;
    gis) ;;
    *) OTHER=${OTHER:-PIPELINE_SCHEDULE=$PIPELINE_SCHEDULE} ;;
  esac
  if [[ -n $OTHER ]]; then
    echo "INTERLEAVED_1F1B and $OTHER ask for different schedules: keep one of them" >&2
    exit 2
  fi
fi

SCHEDULE=()
SPLIT=${ZERO_BUBBLE_V_SCHEDULE:-}${ENABLE_ZERO_BUBBLE:-}
case ${PIPELINE_SCHEDULE:-} in
  "" | gpipe | 1f1b | 1f1b-v | interleaved) ;;
  *) SPLIT=1 ;;
esac
# Layers need not divide over chunks and ranks: what is missing makes room for the embedding and the loss.
[[ -z ${ZERO_BUBBLE_V_SCHEDULE:-} ]] || SCHEDULE+=(--zero-bubble-v-schedule --allow-padding-num-layers)
[[ -z ${ZERO_BUBBLE_MEM_SETUP:-} ]] || SCHEDULE+=(--zero-bubble-v-schedule-mem-setup "$ZERO_BUBBLE_MEM_SETUP")
[[ -z ${ENABLE_ZERO_BUBBLE:-} ]] || SCHEDULE+=(--enable-zero-bubble)
[[ -z ${ENABLE_1F1B_V:-} ]] || SCHEDULE+=(--enable-1f1b-v)
[[ -z ${INTERLEAVED_1F1B:-} ]] || SCHEDULE+=(--num-layers-per-virtual-pipeline-stage 1)
[[ -z ${PIPELINE_SCHEDULE:-} ]] || SCHEDULE+=(--pipeline-schedule "$PIPELINE_SCHEDULE")
[[ -z ${ZERO_BUBBLE_MEM_LIMIT:-} ]] || SCHEDULE+=(--zero-bubble-max-pending-backward "$ZERO_BUBBLE_MEM_LIMIT")
if [[ -n ${ZERO_BUBBLE_TIMER_START:-} ]]; then
  SCHEDULE+=(--zero-bubble-pipeline-timers-start-iter "$ZERO_BUBBLE_TIMER_START")
  : "${ZERO_BUBBLE_TIMER_END:=$((ZERO_BUBBLE_TIMER_START + 10))}"
fi
[[ -z ${ZERO_BUBBLE_TIMER_END:-} ]] || SCHEDULE+=(--zero-bubble-pipeline-timers-end-iter "$ZERO_BUBBLE_TIMER_END")
if [[ -n $SPLIT && -z ${SYNC_OPTIMIZER:-} ]] && ((PIPELINE_SIZE > 1)); then
  SCHEDULE+=(--enable-optimizer-post-validation)
fi

COMMAND=(
  "$PYTHON" -m torch.distributed.run "${LAUNCH[@]}" pretrain_gpt.py
  "${MODEL[@]}" "${TRAINING[@]}" "${PARALLEL[@]}" "${RUN[@]}" "${DATA[@]}" "${SCHEDULE[@]}" "$@"
)
printf '%q ' "${COMMAND[@]}"
echo
[[ -n ${DRY_RUN:-} ]] || exec "${COMMAND[@]}"
