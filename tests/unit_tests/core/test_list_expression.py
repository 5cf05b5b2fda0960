"""List expressions, pairs, splits, layouts."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.core.list_expression import (
    ListExpressionError,
    expand_layout,
    parse_list_expression,
    parse_pair,
    parse_split,
    strip_quotes,
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("3", 3),
        ("([0]*3+[1]*2)", (0, 0, 0, 1, 1)),
        ("[0]*3+[1]*2", (0, 0, 0, 1, 1)),
        ("([1]+[0]*2)*2", (1, 0, 0, 1, 0, 0)),
        ("2*[1, 0]", (1, 0, 1, 0)),
        ("[]", ()),
        ("[1,2,]", (1, 2)),
        ("(1, 2)", (1, 2)),
        (" [ 1 ] + [ 2 ] ", (1, 2)),
    ],
)
def test_expressions(text, expected):
    assert parse_list_expression(text) == expected


expressions = st.recursive(
    st.lists(st.integers(0, 9), min_size=1, max_size=3).map(lambda items: (str(items), tuple(items))),
    lambda inner: st.one_of(
        st.tuples(inner, inner).map(lambda p: (f"({p[0][0]}+{p[1][0]})", p[0][1] + p[1][1])),
        st.tuples(inner, st.integers(0, 3)).map(lambda p: (f"({p[0][0]})*{p[1]}", p[0][1] * p[1])),
    ),
    max_leaves=4,
)


@settings(max_examples=80, derandomize=True, deadline=None)
@given(expressions)
def test_generated_expressions_mean_what_python_means(case):
    text, expected = case
    assert parse_list_expression(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[0]*9**9",
        "[0]*999999999",
        "[0]*4096*4096",
        "9*9",
        "__import__('os')",
        "[1",
        "[1]]",
        "[[1]]",
        "1+2",
        "[1]+2",
        "-1",
        "[0]+" * 50000,
        "(" * 5000,
        "1234567890123",
    ],
)
def test_anything_else_is_refused_at_no_cost(text):
    with pytest.raises(ListExpressionError):
        parse_list_expression(text)


@pytest.mark.parametrize("text", ["127,0", "(127,0)", " ( 127 , 0 ) "])
def test_pairs(text):
    assert parse_pair(text) == (127, 0)


@pytest.mark.parametrize("text", ["127", "(127,0", "127,0)", "1,2,3", "a,b", ""])
def test_bad_pairs(text):
    with pytest.raises(ListExpressionError):
        parse_pair(text)


def test_splits_tolerate_quotes_and_separators():
    assert parse_split("969,30,1") == (0.969, 0.03, 0.001)
    assert parse_split("'99,1,0'") == parse_split('"99 1 0"') == parse_split("99/1") == (0.99, 0.01, 0.0)
    assert strip_quotes("'99,1,0'") == "99,1,0"


@pytest.mark.parametrize("text", ["", "0,0,0", "1,2,3,4", "a,b", "-1,2", "1,-2", "1.2.3"])
def test_bad_splits(text):
    with pytest.raises(ListExpressionError):
        parse_split(text)


def test_layouts():
    assert expand_layout("Et*2|(tt|)*5t|tmL") == ("Ett", "tt", "tt", "tt", "tt", "tt", "t", "tmL")
    assert expand_layout("E|,t||L") == ("E", "t", "", "L")


@pytest.mark.parametrize("text", ["Ex", "E(t", "Et)", "E|(t*99999)*99999|L", "E*"])
def test_bad_layouts(text):
    with pytest.raises(ListExpressionError):
        expand_layout(text)
