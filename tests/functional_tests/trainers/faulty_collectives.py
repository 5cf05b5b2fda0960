#!/usr/bin/env python3
"""pretrain_gpt.py of which a rank goes away as it calls a collective: the others are in it, or about to be.

--fault-at PURPOSE:N, as in dp_gather:3, is the rank's N-th call over its group of this purpose in iteration
--fault-iteration; --fault-how kill ends the rank there, stop holds it up, for ever.
"""

import os
import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import pretrain_gpt


def add_arguments(parser):
    group = parser.add_argument_group("faults")
    group.add_argument("--fault-at", default="")
    group.add_argument("--fault-iteration", type=int, default=4)
    group.add_argument("--fault-rank", type=int, default=1)
    group.add_argument("--fault-how", choices=["kill", "stop"], default="kill")
    group.add_argument(
        "--timeout-s", type=float, default=0.0, help="--distributed-timeout-minutes in seconds"
    )
    return parser


def go_away_at(fault, how, rank, iteration):
    from megatron.core.transport.parallel_state import Group
    from megatron.training import get_args

    purpose, number = fault.split(":")
    calls, tell = [], Group.tell

    def told(group, called):
        if (
            os.environ["RANK"] == str(rank)
            and group.purpose == purpose
            and get_args().curr_iteration + 1 == iteration
        ):
            calls.append(None)
            if len(calls) == int(number):
                print(f"rank {rank} goes away", flush=True)
                os.kill(os.getpid(), signal.SIGKILL if how == "kill" else signal.SIGSTOP)
        tell(group, called)

    Group.tell = told


def datasets_provider(num_samples):
    from megatron.training import get_args

    args = get_args()
    if args.fault_at:
        go_away_at(args.fault_at, args.fault_how, args.fault_rank, args.fault_iteration)
    return pretrain_gpt.train_valid_test_datasets_provider(num_samples)


if __name__ == "__main__":
    from megatron.training.run.arguments import launch_config

    config = launch_config(extra_args_provider=add_arguments)
    if config.extra["timeout_s"]:
        config = config.replace(distributed_timeout_minutes=config.extra["timeout_s"] / 60.0)

    from megatron.core.enums import ModelType
    from megatron.training import pretrain

    pretrain(
        datasets_provider,
        pretrain_gpt.model_provider,
        ModelType.encoder_or_decoder,
        pretrain_gpt.forward_step,
        config=config,
    )
