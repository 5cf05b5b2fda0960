"""What is written of completions: plain text, or a JSON object a line."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import NamedTuple

from tools.generation.prompts import Prompt


class Written(NamedTuple):
    """A completion as it is written. tokens: how many ids the prompt has, and the completion."""

    text: str
    prompt_tokens: int
    tokens: int
    finish_reason: str


class Writer:
    """To standard output, in the order of the prompts. at: the number of the next one to be written."""

    def __init__(self, prompts: Sequence[Prompt], *, json_lines: bool) -> None:
        self.at = 0
        self._prompts, self._json_lines = prompts, json_lines
        self._shown = 0  # characters of the present one

    def show(self, text: str) -> None:
        """The present prompt with its text so far: what is new of that."""
        if not self._shown and len(self._prompts) > 1:
            print(f"=== prompt {self.at + 1} of {len(self._prompts)} ===")
        print(text[self._shown :], end="", flush=True)
        self._shown = len(text)

    def finish(self, prompt_text: str, written: Written) -> None:
        """The present prompt is done. prompt_text: as its ids spell it."""
        prompt = self._prompts[self.at]
        if self._json_lines:
            own_id = {} if prompt.id is None else {"id": prompt.id}
            row = {
                "index": self.at,
                **own_id,
                "prompt": prompt.text,
                "text": written.text,
                "prompt_tokens": written.prompt_tokens,
                "completion_tokens": written.tokens,
                "finish_reason": written.finish_reason,
            }
            print(json.dumps(row), flush=True)
        else:
            self.show(prompt_text + written.text)
            print(flush=True)
        self.at, self._shown = self.at + 1, 0
