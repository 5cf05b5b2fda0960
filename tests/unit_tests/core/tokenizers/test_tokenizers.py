import base64
import json

import numpy as np
import pytest

from megatron.core.optional import MissingPackageError
from megatron.core.tokenizers import huggingface_tokenizer
from megatron.core.tokenizers.build import (
    TOKENIZER_TYPES,
    build_from_config,
    build_tokenizer,
)
from megatron.core.tokenizers.tokenizer import ByteTokenizer, TokenizerError
from megatron.core.tokenizers.tokenizer_config import TokenizerConfig

TEXT = "Hello, world! Grüße\n\t def f(x): return x**2 — 漢字"
CORPUS = ["hello world this is a tokenizer", "the quick brown fox jumps over the lazy dog", TEXT] * 20


def test_bytes():
    tokenizer = build_tokenizer("ByteTokenizer")
    assert tokenizer.tokenize("aé") == [97, 0xC3, 0xA9]
    assert (tokenizer.vocab_size, tokenizer.eod, tokenizer.pad) == (257, 256, None)
    assert tokenizer.detokenize(tokenizer.tokenize(TEXT)) == TEXT
    assert tokenizer.detokenize([104, 256, 105, 300]) == "h<|endoftext|>i\ufffd"
    (ids,) = tokenizer.tokenize_batch(["aé"])
    assert ids.tolist() == [97, 0xC3, 0xA9]


def test_null():
    tokenizer = build_tokenizer("NullTokenizer", vocab_size=100)
    assert (tokenizer.vocab_size, tokenizer.eod) == (101, 100)
    assert tokenizer.tokenize("1 22 3") == [1, 22, 3]
    assert tokenizer.detokenize([1, 22]) == "1 22"
    with pytest.raises(TokenizerError, match="numbers"):
        tokenizer.tokenize("one")
    with pytest.raises(TokenizerError, match="--vocab-size"):
        build_tokenizer("NullTokenizer")


@pytest.fixture
def bpe(tmp_path):
    """A small byte-level BPE, trained here: tokenizer.json, vocab.json, merges.txt."""
    tokenizers = pytest.importorskip("tokenizers", reason="dev extra")
    model = tokenizers.Tokenizer(tokenizers.models.BPE())
    model.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|endoftext|>", "<pad>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    model.train_from_iterator(CORPUS, trainer)
    model.save(str(tmp_path / "tokenizer.json"))
    model.model.save(str(tmp_path))
    return tmp_path, model


def test_hugging_face(bpe):
    folder, model = bpe
    for path in (folder, folder / "tokenizer.json"):
        tokenizer = build_tokenizer("HuggingFaceTokenizer", tokenizer_model=str(path))
        assert tokenizer.vocab_size == model.get_vocab_size()
        assert tokenizer.eod == 0
        assert tokenizer.pad is None
        assert tokenizer.tokenize(TEXT) == model.encode(TEXT).ids
        assert tokenizer.detokenize(tokenizer.tokenize(TEXT)) == TEXT
        assert [ids.tolist() for ids in tokenizer.tokenize_batch([TEXT, ""])] == [model.encode(TEXT).ids, []]


def test_hugging_face_configuration(bpe):
    folder, _ = bpe
    before = build_tokenizer("HuggingFaceTokenizer", tokenizer_model=str(folder)).identity()
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": {"content": "<|endoftext|>"}, "pad_token": "<pad>"})
    )
    tokenizer = build_tokenizer("HuggingFaceTokenizer", tokenizer_model=str(folder))
    assert (tokenizer.eod, tokenizer.pad, tokenizer.special_ids) == (0, 1, frozenset({0}))
    assert tokenizer.identity() == before
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<absent>"}))
    with pytest.raises(TokenizerError, match="no end-of-document token: none of <absent>"):
        build_tokenizer("HuggingFaceTokenizer", tokenizer_model=str(folder))


def test_gpt2(bpe):
    folder, model = bpe
    files = {"vocab_file": str(folder / "vocab.json"), "merge_file": str(folder / "merges.txt")}
    tokenizer = build_tokenizer("GPT2BPETokenizer", **files)
    assert tokenizer.eod == model.token_to_id("<|endoftext|>")
    assert tokenizer.tokenize(TEXT) == model.encode(TEXT).ids
    assert tokenizer.detokenize(tokenizer.tokenize(TEXT)) == TEXT
    with pytest.raises(TokenizerError, match="--merge-file"):
        build_tokenizer("GPT2BPETokenizer", vocab_file=files["vocab_file"])
    with pytest.raises(TokenizerError, match="leave --vocab-size out"):
        build_tokenizer("GPT2BPETokenizer", vocab_size=5, **files)


@pytest.fixture
def piece_model(tmp_path):
    sentencepiece = pytest.importorskip("sentencepiece", reason="dev extra")
    prefix = str(tmp_path / "m")
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS),
        model_prefix=prefix,
        vocab_size=120,
        model_type="unigram",
        hard_vocab_limit=False,
        minloglevel=3,
    )
    return prefix + ".model", sentencepiece.SentencePieceProcessor(model_file=prefix + ".model")


def test_sentencepiece(piece_model):
    path, model = piece_model
    text = "hello world this is the lazy dog"
    gpt = build_tokenizer("GPTSentencePieceTokenizer", tokenizer_model=path)
    assert gpt.tokenize(text) == model.encode(text)
    assert gpt.detokenize(gpt.tokenize(text)) == text
    assert (gpt.vocab_size, gpt.eod, gpt.pad) == (model.vocab_size(), model.eos_id(), None)
    llama = build_tokenizer("Llama2Tokenizer", tokenizer_model=path)
    assert llama.tokenize(text) == [model.bos_id(), *model.encode(text)]
    assert llama.detokenize(llama.tokenize(text)) == text
    base = model.vocab_size()
    megatron = build_tokenizer("SentencePieceTokenizer", tokenizer_model=path)
    # <CLS> <SEP> <EOD> <MASK> <PAD> come after the model's own; begin and end of sentence it has.
    assert (megatron.vocab_size, megatron.eod, megatron.pad) == (base + 5, base + 2, base + 4)
    assert megatron.detokenize([*megatron.tokenize("hello"), megatron.eod]) == "hello<EOD>"


@pytest.fixture
def ranks():
    tokens = [bytes([b]) for b in range(256)] + [b"he", b"ll", b"hell", b"hello"]
    return [
        {"rank": i, "token_bytes": base64.b64encode(t).decode(), "token_str": ""}
        for i, t in enumerate(tokens)
    ]


def test_tiktoken(tmp_path, ranks):
    (tmp_path / "v.json").write_text(json.dumps(ranks))
    (tmp_path / "v.tiktoken").write_text("".join(f"{r['token_bytes']} {r['rank']}\n" for r in ranks))
    made = [
        build_tokenizer(
            "TikTokenizer",
            tokenizer_model=str(tmp_path / name),
            tiktoken_num_special_tokens=10,
            tiktoken_pattern=p,
        )
        for name in ("v.json", "v.tiktoken")
        for p in ("v1", "v2")
    ]
    for tokenizer in made:
        assert tokenizer.tokenize("hello") == [10 + 259]
        assert tokenizer.vocab_size == 270
        assert (tokenizer.bos, tokenizer.eod, tokenizer.pad) == (1, 2, 4)
        assert tokenizer.detokenize([*tokenizer.tokenize(TEXT), 2, 9]) == TEXT + "</s><SPECIAL_9>"
        assert tokenizer.tokenize_batch([TEXT])[0].tolist() == tokenizer.tokenize(TEXT)
        assert tokenizer.pad not in tokenizer.special_ids
    # v2 cuts between lower and upper case, v1 does not: only v1 can merge across.
    assert len({tokenizer.identity() for tokenizer in made}) == 4
    cut = build_tokenizer(
        "TikTokenizer",
        tokenizer_model=str(tmp_path / "v.json"),
        tiktoken_num_special_tokens=10,
        vocab_size=269,
    )
    assert cut.tokenize("hello") == [10 + 258, 10 + ord("o")]


def test_tiktoken_refuses(tmp_path, ranks):
    path = tmp_path / "v.json"
    for content in ("[{}]", "[", "not base64", json.dumps(ranks[:255]), json.dumps([*ranks[:-1], ranks[0]])):
        path.write_text(content)
        with pytest.raises(TokenizerError, match=r"--tokenizer-model .*v\.json"):
            build_tokenizer("TikTokenizer", tokenizer_model=str(path))
    path.write_text(json.dumps(ranks))
    with pytest.raises(TokenizerError, match="--tiktoken-special-tokens"):
        build_tokenizer("TikTokenizer", tokenizer_model=str(path), tiktoken_special_tokens=["<s>"])


def test_missing_files_and_types(tmp_path):
    for kind in ("HuggingFaceTokenizer", "Llama2Tokenizer", "TikTokenizer", "SentencePieceTokenizer"):
        with pytest.raises(TokenizerError, match=f"{kind} needs --tokenizer-model"):
            build_tokenizer(kind)
        with pytest.raises(TokenizerError, match="no such file"):
            build_tokenizer(kind, tokenizer_model=str(tmp_path / "absent"))
    (tmp_path / "broken").write_bytes(b"\x00\x01broken")
    for kind in ("HuggingFaceTokenizer", "Llama2Tokenizer", "TikTokenizer"):
        with pytest.raises(TokenizerError, match="--tokenizer-model"):
            build_tokenizer(kind, tokenizer_model=str(tmp_path / "broken"))
    with pytest.raises(TokenizerError, match="choose one of"):
        build_tokenizer("BertTokenizer")


def test_missing_extra_names_the_pip_line(bpe, monkeypatch):
    folder, _ = bpe

    def missing(module, extra):
        raise MissingPackageError(f"pip install 'megatron-zero[{extra}]'")

    monkeypatch.setattr(huggingface_tokenizer, "require", missing)
    with pytest.raises(MissingPackageError, match=r"megatron-zero\[hf\]"):
        build_tokenizer("HuggingFaceTokenizer", tokenizer_model=str(folder))


def test_types_are_those_of_the_flag():
    from megatron.core.tokenizers.tokenizer_config import TokenizerConfig

    annotation = str(TokenizerConfig.__dataclass_fields__["tokenizer_type"].type)
    assert all(name in annotation for name in TOKENIZER_TYPES)


def test_bytes_need_no_copy():
    assert ByteTokenizer().tokenize_bytes(b"\xff\x00").tolist() == [255, 0]
    assert ByteTokenizer().tokenize_bytes(b"abc").dtype == np.uint8


def test_a_configuration_builds_what_its_fields_say():
    config = TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=100)
    assert build_from_config(config).identity() == build_tokenizer("NullTokenizer", vocab_size=100).identity()
    with pytest.raises(TokenizerError, match="--vocab-size 5"):
        build_from_config(TokenizerConfig(tokenizer_type="ByteTokenizer", vocab_size=5))
