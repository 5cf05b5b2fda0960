"""Covering arrays of the ways in which eight ranks can train: every pair of choices that go together, in few cases. Of
dense models every triple of strategy, schedule and policy besides; of models with experts see `experts_cases`.

`python -m tests.harness.covering` writes that of dense models (tests/parity/one_plan_cases.txt): greedy, from a fixed
seed. The test reads the file and checks what it covers by itself.
"""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import ClassVar, TypeVar

FOLDER = Path(__file__).resolve().parent.parent / "parity"
WORLD_SIZE = 8
SEED = 13
CANDIDATES = 40  # drawn for each case; the one that covers most is taken

LINEAR = ("gpipe", "1f1b", "zb-h1", "zb-h2", "zb-1p", "zb-2p")
TWO_CHUNKS = ("interleaved", "gis", "zbv", "v-half", "v-min", "1f1b-v", "dualpipe-v")
CHOICES: dict[str, tuple[object, ...]] = {
    "tp": (1, 2),
    "pp": (1, 2, 4),
    "strategy": ("no_shard", "optim", "optim_grads", "optim_grads_params", "HSDP", "HFSDP"),
    "schedule": (*LINEAR, *TWO_CHUNKS),
    "policy": ("memory", "backward", "step", "budget"),
    "tied": (True, False),
    "recompute": ("none", "selective", "1", "2"),
    "sp": (False, True),
    "padded": (False, True),
    "validated": (False, True),
}
DEEP = ("strategy", "schedule", "policy")

Pair = tuple[tuple[str, object], ...]


@dataclasses.dataclass(frozen=True)
class Case:
    """recompute: none, selective, or full with so many layers together. padded: fewer layers than stages can share
    evenly. validated: optimizer steps are validated afterwards, and clipped, so that each is taken back once."""

    choices: ClassVar[dict[str, tuple[object, ...]]] = CHOICES
    together: ClassVar[tuple[str, ...]] = DEEP  # covered as one, beside the pairs
    derived: ClassVar[tuple[str, ...]] = ("dp",)  # follow from the choices, and are paired with them

    tp: int
    pp: int
    strategy: str
    schedule: str
    policy: str
    tied: bool
    recompute: str
    sp: bool
    padded: bool
    validated: bool

    @property
    def dp(self) -> int:
        return WORLD_SIZE // (self.tp * self.pp)

    @property
    def chunks(self) -> int:
        return 2 if self.schedule in TWO_CHUNKS else 1

    @property
    def is_possible(self) -> bool:
        """Whether the flags allow it."""
        if self.tp * self.pp > WORLD_SIZE:
            return False
        if self.pp == 1 and (self.schedule != "1f1b" or self.padded or self.validated):
            return False
        if self.sp and self.tp == 1:
            return False
        if self.strategy != "no_shard" and self.dp == 1:
            return False
        if self.strategy in ("HSDP", "HFSDP") and self.dp < 4:
            return False
        if self.policy != "memory" and self.strategy in ("no_shard", "optim"):
            return False
        return self.policy != "backward" or (self.pp == 1 and self.strategy != "optim_grads")

    @property
    def covers(self) -> set[Pair]:
        """Pairs of choices and of what follows from them, and those that are covered together."""
        chosen = [(name, getattr(self, name)) for name in (*self.choices, *self.derived)]
        deep = tuple((name, getattr(self, name)) for name in self.together)
        return {*itertools.combinations(chosen, 2), deep}

    def __str__(self) -> str:
        return " ".join(f"{name}={getattr(self, name)}" for name in self.choices)


C = TypeVar("C", bound=Case)


def parsed(kind: type[C], line: str) -> C:
    """The case that `str` wrote."""
    told = dict(word.split("=") for word in line.split())
    by_text = {name: {str(one): one for one in values} for name, values in kind.choices.items()}
    return kind(**{name: by_text[name][told[name]] for name in kind.choices})


def read_cases(kind: type[C], name: str) -> list[C]:
    return [parsed(kind, line) for line in (FOLDER / name).read_text().splitlines()]


def write_cases(name: str, cases: Iterable[Case]) -> None:
    (FOLDER / name).write_text("".join(f"{case}\n" for case in cases))


def every_case() -> Iterator[Case]:
    """Of dense models."""
    for values in itertools.product(*CHOICES.values()):
        case = Case(*values)  # type: ignore[arg-type]
        if case.is_possible:
            yield case


def to_cover(cases: Iterable[Case]) -> set[Pair]:
    """What any of them covers."""
    return {one for case in cases for one in case.covers}


def covering_array(possible: Sequence[C]) -> list[C]:
    """Greedy: of some that cover what is missing, the one that covers most."""
    draw = random.Random(SEED)
    of: dict[Pair, list[int]] = {}
    covers = [case.covers for case in possible]
    for at, pairs in enumerate(covers):
        for pair in pairs:
            of.setdefault(pair, []).append(at)
    missing = sorted(of, key=lambda pair: (len(of[pair]), str(pair)))
    left, chosen = set(missing), []
    for pair in missing:  # the rarest first
        while pair in left:
            drawn = [draw.choice(of[pair]) for _ in range(CANDIDATES)]
            best = max(drawn, key=lambda at: len(covers[at] & left))
            chosen.append(possible[best])
            left -= covers[best]
    return chosen


if __name__ == "__main__":
    write_cases("one_plan_cases.txt", covering_array(list(every_case())))
