#!/usr/bin/env python3
"""pretrain_gpt.py whose steps go wrong on command, on some stage of its pipeline: for post-validation.

--faults as in tests/harness/gradient_faults.py; --kill-in-rollback R:N ends rank R inside its N-th rollback, R:N:step
behind it, before the step is taken again, R:N:stop holds it up inside; --stop-iteration sends this process SIGTERM
there; --free-bytes is what the machine seems to have left. User code must be told the iteration that it runs in: every
forward asks.
"""

import os
import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import pretrain_gpt

FAULTS = []
NUM_STAGES = 1_001  # as told to the faults: 0 is the first stage, 1 the last, 0.5 all between


def add_arguments(parser):
    group = parser.add_argument_group("faults")
    group.add_argument("--faults", nargs="*", default=[])
    group.add_argument("--kill-in-rollback", default="")
    group.add_argument(
        "--timeout-s", type=float, default=0.0, help="--distributed-timeout-minutes in seconds"
    )
    group.add_argument("--stop-iteration", type=int, default=0)
    group.add_argument("--free-bytes", type=int, default=0)
    group.add_argument(
        "--exit-duration-s", type=float, default=0.0, help="--exit-duration-in-mins in seconds"
    )
    return parser


def forward_step(data_iterator, model):
    from megatron.training import get_args
    from tests.harness.gradient_faults import Fault, Faults

    args = get_args()
    if not model.training:
        return pretrain_gpt.forward_step(data_iterator, model)
    if not FAULTS:
        FAULTS.append(Faults([Fault.parse(text) for text in args.faults]))
    iteration, microbatch = model.context.iteration, model.context.grads.microbatch
    assert args.curr_iteration + 1 == iteration, f"told {args.curr_iteration} before iteration {iteration}"
    if iteration == args.stop_iteration and microbatch == 0 and args.rank == 0:
        os.kill(os.getpid(), signal.SIGTERM)
    stage = 0 if model.pre_process else NUM_STAGES - 1 if model.post_process else NUM_STAGES // 2
    mine = FAULTS[0].into(model, stage, NUM_STAGES, iteration, microbatch)
    losses, loss_func = pretrain_gpt.forward_step(data_iterator, model)
    return FAULTS[0].out_of(losses, mine), loss_func


def kill_in_rollback(text):
    from megatron.core.optimizer.mixed_precision import MixedPrecisionOptimizer

    rank, number, *behind = text.split(":")
    if os.environ.get("RANK") != rank or os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0":
        return
    real, calls = MixedPrecisionOptimizer.rollback, []

    def rollback(self):
        calls.append(None)
        if len(calls) == int(number):
            if "step" in behind:
                real(self)
            print(f"rank {rank} goes away", flush=True)
            os.kill(os.getpid(), signal.SIGSTOP if "stop" in behind else signal.SIGKILL)
        real(self)

    MixedPrecisionOptimizer.rollback = rollback


if __name__ == "__main__":
    from megatron.training.run.arguments import launch_config

    config = launch_config(extra_args_provider=add_arguments)
    for in_seconds, in_minutes in (
        ("timeout_s", "distributed_timeout_minutes"), ("exit_duration_s", "exit_duration_in_mins"),
    ):  # fmt: skip
        if config.extra[in_seconds]:
            config = config.replace(**{in_minutes: config.extra[in_seconds] / 60.0})
    if config.extra["kill_in_rollback"]:
        kill_in_rollback(config.extra["kill_in_rollback"])
    if config.extra["free_bytes"]:
        from megatron.core.device import Device

        Device.free_bytes = lambda self: config.extra["free_bytes"]

    from megatron.core.enums import ModelType
    from megatron.training import pretrain

    pretrain(
        pretrain_gpt.train_valid_test_datasets_provider,
        pretrain_gpt.model_provider,
        ModelType.encoder_or_decoder,
        forward_step,
        config=config,
    )
