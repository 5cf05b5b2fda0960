"""Every flag people use is known, in one state, and typos find their flag."""

import random
import string

import pytest

from megatron.training.config.config import FIELDS, GROUPS
from megatron.training.config.flag_table import (
    Arity,
    FlagState,
    closest_flags,
    flag_table,
    spellings,
)

# The 150 most used flags of real launch configurations.
MOST_USED = """
hidden-size max-position-embeddings micro-batch-size num-attention-heads num-layers seq-length clip-grad
eval-interval eval-iters log-interval lr split save-interval global-batch-size tensor-model-parallel-size
data-path tensorboard-dir transformer-impl save load data-cache-path lr-decay-style min-lr weight-decay
pipeline-model-parallel-size log-memory-to-tensorboard log-num-zeros-in-grad log-params-norm
log-timers-to-tensorboard log-validation-ppl-to-tensorboard bf16 train-iters use-mcore-models merge-file
vocab-file ckpt-format no-gradient-accumulation-fusion distributed-backend lr-warmup-fraction
timing-log-level lr-decay-iters deterministic-mode dist-ckpt-strictness attention-softmax-in-fp32
sequence-parallel use-distributed-optimizer disable-bias-linear attention-backend
use-checkpoint-opt_param-scheduler async-save untie-embeddings-and-output-weights use-persistent-ckpt-worker
overlap-grad-reduce moe-router-load-balancing-type moe-router-topk num-experts attention-dropout
hidden-dropout expert-model-parallel-size overlap-param-gather position-embedding-type context-parallel-size
adam-beta1 adam-beta2 swiglu normalization ffn-hidden-size group-query-attention num-query-groups
dist-ckpt-optim-fully-reshardable moe-grouped-gemm no-bias-gelu-fusion init-method-std lr-warmup-samples
tokenizer-type moe-token-dispatcher-type rotary-percent kv-channels manual-gc moe-aux-loss-coeff rotary-base
fp16 log-throughput no-rope-fusion no-create-attention-mask-in-dataloader exit-interval moe-ffn-hidden-size
moe-router-dtype distributed-timeout-minutes expert-tensor-parallel-size lr-decay-samples train-samples
apply-query-key-layer-scaling make-vocab-size-divisible-by num-layers-per-virtual-pipeline-stage
no-mmap-bin-files ckpt-fully-parallel-load tokenizer-model exit-duration-in-mins fp8-format
moe-shared-expert-intermediate-size num-workers qk-layernorm use-flash-attn moe-router-score-function
kv-lora-rank multi-latent-attention qk-head-dim qk-pos-emb-head-dim v-head-dim moe-layer-freq q-lora-rank
cross-entropy-loss-fusion moe-router-pre-softmax calculate-per-token-loss logging-level moe-permute-fusion
moe-router-enable-expert-bias moe-router-topk-scaling-factor no-check-for-nan-in-loss-and-grad
wandb-exp-name wandb-project mscale mscale-all-dim rotary-scaling-factor use-legacy-models
moe-router-bias-update-rate moe-router-group-topk moe-router-num-groups norm-epsilon manual-gc-interval
ckpt-assume-constant-structure fp8-param-gather fp8-amax-compute-algo fp8-amax-history-len mtp-num-layers
no-ckpt-fully-parallel-save adam-eps decoupled-lr no-masked-softmax-fusion rerun-mode apply-layernorm-1p
fp8-recipe mtp-loss-scaling-factor cross-entropy-fusion-impl use-tp-pp-dp-mapping
data-parallel-sharding-strategy profile-step-end profile-step-start recompute-granularity
""".split()
NEXT_IN_LINE = """
auto-detect-ckpt-format decoupled-min-lr finetune profile-ranks use-megatron-fsdp vocab-size wandb-entity
wandb-save-dir pipeline-model-parallel-layout recompute-num-layers no-barrier-with-level-1-timing
enable-zb-runtime mock-data no-load-optim recompute-modules save-retain-interval lr-warmup-init
num-distributed-optimizer-instances
""".split()
# The feature table of Megatron's users, the fork's and the fully sharded engine's flags.
FEATURES = """
rotary-interleaved rotary-seq-len-interpolation-factor use-rope-scaling rope-scaling-factor no-rope-freq
qk-l2-norm qk-clip window-size window-attn-skip-freq softmax-type attention-output-gate
experimental-attention-variant linear-attention-freq enable-mhc-connections squared-relu openai-gelu
quick-geglu glu-linear-offset activation-func-clamp-value fp32-residual-connection padded-vocab-size
mtp-use-repeated-layer mtp-detach-heads init-method-xavier-uniform embedding-init-method-std use-mup
use-cpu-initialization init-model-with-meta-device heterogeneous-layers-config-path moe-input-jitter-eps
moe-router-force-load-balancing moe-z-loss-coeff moe-expert-capacity-factor moe-token-drop-policy
moe-pad-expert-input-to-capacity moe-shared-expert-gate moe-shared-expert-overlap moe-use-upcycling
moe-flex-dispatcher-backend moe-router-fusion overlap-moe-expert-parallel-comm delay-wgrad-compute
tp-comm-overlap tensor-parallel-num-weight-shards num-virtual-stages-per-pipeline-rank
decoder-first-pipeline-num-layers decoder-last-pipeline-num-layers account-for-embedding-in-pipeline-split
account-for-loss-in-pipeline-split cp-comm-type hierarchical-context-parallel-sizes hybrid-context-parallel
grad-reduce-in-bf16 ddp-num-buckets ddp-bucket-size ddp-average-in-collective outer-dp-sharding-strategy
fsdp-double-buffer use-nccl-ub use-torch-fsdp2 loss-scale initial-loss-scale min-loss-scale
loss-scale-window hysteresis fp4-format first-last-layers-bf16 optimizer sgd-momentum
use-precision-aware-optimizer main-grads-dtype main-params-dtype exp-avg-dtype exp-avg-sq-dtype
lr-wsd-decay-style lr-wsd-decay-iters start-weight-decay end-weight-decay weight-decay-incr-style
rampup-batch-size step-batch-size-schedule decrease-batch-size-if-needed optimizer-cpu-offload
optimizer-offload-fraction overlap-cpu-optimizer-d2h-h2d cpu-offloading-num-layers
fine-grained-activation-offloading offload-modules recompute-method distribute-saved-activations
recompute-activations cuda-graph-impl cuda-graph-modules enable-cuda-graph external-cuda-graph
train-data-path valid-data-path test-data-path per-split-data-args-path data-args-path fim-rate sft
dataloader-inter-document-masking reset-position-ids reset-attention-mask eod-mask-loss
num-dataset-builder-threads dataloader-type iterations-to-skip tiktoken-pattern no-load-rng ckpt-step
use-checkpoint-args ckpt-convert-format ckpt-convert-save timing-log-option check-for-spiky-loss
check-for-large-grads check-weight-hash-across-dp-replicas-interval log-straggler exit-signal-handler
inprocess-restart enable-ft-package error-injection-rate skip-train full-validation multiple-validation-sets
eval-global-batch-size profile use-pytorch-profiler record-memory-history memory-snapshot-path
enable-zero-bubble zero-bubble-max-pending-backward zero-bubble-v-schedule zero-bubble-v-schedule-mem-setup
enable-1f1b-v num-seq-splits interleave-group-size cpu-offload offload-chunk-num auto-offload-time
enable-optimizer-post-validation allow-padding-num-layers enable-exactly-numeric-match use-dist-ckpt
dist-ckpt-format ckpt-fully-parallel-save use-custom-fsdp moe-extended-tp hybrid-attention-ratio
no-async-tensor-model-parallel-allreduce tiktoken-special-tokens override-opt_param-scheduler
override-opt-param-scheduler use-checkpoint-opt-param-scheduler persistent-save-interval
mid-level-dataset-surplus suggested-communication-unit-size fsdp-unit-modules
microbatch-group-size-per-virtual-pipeline-stage zero-bubble-adaptive-memory-limit-percentile
zero-bubble-pipeline-timers-start-iter
""".split()


def test_the_150_most_used_flags_are_150():
    assert len(set(MOST_USED)) == len(MOST_USED) == 150


@pytest.mark.parametrize("flag", [*MOST_USED, *NEXT_IN_LINE, *FEATURES])
def test_every_flag_in_real_use_is_known_with_a_state_and_a_reason(flag):
    entry = spellings()[f"--{flag}"]
    if entry.state is not FlagState.IMPLEMENTED:
        assert entry.why
    else:
        assert entry.field is not None
        assert entry.group in GROUPS


def test_every_field_is_a_flag_and_no_spelling_is_taken_twice():
    table = flag_table()
    assert set(FIELDS) <= set(table)
    every = [flag for entry in table.values() for flag in entry.flags + entry.negations]
    assert len(every) == len(set(every))


def test_two_spellings_of_one_thing_are_one_flag():
    assert spellings()["--use-custom-fsdp"] is spellings()["--use-megatron-fsdp"]
    assert spellings()["--save-interval"] is spellings()["--persistent-save-interval"]


def test_switches_can_be_turned_back_without_clashing():
    assert "--no-bf16" in flag_table()["bf16"].negations
    assert "--bias-linear" in flag_table()["add_bias_linear"].negations
    assert "--disable-mmap-bin-files" in flag_table()["mmap_bin_files"].flags
    assert flag_table()["no_load_optim"].flags == ("--no-load-optim",)


def test_unsupported_flags_with_neutral_values_ask_for_nothing():
    experts = flag_table()["num_moe_experts"]
    assert experts.asks_for_nothing(("0",))
    assert not experts.asks_for_nothing(("8",))
    assert not flag_table()["enable_vocab_parallel"].asks_for_nothing(())


def slip(rng, flag):
    """One insertion, deletion, replacement or swap behind the dashes."""
    at = rng.randrange(2, len(flag))
    letter = rng.choice(string.ascii_lowercase + "-")
    kind = rng.randrange(4)
    if kind == 0:
        return flag[:at] + letter + flag[at:]
    if kind == 1:
        return flag[:at] + flag[at + 1 :]
    if kind == 2:
        return flag[:at] + letter + flag[at + 1 :]
    return flag[: at - 1] + flag[at] + flag[at - 1] + flag[at + 1 :] if at > 2 else flag[:at] + flag[at + 1 :]


@pytest.mark.grid
def test_single_slips_find_their_flag_first():
    rng = random.Random(7)
    known = spellings()
    right = total = 0
    for entry in flag_table().values():
        for flag in entry.flags:
            typo = slip(rng, flag)
            if typo in known or len(typo) < 4:
                continue
            total += 1
            right += known[closest_flags(typo)[0]] is entry
    assert total > 550
    assert right >= 0.95 * total, f"{right} of {total}"


@pytest.mark.parametrize(
    ("unknown", "meant"),
    [
        ("--batch-size", "--micro-batch-size"),
        ("--tensor-parallel-size", "--tensor-model-parallel-size"),
        ("--num-attention-head-groups", "--num-attention-heads"),
        ("--lr-warmup-steps", "--lr-warmup-iters"),
    ],
)
def test_what_is_meant_is_among_the_guesses(unknown, meant):
    assert meant in closest_flags(unknown)


@pytest.mark.parametrize("unknown", ["--bogus-key", "--foo", "--hello-world", "--colour", "--my-own-thing"])
def test_far_guesses_are_not_offered(unknown):
    assert closest_flags(unknown, extra=("--mine",)) == ()


def test_arities_follow_the_fields():
    assert flag_table()["bf16"].arity is Arity.SWITCH
    assert flag_table()["data_path"].arity is Arity.MANY
    assert flag_table()["lr"].arity is Arity.ONE
