"""Text as tokens make it: whole characters, nothing behind a stop string, nothing shown too early."""

import pytest

from megatron.core.tokenizers.text_continuation import TextContinuation
from megatron.core.tokenizers.tokenizer import ByteTokenizer, Tokenizer

TEXT = "Grüße, 世界! 🙂\nEND of it. ENDE"


class Words(Tokenizer):
    """As SentencePiece's: a token begins with a blank, which is left out where a text begins."""

    vocab_size, eod = 100, 99
    words = (" one", " two", " th", "ree", " four")

    def tokenize(self, text):
        raise NotImplementedError

    def detokenize(self, ids):
        return "".join(self.words[i] for i in ids).removeprefix(" ")


def pushed(text: str, *stop: str) -> tuple[TextContinuation, list[str], bool]:
    """Byte by byte: what is known after each of them, and whether the last one was the end."""
    tokenizer = ByteTokenizer()
    made, shown, ended = TextContinuation(tokenizer, tokenizer.tokenize("prompt é"), stop), [], False
    for token in tokenizer.tokenize(text):
        assert not ended
        ended = made.push(token)
        shown.append(made.text)
        if ended:
            break
    return made, shown, ended


def test_whole_characters_only():
    made, shown, ended = pushed(TEXT)
    assert not ended
    assert made.finish() == TEXT
    assert all(TEXT.startswith(one) for one in shown)
    assert {len(one) for one in shown} == set(range(1, len(TEXT) + 1)) | {1}, (
        "each character as soon as it is whole"
    )


@pytest.mark.parametrize(
    "stop", [["END"], [" of", "END of"], ["界! 🙂"], ["nothing of it", "\n"], ["D", "END"], ["G"]]
)
def test_stop_strings_are_cut_off_and_never_shown(stop):
    """Over several tokens, inside characters, the first of several."""
    made, shown, ended = pushed(TEXT, *stop)
    first = min(TEXT.find(one) for one in stop if one in TEXT)
    assert ended
    assert made.finish() == made.text == TEXT[:first]
    assert all(TEXT[:first].startswith(one) for one in shown)


def test_what_only_begins_a_stop_string_is_held_back_until_it_is_known():
    made, shown, _ = pushed("a EN", "ENDE!")
    assert shown == ["a", "a ", "a ", "a "]
    assert not made.push(ord("D"))
    assert made.text == "a "
    assert not made.push(ord("x"))
    assert made.text == "a ENDx"
    made.push(ord("E"))
    assert made.text == "a ENDx"
    assert made.finish() == "a ENDxE"


def test_bytes_that_are_no_character():
    made, *_ = pushed("a")
    for token in (0xE4, 0xB8):  # the beginning of one
        made.push(token)
    assert made.text == "a"
    assert made.finish() == "a\N{REPLACEMENT CHARACTER}"
    made, *_ = pushed("a")
    for token in (0xFF, ord("b")):
        made.push(token)
    assert made.text == "a\N{REPLACEMENT CHARACTER}b"


def test_blanks_before_words_stay():
    made, known = TextContinuation(Words(), [0], stop=["three f"]), []
    for token in (1, 2, 3):
        assert not made.push(token)
        known.append(made.text)
    assert known == [" two", " two ", " two "]
    assert made.push(4)
    assert made.finish() == " two "


def test_no_token():
    assert TextContinuation(Words(), [0, 1]).finish() == ""
