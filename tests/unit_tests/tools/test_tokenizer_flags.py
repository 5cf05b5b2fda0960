"""tools/tokenizer_flags.py: flags over what a checkpoint says."""

import argparse

from megatron.core.tokenizers.tokenizer_config import TokenizerConfig
from tools.tokenizer_flags import add_tokenizer_flags, tokenizer_config


def config_of(saved, *words):
    parser = argparse.ArgumentParser()
    add_tokenizer_flags(parser, "")
    return tokenizer_config(parser.parse_args(words), saved)


def test_flags_win_and_another_type_takes_nothing_over():
    saved = TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=319)
    assert config_of(saved) == saved
    assert config_of(saved, "--vocab-size", "63") == TokenizerConfig(
        tokenizer_type="NullTokenizer", vocab_size=63
    )
    assert config_of(saved, "--tokenizer-type", "ByteTokenizer") == TokenizerConfig(
        tokenizer_type="ByteTokenizer"
    )
