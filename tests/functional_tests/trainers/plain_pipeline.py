#!/usr/bin/env python3
"""A pipeline of a user's own plain nn.Module, with Megatron's `set_input_tensor`, and the mistakes users make in one.

Weights start from their names, so that any cut of the model starts alike. --without makes the model or its provider
lack what a pipeline needs; --same-names names every stage's parameters alike; --reads-values has the forward step look
at tokens; --meets has ranks wait for each other where they build the model.
"""

import sys
from pathlib import Path

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from megatron.core.enums import ModelType
from megatron.training import get_args, pretrain
from megatron.training.global_vars import get_config, get_parallel_state, get_tokenizer
from megatron.training.run.data import build_gpt_datasets


class Residual(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, hidden):
        return hidden + self.down(torch.relu(self.up(hidden)))


class Part(nn.Module):
    """Blocks [first, last) of the model, with the embedding before the first and the loss after the last."""

    def __init__(self, args, first, last, pre_process, post_process):
        super().__init__()
        self.pre_process, self.post_process = pre_process, post_process
        width, vocab = args.hidden_size, args.padded_vocab_size
        if pre_process:
            self.embedding = nn.Embedding(vocab, width)
        names = range(last - first) if args.same_names else range(first, last)
        self.blocks = nn.ModuleDict({str(name): Residual(width) for name in names})
        if post_process:
            self.output = nn.Linear(width, vocab)
        for name, parameter in self.named_parameters():
            generator = torch.Generator().manual_seed(sum(name.encode()))
            parameter.data.normal_(0, 0.1, generator=generator)

    def forward(self, tokens, labels, hidden):
        hidden = self.embedding(tokens) if self.pre_process else hidden
        for block in self.blocks.values():
            hidden = block(hidden)
        if not self.post_process:
            return hidden
        logits = self.output(hidden)
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


class Pipelined(Part):
    """Takes the hidden states of the stage before as Megatron hands them over."""

    received = None

    def set_input_tensor(self, input_tensor):
        self.received = input_tensor

    def forward(self, tokens, labels, hidden=None):
        return super().forward(tokens, labels, self.received)


def add_arguments(parser):
    group = parser.add_argument_group("plain pipeline")
    group.add_argument("--without", choices=["set_input_tensor", "vp_stage"])
    group.add_argument("--same-names", action="store_true")
    group.add_argument("--reads-values", action="store_true")
    group.add_argument("--meets", action="store_true")
    return parser


def build(pre_process, post_process, chunk):
    args, ps = get_args(), get_parallel_state()
    chunks = args.num_virtual_stages_per_pipeline_rank or 1
    each = args.num_layers // (ps.pp_size * chunks)
    first = (chunk * ps.pp_size + ps.pp_rank) * each
    if args.meets:
        torch.distributed.barrier()
    model = Part if args.without == "set_input_tensor" else Pipelined
    return model(args, first, first + each, pre_process, post_process)


def model_provider(pre_process=True, post_process=True, vp_stage=None):
    return build(pre_process, post_process, vp_stage or 0)


def old_provider(pre_process=True, post_process=True):
    return build(pre_process, post_process, 0)


def forward_step(data_iterator, model):
    batch = next(data_iterator)
    if get_args().reads_values and batch.get("tokens") is not None:
        assert batch["tokens"].min().item() >= 0
    output = model(batch.get("tokens"), batch.get("labels"))
    return output, lambda loss: (loss, {"lm loss": loss})


def datasets_provider(num_samples):
    return build_gpt_datasets(get_config(), get_tokenizer(), num_samples)


if __name__ == "__main__":
    old = "vp_stage" in sys.argv
    pretrain(
        datasets_provider,
        old_provider if old else model_provider,
        ModelType.encoder_or_decoder,
        forward_step,
        extra_args_provider=add_arguments,
    )
