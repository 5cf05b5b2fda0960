"""Forwards of a model's stages over batches of rows that differ in length."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from megatron.core.models.gpt.generate import stage_forward
from megatron.core.models.gpt.gpt import GPTModel
from megatron.core.transport.collectives import Pending, broadcast
from megatron.core.transport.parallel_state import ParallelState


class Scorer:
    """All ranks that hold a part of the model call alike. A stage does not wait for the next one to be done, so a
    pipeline works on as many batches as it has stages."""

    def __init__(self, model: GPTModel, ps: ParallelState) -> None:
        self.model, self.ps = model, ps
        self._device = ps.device.torch_device
        self._sent: deque[tuple[list[Pending], Tensor]] = deque()

    def rows(self, rows: Sequence[Sequence[int]]) -> Tensor:
        """[b, s] int64, filled up behind the rows' ends, where causal attention lets nobody look."""
        tensors = [torch.as_tensor(row, dtype=torch.int64) for row in rows]
        return pad_sequence(tensors, batch_first=True).to(self._device)

    def counted(self, rows: Sequence[Sequence[int]]) -> Tensor:
        """[b, s] bool: what of `rows` is no filling."""
        lengths = torch.tensor(list(map(len, rows)), device=self._device)
        return torch.arange(int(max(map(len, rows))), device=self._device) < lengths[:, None]

    def forward(self, tokens: Tensor, labels: Tensor | None = None) -> Tensor | None:
        """Of the last stage, losses [b, s] of labels, or logits [b, s, v]; None of others. Communicates over tp and the
        pipeline."""
        positions = torch.arange(tokens.shape[1], device=self._device).expand_as(tokens)
        out, sending = stage_forward(self.model, tokens, positions, self.ps, labels=labels)
        if self.model.post_process:
            return out
        self._sent.append((sending, out))
        self.finish(self.ps.pp_size)
        return None

    def finish(self, under_way: int = 0) -> None:
        """Wait until the next stage has taken all but `under_way` of the batches."""
        while len(self._sent) > under_way:
            for sending in self._sent.popleft()[0]:
                sending.wait()

    @torch.no_grad()
    def likelihoods(self, rows: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
        """Of each row's tokens but the first, [b, s - 1] on the host of every rank: log probability (fp32), and whether
        it is the likeliest one. Communicates over tp and the pipeline."""
        filled = self.rows(rows)
        tokens, following = filled[:, :-1], filled[:, 1:]
        logits = self.forward(tokens)
        found = torch.empty(2, *following.shape, device=self._device)
        if logits is not None:
            told = torch.log_softmax(logits.float(), -1).gather(-1, following.unsqueeze(-1)).squeeze(-1)
            found = torch.stack((told, (logits.argmax(-1) == following).float()))
        self.finish()
        broadcast(found, self.ps.group("pp"), self.ps.pp_size - 1)
        log_probabilities, likeliest = found.cpu()  # sync: answers for the host
        return log_probabilities, likeliest.bool()
