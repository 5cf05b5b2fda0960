"""Prompts in, completions out: what `tools/generate.py` does once its flags are known."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import torch

from megatron.core.dist_checkpointing.agree import gather_json
from megatron.core.models.gpt.generate import Completion, Sampling, generate, too_long
from megatron.core.models.gpt.gpt import GPTModel
from megatron.core.tokenizers.text_continuation import TextContinuation
from megatron.core.tokenizers.tokenizer import Tokenizer
from megatron.core.transport.parallel_state import ParallelState, destroy_process_group
from megatron.core.words import counted
from megatron.training.config.config import Config
from megatron.training.config.launch_env import LaunchEnv
from tools.generation.prompts import Prompt, read_prompts
from tools.generation.writer import Writer, Written
from tools.inference import alike, check_memory, filled_model, join_and_open, model_tokenizer


def run(args: argparse.Namespace, env: LaunchEnv, problems: list[str]) -> None:
    """Writes what follows the prompts. problems: of the flags, known before.

    Raises CheckpointError, ValueError (a problem a line) and PeerLostError, on all ranks alike.
    """
    prompts, wrong = read_prompts(args.prompt, args.prompts) if env.rank == 0 else ([], [])
    try:
        temperature = 0.0 if args.greedy else args.temperature
        sampling = Sampling(temperature, args.top_k, args.top_p, args.seed)
    except ValueError as error:
        problems.append(str(error))
    if problems or (wrong and env.world_size == 1):
        raise ValueError("\n".join(problems + wrong))
    ps, config, load = join_and_open(args, env)
    prompts, wrong = gather_json((prompts, wrong), ps)[0]
    prompts = [Prompt(*one) for one in prompts]
    if args.fp32:
        config = config.replace(bf16=False, fp16=False)
    with alike(ps):
        tokenizer = model_tokenizer(args, config)
        ids, unfit = tokenized(prompts, tokenizer, config, args.max_new_tokens)
        if wrong or unfit:
            raise ValueError("\n".join([*wrong, *unfit]))
        positions, asked = config.model.max_position_embeddings, max(map(len, ids)) + args.max_new_tokens
        rows = min(len(ids), args.batch_size * ps.pp_size)
        what = f"--max-new-tokens {args.max_new_tokens}: keys and values of {counted(rows, 'prompt')}"
        remedy = f"lower it, or --batch-size {args.batch_size}"
        check_memory(rows * asked * bytes_a_token(config, ps), what, remedy, ps, env)
    if asked > positions and env.rank == 0:  # of rotary ones, or of none
        print(
            f"note: {asked} tokens go beyond the {positions} positions that the model was made for "
            "(--max-position-embeddings); it has no attention window, whatever it had where it was imported from",
            file=sys.stderr,
        )
    model = filled_model(config, load, ps)
    write(args, prompts, ids, model, tokenizer, sampling, ps)
    destroy_process_group(ps)


def write(
    args: argparse.Namespace,
    prompts: Sequence[Prompt],
    ids: Sequence[Sequence[int]],
    model: GPTModel,
    tokenizer: Tokenizer,
    sampling: Sampling,
    ps: ParallelState,
) -> None:
    """Completions, on rank 0 and in the order of the prompts, which data parallel ranks take in turns. Communicates
    over the world."""
    mine = range(ps.dp_rank, len(prompts), ps.dp_size)
    texts = {number: TextContinuation(tokenizer, ids[number], args.stop) for number in mine}
    starts = [tokenizer.detokenize(one) for one in ids]
    writer = Writer(prompts, json_lines=args.json_lines)
    stream = args.stream or (len(prompts) == 1 and not args.json_lines and sys.stdout.isatty())

    def ended(number: int, token: int) -> bool:
        done = texts[number].push(token)
        if stream and ps.is_first_rank and number == writer.at:
            writer.show(starts[number] + texts[number].text)
        return done

    def written(made: Completion) -> Written:
        reason = made.finish_reason or ""
        return Written(texts[made.number].finish(), len(ids[made.number]), len(made.ids), reason)

    completions = generate(
        model,
        [ids[number] for number in mine],
        args.max_new_tokens,
        sampling=sampling,
        vocab_size=tokenizer.vocab_size,
        eod=tokenizer.eod,
        stop=ended,
        batch_size=args.batch_size,
        numbers=mine,
        ps=ps,
    )
    for _ in range(0, len(prompts), ps.dp_size):
        made = next(completions, None)
        own = None if made is None else (made.number, written(made))
        every = gather_json(own, ps) if ps.dp_size > 1 else [own]
        by_number = {one[0]: Written(*one[1]) for one in every if one is not None}
        if ps.is_first_rank:
            for number, one in sorted(by_number.items()):
                writer.finish(starts[number], one)


def tokenized(
    prompts: Sequence[Prompt], tokenizer: Tokenizer, config: Config, max_new_tokens: int
) -> tuple[list[list[int]], list[str]]:
    """Ids of each prompt, and what is wrong with any of them."""
    found, problems = [], []
    for prompt in prompts:
        try:
            ids = tokenizer.tokenize(prompt.text)
        except ValueError as error:  # no text of this tokenizer, or none of UTF-8
            problems.append(f"{prompt.where}: {error}")
            continue
        found.append(ids)
        if not ids:
            problems.append(f"{prompt.where} holds no token: give some text to continue")
        elif why := too_long(config.model, len(ids), max_new_tokens):
            problems.append(f"{prompt.where}: {why}")
    return found, problems


def bytes_a_token(config: Config, ps: ParallelState) -> int:
    """That this rank keeps: keys and values of its heads in its layers."""
    model = config.model
    layers, groups = -(-model.num_layers // ps.pp_size), max(model.num_query_groups // ps.tp_size, 1)
    itemsize: int = getattr(torch, config.params_dtype).itemsize
    return 2 * layers * groups * model.kv_channels * itemsize
