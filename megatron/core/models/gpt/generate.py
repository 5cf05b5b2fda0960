"""Text generation with a key-value cache: greedy, or sampled."""

from __future__ import annotations

import dataclasses
import math

import torch
from torch import Tensor

from megatron.core.models.gpt.gpt import GPTModel
from megatron.core.tensor_parallel.random import stable_seed
from megatron.core.transformer.self_attention import InferenceCache


@dataclasses.dataclass(frozen=True)
class Sampling:
    """temperature 0 = greedy. top_k: only the k likeliest ids (0 = all). top_p: only the likeliest ids that
    together reach this probability. seed: of the draws."""

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


def choose(logits: Tensor, sampling: Sampling, step: int) -> Tensor:
    """Next ids [b] from logits [b, v]; the draw of a step depends on the seed and the step only."""
    if sampling.temperature == 0.0:
        return logits.argmax(-1)
    probabilities = _kept(logits.float() / sampling.temperature, sampling).softmax(-1)
    generator = torch.Generator(device=logits.device).manual_seed(stable_seed(sampling.seed, "sample", step))
    return torch.multinomial(probabilities, 1, generator=generator).squeeze(-1)


@torch.no_grad()
def generate(
    model: GPTModel,
    tokens: Tensor,
    max_new_tokens: int,
    *,
    sampling: Sampling | None = None,
    vocab_size: int | None = None,
    eod: int | None = None,
    use_cache: bool = True,
) -> Tensor:
    """tokens [b, s] and up to `max_new_tokens` more, [b, s + n].

    vocab_size: ids at and above it are padding of the vocabulary and never chosen. eod: stops once every
    row has reached it; a row that is done repeats it. use_cache False computes every step from the
    beginning.

    Raises ValueError when prompt and new tokens do not fit the learned positions.
    """
    sampling = sampling or Sampling()
    total = tokens.shape[1] + max_new_tokens
    limit = model.config.max_position_embeddings
    if model.config.position_embedding_type == "learned_absolute" and total > limit:
        raise ValueError(
            f"{tokens.shape[1]} prompt tokens and {max_new_tokens} new ones exceed the model's {limit} "
            f"learned positions (--max-position-embeddings): shorten the prompt or lower --max-new-tokens"
        )
    was_training = model.training
    model.eval()
    cache = InferenceCache(total) if use_cache else None
    finished = torch.zeros(tokens.shape[0], dtype=torch.bool, device=tokens.device)
    for step in range(max_new_tokens):
        start = 0 if cache is None else cache.length
        new = tokens[:, start:]
        positions = torch.arange(start, tokens.shape[1], device=tokens.device).expand_as(new)
        logits = model(new, positions, inference_cache=cache)[
            :, -1, :vocab_size
        ]  # [b, v], after the last token
        if cache is not None:
            cache.advance(new.shape[1])
        chosen = choose(logits, sampling, step)
        if eod is not None:
            chosen = chosen.masked_fill(finished, eod)
            finished |= chosen == eod
        tokens = torch.cat((tokens, chosen[:, None]), dim=1)
        if eod is not None and bool(finished.all()):
            break
    model.train(was_training)
    return tokens
