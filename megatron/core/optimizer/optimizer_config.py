"""Precision, optimizer, learning rate and weight decay (floor 0)."""

import dataclasses
from typing import Annotated, Literal

from megatron.core.config_base import COUNT, Finite, Index, Rate, arg


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """One optimizer with its schedules and the precision that it works in."""

    optimizer: Literal["adam", "sgd"] = arg("adam", "adam (with decoupled weight decay) or sgd")
    adam_beta1: Rate = arg(0.9, "decay of the first moment")
    adam_beta2: Rate = arg(0.999, "decay of the second moment")
    adam_eps: float = arg(1e-8, "added to the root of the second moment")
    sgd_momentum: Rate = arg(0.9, "momentum of sgd")
    clip_grad: float = arg(1.0, "limit of the global L2 norm of the gradient; 0 = no clipping")
    # Learning rate
    lr: Finite = arg(None, "peak learning rate", required=True)
    min_lr: Finite = arg(0.0, "floor of the schedule")
    decoupled_lr: Finite | None = arg(None, "peak learning rate of word embeddings and output layer")
    decoupled_min_lr: Finite | None = arg(None, "floor of --decoupled-lr's schedule")
    lr_decay_style: Literal["constant", "linear", "cosine", "inverse-square-root", "WSD"] = arg(
        "linear", "shape of the schedule after the warm-up"
    )
    lr_wsd_decay_style: Literal["exponential", "linear", "cosine", "minus_sqrt"] = arg(
        "exponential", "tail of the WSD schedule"
    )
    lr_decay_iters: Index | None = arg(
        None, "length of the schedule", unit="iterations", derived="--train-iters"
    )
    lr_decay_samples: Index | None = arg(
        None, "length of the schedule", unit="samples", derived="--train-samples"
    )
    lr_wsd_decay_iters: Index | None = arg(None, "length of the WSD tail", unit="iterations")
    lr_wsd_decay_samples: Index | None = arg(None, "length of the WSD tail", unit="samples")
    lr_warmup_fraction: Rate | None = arg(
        None, "warm-up as a share of the schedule's length, not rounded to samples"
    )
    lr_warmup_iters: Index = arg(0, "linear warm-up", unit="iterations")
    lr_warmup_samples: Index = arg(0, "linear warm-up", unit="samples")
    lr_warmup_init: float = arg(0.0, "learning rate at the start of the warm-up")
    override_opt_param_scheduler: bool = arg(
        False,
        "take the schedules from the flags, not from the checkpoint",
        flags=("--override-opt_param-scheduler", "--override-opt-param-scheduler"),
    )
    use_checkpoint_opt_param_scheduler: bool = arg(
        False,
        "take the schedules from the checkpoint, whatever the flags say",
        flags=("--use-checkpoint-opt_param-scheduler", "--use-checkpoint-opt-param-scheduler"),
    )
    # Weight decay
    weight_decay: float = arg(0.01, "decoupled weight decay (never on biases and 1-D parameters)")
    start_weight_decay: float = arg(None, "weight decay at the start", derived="--weight-decay")
    end_weight_decay: float = arg(None, "weight decay at the end", derived="--weight-decay")
    weight_decay_incr_style: Literal["constant", "linear", "cosine"] = arg(
        "constant", "how weight decay goes from start to end"
    )
    # Precision
    fp16: bool = arg(False, "fp16 weights with fp32 main weights and loss scaling")
    bf16: bool = arg(False, "bf16 weights with fp32 main weights and fp32 gradients")
    fp64: bool = arg(False, "everything in fp64 (for comparisons)", ours=True)
    allow_tf32: bool = arg(False, "let fp32 GEMMs use TF32 on GPUs", ours=True)
    loss_scale: float | None = arg(None, "constant loss scale for --fp16; unset = dynamic")
    initial_loss_scale: float = arg(2.0**32, "dynamic loss scale at the start")
    min_loss_scale: float = arg(1.0, "floor of the dynamic loss scale")
    loss_scale_window: Annotated[float, COUNT] = arg(
        1000.0, "clean steps before the scale is doubled", unit="iterations"
    )
    hysteresis: int = arg(2, "non-finite steps before the scale is halved", unit="iterations")
    use_precision_aware_optimizer: bool = arg(False, "optimizer states in the dtypes below")
    main_params_dtype: Literal["fp32", "fp16", "bf16", "fp8"] = arg("fp32", "dtype of main weights")
    main_grads_dtype: Literal["fp32", "fp16", "bf16", "fp8"] = arg("fp32", "dtype of main gradients")
    exp_avg_dtype: Literal["fp32", "fp16", "bf16", "fp8"] = arg("fp32", "dtype of the first moment")
    exp_avg_sq_dtype: Literal["fp32", "fp16", "bf16", "fp8"] = arg("fp32", "dtype of the second moment")
