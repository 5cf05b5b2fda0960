"""Conditions and messages of tables."""

import ast

import pytest

from megatron.training.config import resolve, rules
from megatron.training.config.config import FIELDS
from megatron.training.config.expressions import filled, parsed, rows, value_of
from megatron.training.config.rule_table import RuleContext

NAMES = {"two": 2, "seven": 7, "word": "rope", "none": None, "empty": (), "plus": lambda a, b: a + b}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("seven % two == 1 and not two > seven", True),
        ("1 <= two < seven <= 7", True),
        ("1 <= seven < two", False),
        ("seven // two * 2 + 1", 7),
        ("word in ('rope', 'none') and word != 'none'", True),
        ("word not in ('rope', none)", False),
        ("two and word", "rope"),
        ("empty and two", ()),
        ("none or empty or seven or two", 7),
        ("plus(two, 40)", 42),
        ("two * none", None),
        ("none < 2", False),
        ("none == two or none != two", False),
        ("0 < none < 3", False),
        ("none is None and two is not None", True),
    ],
)
def test_values(text, value):
    assert value_of(parsed(text), NAMES.__getitem__) == value


@pytest.mark.parametrize("text", ["word.upper()", "[two]", "two if word else 3", "lambda: two", "two ** 99"])
def test_other_python_is_refused(text):
    with pytest.raises((AssertionError, KeyError)):
        value_of(parsed(text), NAMES.__getitem__)


def test_messages():
    told = filled(
        "{two} is below {=two + seven}: {=found}", NAMES.__getitem__, lambda name: f"--{name}", "{no}"
    )
    assert told == "--two is below 9: {no}"


def names_in(*texts):
    nodes = [node for text in texts if text for node in ast.walk(parsed(text))]
    return {node.id for node in nodes if isinstance(node, ast.Name)}


def fields_of(message):
    words = [part.partition("}")[0] for part in message.split("{")[1:]]
    return names_in(*(word.removeprefix("=") for word in words)) - {"found"}


def test_every_name_in_the_rules_is_a_setting_or_a_function():
    known = {*FIELDS, *dir(RuleContext), *RuleContext.__dataclass_fields__}
    assert known.isdisjoint(rules.FUNCTIONS), "a name stands for two things"
    for row in rows("rules.csv"):
        assert names_in(row["when"]) | fields_of(row["message"]) <= known | rules.FUNCTIONS.keys(), row


def test_every_name_in_what_is_derived_is_a_setting_or_a_function():
    known = {*FIELDS, *resolve.FUNCTIONS, *dir(resolve.Settings), "has_gpu", "memory_bytes", "ranks_here"}
    for row in rows("derived.csv"):
        assert row["only"] in ("", "unset", "not given", "no effect", "dropped")
        assert set(row["name"].split()) <= FIELDS.keys()
        assert names_in(row["when"], row["value"]) | fields_of(row["message"]) <= known, row
