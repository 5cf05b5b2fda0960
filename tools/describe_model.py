"""What a launch line's ranks hold at rest, and what one microbatch of their stages takes by module, for any number of
ranks: built and run here on tensors without memory.

    python tools/describe_model.py --ranks 512 -- --tensor-model-parallel-size 8 --num-layers 80 ...
    python tools/describe_model.py --ranks 8 --json -- --use-custom-fsdp ...

One rank of every pipeline rank. Bytes at rest are the engine's; those of a microbatch are what its F keeps for its B,
and what its B files for its W. Modules come by the bytes that they keep for a FLOP of their F: what to recompute first.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron.core.memory_tracker import PERSISTENT
from megatron.core.words import size_text
from megatron.estimate.description import ModelDescription, ModelPiece, ModuleFigures
from megatron.training.config.config import Config
from megatron.training.config.launch_env import LaunchEnv
from megatron.training.config.problems import ConfigurationError
from megatron.training.engine import Engine
from megatron.training.run.arguments import parse_config
from megatron.training.run.build import imagined_engines
from megatron.training.run.describe import described
from tools.flags import add_flags, script_parser

SHOWN = 8  # modules of a rank


def ranks_of(config: Config) -> list[dict[str, Any]]:
    """By pipeline rank: its first rank, its stages, and bytes."""
    config = described(config)
    spec = config.planner().spec
    engines, description = imagined_engines(config), config.description
    assert isinstance(description, ModelDescription), "the rules ask for all that a model needs"
    if spec.keeps_gathered and description.gathered is not None:
        description = description.gathered
    rows = []
    for place in range(spec.placement.num_ranks):
        rank = config.grid().rank({"pp": place})
        pieces = []
        for stage in spec.local_stages(place):
            part = spec.stages[stage]
            chunks = config.model.recompute_chunks(len(part.layers))
            pieces.append(description.stage(part.layers, chunks, embeds=part.embedding, ends=part.loss))
        rows.append(_row(rank, spec.local_stages(place), engines[rank], pieces))
    return rows


def _row(rank: int, stages: Any, engine: Engine, pieces: list[ModelPiece]) -> dict[str, Any]:
    modules: dict[str, ModuleFigures] = {}
    for piece in pieces:
        for path, figures in piece.modules.items():
            modules[path] = modules.get(path, ModuleFigures()).beside(figures)
    return {
        "rank": rank,
        "stages": list(stages),
        "at_rest_bytes": engine.persistent_bytes(),
        "by_kind": {name: size for name in PERSISTENT if (size := engine.memory_tracker.live(name))},
        "kept_bytes": sum(piece.kept_bytes for piece in pieces),
        "filed_bytes": sum(piece.filed_bytes for piece in pieces),
        "by_module": {path: _module(figures) for path, figures in modules.items()},
    }


def _module(figures: ModuleFigures) -> dict[str, Any]:
    """As --check-config will have it."""
    forward = figures.work.get("F")
    flops = 0 if forward is None else forward.products + forward.attention
    return {
        "parameters": figures.parameters,
        "activation_bytes": figures.kept_bytes,
        "recompute_flops": flops,
        "bytes_per_flop": figures.kept_bytes / flops if flops else None,
    }


def lines_of(row: dict[str, Any]) -> list[str]:
    """A rank's, for people."""
    kinds = ", ".join(f"{name} {size_text(size)}" for name, size in row["by_kind"].items())
    stages = ", ".join(map(str, row["stages"]))
    lines = [
        f"rank {row['rank']} (stage {stages}): {size_text(row['at_rest_bytes'])} at rest ({kinds})",
        f"  a microbatch: {size_text(row['kept_bytes'])} kept from F to B, {size_text(row['filed_bytes'])} from B to W",
    ]
    kept = [(path, one) for path, one in row["by_module"].items() if one["activation_bytes"]]
    kept.sort(key=lambda item: -item[1]["activation_bytes"] / (1 + item[1]["recompute_flops"]))
    lines += [
        f"  {size_text(one['activation_bytes']):>12}  {path or 'the model'}" for path, one in kept[:SHOWN]
    ]
    return lines


def main(words: list[str] | None = None) -> int:
    """0, or 2 where flags do not fit."""
    parser = script_parser("describe_model.py", __doc__)
    own = {
        "--ranks N=1": "in all",
        "--gpus": "what they compute on; else CPUs",
        "--json": "one object, for programs",
    }
    add_flags(parser, own)
    parser.add_argument("line", nargs="*", metavar="FLAG", help="the trainer's, behind --")
    asked = parser.parse_args(words)
    try:
        config = parse_config(asked.line, env=LaunchEnv(world_size=asked.ranks), needs_data=False)
    except ConfigurationError as error:
        print(error, file=sys.stderr)
        return 2
    rows = ranks_of(config.replace(distributed_backend="nccl" if asked.gpus else "gloo"))
    told = (
        json.dumps({"ranks": rows})
        if asked.json
        else "\n".join(line for row in rows for line in lines_of(row))
    )
    print(told)
    return 0


if __name__ == "__main__":
    sys.exit(main())
