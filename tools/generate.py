#!/usr/bin/env python3
"""Write text with a trained checkpoint.

    python tools/generate.py --load runs/quickstart/checkpoints --prompt "def main(" --max-new-tokens 200
    python tools/generate.py --load DIR --prompts questions.jsonl --json-lines --batch-size 16 --stop "\\n\\n" --greedy
    torchrun --nproc-per-node 4 tools/generate.py --load DIR --prompts lines.txt --tensor-model-parallel-size 2
        --pipeline-model-parallel-size 2

Model and tokenizer are those that the checkpoint was trained with; flags of the tokenizer say where its files are now,
or what the checkpoint does not say. A checkpoint of any layout is read under any other. Exit status 3 for a checkpoint
that cannot be used, 2 for wrong flags or prompts, all of which are named, 130 after Ctrl-C; what was written is kept.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron.command import program
from megatron.core.dist_checkpointing.files import CheckpointError
from megatron.core.tokenizers.build import build_from_config
from megatron.core.tokenizers.text_continuation import TextContinuation
from megatron.core.tokenizers.tokenizer import Tokenizer
from megatron.core.transport.rank_grid import dense_grid
from megatron.core.words import counted, size_text
from megatron.training.config.config import Config
from megatron.training.config.launch_env import LaunchEnv
from megatron.training.guard.console import guard_console
from megatron.training.guard.exit_status import ExitStatus, hard_exit
from tools.commands import as_called
from tools.generation.prompts import Prompt, read_prompts
from tools.generation.writer import Writer, Written
from tools.tokenizer_flags import add_tokenizer_flags, check_tokenizer_flags, tokenizer_config

if TYPE_CHECKING:  # torch comes once the line is known to be right
    from megatron.core.dist_checkpointing.state import LocalPiece
    from megatron.core.models.gpt.generate import Completion, Sampling
    from megatron.core.models.gpt.gpt import GPTModel
    from megatron.core.transport.parallel_state import ParallelState

INTERRUPTED = 128 + signal.SIGINT


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=as_called(__doc__),
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--load", required=True, metavar="DIR", help="folder given to --save when training")
    parser.add_argument("--ckpt-step", type=int, metavar="N", help="iteration to load; default the newest")
    parser.add_argument(
        "--prompt", action="append", default=[], metavar="TEXT", help="text to continue; may be repeated"
    )
    parser.add_argument(
        "--prompts",
        action="append",
        default=[],
        metavar="FILE",
        help='a prompt a line; of .jsonl the field "prompt" or "text"; -: lines of standard input',
    )
    parser.add_argument(
        "--batch-size", type=int, default=8, metavar="N", help="prompts in one forward; default 8"
    )
    parser.add_argument("--max-new-tokens", type=int, default=100, metavar="N", help="default 100")
    parser.add_argument(
        "--stop", action="append", default=[], metavar="TEXT", help="end before this text; may be repeated"
    )
    parser.add_argument(
        "--json-lines", action="store_true", help="write a JSON object a prompt, instead of text"
    )
    parser.add_argument(
        "--stream",
        action="store_true",
        help="write text as it is made; on a terminal, of one prompt: default",
    )
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
    parser.add_argument(
        "--seed", type=int, default=1234, metavar="S", help="of the draws; prompt number i has S + i"
    )
    parser.add_argument("--device", help="default: cuda where there is a GPU, else cpu")
    for axis in ("tensor", "pipeline"):
        parser.add_argument(
            f"--{axis}-model-parallel-size", type=int, default=1, metavar="N", help="under torchrun"
        )
    add_tokenizer_flags(parser, "in the place of what the checkpoint says")
    args = parser.parse_args()
    check_tokenizer_flags(parser, args)
    return args


def problems_of(args: argparse.Namespace, env: LaunchEnv) -> list[str]:
    """What is wrong with the flags, before anything is read."""
    tp, pp, found = args.tensor_model_parallel_size, args.pipeline_model_parallel_size, []
    if args.batch_size < 1:
        found.append(f"--batch-size {args.batch_size}: must be at least 1")
    if args.max_new_tokens < 0:
        found.append(f"--max-new-tokens {args.max_new_tokens}: must be 0 or more")
    if "" in args.stop:
        found.append("--stop '': every text has it: give some text, or leave the flag out")
    if args.json_lines and args.stream:
        found.append(
            "--stream with --json-lines: a JSON line is written once its text is whole; leave one out"
        )
    if tp < 1 or pp < 1 or env.world_size % (tp * pp):
        found.append(
            f"--tensor-model-parallel-size {tp} x --pipeline-model-parallel-size {pp} do not divide "
            f"{counted(env.world_size, 'rank')}: start a multiple of that many with torchrun --nproc-per-node N"
        )
    return found


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
    """The trained model, whole, and its configuration. Raises CheckpointError."""
    config, load = open_checkpoint(directory, ckpt_step)
    return filled_model(config, load, device), config


def open_checkpoint(
    directory: str, ckpt_step: int | None
) -> tuple[Config, Callable[[Sequence[LocalPiece], ParallelState | None], None]]:
    """The model's whole configuration, and what fills pieces of it. Raises CheckpointError."""
    from megatron.training.run.checkpointing import load_for_inference

    values, load = load_for_inference(directory, ckpt_step)
    config = Config.from_flat(values)
    if config.model.padded_vocab_size is None:
        raise CheckpointError(
            f"{directory}: no padded_vocab_size in its configuration: not made by this trainer"
        )
    return config, load


def filled_model(
    config: Config,
    load: Callable[[Sequence[LocalPiece], ParallelState | None], None],
    device: object,
    ps: ParallelState | None = None,
) -> GPTModel:
    """The model of `open_checkpoint`; with ps this rank's part: equal numbers of layers a stage, as far as they go.

    Communicates over the world. Raises CheckpointError on all ranks alike; ValueError where sizes do not divide.
    """
    import torch

    from megatron.core.models.gpt.gpt import GPTModel
    from megatron.core.tensor_parallel.mappings import TensorParallel

    tp, (stage, stages) = TensorParallel(), (0, 1)
    if ps is not None:
        tp, (stage, stages) = TensorParallel(ps.tp_group), (ps.pp_rank, ps.pp_size)
    layers, vocabulary = config.model.num_layers, config.model.padded_vocab_size or 0
    if layers < stages:
        raise ValueError(f"--pipeline-model-parallel-size {stages}: the model has {counted(layers, 'layer')}")
    model = GPTModel(
        config.model,
        padded_vocab_size=-(-vocabulary // tp.size) * tp.size,  # zeros behind the checkpoint's rows
        seed=config.training.seed,
        params_dtype=getattr(torch, config.params_dtype),
        device="meta",
        pre_process=stage == 0,
        post_process=stage == stages - 1,
        layers=range(layers * stage // stages, layers * (stage + 1) // stages),
        tp=tp,
    )
    model.to_empty(device=device)
    load(_pieces(model, vocabulary), ps)
    return model.eval()


def _pieces(model: GPTModel, vocabulary: int) -> list[LocalPiece]:
    """Of the model's weights what a checkpoint with so many ids has."""
    import dataclasses

    from megatron.core.dist_checkpointing.state import pieces_of
    from megatron.training.run.checkpointing import MODEL_PREFIX

    found: list[LocalPiece] = []
    for name, weight in model.named_parameters():
        pieces = pieces_of(MODEL_PREFIX.removesuffix("."), model.param_meta[name], weight)
        if "word_embeddings" in name or "output_layer" in name:
            weight.detach().zero_()
            for at, piece in enumerate(pieces):
                rows = piece.tensor[: max(vocabulary - piece.offset[0], 0)]
                shape = (vocabulary, *piece.global_shape[1:])
                pieces[at] = dataclasses.replace(piece, tensor=rows, global_shape=shape)
        found += [piece for piece in pieces if piece.tensor.numel()]
    return found


def join_ranks(args: argparse.Namespace, env: LaunchEnv) -> ParallelState:
    """This rank among those of the launch. Communicates over the world. Raises PeerLostError."""
    import torch

    from megatron.core import device
    from megatron.core.transport import parallel_state
    from megatron.training.guard.rendezvous import open_store

    where = torch.device(args.device)
    if env.world_size == 1:
        return parallel_state.single_process(device.Device(where.type, where.index or 0))
    here = device.current_device(env.local_rank, kind=where.type)
    device.set_threads(env.local_world_size)
    tp, pp = args.tensor_model_parallel_size, args.pipeline_model_parallel_size
    store = open_store(env, parallel_state.DEFAULT_TIMEOUT)
    parallel_state.init_process_group(here, rank=env.rank, world_size=env.world_size, store=store)
    return parallel_state.make_parallel_state(dense_grid(env.world_size, tp=tp, pp=pp), here)


def tokenized(
    prompts: Sequence[Prompt], tokenizer: Tokenizer, config: Config, max_new_tokens: int
) -> tuple[list[list[int]], list[str]]:
    """Ids of each prompt, and what is wrong with any of them. Says where a model goes on behind its positions."""
    from megatron.core.models.gpt.generate import too_long

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


def size_problems(
    args: argparse.Namespace,
    config: Config,
    vocab_size: int,
    lengths: Sequence[int],
    ps: ParallelState,
    here: int,
) -> list[str]:
    """A tokenizer that is not the model's; caches that there is no memory for. here: ranks of this machine."""
    import torch

    model, found = config.model, []
    if vocab_size > (model.padded_vocab_size or 0):
        found.append(
            f"the tokenizer has {vocab_size} ids, the model {model.padded_vocab_size}: were the tokenizer's files "
            "changed?"
        )
    rows = min(len(lengths), args.batch_size * ps.pp_size)
    layers, groups = -(-model.num_layers // ps.pp_size), max(model.num_query_groups // ps.tp_size, 1)
    tokens = rows * (max(lengths, default=0) + args.max_new_tokens)
    itemsize = getattr(torch, config.params_dtype).itemsize
    needed = tokens * 2 * layers * groups * model.kv_channels * itemsize  # keys and values
    available = ps.device.free_bytes()
    if available is not None and ps.device.kind == "cpu":
        available //= here
    if available is not None and needed > available:
        found.append(
            f"--max-new-tokens {args.max_new_tokens}: keys and values of {counted(rows, 'prompt')} take "
            f"{size_text(needed)}, {size_text(available)} are left: lower it, or --batch-size {args.batch_size}"
        )
    return found


def run(args: argparse.Namespace, env: LaunchEnv) -> None:
    """Writes what follows the prompts. Raises CheckpointError, ValueError (a problem a line), PeerLostError, on all
    ranks alike."""
    from megatron.core.dist_checkpointing.agree import gather_json, step
    from megatron.core.models.gpt.generate import Sampling
    from megatron.core.transport.parallel_state import destroy_process_group

    prompts, wrong = read_prompts(args.prompt, args.prompts) if env.rank == 0 else ([], [])
    problems = problems_of(args, env)
    try:
        args.device = chosen_device(args.device)
    except ValueError as error:
        problems.append(str(error))
    try:
        temperature = 0.0 if args.greedy else args.temperature
        sampling = Sampling(temperature, args.top_k, args.top_p, args.seed)
    except ValueError as error:
        problems.append(str(error))
    if problems or (wrong and env.world_size == 1):
        raise ValueError("\n".join(problems + wrong))
    ps = join_ranks(args, env)
    prompts, wrong = gather_json((prompts, wrong), ps)[0]
    prompts = [Prompt(*one) for one in prompts]
    with step() as opened:
        config, load = open_checkpoint(args.load, args.ckpt_step)
    opened.gather(ps)
    tokenizer = build_from_config(tokenizer_config(args, config.tokenizer))
    ids, unfit = tokenized(prompts, tokenizer, config, args.max_new_tokens)
    lengths = sorted(map(len, ids))
    too_large = size_problems(args, config, tokenizer.vocab_size, lengths, ps, env.local_world_size)
    if found := next(filter(None, gather_json([*wrong, *unfit, *too_large], ps)), None):
        raise ValueError("\n".join(found))
    model = filled_model(config, load, ps.device.torch_device, ps)
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
    """Completions, on rank 0 and in the order of the prompts, which data parallel ranks take in turns. Communicates over
    the world."""
    from megatron.core.dist_checkpointing.agree import gather_json
    from megatron.core.models.gpt.generate import generate

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


def main() -> None:
    guard_console()
    env, told = LaunchEnv(), ""
    try:
        env = LaunchEnv.read()
        if env.rank:  # rank 0 says what has happened; Ctrl-C may find this one waiting for others
            signal.signal(signal.SIGINT, signal.SIG_DFL)
        with contextlib.redirect_stderr(io.StringIO()) if env.rank else contextlib.nullcontext():
            args = parse()
        run(args, env)
        return
    except CheckpointError as error:
        status, told = int(ExitStatus.CHECKPOINT), str(error)
    except ValueError as error:
        status, told = int(ExitStatus.CONFIGURATION), str(error)
    except KeyboardInterrupt:
        status, told = INTERRUPTED, "interrupted"
    except RuntimeError as error:  # a lost peer
        if getattr(error, "status", None) != ExitStatus.PEER_LOST:
            raise
        status, told = int(ExitStatus.PEER_LOST), str(error)
    if not env.rank:
        for line in told.splitlines():
            print(f"{program(__file__)}: {line}", file=sys.stderr)
    if env.world_size > 1:
        hard_exit(status)  # the others may be gone
    sys.exit(status)


if __name__ == "__main__":
    main()
