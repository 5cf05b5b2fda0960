"""Text generation in batches, with a key-value cache on every stage: greedy, or sampled.

[Note: the plan of forwards] Prompts are taken in groups, each of which has a cache of its own on every stage of a line.
All stages walk through the same list: a forward of each group under way in turn, as many groups as there are stages,
so that none of them waits once the line is full. A stage gets hidden states from the one before and sends its own to
the next; the last one chooses ids and sends them to all. So every rank knows each group's tokens before its next
forward, and decides alike who has finished, which group comes next, and what shape a message has.
"""

from __future__ import annotations

import dataclasses
import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from megatron.core.models.gpt.gpt import GPTModel
from megatron.core.tensor_parallel.random import stable_seed
from megatron.core.transformer.model_config import TransformerConfig
from megatron.core.transformer.self_attention import InferenceCache
from megatron.core.transport.collectives import Pending, broadcast
from megatron.core.transport.parallel_state import ParallelState
from megatron.core.transport.point_to_point import send_receive


@dataclasses.dataclass(frozen=True)
class Sampling:
    """temperature 0 = greedy. top_k: only the k likeliest ids (0 = all). top_p: only the likeliest ids that
    together reach this probability. seed: of the draws; prompt number i has seed + i, whatever batch it is in."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 1234

    def __post_init__(self) -> None:
        if not 0.0 <= self.temperature < math.inf:
            raise ValueError(f"--temperature {self.temperature}: must be 0 (greedy) or more, and finite")
        if self.top_k < 0:
            raise ValueError(f"--top-k {self.top_k}: must be 0 (all ids) or more")
        if not 0.0 < self.top_p <= 1.0:
            raise ValueError(f"--top-p {self.top_p}: must be above 0 and at most 1")


GREEDY = Sampling()


def _kept(logits: Tensor, sampling: Sampling) -> Tensor:
    """Logits with everything outside top-k and top-p at -inf."""
    if sampling.top_k and sampling.top_k < logits.shape[-1]:
        least = logits.topk(sampling.top_k).values[..., -1:]
        logits = logits.masked_fill(logits < least, -math.inf)
    if sampling.top_p < 1.0:
        ordered, order = logits.sort(descending=True)
        probabilities = ordered.softmax(-1)
        before = (
            probabilities.cumsum(-1) - probabilities
        )  # 0 before the likeliest id, so that one always stays
        ordered = ordered.masked_fill(before >= sampling.top_p, -math.inf)
        logits = torch.empty_like(logits).scatter_(-1, order, ordered)
    return logits


def choose(logits: Tensor, sampling: Sampling, draws: Sequence[tuple[int, int]]) -> Tensor:
    """Next ids [b] from logits [b, v]. draws: of each row the prompt's number and how many ids it has so far; nothing
    else decides on a row's draw, so it is the same in every batch and on every tensor parallel rank."""
    if sampling.temperature == 0.0:
        return logits.argmax(-1)
    probabilities = _kept(logits.float() / sampling.temperature, sampling).softmax(-1)
    generator = torch.Generator(device=logits.device)
    chosen = []
    for row, (prompt, step) in zip(probabilities, draws, strict=True):
        generator.manual_seed(stable_seed(sampling.seed + prompt, "sample", step))
        chosen.append(torch.multinomial(row, 1, generator=generator))
    return torch.cat(chosen)


@dataclasses.dataclass
class Completion:
    """What follows a prompt. number: the prompt's. ids: new tokens, without an end of document. finish_reason:
    "eod", "stop" (`generate`'s stop said so) or "length" (max_new_tokens); None while it is being made."""

    number: int
    ids: list[int] = dataclasses.field(default_factory=list)
    finish_reason: str | None = None


def too_long(config: TransformerConfig, prompt_tokens: int, max_new_tokens: int) -> str | None:
    """Why learned positions do not reach that far; None where they do, or where there are none."""
    limit = config.max_position_embeddings
    if config.position_embedding_type != "learned_absolute" or prompt_tokens + max_new_tokens <= limit:
        return None
    return (
        f"{prompt_tokens} prompt tokens and {max_new_tokens} new ones exceed the model's {limit} learned positions "
        "(--max-position-embeddings): shorten the prompt or lower --max-new-tokens"
    )


Stop = Callable[[int, int], bool]  # (a prompt's number, its newest token) -> whether that was the last one


def generate(
    model: GPTModel,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    *,
    sampling: Sampling = GREEDY,
    vocab_size: int | None = None,
    eod: int | None = None,
    stop: Stop | None = None,
    batch_size: int = 8,
    numbers: Sequence[int] | None = None,
    ps: ParallelState | None = None,
) -> Iterator[Completion]:
    """Up to `max_new_tokens` ids behind each prompt (its ids, at least one), in order, as soon as they are there.

        completions = list(generate(model, [[5, 7], [3]], 20, vocab_size=tokenizer.vocab_size, eod=tokenizer.eod))

    Prompts may differ in length; each one's ids are those that it has alone (but where rounding decides: kernels add up
    in another order in other shapes). vocab_size: ids at and above it are padding of the vocabulary and never chosen.
    stop: called with each new token but an end of document; `TextContinuation.push` looks for stop strings. batch_size:
    prompts in one forward. numbers: of the prompts, 0, 1, ... if not given.

    All ranks that hold a part of the model call alike, get the same answers, and communicate over tp and, where ps has
    a pipeline, over that: see [Note: the plan of forwards]. Raises ValueError when prompt and new tokens do not fit the
    learned positions.
    """
    if why := next(filter(None, (too_long(model.config, len(one), max_new_tokens) for one in prompts)), None):
        raise ValueError(why)
    numbered = list(zip(numbers or range(len(prompts)), prompts, strict=True))
    starts = range(0, len(prompts), batch_size)
    in_order = deque(_Group(numbered[at : at + batch_size], max_new_tokens) for at in starts)
    waiting, active = in_order.copy(), deque[_Group]()
    was_training = model.training
    model.eval()
    try:
        while in_order:
            while waiting and len(active) < (1 if ps is None else ps.pp_size):
                active.append(waiting.popleft())
            group = active.popleft()
            if group.take_chosen(eod, stop):
                _begin_forward(model, group, sampling, vocab_size, ps)
                active.append(group)
            while in_order and not in_order[0].live:
                yield from in_order.popleft().completions
    finally:
        model.train(was_training)


class _Group:
    """Prompts that share forwards, and the forward that is under way on this rank."""

    def __init__(self, prompts: Sequence[tuple[int, Sequence[int]]], max_new_tokens: int) -> None:
        self.completions = [Completion(number) for number, _ in prompts]
        self.live = self.completions
        self.next_tokens = [list(prompt) for _, prompt in prompts]
        self.cache = InferenceCache(max(map(len, self.next_tokens)) + max_new_tokens)
        self.chosen = torch.empty(0, dtype=torch.int64)
        self.pending: list[Pending] = []
        self._max_new_tokens = max_new_tokens

    def take_chosen(self, eod: int | None, stop: Stop | None) -> bool:
        """Wait for the ids that the last forward has come to; whether there is another one to do."""
        for pending in self.pending:
            pending.wait()
        ids = self.chosen.tolist()  # sync: who has finished
        for completion, token in zip(self.live, ids, strict=bool(ids)):
            if token == eod:
                completion.finish_reason = "eod"
                continue
            completion.ids.append(token)
            if stop is not None and stop(completion.number, token):
                completion.finish_reason = "stop"
        for completion in self.live:
            if completion.finish_reason is None and len(completion.ids) >= self._max_new_tokens:
                completion.finish_reason = "length"
        kept = [row for row, completion in enumerate(self.live) if completion.finish_reason is None]
        if len(kept) < len(self.live):
            self.live = [self.live[row] for row in kept]
            self.cache.keep(kept)
        if ids:
            self.next_tokens = [completion.ids[-1:] for completion in self.live]
        return bool(kept)


def _begin_forward(
    model: GPTModel, group: _Group, sampling: Sampling, vocab_size: int | None, ps: ParallelState | None
) -> None:
    """The group's next forward on this stage, and the choice that follows from it. Communicates over the pipeline."""
    device = next(model.parameters()).device
    tokens = [torch.tensor(tokens, device=device) for tokens in group.next_tokens]
    filled = pad_sequence(tokens, batch_first=True)
    group.cache.begin(list(map(len, tokens)), device)
    group.chosen = filled.new_empty(len(tokens))
    out, group.pending = stage_forward(model, filled, group.cache.positions, ps, inference_cache=group.cache)
    if model.post_process:
        draws = [(completion.number, len(completion.ids)) for completion in group.live]
        group.chosen = choose(out[:, 0, :vocab_size], sampling, draws)
    if ps is not None:
        group.pending.append(broadcast(group.chosen, ps.group("pp"), ps.pp_size - 1, async_op=True))


@torch.no_grad()
def stage_forward(
    model: GPTModel, tokens: Tensor, positions: Tensor, ps: ParallelState | None, **inputs: Any
) -> tuple[Tensor, list[Pending]]:
    """A batch [b, s] through this stage: the model's output, and sends that are under way, for which the output is to
    be kept. inputs: more of the model's. Communicates over tp and the pipeline."""
    if ps is not None and not model.pre_process:
        weight = next(model.parameters())
        dtype = weight.dtype
        if model.config.fp32_residual_connection:
            dtype = torch.promote_types(dtype, torch.float32)
        hidden = weight.new_empty(*tokens.t().shape, model.config.hidden_size, dtype=dtype)
        _, (arrival,) = send_receive([], [(hidden, ps.pp_rank - 1)], ps.pp_forward_group)
        arrival.wait()
        model.set_input_tensor(hidden)
    out = model(tokens, positions, **inputs)
    if ps is None or model.post_process:
        return out, []
    out = out.contiguous()
    return out, send_receive([(out, ps.pp_rank + 1)], [], ps.pp_forward_group)[0]
