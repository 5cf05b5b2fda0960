#!/usr/bin/env bash
# A GPT with fully sharded weights, gradients and optimizer state, by Megatron-LM's launch line for it, on mock data and
# CPU ranks. RANKS: how many. Further flags are passed on: another strategy, --bf16, --log-fsdp-ledger, --check-config ...
#   [RANKS=2] examples/custom_fsdp/pretrain.sh [FLAGS]
set -euo pipefail
RANKS=${RANKS:-2}

SHARDING=(
  --use-custom-fsdp --data-parallel-sharding-strategy optim_grads_params --no-gradient-accumulation-fusion
  --calculate-per-token-loss --init-model-with-meta-device
)
MODEL=(
  --num-layers 4 --hidden-size 128 --num-attention-heads 4
  --seq-length 128 --max-position-embeddings 128 --position-embedding-type rope
  --attention-dropout 0 --hidden-dropout 0 --untie-embeddings-and-output-weights
)
TRAINING=(
  --micro-batch-size 4 --global-batch-size 16 --train-iters 20 --lr 3e-3 --clip-grad 1.0
  --mock-data --tokenizer-type ByteTokenizer --no-create-attention-mask-in-dataloader --num-workers 0
  --log-interval 5 --eval-iters 0
)
# torchrun, as clusters start it; python tools/launch.py takes the same flags, and -- before the trainer.
exec torchrun --standalone --nproc-per-node "$RANKS" pretrain_gpt.py \
  "${SHARDING[@]}" "${MODEL[@]}" "${TRAINING[@]}" "$@"
