"""What Megatron-LM keeps of an optimizer beside its tensors, as our checkpoints keep it (floor 0)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron.interchange.architecture import InterchangeError
from megatron.interchange.inert_pickle import plain
from megatron.interchange.torch_archive import Archive

LEFT_OUT = "load without it (--no-load-optim or --finetune)"
# Our field of a schedule -> theirs, and what it is where older releases do not say.
SCHEDULE = {
    "max_lr": "max_lr", "min_lr": "min_lr", "warmup_samples": "lr_warmup_steps", "decay_samples": "lr_decay_steps",
    "decay_style": "lr_decay_style", "start_weight_decay": "start_wd", "end_weight_decay": "end_wd",
    "weight_decay_samples": "wd_incr_steps", "weight_decay_style": "wd_incr_style",
}  # fmt: skip


def inner_optimizer(saved: Mapping[str, Any], path: Path) -> Mapping[str, Any]:
    """torch's state of the optimizer, which that of 16-bit weights wraps. Raises InterchangeError for several."""
    optimizer = saved.get("optimizer")
    inner = optimizer.get("optimizer", optimizer) if isinstance(optimizer, dict) else None
    if not isinstance(inner, dict) or not isinstance(inner.get("param_groups"), list):
        raise InterchangeError(f"{path}: no state of one optimizer: {LEFT_OUT}")
    return inner


def optimizer_sections(
    archive: Archive, args: Mapping[str, Any], iteration: int, path: Path
) -> dict[str, Any]:
    """Sections `optimizer`, `scheduler` and `scaler` of a checkpoint's `common`. archive: of `common.pt`, or of one
    rank's file. Raises InterchangeError where it does not say what they need."""
    saved, inner = archive.value, inner_optimizer(archive.value, path)
    schedule = plain(saved.get("opt_param_scheduler"))
    if not isinstance(schedule, dict) or (missing := [*SCHEDULE.values(), "num_steps"] - schedule.keys()):
        lacking = "opt_param_scheduler" if not isinstance(schedule, dict) else ", ".join(sorted(missing))
        raise InterchangeError(f"{path}: nothing is said of {lacking}, which its optimizer needs: {LEFT_OUT}")
    decoupled, tail = args.get("decoupled_lr"), args.get("lr_wsd_decay_samples")
    if tail is None:
        tail = (args.get("lr_wsd_decay_iters") or 0) * (args.get("global_batch_size") or 0)
    floor = args.get("decoupled_min_lr")
    return {
        "optimizer": {
            "optimizer": args.get("optimizer", "adam"),
            "num_steps": _num_steps(archive, inner, iteration),
        },
        "scheduler": {
            "samples": schedule["num_steps"],
            "schedule": {
                **{ours: schedule[theirs] for ours, theirs in SCHEDULE.items()},
                "init_lr": args.get("lr_warmup_init", 0.0),
                "decoupled_max_lr": decoupled,
                "decoupled_min_lr": None
                if decoupled is None
                else schedule["min_lr"]
                if floor is None
                else floor,
                "wsd_samples": tail,
                "wsd_style": args.get("lr_wsd_decay_style", "exponential"),
            },
        },
        "scaler": _scaler(archive, saved["optimizer"].get("grad_scaler")),
    }


def _num_steps(archive: Archive, inner: Mapping[str, Any], iteration: int) -> int:
    """Steps taken, which each parameter's state counts, or all of them together, or a group. SGD does not count."""
    states = inner.get("state")
    states = states if isinstance(states, dict) else {}
    counted = [
        states.get("common_step"),
        *(one.get("step") for one in states.values() if isinstance(one, dict)),
    ]
    counted += [group.get("step") for group in inner["param_groups"] if isinstance(group, dict)]
    return int(next((archive.number(one) or 0 for one in counted if one is not None), iteration))


def _scaler(archive: Archive, saved: Any) -> dict[str, Any]:
    """Of a loss scale that follows the gradients; one that does not is what the flags say."""
    if not isinstance(saved, dict) or "growth_tracker" not in saved:
        return {"scale": 1.0}
    names = {"scale": "scale", "clean_steps": "growth_tracker", "budget": "hysteresis_tracker"}
    return {ours: archive.number(saved.get(theirs)) for ours, theirs in names.items()}
