"""Which rank holds which stage of the pipeline."""

from __future__ import annotations

from dataclasses import dataclass

LINEAR, LOOPED, V_SHAPED = "linear", "looped", "v"
KINDS = (LINEAR, LOOPED, V_SHAPED)


@dataclass(frozen=True)
class Placement:
    """num_chunks global stages on each of num_ranks ranks.

    linear: stage r on rank r. looped: chunk c of rank r is stage c*num_ranks + r. v: as looped, but odd chunks run
    from the last rank to the first, so that the stage after a turn is on the same rank.
    """

    kind: str
    num_ranks: int
    num_chunks: int = 1

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"placement {self.kind!r} is none of {', '.join(KINDS)}")
        if self.num_ranks < 1 or self.num_chunks < 1:
            raise ValueError(f"{self.num_ranks} ranks with {self.num_chunks} chunks: both must be at least 1")
        if self.kind == LINEAR and self.num_chunks != 1:
            raise ValueError(f"a linear placement has one chunk a rank, not {self.num_chunks}")

    @property
    def num_stages(self) -> int:
        """Global stages."""
        return self.num_ranks * self.num_chunks

    def rank_of(self, stage: int) -> int:
        """The rank that holds a global stage."""
        assert 0 <= stage < self.num_stages, (stage, self.num_stages)
        chunk, place = divmod(stage, self.num_ranks)
        return self.num_ranks - 1 - place if self.kind == V_SHAPED and chunk % 2 else place

    def chunk_of(self, stage: int) -> int:
        """The local number of a global stage on its rank."""
        assert 0 <= stage < self.num_stages, (stage, self.num_stages)
        return stage // self.num_ranks

    def stage_of(self, rank: int, chunk: int) -> int:
        """The global stage of a rank's chunk."""
        assert 0 <= rank < self.num_ranks, (rank, self.num_ranks)
        assert 0 <= chunk < self.num_chunks, (chunk, self.num_chunks)
        place = self.num_ranks - 1 - rank if self.kind == V_SHAPED and chunk % 2 else rank
        return chunk * self.num_ranks + place

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The global stages of a rank, by chunk, which is their order."""
        return tuple(self.stage_of(rank, chunk) for chunk in range(self.num_chunks))

    def ranks(self) -> tuple[int, ...]:
        """The rank of each global stage."""
        return tuple(self.rank_of(stage) for stage in range(self.num_stages))

    @property
    def has_both_ends_on_one_rank(self) -> bool:
        """Whether the first and the last of several stages are."""
        return self.num_stages > 1 and self.rank_of(0) == self.rank_of(self.num_stages - 1)

    def as_json(self) -> dict[str, str | int]:
        """For files and hashes."""
        return {"kind": self.kind, "ranks": self.num_ranks, "chunks": self.num_chunks}
