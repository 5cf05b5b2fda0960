#!/usr/bin/env python3
"""A trainer of your own: any nn.Module, a flag of your own, and everything else from the framework.

The model is a plain PyTorch module (a bag of the last few tokens and an MLP), not one of ours. Run it with:

    python tools/launch.py --nproc-per-node 2 -- examples/custom_trainer/pretrain_small_mlp_lm.py \
        --context-tokens 4 --mock-data --num-layers 1 --hidden-size 64 --num-attention-heads 1 --seq-length 64 \
        --max-position-embeddings 64 --micro-batch-size 4 --train-iters 20 --lr 1e-3 --log-interval 5 \
        --tokenizer-type NullTokenizer --vocab-size 255
"""

import torch
from torch import nn

from megatron.core.enums import ModelType
from megatron.training import get_args, get_tokenizer, pretrain, print_rank_0


class LastTokensModel(nn.Module):
    """Predicts the next token from the last few, through one hidden layer."""

    def __init__(self, vocab_size, context_tokens, hidden_size):
        super().__init__()
        self.context_tokens = context_tokens
        self.embedding = nn.Embedding(vocab_size, hidden_size)
        self.hidden = nn.Linear(context_tokens * hidden_size, hidden_size)
        self.output = nn.Linear(hidden_size, vocab_size)

    def forward(self, tokens, labels):
        padded = nn.functional.pad(tokens, (self.context_tokens - 1, 0))
        windows = padded.unfold(1, self.context_tokens, 1)  # [b, s, context]
        logits = self.output(torch.relu(self.hidden(self.embedding(windows).flatten(2))))  # [b, s, v]
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view_as(
            labels
        )


def add_arguments(parser):
    group = parser.add_argument_group("last tokens model")
    group.add_argument("--context-tokens", type=int, default=3, help="tokens that the model looks back")
    return parser


def model_provider(pre_process=True, post_process=True):
    args = get_args()
    print_rank_0(f"building a model that looks back {args.context_tokens} tokens ...")
    return LastTokensModel(args.padded_vocab_size, args.context_tokens, args.hidden_size)


def forward_step(data_iterator, model):
    device = next(model.parameters()).device
    batch = {name: tensor.to(device) for name, tensor in next(data_iterator).items()}
    losses = model(batch["tokens"], batch["labels"])

    def loss_func(output):
        loss = (output * batch["loss_mask"]).sum() / batch["loss_mask"].sum()
        return loss, {"lm loss": loss}

    return losses, loss_func


def datasets_provider(num_samples):
    from megatron.training.global_vars import get_config
    from megatron.training.run.data import build_gpt_datasets

    return build_gpt_datasets(get_config(), get_tokenizer(), num_samples)


if __name__ == "__main__":
    pretrain(
        datasets_provider,
        model_provider,
        ModelType.encoder_or_decoder,
        forward_step,
        extra_args_provider=add_arguments,
        args_defaults={"tokenizer_type": "NullTokenizer"},
    )
