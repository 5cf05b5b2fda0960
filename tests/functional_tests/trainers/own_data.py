#!/usr/bin/env python3
"""Our GPT on data sets of the user's own, counting numbers; --stock-builder asks for those of the flags instead."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from megatron.core.enums import ModelType
from megatron.training import get_args, pretrain
from megatron.training.global_vars import get_config, get_tokenizer
from megatron.training.run.data import build_gpt_datasets
from pretrain_gpt import forward_step, model_provider


class Counting:
    """Sample i counts up from i."""

    def __init__(self, length, seq_length):
        self.length, self.seq_length = length, seq_length

    def __len__(self):
        return self.length

    def __getitem__(self, i):
        text = (torch.arange(self.seq_length + 1) + i) % 100
        return {
            "tokens": text[:-1],
            "labels": text[1:],
            "loss_mask": torch.ones(self.seq_length),
            "position_ids": torch.arange(self.seq_length),
        }


def add_arguments(parser):
    parser.add_argument("--stock-builder", action="store_true")
    return parser


def datasets_provider(num_samples):
    args = get_args()
    if args.stock_builder:
        return build_gpt_datasets(get_config(), get_tokenizer(), num_samples)
    return tuple(Counting(number or 0, args.seq_length) for number in num_samples)


if __name__ == "__main__":
    pretrain(
        datasets_provider,
        model_provider,
        ModelType.encoder_or_decoder,
        forward_step,
        extra_args_provider=add_arguments,
    )
