#!/usr/bin/env python3
"""How much of a step is bubble, with stages that sleep: Megatron's own 1F1B beside zbpp_light and the patch.

    python extras/proof/bubble.py --stages 4 --microbatches 8
    python extras/proof/bubble.py --stages 8 --microbatches 24 --release 0.16.1

F, B and W sleep for a quarter of a second each, so other load on the machine changes little. Everything else is
Megatron's: its linear layer, its schedule or ours on top, its process groups (gloo). A step is timed from the start of
the first operation to the end of the last, on the rank where that is longest; the bubble is the share in which this
rank does none of its work: (step - m (F + B + W)) / step.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]
PLANNED = ("zb-h2", "zb-1p", "zb-2p")


# Inside a release ------------------------------------------------------------------------------------


def measure(ctx: Any, seconds: float, num_microbatches: int, contestants: list[list[Any]], steps: int) -> Any:
    """Starts and ends of this rank's steps, by contestant. On every rank, megatron-core on the path."""
    import torch
    from megatron.core import parallel_state
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.tensor_parallel import ColumnParallelLinear, layers
    from megatron.core.transformer import TransformerConfig

    events: list[float] = []

    def work() -> None:
        events.append(time.monotonic())
        time.sleep(seconds)
        events.append(time.monotonic())

    class SlowInputGradient(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.view_as(x)

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            work()
            return grad

    def slow_weight_gradient(x: torch.Tensor, grad: torch.Tensor, main_grad: torch.Tensor) -> None:
        work()
        main_grad.add_(grad.t().matmul(x))

    class Kernel:
        wgrad_gemm_accum_fp32 = staticmethod(slow_weight_gradient)

    layers.fused_weight_gradient_mlp_cuda, layers._grad_accum_fusion_available = Kernel, True
    sys.modules["fused_weight_gradient_mlp_cuda"] = Kernel
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=ctx.world_size)
    width = 8
    config = TransformerConfig(
        num_layers=ctx.world_size,
        hidden_size=width,
        num_attention_heads=1,
        use_cpu_initialization=True,
        pipeline_dtype=torch.float32,
        pipeline_model_parallel_size=ctx.world_size,
        gradient_accumulation_fusion=True,
        deallocate_pipeline_outputs=True,
    )

    class Stage(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.config, self.given = config, None
            self.linear = ColumnParallelLinear(
                width, width, config=config, init_method=torch.nn.init.ones_, bias=False, gather_output=False
            )
            self.linear.weight.main_grad = torch.zeros(width, width)
            self.linear.weight.grad_added_to_main_grad = False

        def set_input_tensor(self, tensor: Any) -> None:
            self.given = tensor[0] if isinstance(tensor, list) else tensor

        def forward(self) -> torch.Tensor:
            x = self.given if self.given is not None else torch.ones(1, 1, width, requires_grad=True)
            work()
            return self.linear(SlowInputGradient.apply(x))[0]

    def forward_step(data: Any, model: Stage) -> Any:
        return model(), lambda output: (output.sum(), {})

    stage = Stage()
    times = []
    for name, words in contestants:
        if name == "package":
            import zbpp_light

            zbpp_light.patch_megatron(**words)
        of_steps = []
        for _ in range(steps):
            events.clear()
            stage.linear.weight.main_grad.zero_()
            torch.distributed.barrier()
            get_forward_backward_func()(
                forward_step_func=forward_step,
                data_iterator=None,
                model=[stage],
                num_microbatches=num_microbatches,
                seq_length=1,
                micro_batch_size=1,
                forward_only=False,
            )
            assert len(events) == 6 * num_microbatches, f"{len(events)} ends of operations"
            of_steps.append([events[0], events[-1]])
        if name == "package":
            zbpp_light.unpatch_megatron()
        times.append((of_steps, float(stage.linear.weight.main_grad.sum())))
    return times


def inside() -> None:
    """What a process under a release runs: a line of JSON in, one out."""
    sys.path[:0] = [str(HERE.parent / "zbpp_light" / "examples")]
    sys.path += [str(HERE.parents[1] / "tests")]
    import torch

    torch.set_num_threads(1)
    import cpu_shims

    cpu_shims.install()
    from harness.ranks import run_ranks

    asked = json.loads(sys.stdin.readline())
    replies, sys.stdout = sys.stdout, sys.stderr
    stages = asked.pop("stages")
    print(json.dumps(run_ranks(measure, stages, timeout=asked.pop("timeout"), **asked)), file=replies, flush=True)


# Outside -----------------------------------------------------------------------------------------------


def bubbles(
    release: str,
    stages: int,
    num_microbatches: int,
    *,
    seconds: float,
    steps: int,
    contestants: list[list[Any]],
    megatron: str | None = None,
) -> list[float]:
    """The least bubble of each contestant's steps, as a share."""
    from release_process import environment

    asked = {"stages": stages, "seconds": seconds, "num_microbatches": num_microbatches, "contestants": contestants}
    limit = 60 + 2 * len(contestants) * steps * (num_microbatches + 2 * stages) * 3 * seconds
    result = subprocess.run(
        [sys.executable, "-S", __file__, "--inside"],
        env=environment(release, megatron),
        input=json.dumps({**asked, "steps": steps, "timeout": limit}) + "\n",
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr[-4000:]
    by_rank = json.loads(result.stdout)
    assert len({grads for _, grads in by_rank[0]}) == 1, f"other weight gradients: {by_rank[0]}"
    work = num_microbatches * 3 * seconds
    found = []
    for contestant in zip(*by_rank, strict=True):
        costs = [max(end - start for start, end in of_step) for of_step in zip(*(each for each, _ in contestant), strict=True)]
        found.append(min((cost - work) / cost for cost in costs))
    return found


def ideal(schedule: str, stages: int, num_microbatches: int, folder: Path) -> tuple[float, str | None]:
    """The planned bubble and, for what the package does not make itself, the plan's file."""
    tool = [sys.executable, str(HERE.parents[1] / "tools" / "show_schedule.py"), "--schedule", schedule]
    tool += ["--stages", str(stages), "--microbatches", str(num_microbatches)]

    def said(form: str) -> str:
        return subprocess.run([*tool, "--format", form], capture_output=True, text=True, check=True).stdout

    share = json.loads(said("json"))["bubble_rate"]
    if schedule not in PLANNED:
        return share, None
    path = folder / f"{schedule}.json"
    path.write_text(said("plan"))
    return share, str(path)


def report(release: str, stages: int, num_microbatches: int, *, seconds: float, steps: int) -> dict[str, tuple[float, float]]:
    """Contestant -> (measured, planned) bubble."""
    import apply_patch

    with tempfile.TemporaryDirectory() as folder:
        made = {name: ideal(name, stages, num_microbatches, Path(folder)) for name in ("1f1b", "zb-h1", "zb-1p", "zb-2p")}
        contestants: list[list[Any]] = [["megatron", {}], ["package", {"schedule": "zb-h1"}]]
        contestants += [["package", {"plan": made[name][1]}] for name in ("zb-1p", "zb-2p")]
        common: dict[str, Any] = {"seconds": seconds, "steps": steps}
        found = bubbles(release, stages, num_microbatches, contestants=contestants, **common)
        names = ("Megatron's 1F1B", "zbpp_light, zb-h1", "zbpp_light, zb-1p", "zbpp_light, zb-2p")
        result = {
            name: (share, made[schedule][0]) for name, share, schedule in zip(names, found, made, strict=True)
        }
        if release == apply_patch.PATCHED_RELEASE:
            changed = str(apply_patch.patched())
            (share,) = bubbles(
                release, stages, num_microbatches, contestants=[["megatron", {}]], megatron=changed, **common
            )
            result["zb_h1.patch"] = share, made["zb-h1"][0]
    return result


def main(words: Sequence[str] | None = None) -> int:
    import releases

    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0], allow_abbrev=False)
    parser.add_argument("--release", choices=releases.RELEASES, default=releases.NEWEST)
    parser.add_argument("--stages", type=int, default=4)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--ms", type=float, default=250.0, help="of each of F, B and W (default 250)")
    parser.add_argument("--steps", type=int, default=2, help="the best counts (default 2)")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(words)
    if options.inside:
        inside()
        return 0
    print(f"megatron-core {options.release}, p {options.stages}, m {options.microbatches}, F = B = W = {options.ms:g} ms")
    found = report(
        options.release, options.stages, options.microbatches, seconds=options.ms / 1000, steps=options.steps
    )
    for name, (share, planned) in found.items():
        print(f"{name:<20} {100 * share:5.1f} %   (planned {100 * planned:4.1f} %)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
