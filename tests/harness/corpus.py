"""A corpus that stays as it is: what tests expect of a loss must not move with a page of the documentation."""

from __future__ import annotations

import random
from pathlib import Path

_WORDS = (
    "the of and to in a is that it was for on are with as at be this have from or by had not but what all were when we "
    "there can an your which their said if do will each about how up out them then she many some so these would other "
    "into has more her two like him see time could no make than first been its who now people my made over did down "
    "only way find use may water long little very after words called just where most know rank stage weight gradient "
    "pipeline schedule memory microbatch layer forward backward optimizer checkpoint sequence parallel tensor model"
).split()


def write(folder: Path, documents: int = 40, words: int = 1600) -> None:
    """Markdown files of sentences whose words are as frequent as their places in the list say: bytes of about 3 nats by
    frequency, fewer by what came before."""
    draw = random.Random(0)
    weights = [1 / (place + 3) for place in range(len(_WORDS))]
    folder.mkdir()
    for number in range(documents):
        drawn = iter(draw.choices(_WORDS, weights, k=words))
        lines = []
        while sentence := [word for word, _ in zip(drawn, range(draw.randint(4, 14)), strict=False)]:
            lines.append(" ".join(sentence).capitalize() + ".")
        (folder / f"{number or 'tour'}.md").write_text(f"# Page {number}\n" + "\n".join(lines) + "\n")
