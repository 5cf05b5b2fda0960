"""What of Megatron is replaced, and given back."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import os
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from zbpp_light import checks, plan_file, schedules
from zbpp_light.executor import Groups, Step, only
from zbpp_light.plan_file import PlanFile
from zbpp_light.schedules import Rows, Timing
from zbpp_light.signatures import KNOWN, parameters
from zbpp_light.weights import WeightGradients

_SWITCH = "ZBPP_LIGHT"
_LINE = "forward_backward_pipelining_without_interleaving"
_VIRTUAL = "forward_backward_pipelining_with_interleaving"
_patch: Patch | None = None


def patch_megatron(schedule: str = "zb-h1", plan: str | os.PathLike[str] | None = None) -> None:
    """Training steps of pipelines run by this schedule, from the next one on. Evaluation stays Megatron's.

    schedule: zb-h1, zb-h2 or 1f1b. plan: a file of Megatron-Zero's `show_schedule.py --format plan` with one stage a rank.
    Megatron is imported if it is not yet. With ZBPP_LIGHT=0 in the environment nothing is patched.

    Raises ValueError for an unknown schedule, a file that is no such plan, a megatron-core whose functions have parameters
    that we do not know, if Megatron is patched already, or inside a running step.
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
        if file is None or schedule != "zb-h1":
            schedules.known(schedule)
        if file is not None and schedule not in ("zb-h1", file.schedule):
            raise ValueError(
                f"schedule={schedule!r} and {file.path}, a plan of {file.schedule}: give one of the two"
            )
        patch = Patch(schedule, file)
    except ValueError as error:
        raise ValueError(f"zbpp_light: {error}") from None
    patch.install()
    _patch = patch


def unpatch_megatron() -> None:
    """Gives Megatron its own functions back. Raises ValueError if nothing is patched, or inside a running step."""
    global _patch
    if _patch is None:
        if not _is_on():
            return
        raise ValueError("zbpp_light: nothing is patched")
    _patch.refuse_running("unpatch_megatron")
    _patch.remove()
    _patch = None


def _is_on() -> bool:
    switch = os.environ.get(_SWITCH, "1")
    if switch not in ("0", "1", ""):
        raise ValueError(f"zbpp_light: {_SWITCH} is 0 (Megatron is left as it is) or 1, not {switch!r}")
    return switch != "0"


def _print(line: str) -> None:
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(f"zbpp_light: {line}", flush=True)


@dataclasses.dataclass(frozen=True)
class Prepared:
    """The plan of a number of stages and microbatches."""

    rows: Rows
    timing: Timing


class Patch:
    """What `patch_megatron` has put in place. Raises ValueError for functions of Megatron that we do not know."""

    def __init__(self, schedule: str, file: PlanFile | None) -> None:
        self._schedule, self._file = file.schedule if file else schedule, file
        self._megatron: Any = importlib.import_module("megatron.core.pipeline_parallel.schedules")
        self._layers: Any = importlib.import_module("megatron.core.tensor_parallel.layers")
        for name in KNOWN:
            if "." not in name:
                parameters(getattr(self._megatron, name), name)
        self._weights = WeightGradients(self._layers)
        self._originals = {name: getattr(self._megatron, name) for name in (_LINE, _VIRTUAL)}
        self._prepared: dict[tuple[int, int], Prepared] = {}
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
        def forward_backward(**call: Any) -> Any:
            if call.get("forward_only", False):
                return original(**call)
            if self._running:
                raise ValueError("zbpp_light: a training step inside a running step")
            self._running = True
            try:
                return self._step(call)
            finally:
                self._running = False
                self._weights.forget()

        return forward_backward

    def _step(self, call: dict[str, Any]) -> Any:
        groups = Groups(self._megatron, call)
        key = groups.stages, call["num_microbatches"]
        first = key not in self._prepared
        if first:
            self._prepared[key] = self._prepare(groups, call)
        plan, weights = self._prepared[key], self._weights
        weights.measuring = first
        step = Step(self._megatron, groups, plan.rows, plan.timing, weights, call)
        if not first:
            return step.run()
        weights.split.clear()
        weights.most_bytes = 0
        result = step.run()
        self._report(groups, plan, only(call["model"]), call["num_microbatches"])
        return result

    def _prepare(self, groups: Groups, call: dict[str, Any]) -> Prepared:
        """Checked on all stages. Raises ValueError with all reasons on each."""
        chunks = call["model"] if isinstance(call["model"], list) else [call["model"]]
        config = self._megatron.get_model_config(chunks[0])
        reasons = checks.problems(self._layers, config, chunks)
        if self._file is not None:
            reasons += self._file.problems(groups.stages, call["num_microbatches"])
        splits = any(checks.can_split(self._layers, config, chunk) for chunk in chunks)
        everywhere: list[Any] = [None] * groups.stages
        dist.all_gather_object(everywhere, (reasons, splits), group=groups.pipeline)
        reasons = list(dict.fromkeys(reason for theirs, _ in everywhere for reason in theirs))
        if not any(splits for _, splits in everywhere):
            reasons.append("the model has no linear layer of Megatron's whose B and W are apart")
        if reasons:
            raise ValueError(
                "zbpp_light cannot run this training step:\n" + "\n".join(f"- {reason}" for reason in reasons)
            )
        self._weights.whole |= checks.embedding_weights(self._layers, chunks[0])
        if not self._hooks:
            for module in checks.engine_linears(config, chunks[0]):
                self._hooks.append(
                    module.register_forward_hook(lambda module, *_: self._weights.put_module(module))
                )
        rows = (
            self._file.rows
            if self._file
            else schedules.make(self._schedule, groups.stages, call["num_microbatches"])
        )
        return Prepared(rows, schedules.timed(rows))

    def _report(self, groups: Groups, plan: Prepared, model: Any, microbatches: int) -> None:
        weights = [parameter for parameter in model.parameters() if parameter.requires_grad]
        computed = sum(weight.numel() for weight in self._weights.split)
        mine = computed, sum(weight.numel() for weight in weights), self._weights.most_bytes
        figures: list[Any] = [None] * groups.stages
        dist.all_gather_object(figures, mine, group=groups.pipeline)
        computed, total = (sum(figure[place] for figure in figures) for place in (0, 1))
        most = max(range(groups.stages), key=lambda stage: figures[stage][2])
        bubble, apart = plan.timing.bubble, plan.timing.bubble_apart
        of_1f1b = schedules.timed(schedules.make("1f1b", groups.stages, microbatches)).bubble
        between = (
            ""
            if abs(bubble - apart) < 5e-4
            else f", {apart:.1%} where ranks do not wait for each other between steps"
        )
        _print(
            f"{self._schedule}, {groups.stages} stages, {microbatches} microbatches, planned bubble {bubble:.1%} (1f1b "
            f"{of_1f1b:.1%}{between}); W computes {computed / total:.1%} of the weights; waiting for W: at most "
            f"{max(map(schedules.most_waiting, plan.rows))} microbatches by plan, at most {figures[most][2] / 2**20:.1f} MiB "
            f"measured (stage {most})"
        )
        if self._file is not None and self._file.ignored:
            _print(
                f"{self._file.ignored} operations of data parallelism in {self._file.path} are ignored: it is Megatron's here"
            )
