"""Tokenizers read by Hugging Face's `tokenizers` (extra `hf`), from local files only."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron.core import safe_files
from megatron.core.optional import require
from megatron.core.tokenizers.tokenizer import MAX_FILE_BYTES, Tokenizer, TokenizerError, content_digest
from megatron.core.tokenizers.tokenizer_config import TokenizerConfig

END_OF_DOCUMENT_CANDIDATES = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>")
SPECIAL_ROLES = ("bos_token", "eos_token", "unk_token", "sep_token", "cls_token", "mask_token")


class _Backend(Tokenizer):
    """Over a `tokenizers.Tokenizer`. files: their content, all that it was made from."""

    def __init__(self, backend: Any, *files: bytes) -> None:
        self.backend, self.content = backend, content_digest(*files)
        self.vocab_size = int(backend.get_vocab_size(with_added_tokens=True))

    def tokenize(self, text: str) -> list[int]:
        return self.backend.encode(text, add_special_tokens=False).ids

    def tokenize_whole(self, text: str) -> list[int]:
        return self.backend.encode(text, add_special_tokens=True).ids

    def detokenize(self, ids: Sequence[int]) -> str:
        return self.backend.decode(list(ids), skip_special_tokens=False)

    def tokenize_batch(self, texts: Sequence[str]) -> list[NDArray[Any]]:
        encodings = self.backend.encode_batch(list(texts), add_special_tokens=False)
        return [np.array(encoding.ids, dtype=np.int64) for encoding in encodings]


class HuggingFaceTokenizer(_Backend):
    """A `tokenizer.json`, or a folder with one and perhaps a `tokenizer_config.json` beside it.

    The end of document is the `eos_token` of the configuration, else the first of the usual names that the vocabulary
    has. Raises TokenizerError for missing or broken files, and for a vocabulary without an end of document.
    """

    def __init__(self, config: TokenizerConfig) -> None:
        path = self._need(config.tokenizer_model, "--tokenizer-model")
        file = os.path.join(path, "tokenizer.json") if os.path.isdir(path) else path
        data = self._read(file, "--tokenizer-model")
        library = require("tokenizers", "hf")
        try:
            backend = library.Tokenizer.from_buffer(data)
        except Exception as error:  # the library raises bare Exception
            raise TokenizerError(f"--tokenizer-model {file}: not a tokenizer.json: {error}") from error
        backend.no_truncation()
        backend.no_padding()
        super().__init__(backend, data)
        roles = _special_tokens(os.path.join(os.path.dirname(file), "tokenizer_config.json"))
        names = (roles["eos_token"],) if "eos_token" in roles else END_OF_DOCUMENT_CANDIDATES
        ends = [i for i in map(backend.token_to_id, names) if i is not None]
        if not ends:
            raise TokenizerError(
                f"{file}: no end-of-document token: none of {', '.join(names)} is in the vocabulary; give eos_token in "
                "tokenizer_config.json beside it"
            )
        self.eod = int(ends[0])
        ids = (backend.token_to_id(roles[role]) for role in SPECIAL_ROLES if role in roles)
        self.special_ids = frozenset({self.eod, *(i for i in ids if i is not None)})
        self.bos, self.pad = (
            backend.token_to_id(roles[role]) if role in roles else None for role in ("bos_token", "pad_token")
        )


class GPT2BPETokenizer(_Backend):
    """GPT-2's byte-level BPE from `--vocab-file` (vocab.json) and `--merge-file` (merges.txt)."""

    def __init__(self, config: TokenizerConfig) -> None:
        vocab_file, merge_file = config.vocab_file, config.merge_file
        vocabulary = self._read(vocab_file, "--vocab-file")
        merges = self._read(merge_file, "--merge-file")
        library = require("tokenizers", "hf")
        try:
            backend = library.Tokenizer(library.models.BPE(json.loads(vocabulary), _pairs(merges)))
        except RecursionError:
            told = "JSON nested too deeply: give a vocab.json"
            raise TokenizerError(f"--vocab-file {vocab_file}: {told}") from None
        except Exception as error:  # the library raises bare Exception
            raise TokenizerError(f"--vocab-file {vocab_file}, --merge-file {merge_file}: {error}") from error
        backend.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = library.decoders.ByteLevel()
        super().__init__(backend, vocabulary, merges)
        eod = backend.token_to_id("<|endoftext|>")
        if eod is None:
            raise TokenizerError(f"--vocab-file {vocab_file}: holds no <|endoftext|>, which ends documents")
        self.eod, self.special_ids = int(eod), frozenset({int(eod)})


def _pairs(merges: bytes) -> list[tuple[str, ...]]:
    """The lines of a merges.txt, two tokens each, without its comment."""
    lines = [line for line in merges.decode().split("\n") if line.strip() and not line.startswith("#version")]
    return [tuple(line.rstrip("\r").split(" ")) for line in lines]


def _special_tokens(path: str) -> dict[str, str]:
    """Role to token text from a tokenizer_config.json; a token is a string or an object with "content"."""
    try:
        content = safe_files.read_json(path, max_bytes=MAX_FILE_BYTES, follow=True)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise TokenizerError(str(error)) from error
    if not isinstance(content, dict):
        raise TokenizerError(f"{path}: expected a JSON object, found {type(content).__name__}")
    tokens = {role: content.get(role) for role in (*SPECIAL_ROLES, "pad_token")}
    texts = {role: one.get("content") if isinstance(one, dict) else one for role, one in tokens.items()}
    return {role: text for role, text in texts.items() if isinstance(text, str)}
