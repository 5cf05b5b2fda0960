#!/usr/bin/env python3
"""Write text with a trained checkpoint.

    python tools/generate.py --load runs/quickstart/checkpoints --prompt "def main(" --max-new-tokens 200
    python tools/generate.py --load DIR --prompt "Once" --temperature 0.8 --top-p 0.95 --seed 7

Model and tokenizer are those that the checkpoint was trained with; flags of the tokenizer say where its files are now,
or what the checkpoint does not say. One process. Exit status 3 for a checkpoint that cannot be used, 2 for a wrong
flag.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron.command import program
from megatron.core.available_memory import available_bytes
from megatron.core.dist_checkpointing.files import CheckpointError
from megatron.core.tokenizers.build import build_from_config
from megatron.core.words import size_text
from megatron.training.config.config import Config
from megatron.training.guard.console import guard_console
from megatron.training.guard.exit_status import ExitStatus
from tools.commands import as_called
from tools.tokenizer_flags import add_tokenizer_flags, check_tokenizer_flags, tokenizer_config

if TYPE_CHECKING:  # torch comes once the line is known to be right
    from megatron.core.models.gpt.gpt import GPTModel


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=as_called(__doc__),
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--load", required=True, metavar="DIR", help="folder given to --save when training")
    parser.add_argument("--ckpt-step", type=int, metavar="N", help="iteration to load; default the newest")
    parser.add_argument("--prompt", required=True, metavar="TEXT", help="text to continue")
    parser.add_argument("--max-new-tokens", type=int, default=100, metavar="N", help="default 100")
    parser.add_argument("--greedy", action="store_true", help="always the likeliest token")
    parser.add_argument(
        "--temperature", type=float, default=1.0, metavar="T", help="below 1 safer, above wilder, 0 greedy"
    )
    parser.add_argument(
        "--top-k", type=int, default=0, metavar="K", help="draw from the k likeliest tokens; 0: from all"
    )
    parser.add_argument(
        "--top-p", type=float, default=1.0, metavar="P", help="draw from the likeliest with this share"
    )
    parser.add_argument("--seed", type=int, default=1234, metavar="S", help="of the draws")
    parser.add_argument("--device", help="default: cuda where there is a GPU, else cpu")
    add_tokenizer_flags(parser, "in the place of what the checkpoint says")
    args = parser.parse_args()
    check_tokenizer_flags(parser, args)
    return args


def chosen_device(device: str | None) -> str:
    """The device, None: the default. Raises ValueError for one that is none, holds no values or is not there."""
    import torch

    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        if torch.empty(0, device=device).is_meta:
            raise ValueError(f"--device {device}: holds no values: give cpu or cuda")
    except (RuntimeError, AssertionError) as error:  # AssertionError: a torch that was built without it
        raise ValueError(f"--device {device}: cannot be used: {str(error).splitlines()[0]}") from error
    return device


def load_model(directory: str, ckpt_step: int | None, device: str) -> tuple[GPTModel, Config]:
    """The trained model and its whole configuration. Raises CheckpointError."""
    import torch

    from megatron.core.dist_checkpointing.state import LocalPiece
    from megatron.core.models.gpt.gpt import GPTModel
    from megatron.training.run.checkpointing import MODEL_PREFIX, load_for_inference

    values, load = load_for_inference(directory, ckpt_step)
    config = Config.from_flat(values)
    vocabulary = config.model.padded_vocab_size
    if vocabulary is None:
        raise CheckpointError(
            f"{directory}: no padded_vocab_size in its configuration: not made by this trainer"
        )
    model = GPTModel(
        config.model,
        padded_vocab_size=vocabulary,
        seed=config.training.seed,
        params_dtype=getattr(torch, config.params_dtype),
        device="meta",
    )
    model.to_empty(device=device)
    weights = ((MODEL_PREFIX + name, weight.detach()) for name, weight in model.named_parameters())
    load(
        [LocalPiece(name, tuple(weight.shape), (0,) * weight.dim(), weight) for name, weight in weights], None
    )
    return model.eval(), config


def check_size(args: argparse.Namespace, config: Config, vocab_size: int, prompt_tokens: int) -> None:
    """Raises ValueError for a tokenizer that is not the model's, and for more tokens than there is memory for."""
    import torch

    model = config.model
    if vocab_size > (model.padded_vocab_size or 0):
        raise ValueError(
            f"the tokenizer has {vocab_size} ids, the model {model.padded_vocab_size}: were the tokenizer's files "
            "changed?"
        )
    if args.max_new_tokens < 0:
        raise ValueError(f"--max-new-tokens {args.max_new_tokens}: must be 0 or more")
    values = 2 * model.num_layers * model.num_query_groups * model.kv_channels  # keys and values of a token
    needed = (prompt_tokens + args.max_new_tokens) * values * getattr(torch, config.params_dtype).itemsize
    available = available_bytes() if torch.device(args.device).type == "cpu" else None
    if available is not None and needed > available:
        raise ValueError(
            f"--max-new-tokens {args.max_new_tokens}: keys and values take {size_text(needed)}, "
            f"{size_text(available)} are left"
        )


def run(args: argparse.Namespace) -> None:
    """Prints the prompt and what follows it."""
    import torch

    from megatron.core.models.gpt.generate import Sampling, generate

    sampling = Sampling(
        temperature=0.0 if args.greedy else args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        seed=args.seed,
    )
    args.device = chosen_device(args.device)
    model, config = load_model(args.load, args.ckpt_step, args.device)
    tokenizer = build_from_config(tokenizer_config(args, config.tokenizer))
    prompt = tokenizer.tokenize(args.prompt)
    if not prompt:
        raise ValueError("--prompt holds no token: give some text to continue")
    check_size(args, config, tokenizer.vocab_size, len(prompt))
    out = generate(
        model,
        torch.tensor([prompt], device=args.device),
        args.max_new_tokens,
        sampling=sampling,
        vocab_size=tokenizer.vocab_size,
        eod=tokenizer.eod,
    )
    ids = out[0].tolist()
    while len(ids) > len(prompt) and ids[-1] == tokenizer.eod:
        ids.pop()
    print(tokenizer.detokenize(ids))


def main() -> None:
    guard_console()
    try:
        run(parse())
    except CheckpointError as error:
        print(f"{program(__file__)}: {error}", file=sys.stderr)
        sys.exit(ExitStatus.CHECKPOINT)
    except ValueError as error:
        print(f"{program(__file__)}: {error}", file=sys.stderr)
        sys.exit(ExitStatus.CONFIGURATION)


if __name__ == "__main__":
    main()
