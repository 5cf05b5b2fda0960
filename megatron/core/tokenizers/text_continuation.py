"""The text that tokens make behind a prompt, as they come: whole characters, up to a stop string."""

from __future__ import annotations

from collections.abc import Sequence

from megatron.core.tokenizers.tokenizer import Tokenizer

UNFINISHED = "\N{REPLACEMENT CHARACTER}"  # what a tokenizer shows of bytes that are no character, or not yet


class TextContinuation:
    """The text of tokens that follow a prompt, cut before the first stop string that it has.

        texts = [TextContinuation(tokenizer, prompt, stop=["\\n\\n"]) for prompt in prompts]
        generate(model, prompts, 20, stop=lambda index, token: texts[index].push(token))

    text: as far as it is certain. What may be the beginning of a stop string is held back, and so are bytes that may
    be the beginning of a character; `finish` adds them.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], stop: Sequence[str] = ()) -> None:
        self.text = ""
        self._tokenizer, self._stop = tokenizer, stop
        self._held = ""
        # Of tokens from `first` on the text is compared with that of those before `known`, the last whole character's:
        # some tokenizers write a token otherwise at the beginning of a text.
        self._ids, self._first, self._known = list(prompt), 0, len(prompt)

    def push(self, token: int) -> bool:
        """Add a token. Returns whether the text has come to a stop string; then no other token may follow."""
        self._ids.append(token)
        return self._advance(ended=False)

    def finish(self) -> str:
        """No token follows: the whole text. Of bytes that are no character U+FFFD is left."""
        self._advance(ended=True)
        return self.text

    def _advance(self, *, ended: bool) -> bool:
        before = self._tokenizer.detokenize(self._ids[self._first : self._known])
        after = self._tokenizer.detokenize(self._ids[self._first :])
        if after.endswith(UNFINISHED) and not ended:
            return False
        self._first, self._known = self._known, len(self._ids)
        text = self._held + after[len(before) :]
        if found := [place for stop in self._stop if (place := text.find(stop)) >= 0]:
            self.text, self._held = self.text + text[: min(found)], ""
            return True
        beginnings = (stop[:length] for stop in self._stop for length in range(1, len(stop)))
        held = 0 if ended else max((len(one) for one in beginnings if text.endswith(one)), default=0)
        self.text, self._held = self.text + text[: len(text) - held], text[len(text) - held :]
        return False
