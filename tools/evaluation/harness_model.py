"""A model of ours as lm-evaluation-harness asks for one; imported once its package is known to be there.

Requests are answered as the harness's own `hf` model answers them: the same tokens in context and continuation, the
same truncation from the left, the same windows of a rolling likelihood.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs, postprocess_generated_text
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from megatron.core.models.gpt.generate import Sampling, generate
from megatron.core.tokenizers.tokenizer import Tokenizer
from tools.evaluation.scorer import Scorer

MAX_GEN_TOKS = 256  # where a task does not say


class HarnessModel(TemplateLM):
    """Every rank of tensor and pipeline parallel groups has one and is asked the same, in the same order."""

    def __init__(self, scorer: Scorer, tokenizer: Tokenizer, batch_size: int) -> None:
        super().__init__()
        self._scorer, self._tokens, self._batch_size = scorer, tokenizer, batch_size
        self._max_length = scorer.model.config.seq_length

    @property
    def eot_token_id(self) -> int:
        return self._tokens.eod

    @property
    def prefix_token_id(self) -> int:
        """What comes before a text without a context."""
        bos = self._tokens.bos
        return self._tokens.eod if bos is None else bos

    @property
    def max_length(self) -> int:
        return self._max_length

    @property
    def tokenizer_name(self) -> str:
        return self._tokens.identity()

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """With the tokenizer's own special tokens, unless asked not to, or the text begins with them."""
        begins = string.startswith(self._tokens.detokenize([self.prefix_token_id]))
        plain = begins if add_special_tokens is None else not add_special_tokens
        return self._tokens.tokenize(string) if plain else self._tokens.tokenize_whole(string)

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], **_: Any
    ) -> list[tuple[float, bool]]:
        """Of each request (what it is, context ids, continuation ids): log probability of the continuation, and whether
        each of its tokens is the likeliest one."""
        rows = [(context + wanted)[-(self._max_length + 1) :] for _, context, wanted in requests]
        by_length = sorted(range(len(rows)), key=lambda at: len(rows[at]), reverse=True)
        answers: list[tuple[float, bool]] = [(0.0, True)] * len(rows)
        for begin in range(0, len(rows), self._batch_size):
            batch = by_length[begin : begin + self._batch_size]
            found, likeliest = self._scorer.likelihoods([rows[at] for at in batch])
            for row, at in enumerate(batch):
                end = len(rows[at]) - 1
                scored = slice(end - min(len(requests[at][2]), end), end)
                answers[at] = float(found[row, scored].double().sum()), bool(likeliest[row, scored].all())
                self.cache_hook.add_partial("loglikelihood", requests[at][0], answers[at])
        return answers

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Of each text, every token once."""
        totals = []
        for (text,) in (request.args for request in requests):
            pairs = get_rolling_token_windows(
                token_list=self.tok_encode(text),
                prefix_token=self.prefix_token_id,
                max_seq_len=self._max_length,
                context_len=1,
            )
            windows = [(("", ""), *make_disjoint_window(pair)) for pair in pairs]
            totals.append(sum(total for total, _ in self._loglikelihood_tokens(windows)))
        return totals

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Of each context what follows it, to before a stop string."""
        return [self._continued(*request.args) for request in requests]

    def _continued(self, context: str, settings: dict[str, Any]) -> str:
        wanted: dict[str, Any] = dict(normalize_gen_kwargs(settings, MAX_GEN_TOKS))
        until = handle_stop_sequences(wanted.get("until"), eos=self._tokens.detokenize([self._tokens.eod]))
        count = int(wanted["max_gen_toks"])
        if count >= self._max_length:
            raise ValueError(
                f"max_gen_toks {count}: --seq-length {self._max_length} leaves no room for a context"
            )
        prompt = self.tok_encode(context)[count - self._max_length :]
        drawn = bool(wanted.get("do_sample"))
        sampling = Sampling(
            temperature=float(wanted.get("temperature") or 0.0) if drawn else 0.0,
            top_k=int(wanted.get("top_k") or 0),
            top_p=float(wanted.get("top_p") or 1.0),
        )
        ids = self._generated(prompt, count, sampling)
        special = self._tokens.special_ids
        text = self._tokens.detokenize([one for one in ids if one not in special])
        return str(postprocess_generated_text(generation=text, stop=until, think_end_token=None))

    def _generated(self, prompt: Sequence[int], count: int, sampling: Sampling) -> list[int]:
        """New ids. Communicates over tp and the pipeline."""
        tokens = self._tokens
        (made,) = generate(
            self._scorer.model,
            [prompt],
            count,
            sampling=sampling,
            vocab_size=tokens.vocab_size,
            eod=tokens.eod,
            ps=self._scorer.ps,
        )
        return list(made.ids)
