"""How well a model predicts documents: nats a token, perplexity, bits a byte."""

from __future__ import annotations

import itertools
import math
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch

from megatron.core.dist_checkpointing.agree import gather_json
from megatron.core.transport.parallel_state import ParallelState
from megatron.core.words import brief, counted
from tools.evaluation.documents import Document, TextWindow, batches, windows
from tools.evaluation.scorer import Scorer
from tools.inference import alike

LONG = 1 << 20  # a document of more characters is shared out by windows
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


class _Share:
    """This rank's part of what is to be predicted, and counts of what has passed.

    A document is one replica's, in turns, so that no other tokenizes it; of a long one each replica takes windows in
    turns. bytes: of documents, which ranks of the world count in turns.
    """

    def __init__(self, documents: Iterable[Document], vocab_size: int, ps: ParallelState) -> None:
        self._documents, self._vocab_size, self._ps = documents, vocab_size, ps
        self.documents, self.bytes, self.known = 0, 0, True

    def windows(self, length: int) -> Iterator[TextWindow]:
        ps = self._ps
        for number, document in enumerate(self._documents):
            self.documents += 1
            if number % ps.world_size == ps.rank:
                num_bytes = document.num_bytes()
                self.known, self.bytes = self.known and num_bytes is not None, self.bytes + (num_bytes or 0)
            if document.size > LONG:
                yield from itertools.islice(
                    windows(self._ids(document), length), ps.dp_rank, None, ps.dp_size
                )
            elif number % ps.dp_size == ps.dp_rank:
                yield from windows(self._ids(document), length)

    def _ids(self, document: Document) -> Sequence[int]:
        ids = document.ids()
        if ids and not 0 <= min(ids) <= max(ids) < self._vocab_size:
            raise ValueError(
                f"{document.where}: has ids from {min(ids)} to {max(ids)}, the model {self._vocab_size} ids: was it "
                "made with another tokenizer?"
            )
        return ids


def predict(
    scorer: Scorer, documents: Iterable[Document], *, length: int, batch_size: int, show: bool = False
) -> Predicted:
    """Evaluate all documents, which data parallel ranks share.

    length: inputs of a window. show: lines on progress on standard error. Communicates over the world. Raises
    ValueError for ids that the model does not have, and what the documents raise, on all ranks alike.
    """
    ps, model = scorer.ps, scorer.model
    share = _Share(documents, model.vocab_size, ps)
    nats = torch.zeros((), dtype=torch.float64, device=ps.device.torch_device)
    tokens, began = 0, time.monotonic()
    next_line = began + _EVERY_S
    with alike(ps):
        for batch in batches(share.windows(length), batch_size):
            inputs = [window.inputs for window in batch]
            losses = scorer.forward(scorer.rows(inputs), scorer.rows([window.targets for window in batch]))
            if losses is not None:
                nats += losses.double().masked_fill_(~scorer.counted(inputs), 0.0).sum()
            tokens += sum(map(len, inputs))
            if show and (now := time.monotonic()) >= next_line:
                speed = f"{brief(tokens / (now - began))} tokens/s"
                of_how_many = f" of each of {ps.dp_size} replicas" if ps.dp_size > 1 else ""
                print(f"{counted(share.documents, 'document')}, {speed}{of_how_many}", file=sys.stderr)
                next_line = now + _EVERY_S
    scorer.finish()
    answers = model.post_process and ps.tp_rank == 0
    mine = [tokens, float(nats), share.bytes, share.known, answers]  # sync: the result
    every = gather_json(mine, ps)
    shares = [one for one in every if one[4]]
    known = all(one[3] for one in every)
    return Predicted(
        share.documents,
        sum(one[0] for one in shares),
        math.fsum(one[1] for one in shares),
        sum(one[2] for one in every) if known else None,
    )
