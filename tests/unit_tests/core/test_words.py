"""Figures in words: what every one of them has in common, whatever the value."""

import math
import re
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.core import words

MOST = 22  # characters, its unit with it
ANY = st.floats(allow_nan=True, allow_infinity=True)
AMOUNT = st.floats(0, sys.float_info.max)
EXPONENT = re.compile(r"\d[eE][-+]?\d")
LETTERS = {letter: 1000.0**power for power, letter in enumerate("kMGTPEZYRQ", 1)}
LETTERS |= {letter: 1000.0**-power for power, letter in enumerate("munpfazyrq", 1)}
UNITS = {"byte": 1, "bytes": 1} | {f"{letter}iB": 1024**power for power, letter in enumerate("KMGTPE", 1)}
UNITS |= {"s": 1, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}
SPOKEN = {
    "plain": words.plain,
    "scaled": lambda value: words.scaled(value, "FLOP/s"),
    "size": words.size_text,
    "time": words.time_text,
    "share": words.share_text,
    "brief": words.brief,
}


def value_of(text):
    """What a figure says, as a number."""
    if text.startswith("over "):
        return math.inf
    found = re.fullmatch(r"(-?[\d,]+(?:\.\d+)?)([a-zA-Z]?)(?:%| ([a-zA-Z]+))?", text)
    assert found, text
    value = float(found[1].replace(",", "")) * LETTERS.get(found[2], 1.0)
    return value * UNITS.get(found[3] or "", 1.0) / (100 if text.endswith("%") else 1)


@pytest.mark.parametrize("name", SPOKEN)
@given(value=st.one_of(AMOUNT, st.floats(1e-9, 1e15), st.integers(0, 10**18), st.none(), ANY))
def test_no_exponent_and_not_too_long(name, value):
    if name in ("time", "scaled") and value is not None and value < 0:
        value = -value
    text = SPOKEN[name](value)
    assert not EXPONENT.search(text), text
    assert len(text) <= MOST, text
    assert (text == words.NOT_KNOWN) == (value is None)
    assert not re.match(r"-0[.0]*\D*$", text), "a zero has no sign"


@pytest.mark.parametrize("name", ["plain", "size", "share", "brief", "time"])
@given(one=st.floats(0, 1e29), factor=st.floats(1.0, 1e3))
def test_larger_is_never_said_to_be_smaller(name, one, factor):
    two = one * factor
    if name == "time":
        one, two = min(one, 110.0), min(two, 110.0)
    low, high = (value_of(SPOKEN[name](value)) for value in (one, two))
    assert low <= high * (1 + 1e-12), (SPOKEN[name](one), SPOKEN[name](two))


@pytest.mark.parametrize("digits", [3, 4, 6])
@given(value=st.floats(1e-28, 1e28))
def test_what_is_read_back_is_the_value_to_so_many_digits(digits, value):
    for text in (words.plain(value, digits), words.plain(-value, digits)):
        assert abs(value_of(text)) == pytest.approx(value, rel=0.501 * 10.0 ** (1 - digits))
    if value >= 1:
        assert value_of(words.size_text(value, digits=digits)) == pytest.approx(
            value, rel=0.501 * 10.0 ** (1 - digits)
        )


@given(value=st.one_of(ANY, st.none()), width=st.integers(5, 9), places=st.integers(0, 4))
def test_a_column_is_as_wide_as_it_says(value, width, places):
    text = words.column(value, width, places)
    assert len(text) in (width, len(str(value))), text
    assert not EXPONENT.search(text), text


@given(seconds=AMOUNT)
def test_durations_are_short(seconds):
    assert not EXPONENT.search(words.duration(seconds))
    assert len(words.duration(seconds)) <= MOST
    if seconds < 8e8:
        assert len(words.brief_duration(seconds)) <= 7
    assert words.age(min(seconds, 1e12)).endswith(" ago")


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        (words.decimal(-1e-9, 7), "0"),
        (words.size_text(2.29e12, digits=3), "2.08 TiB"),
        (words.plain(4.44089e-16), "444.1a"),
        (words.plain(9.9996), "10"),
        (words.plain(999_999.9), "1,000,000"),
        (words.scaled(999.96e9, "FLOP"), "1 TFLOP"),
        (words.size_text(1023.9 * 2**20), "0.9999 GiB"),
        (words.size_text(1), "1 byte"),
        (words.size_text(2.5, "layers"), "2.5"),
        (words.counted(1, "document"), "1 document"),
        (words.counted(3, "pipeline rank"), "3 pipeline ranks"),
        (words.counted(2, "microbatch"), "2 microbatches"),
        (words.counted(2, "corpus"), "2 corpora"),
        (words.plural(1, "is"), "is"),
        (words.plural(0, "is"), "are"),
        (words.share_text(-1e-9), "0.0%"),
        (words.time_text(0.0), "0 s"),
        (words.time_text(0.027761, 5), "27.761 ms"),
        (words.time_text(7200), "2:00:00"),
        (words.brief(64_434_356_224), "64.43G"),
        (words.between(["3", "3"]), "3"),
        (words.between(["3", "5"]), "3 to 5"),
    ],
)
def test_examples(said, expected):
    assert said == expected
