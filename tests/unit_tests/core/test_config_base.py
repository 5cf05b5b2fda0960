"""Fields that are flags."""

import dataclasses
from typing import Literal

import pytest

from megatron.core.config_base import ValueType, arg, arg_info, flag_names, value_type


@dataclasses.dataclass(frozen=True)
class Group:
    num_things: int = arg(3, "things")
    bare: bool = arg(True, "no bare", flags=("--no-bare", "--without-bare"))
    plain: int = 7


def field(name):
    return next(f for f in dataclasses.fields(Group) if f.name == name)


def test_default_spelling_comes_from_the_name_and_given_ones_replace_it():
    assert flag_names(field("num_things")) == ("--num-things",)
    assert flag_names(field("bare")) == ("--no-bare", "--without-bare")


def test_a_plain_field_is_no_flag():
    assert arg_info(field("plain")) is None
    with pytest.raises(AssertionError, match="plain is no flag"):
        flag_names(field("plain"))


def test_defaults_are_ordinary_dataclass_defaults():
    assert Group() == Group(num_things=3, bare=True, plain=7)


@pytest.mark.parametrize(
    ("annotation", "expected"),
    [
        (int, ValueType(int)),
        (float | None, ValueType(float, optional=True)),
        (tuple[str, ...], ValueType(str, many=True)),
        (tuple[int, ...] | None, ValueType(int, many=True, optional=True)),
        (Literal["a", "b"], ValueType(str, choices=("a", "b"))),
        (float | Literal["a"] | None, ValueType(float, choices=("a",), optional=True)),
        (Literal["a", "b"] | None, ValueType(str, choices=("a", "b"), optional=True)),
    ],
)
def test_annotations(annotation, expected):
    assert value_type(annotation) == expected


@pytest.mark.parametrize("annotation", [dict, list[int], int | str])
def test_other_annotations_are_refused(annotation):
    with pytest.raises(AssertionError, match="annotation"):
        value_type(annotation)
