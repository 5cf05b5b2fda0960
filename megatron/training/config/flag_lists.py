"""The flags that are known and do not (or not fully) act: plain lists with reasons, read by flag_table (floor 0).

`switches` take no value, `values` one, `many` several. `--flag/--alias` are spellings of one flag;
`--flag=a|b` names the words with which a flag that is not
supported asks for nothing. Roadmap names are headings of docs/roadmap.md.
"""

from __future__ import annotations

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True)
class FlagList:
    """Flags that share a reason."""

    why: str
    switches: str = ""
    values: str = ""
    many: str = ""


ZERO_BUBBLE = "roadmap: zero-bubble schedules"
CUSTOM_FSDP = "roadmap: custom FSDP"
CONTEXT_PARALLEL = "roadmap: context parallel"
MOE = "roadmap: mixture of experts"
MLA = "roadmap: multi-latent attention"
MTP = "roadmap: multi-token prediction"
FP8 = "roadmap: fp8"
TRANSFORMER_ENGINE = "roadmap: Transformer Engine"
NCCL_GROUP_CALLS = "roadmap: NCCL group calls"
USER_BUFFERS = "roadmap: user buffers"
SHARP = "roadmap: SHARP"
OFFLOAD = "roadmap: offload"
MODEL_VARIANTS = "roadmap: model variants"
OPTIMIZERS = "roadmap: more optimizers"
DATA_VARIANTS = "roadmap: data variants"
PROFILING = "roadmap: profiling"
CUDA_GRAPHS = "roadmap: CUDA graphs"
INFERENCE = "roadmap: inference"
CONVERSION = "roadmap: checkpoint conversion"
RELIABILITY = "roadmap: reliability"

# Fields of which only some values are supported: the values, and why.
FIELD_LIMITS: dict[str, tuple[tuple[Any, ...], str]] = {
    "context_parallel_size": ((1,), CONTEXT_PARALLEL),
    "expert_model_parallel_size": ((1,), MOE),
    "expert_tensor_parallel_size": ((None, 1), MOE),
    "use_precision_aware_optimizer": ((False,), OPTIMIZERS),
    "main_params_dtype": (("fp32",), OPTIMIZERS),
    "main_grads_dtype": (("fp32",), OPTIMIZERS),
    "exp_avg_dtype": (("fp32",), OPTIMIZERS),
    "exp_avg_sq_dtype": (("fp32",), OPTIMIZERS),
    "transformer_impl": (("local",), TRANSFORMER_ENGINE),
    "rerun_mode": (("disabled", "validate_results"), RELIABILITY),
    "ckpt_format": (("torch_dist", "torch", "torch_dcp", "fsdp_dtensor"), CONVERSION),
}

# Fields that are kept for scripts which read them.
INERT_FIELDS: dict[str, str] = {
    "exit_signal_handler": "SIGTERM always saves and exits",
    "mmap_bin_files": "token files are always read with pread: a file that shrinks is an error, not a crash",
    "num_dataset_builder_threads": "indices are built in one thread, vectorised",
}

# Choices of Megatron's that a field here does not have.
KNOWN_CHOICES: dict[str, dict[str, str]] = {
    "optimizer": dict.fromkeys(("muon", "dist_muon", "lion", "soap", "adaptive_muon"), OPTIMIZERS),
    "position_embedding_type": dict.fromkeys(("yarn", "mrope", "relative"), MODEL_VARIANTS),
    "tokenizer_type": dict.fromkeys(
        (
            "SFTTokenizer",
            "BertWordPieceLowerCase",
            "BertWordPieceCase",
            "MultimodalTokenizer",
            "NullMultimodalTokenizer",
        ),
        DATA_VARIANTS,
    ),
}

INERT: tuple[FlagList, ...] = (
    FlagList(
        "there is one implementation of the model",
        switches="--use-mcore-models --use-legacy-models",
    ),
    FlagList(
        "fusion is left to torch's kernels; the arithmetic is the same",
        switches="--no-masked-softmax-fusion --no-bias-gelu-fusion --no-bias-swiglu-fusion "
        "--no-bias-dropout-fusion --no-rope-fusion --no-persist-layer-norm --cross-entropy-loss-fusion "
        "--apply-rope-fusion --no-clone-scatter-output-in-embedding",
        values="--cross-entropy-fusion-impl",
    ),
    FlagList(
        "that is how it is: bf16 weight gradients are rounded before they are added in fp32 (docs/megatron_compat.md)",
        switches="--no-gradient-accumulation-fusion",
    ),
    FlagList(
        "initial weights depend on the seed and the parameter's name only, wherever they are drawn",
        switches="--use-cpu-initialization --perform-initialization",
    ),
    FlagList(
        "there is one checkpoint format: sharded, written and read in parallel, verified, loadable under "
        "any layout",
        switches="--use-dist-ckpt --ckpt-fully-parallel-save --no-ckpt-fully-parallel-save "
        "--ckpt-fully-parallel-load --ckpt-assume-constant-structure --use-persistent-ckpt-worker "
        "--auto-detect-ckpt-format --dist-ckpt-optim-fully-reshardable "
        "--distrib-optim-fully-reshardable-mem-efficient --verify-integrity",
        values="--dist-ckpt-format --dist-ckpt-strictness --ckpt-fully-parallel-load-exchange-algo",
    ),
    FlagList(
        "communication is scheduled by the engine that owns it",
        switches="--no-async-tensor-model-parallel-allreduce --no-overlap-p2p-communication "
        "--no-align-grad-reduce --no-align-param-gather --enable-gloo-process-groups "
        "--disable-gloo-process-groups --no-scatter-gather-tensors-in-pipeline --contiguous-grad-buffer "
        "--overlap-p2p-communication-warmup-flush --use-ring-exchange-p2p "
        "--use-contiguous-buffers-in-local-ddp",
        values="--ddp-pad-buckets-for-high-nccl-busbw --local-rank",
        many="--high-priority-stream-groups",
    ),
    FlagList(
        "gathers of weights always have a communicator of their own", switches="--create-all-gather-group"
    ),
    FlagList(
        "gradients travel as sums and are divided once, inside the optimizer",
        switches="--no-gradient-reduce-div-fusion",
    ),
    FlagList(
        "what does not fit the slots of --fsdp-double-buffer always gets memory of its own, and is counted",
        switches="--fsdp-db-use-persist-buf-on-alloc-fail",
    ),
    FlagList(
        "used with --profile only",
        values="--profile-step-start --profile-step-end",
        many="--profile-ranks",
    ),
    FlagList(
        "used with --log-straggler only",
        switches="--disable-straggler-on-startup",
        values="--straggler-minmax-count",
    ),
    FlagList(
        "dropout masks are stateless: no generator is tracked",
        switches="--te-rng-tracker --inference-rng-tracker",
    ),
    FlagList(
        "nothing is sent anywhere: there is no telemetry",
        switches="--no-one-logger --enable-one-logger --one-logger-async",
        values="--one-logger-project --one-logger-run-name --app-tag-run-name --app-tag-run-version",
    ),
    FlagList("left to torch's caching allocator", values="--empty-unused-memory-level"),
    FlagList("it is always written", switches="--log-batch-size-to-tensorboard"),
    FlagList("rotary positions have no table", switches="--no-position-embedding"),
    FlagList("the one data and model class of their kind", values="--data-impl --DDP-impl"),
    FlagList(
        "what ranks hold alike is compared by --check-weight-hash-across-dp-replicas-interval, not in every forward",
        switches="--test-mode",
    ),
    FlagList(
        "no message goes ahead of another: the plan says when a transfer is posted",
        switches="--no-pre-communication-optimization",
    ),
    FlagList("experimental features have their own flags", switches="--enable-experimental"),
    FlagList(
        "there is one runtime, and zero-bubble runs equal 1F1B bit for bit",
        switches="--enable-zb-runtime --enable-exactly-numeric-match",
    ),
)

UNSUPPORTED: tuple[FlagList, ...] = (
    FlagList(
        TRANSFORMER_ENGINE,
        switches="--tp-comm-overlap --tp-comm-bulk-dgrad --tp-comm-bulk-wgrad "
        "--disable-tp-comm-overlap-ag --disable-tp-comm-bulk-dgrad "
        "--disable-tp-comm-bulk-wgrad --tp-comm-overlap-rs-dgrad --tp-comm-split-ag --tp-comm-split-rs",
        values="--tp-comm-overlap-cfg --tp-comm-bootstrap-backend",
    ),
    FlagList(
        "tensor parallel ranks each hold one part of a weight",
        values="--tensor-parallel-num-weight-shards=1",
    ),
    FlagList(
        "use --sequence-parallel, which splits saved activations over tensor parallel ranks",
        switches="--distribute-saved-activations",
    ),
    FlagList(
        ZERO_BUBBLE,
        switches="--defer-embedding-wgrad-compute",
        values="--wgrad-deferral-limit=0",
    ),
    FlagList(
        "use --pipeline-model-parallel-layout with E in a stage of its own, as in E|t*4|t*4L",
        switches="--standalone-embedding-stage",
    ),
    FlagList(
        "models with an encoder are not built: GPT has decoder layers only",
        values="--encoder-pipeline-model-parallel-size=0 --encoder-tensor-model-parallel-size=0 "
        "--pipeline-model-parallel-split-rank",
    ),
    FlagList(
        ZERO_BUBBLE,
        switches="--disable-backward-fusion --enable-layer-redistribution --enable-vocab-parallel "
        "--use-interlaced-schedule",
        values="--final-stage-num-layers --num-seq-splits=1",
    ),
    FlagList(CUSTOM_FSDP, switches="--megatron-fsdp-enable-fine-grained-param-gather"),
    FlagList(
        USER_BUFFERS,
        switches="--use-nccl-ub --disable-symmetric-registration --fsdp-manual-registration",
    ),
    FlagList(SHARP, switches="--use-sharp"),
    FlagList(NCCL_GROUP_CALLS, values="--nccl-communicator-config-path"),
    FlagList("there is one custom FSDP: leave it out, or give 1", values="--megatron-fsdp-version=1"),
    FlagList("use --use-custom-fsdp", switches="--use-torch-fsdp2"),
    FlagList(
        "use --use-custom-fsdp --fsdp-reshard-policy backward",
        switches="--torch-fsdp2-no-reshard-after-forward",
    ),
    FlagList(
        "use --overlap-param-gather, which gathers weights when the next forward needs them",
        switches="--overlap-param-gather-with-optimizer-step",
    ),
    FlagList(
        "initial weights depend on the seed and the parameter's name only: all replicas start alike",
        switches="--data-parallel-random-init",
    ),
    FlagList(
        "a checkpoint is always read whole: every tensor that the run needs must be in it",
        values="--strict-fsdp-dtensor-load=True|true|1",
    ),
    FlagList(
        CONTEXT_PARALLEL,
        switches="--hybrid-context-parallel",
        values="--max-seqlen-per-dp-cp-rank",
        many="--cp-comm-type=p2p|a2a|allgather --hierarchical-context-parallel-sizes=1",
    ),
    FlagList(
        MOE,
        switches="--moe-grouped-gemm --moe-router-pre-softmax --moe-permute-fusion "
        "--moe-router-enable-expert-bias --moe-shared-expert-overlap --moe-shared-expert-gate "
        "--moe-use-upcycling --moe-router-fusion --moe-pad-expert-input-to-capacity --moe-per-layer-logging "
        "--moe-layer-recompute --moe-enable-deepep --moe-router-force-load-balancing "
        "--overlap-moe-expert-parallel-comm --delay-wgrad-compute --moe-use-legacy-grouped-gemm "
        "--moe-extended-tp --moe-apply-probs-on-input --moe-router-padding-for-fp8 "
        "--moe-router-padding-for-quantization ",
        values="--num-experts=0|1|None --moe-router-topk --moe-token-dispatcher-type --moe-ffn-hidden-size "
        "--moe-router-dtype --moe-shared-expert-intermediate-size --moe-router-score-function "
        "--moe-layer-freq --moe-router-topk-scaling-factor --moe-router-bias-update-rate "
        "--moe-router-group-topk --moe-router-num-groups --moe-router-topk-limited-devices "
        "--moe-z-loss-coeff --moe-input-jitter-eps --moe-expert-capacity-factor --moe-token-drop-policy "
        "--moe-flex-dispatcher-backend --moe-deepep-num-sms --moe-hybridep-num-sms "
        "--moe-upcycling-granularity --moe-latent-size ",
        many="--moe-router-load-balancing-type --moe-aux-loss-coeff",
    ),
    FlagList(
        MLA,
        switches="--multi-latent-attention --mla-down-proj-fusion ",
        values="--q-lora-rank --kv-lora-rank --qk-head-dim --qk-pos-emb-head-dim --v-head-dim --mscale "
        "--mscale-all-dim --rotary-scaling-factor --rope-type --beta-fast --beta-slow "
        "--original-max-position-embeddings",
    ),
    FlagList(
        MTP,
        switches="--mtp-use-repeated-layer --mtp-detach-heads",
        values="--mtp-num-layers=0|None --mtp-loss-scaling-factor",
    ),
    FlagList(
        FP8,
        switches="--keep-fp8-transpose-cache --keep-fp8-transpose-cache-when-using-custom-fsdp "
        "--fp8-param-gather --first-last-layers-bf16 --no-fp8-wgrad --fp8-e4m3 "
        "--fp8-multi-head-attention --reuse-grad-buf-for-mxfp8-param-ag --fp4-param-gather",
        values="--fp8-format --fp8-recipe --fp8-amax-compute-algo --fp8-amax-history-len --fp8-margin "
        "--fp8-interval --fp4-format --fp4-recipe --num-layers-at-start-in-bf16 --num-layers-at-end-in-bf16 "
        "--fp8-quantizer-factory --fp4-quantizer-factory --te-precision-config-file",
    ),
    FlagList(
        OFFLOAD,
        switches="--optimizer-cpu-offload --overlap-cpu-optimizer-d2h-h2d "
        "--fine-grained-activation-offloading --cpu-offload --offload-overlap-sr "
        "--offload-continuous-buffers --recompute-lgd --auto-offload-time --cpu-offloading "
        "--use-torch-optimizer-for-cpu-offload --no-pin-cpu-grads --no-pin-cpu-params",
        values="--optimizer-offload-fraction --cpu-offloading-num-layers=0 --offload-chunk-num=0 "
        "--offload-time --min-offloaded-tensor-size",
        many="--offload-modules",
    ),
    FlagList(
        MODEL_VARIANTS,
        switches="--qk-l2-norm --qk-clip --attention-output-gate --use-mup --init-method-xavier-uniform "
        "--apply-residual-connection-post-layernorm --enable-mhc-connections --apply-wd-to-qk-layernorm "
        "--no-initialization ",
        values="--window-attn-skip-freq --softmax-type=vanilla --glu-linear-offset=0|0.0 "
        "--activation-func-clamp-value --no-rope-freq --embedding-init-method-std "
        "--relative-attention-num-buckets --relative-attention-max-distance "
        "--heterogeneous-layers-config-path --heterogeneous-layers-config-encoded-json "
        "--experimental-attention-variant --linear-attention-freq --window-size=-1,-1|(-1,-1) --spec "
        "--hybrid-attention-ratio=0|0.0 --hybrid-mlp-ratio=0|0.0 --hybrid-override-pattern "
        "--hybrid-layer-pattern --mamba-state-dim --mamba-head-dim --mamba-num-groups --mamba-num-heads "
        "--encoder-num-layers --decoder-num-layers --encoder-seq-length --decoder-seq-length --qk-clip-alpha "
        "--qk-clip-threshold ",
        many="--mrope-section",
    ),
    FlagList(
        OPTIMIZERS,
        switches="--muon-use-nesterov --muon-split-qkv --decoupled-weight-decay ",
        values="--muon-momentum --muon-scale-mode --muon-num-ns-steps --muon-tp-mode "
        "--muon-extra-scale-factor --muon-coefficient-type --muon-fp32-matmul-prec --lion-beta1 --lion-beta2 "
        "--no-weight-decay-cond-type ",
    ),
    FlagList(
        "use --rampup-batch-size",
        values="--step-batch-size-schedule",
    ),
    FlagList(
        "evaluation uses the training batch sizes",
        values="--eval-global-batch-size --eval-micro-batch-size",
    ),
    FlagList(
        DATA_VARIANTS,
        switches="--fim-data --sft --dataloader-inter-document-masking --dataloader-fast-cache-load "
        "--tokenizer-hf-use-fast --tokenizer-hf-include-special-tokens --tokenizer-sentencepiece-legacy "
        "--allow-ambiguous-pad-tokens ",
        values="--fim-rate=0|0.0 --fim-spm-rate --fim-fragment-rate --fim-no-prefix --fim-split-sample "
        "--fim-prefix-token --fim-middle-token --fim-suffix-token --fim-pad-token --fim-eod-token "
        "--s3-cache-path --object-storage-cache-path --sft-tokenizer-prompt-format --sample-rate=1|1.0 "
        "--vocab-extra-ids=0 --tokenizer-metadata --dataloader-defer-npy-index-mmap "
        "--tokenizer-special-tokens ",
    ),
    FlagList(
        "code from a repository is never run: use a tokenizer.json that is on disk",
        switches="--trust-remote-code",
    ),
    FlagList(
        CUDA_GRAPHS,
        switches="--enable-cuda-graph --external-cuda-graph --cuda-graph-use-single-mempool ",
        values="--cuda-graph-impl=none --cuda-graph-warmup-steps",
        many="--cuda-graph-modules --cuda-graph-scope",
    ),
    FlagList(
        PROFILING,
        switches="--profile --use-pytorch-profiler --record-memory-history --nvtx-ranges --log-energy "
        "--log-straggler --pytorch-profiler-collect-shapes --pytorch-profiler-collect-callstack "
        "--pytorch-profiler-collect-chakra --log-device-memory-used --report-theoretical-memory "
        "--log-max-attention-logit",
        values="--memory-snapshot-path --log-memory-interval --straggler-ctrlr-port ",
    ),
    FlagList(
        RELIABILITY,
        switches="--enable-ft-package --calc-ft-timeouts --inprocess-restart --check-for-spiky-loss "
        "--check-for-large-grads --non-persistent-local-ckpt-replication --replication",
        values="--error-injection-rate=0 --error-injection-type --inprocess-max-iterations "
        "--ft-num-warmup-iters --inprocess-heartbeat-timeout --inprocess-soft-timeout "
        "--inprocess-hard-timeout --result-rejected-tracker-filename --non-persistent-save-interval "
        "--non-persistent-ckpt-type --non-persistent-global-ckpt-dir --non-persistent-local-ckpt-dir "
        "--non-persistent-local-ckpt-algo --replication-jump --replication-factor --train-sync-interval "
        "--exit-signal=SIGTERM|sigterm --adlr-autoresume-interval --inprocess-granularity",
    ),
    FlagList("use --exit-duration-in-mins", switches="--adlr-autoresume"),
    FlagList(
        CONVERSION,
        values="--ckpt-convert-format --ckpt-convert-save --pretrained-checkpoint ",
        switches="--dist-ckpt-save-pre-mcore-014 --no-strict-load --use-mp-args-from-checkpoint-args "
        "--no-use-tokenizer-model-from-checkpoint-args ",
    ),
    FlagList(
        INFERENCE,
        switches="--inference-dynamic-batching --enable-chunked-prefill ",
        values="--inference-batch-times-seqlen-threshold --inference-max-requests --inference-max-seq-length "
        "--max-tokens-to-oom --inference-dynamic-batching-buffer-size-gb "
        "--inference-dynamic-batching-num-cuda-graphs",
    ),
)

# Features that are not supported -> their settings, which ask for nothing where none of the feature's flags is given.
SETTINGS: dict[str, str] = {
    "--num-experts": "--moe-router-topk --moe-router-pre-softmax --moe-router-dtype --moe-router-score-function "
    "--moe-router-enable-expert-bias --moe-router-bias-update-rate --moe-router-num-groups --moe-router-group-topk "
    "--moe-router-topk-scaling-factor --moe-router-topk-limited-devices --moe-router-load-balancing-type "
    "--moe-router-fusion --moe-router-force-load-balancing --moe-router-padding-for-fp8 "
    "--moe-router-padding-for-quantization --moe-aux-loss-coeff --moe-z-loss-coeff --moe-input-jitter-eps "
    "--moe-token-dispatcher-type --moe-token-drop-policy --moe-flex-dispatcher-backend --moe-deepep-num-sms "
    "--moe-hybridep-num-sms --moe-expert-capacity-factor --moe-pad-expert-input-to-capacity --moe-ffn-hidden-size "
    "--moe-shared-expert-intermediate-size --moe-shared-expert-overlap --moe-shared-expert-gate --moe-layer-freq "
    "--moe-grouped-gemm --moe-use-legacy-grouped-gemm --moe-permute-fusion --moe-apply-probs-on-input "
    "--moe-per-layer-logging --moe-latent-size --moe-upcycling-granularity",
    "--multi-latent-attention": "--q-lora-rank --kv-lora-rank --qk-head-dim --qk-pos-emb-head-dim --v-head-dim "
    "--mscale --mscale-all-dim --rotary-scaling-factor --rope-type --beta-fast --beta-slow "
    "--original-max-position-embeddings",
    "--mtp-num-layers": "--mtp-loss-scaling-factor --mtp-use-repeated-layer --mtp-detach-heads",
    "--fp8-format --fp8-e4m3 --fp4-format": "--fp8-recipe --fp8-amax-compute-algo --fp8-amax-history-len --fp8-margin "
    "--fp8-interval --no-fp8-wgrad --fp4-recipe",
    "--optimizer-cpu-offload": "--optimizer-offload-fraction --overlap-cpu-optimizer-d2h-h2d "
    "--use-torch-optimizer-for-cpu-offload --no-pin-cpu-grads --no-pin-cpu-params",
    "--offload-chunk-num --cpu-offload": "--offload-time --auto-offload-time --offload-overlap-sr "
    "--offload-continuous-buffers",
    "--fine-grained-activation-offloading": "--offload-modules --min-offloaded-tensor-size",
    "--tp-comm-overlap": "--tp-comm-overlap-cfg --tp-comm-bootstrap-backend --tp-comm-bulk-dgrad --tp-comm-bulk-wgrad "
    "--disable-tp-comm-overlap-ag --disable-tp-comm-bulk-dgrad --disable-tp-comm-bulk-wgrad "
    "--tp-comm-overlap-rs-dgrad --tp-comm-split-ag --tp-comm-split-rs",
    "--enable-cuda-graph --external-cuda-graph --cuda-graph-impl": "--cuda-graph-warmup-steps "
    "--cuda-graph-use-single-mempool --cuda-graph-modules --cuda-graph-scope",
    "--fim-data": "--fim-rate --fim-spm-rate --fim-fragment-rate --fim-no-prefix --fim-split-sample "
    "--fim-prefix-token --fim-middle-token --fim-suffix-token --fim-pad-token --fim-eod-token",
    "--sft": "--sft-tokenizer-prompt-format",
    "--qk-clip": "--qk-clip-alpha --qk-clip-threshold",
    "--window-size": "--window-attn-skip-freq",
    "--inprocess-restart": "--inprocess-max-iterations --inprocess-heartbeat-timeout --inprocess-soft-timeout "
    "--inprocess-hard-timeout --inprocess-granularity",
    "--enable-ft-package": "--ft-num-warmup-iters --calc-ft-timeouts",
    "--error-injection-rate": "--error-injection-type",
    "--replication": "--replication-jump --replication-factor",
    "--non-persistent-save-interval": "--non-persistent-ckpt-type --non-persistent-global-ckpt-dir "
    "--non-persistent-local-ckpt-dir --non-persistent-local-ckpt-algo",
    "--profile": "--use-pytorch-profiler --pytorch-profiler-collect-shapes --pytorch-profiler-collect-callstack "
    "--pytorch-profiler-collect-chakra",
    "--record-memory-history": "--memory-snapshot-path",
    "--log-straggler": "--straggler-ctrlr-port",
}
