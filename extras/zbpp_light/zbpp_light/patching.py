"""What of Megatron is replaced, and given back."""

import contextlib
import functools
import importlib
import os
import weakref
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from zbpp_light import checks, plan_file, schedules
from zbpp_light.executor import Groups, Step
from zbpp_light.plan_file import PlanFile
from zbpp_light.schedules import MADE_HERE, B, Plan, W
from zbpp_light.signatures import KNOWN, parameters
from zbpp_light.weights import WHOLE, WeightGradients

# What Megatron's `get_forward_backward_func` looks up when it is called.
_REPLACED = ("forward_backward_pipelining_without_interleaving", "forward_backward_pipelining_with_interleaving")
_patch: "Patch | None" = None


def patch_megatron(schedule: str = MADE_HERE, plan: str | os.PathLike[str] | None = None) -> None:
    """Training steps of pipelines run by ZB-H1 from now on, evaluation by Megatron's own schedule. Megatron may be
    imported before or behind. With ZBPP_LIGHT=0 in the environment nothing is patched.

    schedule: zb-h1, for any stages and microbatches. plan: instead, a file of `show_schedule.py --format plan`.
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
        if file is None:
            schedules.known(schedule)
        elif schedule not in (MADE_HERE, file.schedule):
            raise ValueError(f"schedule={schedule!r} and {file.path}, a plan of {file.schedule}: give one of the two")
        _patch = Patch(file)
    except ValueError as error:
        raise ValueError(f"zbpp_light: {error}") from None


def unpatch_megatron() -> None:
    """Gives Megatron its own functions back. Raises ValueError if nothing is patched, or inside a running step."""
    global _patch
    if _patch is not None:
        _patch.refuse_running("unpatch_megatron")
        _patch.undo.close()
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

    def __init__(self, file: PlanFile | None) -> None:
        self._file = file
        self._megatron: Any = importlib.import_module("megatron.core.pipeline_parallel.schedules")
        self._layers: Any = importlib.import_module("megatron.core.tensor_parallel.layers")
        for name in (name for name in KNOWN if "." not in name):
            parameters(getattr(self._megatron, name), name)
        self._weights = WeightGradients(self._layers)
        self._plans: dict[tuple[int, int], Plan] = {}  # by stages and microbatches
        self._models: weakref.WeakSet[Any] = weakref.WeakSet()  # that are checked
        self._running = False
        self.undo = contextlib.ExitStack()  # gives Megatron back what is its own
        self.undo.callback(delattr, self._weights.linear, "apply")  # it inherits torch's again
        self._weights.linear.apply = self._weights.apply
        for name in _REPLACED:
            original = getattr(self._megatron, name)
            self.undo.callback(setattr, self._megatron, name, original)
            setattr(self._megatron, name, self._replacement(original))

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
        groups, weights = Groups(self._megatron, given), self._weights
        key = groups.stages, given["num_microbatches"]
        chunks = given["model"] if isinstance(given["model"], list) else [given["model"]]
        weights.measuring = key not in self._plans or chunks[0] not in self._models
        if weights.measuring:
            self._check(groups, chunks, *key)
            self._plans[key] = schedules.timed(self._file.rows if self._file else schedules.make(*key))
        losses = Step(self._megatron, groups, self._plans[key], weights, given).run()
        if weights.measuring:
            self._report(groups, chunks[0], self._plans[key], *key)
        return losses

    def _check(self, groups: Groups, chunks: list[Any], stages: int, microbatches: int) -> None:
        """Raises ValueError with the reasons of all stages on each."""
        config = self._megatron.get_model_config(chunks[0])
        mine = checks.problems(config, chunks)
        mine += self._file.problems(stages, microbatches) if self._file else []
        splits = any(checks.can_split(self._layers, config, chunk) for chunk in chunks)
        said, split, plans = zip(*_gathered((mine, splits, self._file and self._file.hash), groups), strict=True)
        reasons = list(dict.fromkeys(reason for reasons in said for reason in reasons))
        if len({*plans}) > 1:
            reasons.append(f"stages have different plans: {', '.join(plan or MADE_HERE for plan in plans)}")
        if not any(split):
            reasons.append("the model has no linear layer of Megatron's, whose B and W could be apart")
        if reasons:
            raise ValueError("\n- ".join(["zbpp_light cannot run this training step:", *reasons]))
        if chunks[0] not in self._models:
            self._models.add(chunks[0])
            for weight in checks.embedding_weights(self._layers, chunks[0]):
                setattr(weight, WHOLE, True)
            for module in checks.engine_linears(config, chunks[0]):
                self.undo.callback(module.register_forward_hook(self._weights.put_module).remove)

    def _report(self, groups: Groups, model: Any, plan: Plan, stages: int, microbatches: int) -> None:
        """A line of rank 0's, of all its stages."""
        computed = self._weights.computed
        trained = {weight for weight in model.parameters() if weight.requires_grad and computed}  # where a stage splits
        sizes = [sum(weight.numel() for weight in some) for some in (computed & trained, trained)]
        split, whole, most = zip(*_gathered((*sizes, self._weights.most_bytes), groups), strict=True)
        computed.clear()
        apart = f"{plan.bubble_apart:.1%} where ranks do not wait for each other between steps; "
        waiting = max(schedules.most(row, B, W) for row in plan.rows)
        _print(
            f"{self._file.schedule if self._file else MADE_HERE}, {stages} stages, {microbatches} microbatches, planned"
            f" bubble {plan.bubble:.1%} ({apart if plan.bubble - plan.bubble_apart > 1e-9 else ''}1f1b "
            f"{(stages - 1) / (stages - 1 + microbatches):.1%}); W computes {sum(split) / max(sum(whole), 1):.1%} of "
            f"the weights; waiting for W: at most {waiting} microbatches by plan, at most {max(most) / 2**20:.1f} MiB "
            f"measured (stage {most.index(max(most))})"
        )
        if self._file and self._file.ignored:
            _print(f"{self._file.path}: {self._file.ignored} operations of data parallelism are left to Megatron")


def _gathered(value: Any, groups: Groups) -> list[Any]:
    """Of all stages."""
    values = [None] * groups.stages
    dist.all_gather_object(values, value, group=groups.pipeline)
    return values
