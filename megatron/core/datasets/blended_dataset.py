"""Several datasets read in turns."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megatron.core.datasets.blend_indices import build_blending_indices, build_exhaustive_blending_indices
from megatron.core.datasets.errors import DataError, require_memory
from megatron.core.datasets.gpt_dataset import GPTDataset, Sample


class BlendedDataset:
    """A deterministic mixture; who takes which turn is decided by blend_indices.py.

    members: at least one.  weights: normalised.  size: samples of the blend; None goes through every member
    once. Raises DataError where a member is too short for its turns. Turns are kept in memory, 10 bytes a
    sample; building them takes about a second for 10^7, so they are not cached on disk.
    """

    def __init__(self, members: Sequence[GPTDataset], weights: list[float], size: int | None) -> None:
        self.members = list(members)
        self.weights = list(weights)
        turns_taken = sum(map(len, members)) if size is None else size
        require_memory(10 * turns_taken, f"the turns of {turns_taken} samples of a blend (--train-samples)")
        if size is None:
            self.member_index, self.sample_index = build_exhaustive_blending_indices(
                [len(m) for m in members]
            )
        else:
            self.member_index, self.sample_index = build_blending_indices(weights, size)
        turns = np.bincount(self.member_index, minlength=len(self.members))
        for member, needed in zip(self.members, turns.tolist(), strict=True):
            if needed > len(member):
                raise DataError(
                    f"{member.corpus.prefix}: the blend needs {needed} samples of split {member.split!r}, "
                    "the dataset "
                    f"has {len(member)}: raise --mid-level-dataset-surplus"
                )

    def __len__(self) -> int:
        return len(self.member_index)

    def __getitem__(self, i: int) -> Sample:
        """Sample i, as the member gives it."""
        member, sample = self.locate(i)
        return self.members[member][sample]

    def description(self) -> dict[str, object]:
        """What decides which tokens sample i has; see `GPTDataset.description`."""
        return {"weights": self.weights, "members": [member.description() for member in self.members]}

    def documents(self, i: int) -> list[int]:
        """The sequences, in their own corpus, that sample i has tokens of."""
        member, sample = self.locate(i)
        return self.members[member].documents(sample)

    def locate(self, i: int) -> tuple[int, int]:
        """Which member gives sample i, and which of its samples that is."""
        if not 0 <= i < len(self):
            raise IndexError(f"sample {i} of {len(self)}")
        return int(self.member_index[i]), int(self.sample_index[i])
