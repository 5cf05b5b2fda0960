"""What of Megatron is replaced, and given back."""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from zbpp_light import checks, plan_file, schedules
from zbpp_light.executor import Groups, Step
from zbpp_light.plan_file import PlanFile
from zbpp_light.schedules import B, Rows, Timing, W
from zbpp_light.signatures import KNOWN, parameters
from zbpp_light.weights import WeightGradients

# What Megatron's `get_forward_backward_func` looks up when it is called.
_REPLACED = ("forward_backward_pipelining_without_interleaving", "forward_backward_pipelining_with_interleaving")
_patch: Patch | None = None


def patch_megatron(schedule: str = "zb-h1", plan: str | os.PathLike[str] | None = None) -> None:
    """Training steps of pipelines run by this schedule from now on; evaluation stays Megatron's. Whatever is imported
    first. With ZBPP_LIGHT=0 in the environment nothing is patched.

    schedule: zb-h1, zb-h2 or 1f1b. plan: instead, a file of Megatron-Zero's `show_schedule.py --format plan`.

    Raises ValueError for an unknown schedule, a file that is no plan of one stage a rank, functions of Megatron with
    parameters that are not known, a second call, or one inside a running step.
    """
    global _patch
    if not _is_on():
        _print("ZBPP_LIGHT=0: Megatron is left as it is")
        return
    if _patch is not None:
        _patch.refuse_running("patch_megatron")
        raise ValueError("zbpp_light: Megatron is patched already; call unpatch_megatron() first")
    try:
        file = plan_file.read(plan) if plan is not None else None
        if file is None or schedule not in ("zb-h1", file.schedule):
            schedules.known(schedule)
        if file is not None and schedule not in ("zb-h1", file.schedule):
            raise ValueError(f"schedule={schedule!r} and {file.path}, a plan of {file.schedule}: give one of the two")
        patch = Patch(schedule, file)
    except ValueError as error:
        raise ValueError(f"zbpp_light: {error}") from None
    patch.install()
    _patch = patch


def unpatch_megatron() -> None:
    """Gives Megatron its own functions back. Raises ValueError if nothing is patched, or inside a running step."""
    global _patch
    if _patch is not None:
        _patch.refuse_running("unpatch_megatron")
        _patch.remove()
        _patch = None
    elif _is_on():
        raise ValueError("zbpp_light: nothing is patched")


def _is_on() -> bool:
    switch = os.environ.get("ZBPP_LIGHT", "1")
    if switch not in ("0", "1", ""):
        raise ValueError(f"zbpp_light: ZBPP_LIGHT is 0 (Megatron is left as it is) or 1, not {switch!r}")
    return switch != "0"


def _print(line: str) -> None:
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(f"zbpp_light: {line}", flush=True)


class Patch:
    """What `patch_megatron` puts in place. Raises ValueError for functions of Megatron that are not known."""

    def __init__(self, schedule: str, file: PlanFile | None) -> None:
        self._schedule, self._file = file.schedule if file else schedule, file
        self._megatron: Any = importlib.import_module("megatron.core.pipeline_parallel.schedules")
        self._layers: Any = importlib.import_module("megatron.core.tensor_parallel.layers")
        for name in KNOWN:
            if "." not in name:
                parameters(getattr(self._megatron, name), name)
        self._weights = WeightGradients(self._layers)
        self._originals = {name: getattr(self._megatron, name) for name in _REPLACED}
        self._plans: dict[tuple[int, int], tuple[Rows, Timing]] = {}  # by stages and microbatches
        self._hooks: list[Any] = []
        self._running = False

    def install(self) -> None:
        for name, original in self._originals.items():
            setattr(self._megatron, name, self._replacement(original))
        self._weights.install()

    def remove(self) -> None:
        for name, original in self._originals.items():
            setattr(self._megatron, name, original)
        self._weights.remove()
        for hook in self._hooks:
            hook.remove()

    def refuse_running(self, what: str) -> None:
        if self._running:
            raise ValueError(f"zbpp_light: {what} inside a running step: call it between steps")

    def _replacement(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def forward_backward(**given: Any) -> Any:
            if given.get("forward_only", False):
                return original(**given)
            self.refuse_running("a training step")
            self._running = True
            try:
                return self._step(given)
            finally:
                self._running = False
                self._weights.forget()

        return forward_backward

    def _step(self, given: dict[str, Any]) -> Any:
        groups, microbatches = Groups(self._megatron.parallel_state, given), given["num_microbatches"]
        key, weights = (groups.stages, microbatches), self._weights
        first = key not in self._plans
        if first:
            chunks = given["model"] if isinstance(given["model"], list) else [given["model"]]
            self._check(groups, chunks, microbatches)
            rows = self._file.rows if self._file else schedules.make(self._schedule, *key)
            self._plans[key] = rows, schedules.timed(rows)
        weights.measuring = first
        losses = Step(self._megatron, groups, *self._plans[key], weights, given).run()
        if first:
            self._report(groups, chunks[0], *self._plans[key], microbatches)
        return losses

    def _check(self, groups: Groups, chunks: list[Any], microbatches: int) -> None:
        """Raises ValueError with the reasons of all stages on each."""
        config = self._megatron.get_model_config(chunks[0])
        mine = checks.problems(config, chunks)
        mine += self._file.problems(groups.stages, microbatches) if self._file else []
        splits = any(checks.can_split(self._layers, config, chunk) for chunk in chunks)
        everywhere = _gathered((mine, splits), groups)
        reasons = list(dict.fromkeys(reason for reasons, _ in everywhere for reason in reasons))
        if not any(splits for _, splits in everywhere):
            reasons.append("the model has no linear layer of Megatron's, whose B and W could be apart")
        if reasons:
            raise ValueError(
                "zbpp_light cannot run this training step:\n" + "\n".join(f"- {reason}" for reason in reasons)
            )
        self._weights.whole |= checks.embedding_weights(self._layers, chunks[0])
        if not self._hooks:
            linears = checks.engine_linears(config, chunks[0])
            self._hooks = [module.register_forward_hook(self._weights.put_module) for module in linears]

    def _report(self, groups: Groups, model: Any, rows: Rows, timing: Timing, microbatches: int) -> None:
        """A line of rank 0's, of all its stages."""
        weights = [weight for weight in model.parameters() if weight.requires_grad]
        sizes = [sum(weight.numel() for weight in some) for some in (self._weights.computed, weights)]
        split, whole, most = zip(*_gathered((*sizes, self._weights.most_bytes), groups), strict=True)
        of_1f1b = schedules.timed(schedules.make("1f1b", groups.stages, microbatches)).bubble
        apart = f"{timing.bubble_apart:.1%} where ranks do not wait for each other between steps; "
        _print(
            f"{self._schedule}, {groups.stages} stages, {microbatches} microbatches, planned bubble {timing.bubble:.1%} "
            f"({apart if timing.bubble - timing.bubble_apart > 1e-9 else ''}1f1b {of_1f1b:.1%}); W computes "
            f"{sum(split) / sum(whole):.1%} of the weights; waiting for W: at most "
            f"{max(schedules.most(row, B, W) for row in rows)} microbatches by plan, at most {max(most) / 2**20:.1f} MiB "
            f"measured (stage {most.index(max(most))})"
        )
        if self._file and self._file.ignored:
            _print(f"{self._file.path}: {self._file.ignored} operations of data parallelism are left to Megatron")


def _gathered(value: Any, groups: Groups) -> list[Any]:
    """Of all stages."""
    values = [None] * groups.stages
    dist.all_gather_object(values, value, group=groups.pipeline)
    return values
