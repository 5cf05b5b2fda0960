"""Launch lines as people write them for Megatron (flags only), and the smallest line of ours."""

SMALL = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32 "
    "--micro-batch-size 2 --lr 1e-3 --train-iters 10 --mock-data --tokenizer-type ByteTokenizer"
).split()

# examples/gpt3, 175B on 128 nodes of 8.
GPT3_175B = (
    "--num-layers 96 --hidden-size 12288 --num-attention-heads 96 --seq-length 2048 "
    "--max-position-embeddings 2048 "
    "--attention-backend auto --micro-batch-size 1 --global-batch-size 1536 --rampup-batch-size 16 16 "
    "5859375 "
    "--train-iters 500000 --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.95 --init-method-std 0.006 "
    "--clip-grad 1.0 --fp16 --lr 6.0e-5 --lr-decay-style cosine --min-lr 6.0e-6 --lr-warmup-fraction .001 "
    "--lr-decay-iters 430000 --tensor-model-parallel-size 8 --pipeline-model-parallel-size 16 "
    "--data-path /data/corpus_text_document --vocab-file vocab.json --merge-file merges.txt --split 949,50,1 "
    "--log-interval 100 --save-interval 10000 --eval-interval 1000 --save /ckpt --load /ckpt --eval-iters 10 "
    "--tensorboard-dir /tb"
).split()

# examples/llama: 8B with FSDP2-free data parallelism, fp8, tensor and context parallel.
LLAMA3_8B = (
    "--use-mcore-models --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 "
    "--group-query-attention --num-query-groups 8 --kv-channels 128 --seq-length 8192 "
    "--max-position-embeddings 8192 --position-embedding-type rope --rotary-base 1000000 --rotary-percent "
    "1.0 "
    "--attention-dropout 0.0 --hidden-dropout 0.0 --swiglu --init-method-std 0.0134 --attention-backend "
    "fused "
    "--apply-layernorm-1p --untie-embeddings-and-output-weights --disable-bias-linear --normalization "
    "RMSNorm "
    "--micro-batch-size 1 --global-batch-size 128 --train-samples 1953125000 --lr-decay-samples 1949218748 "
    "--lr-warmup-samples 3906252 --lr 0.00015 --min-lr 0.00001 --decoupled-lr 5.0e-4 --decoupled-min-lr "
    "4.5e-5 "
    "--lr-decay-style cosine --clip-grad 1.0 --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.95 --bf16 "
    "--cross-entropy-loss-fusion --calculate-per-token-loss --manual-gc --empty-unused-memory-level 1 "
    "--fp8-format hybrid --fp8-amax-history-len 1024 --fp8-amax-compute-algo max --fp8-param-gather "
    "--tensor-model-parallel-size 1 --context-parallel-size 2 --sequence-parallel "
    "--use-distributed-optimizer "
    "--overlap-grad-reduce --overlap-param-gather --mock-data --tokenizer-type NullTokenizer --vocab-size "
    "128256 "
    "--data-cache-path /cache --split '99,1,0' --no-create-attention-mask-in-dataloader --no-mmap-bin-files "
    "--num-workers 1 --log-interval 1 --eval-iters 32 --eval-interval 100 --save-interval 1000 "
    "--log-throughput "
    "--profile --profile-step-start 4 --profile-step-end 6 --ckpt-format torch_dist "
    "--distributed-timeout-minutes 60 "
    "--save /ckpt --load /ckpt --tensorboard-dir /tb --transformer-impl transformer_engine"
).split()

# examples/mixtral: 8x7B, experts over 8 ranks.
MIXTRAL_8X7B = (
    "--use-mcore-models --disable-bias-linear --seq-length 4096 --max-position-embeddings 32768 "
    "--num-layers 32 "
    "--hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 --init-method-std 0.01 "
    "--attention-dropout 0.0 --hidden-dropout 0.0 --normalization RMSNorm --position-embedding-type rope "
    "--swiglu "
    "--untie-embeddings-and-output-weights --group-query-attention --num-query-groups 8 "
    "--no-masked-softmax-fusion --no-position-embedding --rotary-base 1000000 --num-experts 8 "
    "--moe-router-topk 2 --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-2 "
    "--moe-grouped-gemm "
    "--moe-token-dispatcher-type alltoall --overlap-param-gather --overlap-grad-reduce "
    "--tokenizer-type Llama2Tokenizer --tokenizer-model tokenizer.model --data-path /data/c_text_document "
    "--split 99990,8,2 --micro-batch-size 1 --global-batch-size 256 --lr 1e-4 --train-iters 500000 "
    "--lr-decay-iters 320000 --lr-decay-style cosine --min-lr 1.0e-5 --weight-decay 0.1 --lr-warmup-iters "
    "500 "
    "--clip-grad 1.0 --bf16 --tensor-model-parallel-size 1 --pipeline-model-parallel-size 4 "
    "--expert-model-parallel-size 8 --use-distributed-optimizer --sequence-parallel --log-interval 1 "
    "--save-interval 10000 --eval-interval 1000 --eval-iters 10 --save /ckpt --load /ckpt --no-load-optim "
    "--no-load-rng"
).split()

# examples/gpt3, 345M-like: one device, what runs here unchanged.
GPT_345M = (
    "--num-layers 24 --hidden-size 1024 --num-attention-heads 16 --seq-length 1024 "
    "--max-position-embeddings 1024 "
    "--micro-batch-size 4 --global-batch-size 8 --lr 0.00015 --train-iters 500000 --lr-decay-iters 320000 "
    "--lr-decay-style cosine --min-lr 1.0e-5 --weight-decay 1e-2 --lr-warmup-fraction .01 --clip-grad 1.0 "
    "--fp16 "
    "--data-path corpus_text_document --vocab-file gpt2-vocab.json --merge-file gpt2-merges.txt --split "
    "949,50,1 "
    "--log-interval 100 --save-interval 10000 --eval-interval 1000 --eval-iters 10 --distributed-backend nccl"
).split()

# Llama 3.1 405B as Megatron's users run it (less context parallel): 126 layers and both ends over 8 ranks of 8 chunks.
LLAMA3_405B = (
    "--use-mcore-models --num-layers 126 --hidden-size 16384 --ffn-hidden-size 53248 --num-attention-heads 128 "
    "--group-query-attention --num-query-groups 8 --seq-length 8192 --max-position-embeddings 8192 "
    "--position-embedding-type rope --rotary-base 500000 --use-rope-scaling --swiglu --normalization RMSNorm "
    "--disable-bias-linear --untie-embeddings-and-output-weights --attention-dropout 0.0 --hidden-dropout 0.0 "
    "--tensor-model-parallel-size 8 --sequence-parallel --pipeline-model-parallel-size 8 "
    "--num-virtual-stages-per-pipeline-rank 8 --account-for-embedding-in-pipeline-split "
    "--account-for-loss-in-pipeline-split --microbatch-group-size-per-virtual-pipeline-stage 8 "
    "--overlap-p2p-communication-warmup-flush --micro-batch-size 1 --global-batch-size 256 --lr 8e-5 --min-lr 8e-7 "
    "--train-iters 1000 --lr-decay-style cosine --lr-warmup-iters 100 --clip-grad 1.0 --weight-decay 0.1 --bf16 "
    "--mock-data --tokenizer-type NullTokenizer --vocab-size 128255 --overlap-grad-reduce"
).split()
