"""The model chunks of one rank as one set of parameters, by the names they have in the whole model."""

from __future__ import annotations

from torch import nn

from megatron.core.module import ModelError


class ModelChunks:
    """Chunks of one rank, one pipeline stage each.

    parameters: of all chunks, in their order. holders: name -> the chunks that hold it (several hold it only as the
    very same tensor). names_of: the names of each chunk. stage_of: name -> global stage, the first of several.

    Raises ModelError where chunks have different parameters of one name, or one parameter under two.
    """

    def __init__(self, modules: tuple[nn.Module, ...], stages: tuple[int, ...] | None = None) -> None:
        stages = tuple(range(len(modules))) if stages is None else stages
        assert len(stages) == len(modules), f"{len(modules)} chunks, stages {stages}"
        assert list(stages) == sorted(set(stages)), f"chunks in the order of their stages, not {stages}"
        self.modules = modules
        self.stages = stages
        self.parameters: dict[str, nn.Parameter] = {}
        self.holders: dict[str, list[int]] = {}
        self.names_of: list[list[str]] = [[] for _ in modules]
        name_of: dict[int, str] = {}
        for chunk, module in enumerate(modules):
            for name, parameter in module.named_parameters():
                known = self.parameters.setdefault(name, parameter)
                if known is not parameter:
                    raise ModelError(
                        f"model chunks {self.holders[name][0]} and {chunk} both have a parameter {name!r}: give the "
                        "parameters of different chunks different names, those of the whole model"
                    )
                other = name_of.setdefault(id(parameter), name)
                if other != name:
                    raise ModelError(
                        f"one tensor has two names, {other!r} and {name!r}: give a parameter that several chunks hold "
                        "the same name in all of them"
                    )
                self.holders.setdefault(name, []).append(chunk)
                self.names_of[chunk].append(name)
        self.stage_of = {name: stages[chunks[0]] for name, chunks in self.holders.items()}
