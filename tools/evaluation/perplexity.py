"""How well a model predicts documents: nats a token, perplexity, bits a byte."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch

from megatron.core.dist_checkpointing.agree import gather_json
from megatron.core.words import brief, counted
from tools.evaluation.documents import Document, TextWindow, batches, windows
from tools.evaluation.scorer import Scorer

_EVERY_S = 5.0  # between two lines on progress


class Predicted(NamedTuple):
    """nats: negative log likelihood of `tokens` tokens together. bytes: of all documents' texts; None where they are
    not known of all."""

    documents: int
    tokens: int
    nats: float
    bytes: int | None

    def figures(self) -> dict[str, float | None]:
        """As `--json` writes them; null for what is not finite, or not known."""
        per_token = self.nats / self.tokens
        per_byte = self.nats / math.log(2) / self.bytes if self.bytes else None
        perplexity = math.exp(per_token) if per_token < math.log(sys.float_info.max) else None
        found = {"nats_per_token": per_token, "perplexity": perplexity, "bits_per_byte": per_byte}
        finite = {
            name: None if value is None or not math.isfinite(value) else value
            for name, value in found.items()
        }
        return {"tokens": self.tokens, **finite}


class _Reader:
    """Counts what passes: documents, and bytes of those that are this rank's to count."""

    def __init__(self, documents: Iterable[Document], vocab_size: int, rank: int, ranks: int) -> None:
        self._documents, self._vocab_size, self._rank, self._ranks = documents, vocab_size, rank, ranks
        self.documents, self.bytes, self.known = 0, 0, True

    def windows(self, length: int) -> Iterator[TextWindow]:
        for document in self._documents:
            if (
                len(document.ids)
                and not 0 <= int(min(document.ids)) <= int(max(document.ids)) < self._vocab_size
            ):
                raise ValueError(
                    f"{document.where}: has ids from {min(document.ids)} to {max(document.ids)}, the model "
                    f"{self._vocab_size} ids: was it made with another tokenizer?"
                )
            if self.documents % self._ranks == self._rank:
                num_bytes = document.num_bytes()
                self.known, self.bytes = self.known and num_bytes is not None, self.bytes + (num_bytes or 0)
            self.documents += 1
            yield from windows(document, length)


def predict(
    scorer: Scorer, documents: Iterable[Document], *, length: int, batch_size: int, show: bool = False
) -> Predicted:
    """Evaluate all documents, whose windows data parallel ranks share out by batches.

    length: inputs of a window. show: lines on progress on standard error. Every rank reads all documents. Communicates
    over the world. Raises ValueError for ids that the model does not have, and what the documents raise.
    """
    ps, model = scorer.ps, scorer.model
    reader = _Reader(documents, model.vocab_size, ps.rank, ps.world_size)
    nats = torch.zeros((), dtype=torch.float64, device=ps.device.torch_device)
    tokens, seen, began = 0, 0, time.monotonic()
    next_line = began + _EVERY_S
    for number, batch in enumerate(batches(reader.windows(length), batch_size)):
        here = sum(len(window.inputs) for window in batch)
        seen += here
        if number % ps.dp_size != ps.dp_rank:
            continue
        inputs = [window.inputs for window in batch]
        losses = scorer.forward(scorer.rows(inputs), scorer.rows([window.targets for window in batch]))
        if losses is not None:
            nats += losses.double().masked_fill_(~scorer.counted(inputs), 0.0).sum()
        tokens += here
        if show and (now := time.monotonic()) >= next_line:
            speed = f"{brief(seen / (now - began))} tokens/s"
            print(f"{seen:,} tokens of {counted(reader.documents, 'document')}, {speed}", file=sys.stderr)
            next_line = now + _EVERY_S
    scorer.finish()
    answers = model.post_process and ps.tp_rank == 0
    mine = [tokens, float(nats), reader.bytes, reader.known, answers]  # sync: the result
    every = gather_json(mine, ps)
    shares = [one for one in every if one[4]]
    known = all(one[3] for one in every)
    return Predicted(
        reader.documents,
        sum(one[0] for one in shares),
        math.fsum(one[1] for one in shares),
        sum(one[2] for one in every) if known else None,
    )
