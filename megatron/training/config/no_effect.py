"""Settings that do nothing beside the others, and that Megatron (or its zero-bubble fork) takes all the same (floor 0).

`resolve` tells each of them in one line. What is wrong with a value, and what contradicts another, the rules tell.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from megatron.core.pipeline_parallel.plan.schedules import AUTO, SCHEDULES
from megatron.training.config.rule_table import spelled

Values = Mapping[str, Any]

_LOSS_SCALE = "loss_scale initial_loss_scale min_loss_scale loss_scale_window hysteresis"
_POST_VALIDATION = "enable_optimizer_post_validation post_validation_rollback post_validation_after"
_PENDING, _LIMIT, _SETUP = (
    "zero_bubble_max_pending_backward",
    "pipeline_memory_limit",
    "zero_bubble_v_schedule_mem_setup",
)
# These are put back to their defaults, because they are looked at without what they go with.
DROPPED = ("sequence_parallel", _PENDING, _SETUP, *_POST_VALIDATION.split())


def without_effect(values: Values) -> Iterator[tuple[str, str]]:
    """(destination name, why) of every setting that does nothing beside these, given or not."""
    for names, why in (*_idle(values), *_idle_in_pipelines(values)):
        for name in names.split():
            yield name, why


def told(name: str, value: Any, why: str) -> str:
    """The line that says so, with the value as it was given."""
    shown = " ".join(map(str, value)) if isinstance(value, tuple) else str(value)
    return f"{spelled(name)}{'' if value is True else ' ' + shown} has no effect {why}"


def _idle(v: Values) -> Iterator[tuple[str, str]]:
    if v["tensor_model_parallel_size"] == 1:
        yield "sequence_parallel", "at --tensor-model-parallel-size 1"
    if v["recompute_granularity"] != "full":
        yield "recompute_method recompute_num_layers", "without --recompute-granularity full"
    if v["recompute_granularity"] != "selective":
        yield "recompute_modules", "without --recompute-granularity selective"
    if v["position_embedding_type"] != "rope":
        kind = v["position_embedding_type"]
        yield "use_rope_scaling", f"with --position-embedding-type {kind}: rotary positions are scaled"
    if not v["fp16"]:
        yield _LOSS_SCALE, "without --fp16"
    if v["decoupled_lr"] is None:
        yield "decoupled_min_lr", "without --decoupled-lr"
    if v["save"] is None:
        yield "async_save log_progress save_retain_interval", "without --save"
    if v["rank_memory_limit"] is None:
        yield "achieved_tflops dp_bandwidth_gb_per_s", "without --rank-memory-limit"
    if v["load"] is None:
        yield "finetune no_load_optim no_load_rng use_checkpoint_opt_param_scheduler", "without --load"


def _idle_in_pipelines(v: Values) -> Iterator[tuple[str, str]]:
    schedule, on_a_v = v["pipeline_schedule"], v["zero_bubble_v_schedule"]
    searched = [name for name, row in SCHEDULES.items() if row.searched]
    group = "microbatch_group_size_per_vp_stage"
    runs = f"with the schedule {schedule}"
    if v["pipeline_schedule_file"] is not None:
        runs, schedule = "with --pipeline-schedule-file: the file says what is run", "of the file"
    if v["pipeline_model_parallel_size"] == 1:
        yield _POST_VALIDATION, "with one pipeline rank: there is nobody to wait for"
    if not on_a_v:
        yield _SETUP, "without --zero-bubble-v-schedule"
    if on_a_v:
        yield _PENDING, "with --zero-bubble-v-schedule: --zero-bubble-v-schedule-mem-setup says its limit"
    elif schedule not in (None, AUTO, *searched):
        yield _PENDING, runs
    if schedule not in (None, AUTO, *(name for name, row in SCHEDULES.items() if row.group_size == group)):
        yield group, runs
    percentile = "zero_bubble_adaptive_memory_limit_percentile"
    if on_a_v:
        yield percentile, "with --zero-bubble-v-schedule, whose limit does not depend on the device"
    elif schedule not in (None, *searched):
        yield percentile, runs
    elif not v["enable_zero_bubble"]:
        yield percentile, "without --enable-zero-bubble"
    elif limit := next((name for name in (_PENDING, _LIMIT) if v[name] is not None), None):
        yield percentile, f"with {spelled(limit)}, which says the limit"


def partly(v: Values) -> Iterator[str]:
    """Lines about settings of which a part has no effect."""
    layers, most = v["recompute_num_layers"], v["num_layers"]
    if v["recompute_granularity"] == "full" and None not in (layers, most) and layers > most:
        yield f"--recompute-num-layers {layers} is above --num-layers {most}: all layers are recomputed"
    retain, interval = v["save_retain_interval"], v["save_interval"]
    if v["save"] is None or None in (retain, interval) or min(retain, interval) < 1 or retain % interval == 0:
        return
    kept = math.lcm(retain, interval)
    all_stay = f"has no effect on the checkpoints of --save-interval {interval}: all of them stay"
    some_stay = (
        f"is no multiple of --save-interval {interval}: multiples of both stay, every {kept} iterations"
    )
    yield f"--save-retain-interval {retain} {all_stay if kept == interval else some_stay + ', and the newest two'}"
