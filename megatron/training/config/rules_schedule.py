"""Rules on the schedules of learning rate and weight decay (floor 0)."""

from __future__ import annotations

from megatron.core.optimizer.schedule_lengths import ScheduleLengths, schedule_faults, schedule_lengths
from megatron.training.config.rule_table import RuleContext, RuleTable, spelled

RULES = RuleTable()
rule = RULES.rule


@rule(
    "warmup-fraction",
    "--lr-warmup-fraction --lr-warmup-iters --lr-warmup-samples",
    "give the warm-up once: as a fraction, in iterations or in samples",
)
def _warmup_fraction(s: RuleContext) -> str | None:
    if s.value("lr_warmup_fraction") is None or not (
        s.value("lr_warmup_iters") or s.value("lr_warmup_samples")
    ):
        return None
    return "--lr-warmup-fraction is given together with a warm-up in iterations or samples"


def _schedule_fault(s: RuleContext, which: str) -> str | None:
    """What the schedule itself would object to in one of its lengths."""
    lengths = _schedule_lengths(s)
    if lengths is None:
        return None
    faults = schedule_faults(
        s.value("lr_decay_style"),
        warmup_samples=lengths.warmup_samples,
        decay_samples=lengths.decay_samples,
        wsd_samples=lengths.wsd_samples,
    )
    message = next((fault.message for fault in faults if fault.which == which), None)
    if message is None or lengths.samples_per_step is None:
        return message
    return f"{message} (iterations of {lengths.samples_per_step})"


def _schedule_lengths(s: RuleContext) -> ScheduleLengths | None:
    """None where nothing is trained, and where another rule tells that the lengths make no sense."""
    iterations, samples = s.value("train_iters"), s.value("train_samples")
    if s.value("skip_train") or (iterations is None) == (samples is None) or not (iterations or samples):
        return None
    optimizer, batch = s.config.optimizer, s.value("global_batch_size")
    names = ("lr_warmup_iters", "lr_warmup_samples", "lr_decay_iters", "lr_decay_samples")
    given = [s.value(name) for name in (*names, "lr_wsd_decay_iters", "lr_wsd_decay_samples")]
    if any(length is not None and length < 0 for length in (iterations, samples, *given)):
        return None
    if optimizer.lr_warmup_fraction is not None and not 0 <= optimizer.lr_warmup_fraction < 1:
        return None
    return schedule_lengths(
        optimizer,
        train_iters=iterations,
        train_samples=samples,
        # Where the batch is at fault itself, any will do: lengths in iterations are compared with each other.
        global_batch_size=batch if batch is not None and batch >= 1 else 1,
    )


@rule(
    "schedule-length",
    "--lr-decay-iters --lr-decay-samples --train-iters --train-samples",
    "give a schedule of one iteration at least, or leave it out for the length of the run",
)
def _schedule_length(s: RuleContext) -> str | None:
    return _schedule_fault(s, "decay")


@rule(
    "warmup-length",
    "--lr-warmup-iters --lr-warmup-samples --lr-decay-iters --lr-decay-samples --train-iters --train-samples",
    "make the warm-up shorter than the schedule",
)
def _warmup_length(s: RuleContext) -> str | None:
    return _schedule_fault(s, "warmup")


@rule(
    "lr-order", "--lr --min-lr --decoupled-lr --decoupled-min-lr --lr-warmup-init", "keep floors below peaks"
)
def _lr_order(s: RuleContext) -> str | None:
    if s.value("skip_train"):
        return None
    for peak, floor in (("lr", "min_lr"), ("decoupled_lr", "decoupled_min_lr"), ("lr", "lr_warmup_init")):
        high, low = s.value(peak), s.value(floor)
        if high is not None and low is not None and low > high:
            return f"{spelled(floor)} {low} is above {spelled(peak)} {high}"
    return None


@rule(
    "wsd-tail",
    "--lr-decay-style --lr-wsd-decay-iters --lr-wsd-decay-samples",
    "give --lr-wsd-decay-iters (or -samples in a sample-based run), at least 1 and at most the schedule",
)
def _wsd_tail(s: RuleContext) -> str | None:
    if s.value("lr_decay_style") != "WSD" or s.value("skip_train"):
        return None
    unit = "samples" if s.value("train_samples") is not None else "iters"
    if s.value(f"lr_wsd_decay_{unit}") is None:
        return f"--lr-decay-style WSD needs --lr-wsd-decay-{unit}"
    return _schedule_fault(s, "tail")


@rule(
    "weight-decay-ramp",
    "--weight-decay-incr-style --start-weight-decay --end-weight-decay",
    "give both ends with --weight-decay-incr-style linear or cosine, or neither with constant",
)
def _weight_decay_ramp(s: RuleContext) -> str | None:
    start, end, style = (
        s.value("start_weight_decay"),
        s.value("end_weight_decay"),
        s.value("weight_decay_incr_style"),
    )
    if style == "constant":
        if start != end:
            return f"a constant weight decay cannot go from {start} to {end}"
        return None
    if not (s.given("start_weight_decay") and s.given("end_weight_decay")):
        return f"--weight-decay-incr-style {style} needs --start-weight-decay and --end-weight-decay"
    if start < 0 or end < start:
        return f"weight decay must rise from a start that is not negative, not from {start} to {end}"
    return None


@rule(
    "scheduler-source",
    "--override-opt_param-scheduler --use-checkpoint-opt_param-scheduler",
    "keep one of them",
)
def _scheduler_source(s: RuleContext) -> str | None:
    both = s.value("override_opt_param_scheduler") and s.value("use_checkpoint_opt_param_scheduler")
    return "the schedules cannot come both from the flags and from the checkpoint" if both else None
