#!/usr/bin/env python3
"""pretrain_gpt.py whose optimizer writes one bad weight: --bad-value in update --bad-update of rank --bad-rank."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import pretrain_gpt


def add_arguments(parser):
    group = parser.add_argument_group("faults")
    group.add_argument("--bad-update", type=int, required=True)
    group.add_argument("--bad-rank", type=int, default=0)
    group.add_argument("--bad-value", type=float, default=float("inf"))
    return parser


def spoil(args):
    from megatron.core.optimizer.flat_update import FlatUpdate
    from megatron.training.config.launch_env import LaunchEnv

    real, calls = FlatUpdate.step, []

    def step(self, batches):
        real(self, batches)
        calls.append(None)
        if len(calls) == args["bad_update"]:
            piece = self._slices[-1]
            piece.main_weights[3] = args["bad_value"]

    if LaunchEnv.read().rank == args["bad_rank"]:
        FlatUpdate.step = step


if __name__ == "__main__":
    from megatron.training.run.arguments import launch_config

    config = launch_config(extra_args_provider=add_arguments)
    spoil(config.extra)

    from megatron.core.enums import ModelType
    from megatron.training import pretrain

    pretrain(
        pretrain_gpt.train_valid_test_datasets_provider,
        pretrain_gpt.model_provider,
        ModelType.encoder_or_decoder,
        pretrain_gpt.forward_step,
        config=config,
    )
