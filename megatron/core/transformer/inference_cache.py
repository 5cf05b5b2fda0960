"""Keys and values of the tokens already seen, for generation."""

from __future__ import annotations

import torch
from torch import Tensor


class InferenceCache:
    """One pair of buffers a layer, [b, groups, max_tokens, d]; `length` tokens are filled in every layer.

    The model reads and writes it during `forward`; whoever generates calls `advance` after each forward.
    """

    def __init__(self, max_tokens: int) -> None:
        self.max_tokens = max_tokens
        self.length = 0
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}

    def extend(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Files new keys and values [b, groups, new, d] of a layer; returns all of them up to the newest."""
        end = self.length + key.shape[2]
        assert end <= self.max_tokens, f"cache of {self.max_tokens} tokens, asked for {end}"
        if layer not in self._layers:
            shape = (key.shape[0], key.shape[1], self.max_tokens, key.shape[3])
            self._layers[layer] = (key.new_empty(shape), value.new_empty(shape))
        keys, values = self._layers[layer]
        keys[:, :, self.length : end] = key
        values[:, :, self.length : end] = value
        return keys[:, :, :end], values[:, :, :end]

    def advance(self, tokens: int) -> None:
        """`tokens` more are filled, in every layer."""
        self.length += tokens

    def causal_mask(self, new_tokens: int, device: torch.device) -> Tensor | None:
        """[1, 1, new, all] True = masked, or None where plain causal attention says the same."""
        if self.length == 0:
            return None
        query = torch.arange(self.length, self.length + new_tokens, device=device)[:, None]
        return (torch.arange(self.length + new_tokens, device=device)[None, :] > query)[None, None]
