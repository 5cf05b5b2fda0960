"""A checkpoint's model for inference: whole in one process, or the parts of several ranks, in any layout."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import torch

from megatron.core import device
from megatron.core.dist_checkpointing.files import CheckpointError
from megatron.core.dist_checkpointing.state import LocalPiece, pieces_of
from megatron.core.models.gpt.gpt import GPTModel
from megatron.core.tensor_parallel.mappings import TensorParallel
from megatron.core.transport import parallel_state
from megatron.core.transport.parallel_state import ParallelState
from megatron.core.transport.rank_grid import dense_grid
from megatron.core.words import counted
from megatron.training.config.config import Config
from megatron.training.config.launch_env import LaunchEnv
from megatron.training.guard.rendezvous import open_store
from megatron.training.run.checkpointing import MODEL_PREFIX, load_for_inference

Load = Callable[[Sequence[LocalPiece], ParallelState | None], None]


def chosen_device(device: str | None) -> str:
    """The device, None: the default. Raises ValueError for one that is none, holds no values or is not there."""
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        if torch.empty(0, device=device).is_meta:
            raise ValueError(f"--device {device}: holds no values: give cpu or cuda")
    except (RuntimeError, AssertionError) as error:  # AssertionError: a torch that was built without it
        raise ValueError(f"--device {device}: cannot be used: {str(error).splitlines()[0]}") from error
    return device


def join_ranks(device_name: str, tp: int, pp: int, env: LaunchEnv) -> ParallelState:
    """This rank among those of the launch, data parallel beyond tp x pp. Communicates over the world.

    Raises PeerLostError."""
    where = torch.device(device_name)
    kind: device.DeviceKind = "cuda" if where.type == "cuda" else "cpu"
    if env.world_size == 1:
        return parallel_state.single_process(device.Device(kind, where.index or 0))
    here = device.current_device(env.local_rank, kind=kind)
    device.set_threads(env.local_world_size)
    store = open_store(env, parallel_state.DEFAULT_TIMEOUT)
    parallel_state.init_process_group(here, rank=env.rank, world_size=env.world_size, store=store)
    return parallel_state.make_parallel_state(dense_grid(env.world_size, tp=tp, pp=pp), here)


def load_model(directory: str, ckpt_step: int | None, device: str) -> tuple[GPTModel, Config]:
    """The trained model, whole, and its configuration. Raises CheckpointError."""
    config, load = open_checkpoint(directory, ckpt_step)
    return filled_model(config, load, device), config


def open_checkpoint(directory: str, ckpt_step: int | None) -> tuple[Config, Load]:
    """The model's whole configuration, and what fills pieces of it. Raises CheckpointError."""
    values, load = load_for_inference(directory, ckpt_step)
    config = Config.from_flat(values)
    if config.model.padded_vocab_size is None:
        raise CheckpointError(
            f"{directory}: no padded_vocab_size in its configuration: not made by this trainer"
        )
    return config, load


def filled_model(
    config: Config,
    load: Load,
    device: str | torch.device,
    ps: ParallelState | None = None,
) -> GPTModel:
    """The model of `open_checkpoint`; with ps this rank's part: equal numbers of layers a stage, as far as they go.

    Communicates over the world. Raises CheckpointError on all ranks alike; ValueError where sizes do not divide.
    """
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
