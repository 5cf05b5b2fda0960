"""What Megatron-LM keeps of an optimizer beside its tensors, as our checkpoints keep it (floor 0)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron.interchange.architecture import InterchangeError
from megatron.interchange.inert_pickle import at, plain
from megatron.interchange.torch_archive import Archive

LEFT_OUT = "load without it (--no-load-optim or --finetune)"
# Our field of a schedule -> theirs, and what it is where older releases do not say.
SCHEDULE = {
    "max_lr": "max_lr", "min_lr": "min_lr", "warmup_samples": "lr_warmup_steps", "decay_samples": "lr_decay_steps",
    "decay_style": "lr_decay_style", "start_weight_decay": "start_wd", "end_weight_decay": "end_wd",
    "weight_decay_samples": "wd_incr_steps", "weight_decay_style": "wd_incr_style",
}  # fmt: skip


def inner_optimizers(saved: Any, path: Path) -> list[tuple[Any, Any]]:
    """A rank's optimizers: each as it was saved, and torch's state in it, which that of 16-bit weights wraps. One, or
    two where experts have ranks of their own, which the second is for. Raises InterchangeError for anything else."""
    whole = at(saved, "optimizer")
    if isinstance(whole, dict) and 0 in whole:  # by number: torch_dist's
        whole = list(whole.values())
    each = whole if isinstance(whole, list) else [whole]
    found = [(one, at(one, "optimizer") or one) for one in each]
    if len(found) not in (1, 2) or not all(isinstance(at(inner, "param_groups"), list) for _, inner in found):
        raise InterchangeError(f"{path}: no state of one optimizer: {LEFT_OUT}")
    return found


def optimizer_sections(
    archive: Archive, args: Mapping[str, Any], iteration: int, path: Path
) -> dict[str, Any]:
    """Sections `optimizer`, `scheduler` and `scaler` of a checkpoint's `common`. archive: of `common.pt`, or of one
    rank's file. Raises InterchangeError where it does not say what they need."""
    (whole, inner), *_ = inner_optimizers(archive.value, path)
    schedule = plain(at(archive.value, "opt_param_scheduler"))
    if missing := [name for name in (*SCHEDULE.values(), "num_steps") if at(schedule, name) is None]:
        raise InterchangeError(
            f"{path}: its opt_param_scheduler says nothing of {', '.join(missing)}, which its optimizer needs: "
            f"{LEFT_OUT}"
        )
    decoupled, floor, tail = (
        args.get(name) for name in ("decoupled_lr", "decoupled_min_lr", "lr_wsd_decay_samples")
    )
    if tail is None:
        tail = (args.get("lr_wsd_decay_iters") or 0) * (args.get("global_batch_size") or 0)
    if floor is None:
        floor = schedule["min_lr"]
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
                "decoupled_min_lr": None if decoupled is None else floor,
                "wsd_samples": tail,
                "wsd_style": args.get("lr_wsd_decay_style", "exponential"),
            },
        },
        "scaler": _scaler(archive, at(whole, "grad_scaler")),
    }


def _num_steps(archive: Archive, inner: Any, iteration: int) -> int:
    """Steps taken, which each parameter's state counts, or all of them together, or a group. SGD does not count."""
    states = at(inner, "state")
    of_parameters = states.values() if isinstance(states, dict) else ()
    counted = [
        at(states, "common_step"),
        *(at(one, "step") for one in (*of_parameters, *inner["param_groups"])),
    ]
    return int(next((archive.number(step) or 0 for step in counted if step is not None), iteration))


def _scaler(archive: Archive, saved: Any) -> dict[str, Any]:
    """Of a loss scale that follows the gradients; one that does not is what the flags say."""
    if at(saved, "growth_tracker") is None:
        return {"scale": 1.0}
    names = {"scale": "scale", "clean_steps": "growth_tracker", "budget": "hysteresis_tracker"}
    return {ours: archive.number(saved.get(theirs)) for ours, theirs in names.items()}
