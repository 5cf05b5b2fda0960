"""A checkpoint's model for tools that only run it forwards: whole, or this rank's part under TP, PP and DP ranks."""

from __future__ import annotations

import argparse
import contextlib
import io
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from megatron.command import program
from megatron.core.datasets.errors import DataError
from megatron.core.dist_checkpointing.files import CheckpointError
from megatron.core.tokenizers.build import build_from_config
from megatron.core.tokenizers.tokenizer import Tokenizer
from megatron.core.transport.rank_grid import dense_grid
from megatron.core.words import counted, size_text
from megatron.training.config.config import Config
from megatron.training.config.launch_env import LaunchEnv
from megatron.training.guard.console import guard_console
from megatron.training.guard.exit_status import ExitStatus, StatusTable, hard_exit, status_of
from tools import tokenizer_flags
from tools.flags import add_flags, check_bounds, script_parser

if TYPE_CHECKING:  # torch comes once the line is known to be right
    from megatron.core.dist_checkpointing.state import LocalPiece
    from megatron.core.models.gpt.gpt import GPTModel
    from megatron.core.transport.parallel_state import ParallelState

Load = Callable[["Sequence[LocalPiece]", "ParallelState | None"], None]
INTERRUPTED = 128 + signal.SIGINT
REFUSALS: StatusTable = {
    CheckpointError: ExitStatus.CHECKPOINT,
    DataError: ExitStatus.DATA,
    ValueError: ExitStatus.CONFIGURATION,
}


def model_parser(script: str, about: str | None) -> argparse.ArgumentParser:
    """The flags that name a model, its tokenizer, and the ranks and the device that it runs on."""
    parser = script_parser(script, about)
    add_flags(
        parser, {"--load DIR": "folder given to --save when training, or of another format"}, required=True
    )
    add_flags(
        parser,
        {
            "--ckpt-step N": "iteration to load; default the newest",
            "--max-position-embeddings N": "of a Hugging Face model whose attention window spans no more",
            "--device NAME": "default: cuda where there is a GPU, else cpu",
            "--tensor-model-parallel-size N=1": "under torchrun",
            "--pipeline-model-parallel-size N=1": "under torchrun",
        },
    )
    tokenizer_flags.add_tokenizer_flags(parser, "in the place of what the checkpoint says")
    return parser


def parsed(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """The line of a `model_parser`."""
    args = parser.parse_args()
    check_bounds(parser, args, tokenizer_flags.FIELDS)
    return args


def rank_problems(args: argparse.Namespace, env: LaunchEnv) -> list[str]:
    """What is wrong with sizes and device, which is chosen where none is given. It brings torch."""
    tp, pp = args.tensor_model_parallel_size, args.pipeline_model_parallel_size
    problems = []
    if min(tp, pp) < 1 or env.world_size % (tp * pp):
        problems.append(
            f"--tensor-model-parallel-size {tp} x --pipeline-model-parallel-size {pp} do not divide "
            f"{counted(env.world_size, 'rank')}: start a multiple of that many with torchrun --nproc-per-node N"
        )
    try:
        args.device = chosen_device(args.device)
    except ValueError as error:
        problems.append(str(error))
    return problems


def chosen_device(device: str | None) -> str:
    """The device, None: the default. Raises ValueError for one that is none, holds no values or is not there."""
    import torch

    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        if torch.empty(0, device=device).device.type not in ("cpu", "cuda"):
            raise ValueError(f"--device {device}: holds no values, or is not supported: give cpu or cuda")
    except (RuntimeError, AssertionError) as error:  # AssertionError: a torch that was built without it
        raise ValueError(f"--device {device}: cannot be used: {str(error).splitlines()[0]}") from error
    return device


def open_checkpoint(
    directory: str, ckpt_step: int | None, positions: int | None = None
) -> tuple[Config, Load]:
    """The model's whole configuration, and what fills pieces of it. positions: `--max-position-embeddings`. Raises
    CheckpointError."""
    from megatron.training.run.checkpointing import load_for_inference

    values, load = load_for_inference(directory, ckpt_step, positions)
    config = Config.from_flat(values)
    if config.model.padded_vocab_size is None:
        raise CheckpointError(
            f"{directory}: no padded_vocab_size in its configuration: not made by this trainer"
        )
    return config, load


def filled_model(config: Config, load: Load, ps: ParallelState) -> GPTModel:
    """The model of `open_checkpoint`, this rank's part: equal numbers of layers a stage, as far as they go.

    Communicates over the world. Raises CheckpointError on all ranks alike; ValueError where sizes do not divide.
    """
    import torch

    from megatron.core.dist_checkpointing.state import pieces_of
    from megatron.core.tensor_parallel.mappings import TensorParallel
    from megatron.training.engine import bias_pieces
    from megatron.training.run.build import part_of_model
    from megatron.training.run.checkpointing import MODEL_PREFIX

    config = config.replace(
        moe_expert_capacity_factor=None
    )  # a text does not depend on what is written beside it
    layers, stage, stages = config.model.num_layers, ps.pp_rank, ps.pp_size
    if layers < stages:
        raise ValueError(f"--pipeline-model-parallel-size {stages}: the model has {counted(layers, 'layer')}")
    with torch.device("meta"):
        model = part_of_model(
            config,
            pre_process=stage == 0,
            post_process=stage == stages - 1,
            layers=range(layers * stage // stages, layers * (stage + 1) // stages),
            tp=TensorParallel.of(ps, False),
        )
    model.to_empty(device=ps.device.torch_device)
    prefix = MODEL_PREFIX.removesuffix(".")
    named = model.named_parameters()
    pieces = [piece for name, weight in named for piece in pieces_of(prefix, model.param_meta[name], weight)]
    load(pieces + bias_pieces(dict(model.named_buffers())), ps)
    return model.eval()


def join_ranks(args: argparse.Namespace, env: LaunchEnv) -> ParallelState:
    """This rank among those of the launch, on `--device`. Communicates over the world. Raises PeerLostError."""
    import torch

    from megatron.core import device
    from megatron.core.transport import parallel_state
    from megatron.training.guard.rendezvous import open_store

    where = torch.device(args.device)
    kind: device.DeviceKind = "cuda" if where.type == "cuda" else "cpu"
    if env.world_size == 1:
        return parallel_state.single_process(device.Device(kind, where.index or 0))
    here = device.current_device(env.local_rank, kind=kind)
    device.set_threads(env.local_world_size)
    tp, pp = args.tensor_model_parallel_size, args.pipeline_model_parallel_size
    store = open_store(env, parallel_state.DEFAULT_TIMEOUT)
    parallel_state.init_process_group(here, rank=env.rank, world_size=env.world_size, store=store)
    return parallel_state.make_parallel_state(dense_grid(env.world_size, tp=tp, pp=pp), here)


def join_and_open(args: argparse.Namespace, env: LaunchEnv) -> tuple[ParallelState, Config, Load]:
    """`join_ranks` and `open_checkpoint`, whose errors all ranks raise alike."""
    ps = join_ranks(args, env)
    with alike(ps):
        return ps, *open_checkpoint(args.load, args.ckpt_step, args.max_position_embeddings)


@contextlib.contextmanager
def alike(ps: ParallelState) -> Iterator[None]:
    """What a rank refuses in a part that it does alone is raised by all, with the first one's message.

    Communicates over the world. Raises ValueError, or the kind of it that a tool's `main` has a status of its own for.
    """
    from megatron.core.dist_checkpointing.agree import gather_json

    refusal = None
    try:
        yield
    except ValueError as error:
        refusal = int(status_of(error, REFUSALS)), str(error)
    if first := next(filter(None, gather_json(refusal, ps)), None):
        raise next(kind for kind, status in REFUSALS.items() if status == first[0])(first[1])


def model_tokenizer(args: argparse.Namespace, config: Config) -> Tokenizer:
    """The one that the flags name, over the checkpoint's. Raises ValueError for one that is not the model's."""
    tokenizer = build_from_config(tokenizer_flags.tokenizer_config(args, config.tokenizer))
    rows = config.model.padded_vocab_size or 0
    if tokenizer.vocab_size > rows:
        raise ValueError(
            f"the tokenizer has {tokenizer.vocab_size} ids, the model {rows}: give that of the model "
            "(--tokenizer-type, --tokenizer-model, ...); or were its files changed?"
        )
    return tokenizer


def check_memory(needed: int, what: str, remedy: str, ps: ParallelState, env: LaunchEnv) -> None:
    """Raises ValueError where this rank's device has less left; ranks of a machine share the memory of a CPU."""
    free = ps.device.free_bytes()
    if free is not None and ps.device.kind == "cpu":
        free //= env.local_world_size
    if free is not None and needed > free:
        raise ValueError(f"{what} take {size_text(needed)}, {size_text(free)} are left: {remedy}")


def main_of_ranks(
    script: str,
    parse: Callable[[], argparse.Namespace],
    run: Callable[[argparse.Namespace, LaunchEnv], None],
) -> None:
    """A tool's `main`, on each rank of a launch: what is wrong is said by rank 0 alone, and is the exit status."""
    guard_console()
    env, message = LaunchEnv(), ""
    try:
        env = LaunchEnv.read()
        if env.rank:  # Ctrl-C may find this one waiting for others
            signal.signal(signal.SIGINT, signal.SIG_DFL)
        with contextlib.redirect_stderr(io.StringIO()) if env.rank else contextlib.nullcontext():
            args = parse()
        run(args, env)
        return
    except ValueError as error:
        status, message = int(status_of(error, REFUSALS)), str(error)
    except KeyboardInterrupt:
        status, message = INTERRUPTED, "interrupted"
    except RuntimeError as error:  # a lost peer
        if getattr(error, "status", None) != ExitStatus.PEER_LOST:
            raise
        status, message = int(ExitStatus.PEER_LOST), str(error)
    if not env.rank:
        for line in message.splitlines():
            print(f"{program(script)}: {line}", file=sys.stderr)
    if env.world_size > 1:
        hard_exit(status)  # the others may be gone
    sys.exit(status)
