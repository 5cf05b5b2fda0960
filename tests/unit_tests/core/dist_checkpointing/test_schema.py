"""A table of fields: what passes, what is said of what does not."""

import dataclasses
from pathlib import Path

import pytest

from megatron.core.dist_checkpointing.files import CheckpointError
from megatron.core.schema import (
    MAX_DEPTH,
    Place,
    anything,
    array,
    boolean,
    check,
    fields_of,
    integer,
    mapping,
    number,
    one_of,
    optional,
    or_null,
    text,
)

PLACE = Place(Path("m.json"), error=CheckpointError)


def nested(depth):
    value = 1
    for _ in range(depth):
        value = {"x": value}
    return value


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        (integer(), [0, 5, 1 << 56], [-1, True, 1.0, "1", None, (1 << 56) + 1, [1]]),
        (
            number(low=0.0),
            [0, 0.5, 10**20],
            [-0.1, True, "1", None, 1e301, float("nan"), float("inf"), 10**400],
        ),
        (boolean, [True, False], [0, 1, None, "true"]),
        (text("[a-z]+"), ["abc"], ["", "A", 1, None, "a\n"]),
        (text(), ["", "a b"], ["\x1b[2J", "\ud800", "x" * 1001]),
        (one_of("a", 1), ["a", 1], [True, 1.0, "b", None, ["a"], {}]),
        (or_null(integer()), [None, 1], ["1"]),
        (array(integer(), 2), [[], [1, 2]], [[1, 2, 3], [True], {}, "ab", None]),
        (mapping(integer()), [{}, {"a": 1}], [{"a": "b"}, [], None, {"\n": 1}]),
        (
            {"a": integer(), "b": optional(boolean)},
            [{"a": 1}, {"a": 1, "b": True}],
            [{}, {"a": 1, "c": 2}, [], None],
        ),
        (anything, [None, [1, {"a": "b"}], nested(MAX_DEPTH - 1)], [nested(MAX_DEPTH + 1), nested(500)]),
    ],
)
def test_what_passes_and_what_does_not(schema, good, bad):
    for value in good:
        check(schema, value, PLACE)
    for value in bad:
        with pytest.raises(CheckpointError, match=r"^m\.json: field '.*expected .*, found "):
            check(schema, value, PLACE.at("x"))


def test_the_path_to_a_value_is_named():
    schema = {"a": array({"b": mapping(or_null(integer()))})}
    with pytest.raises(
        CheckpointError, match=r"field 'top\.a\[1\]\.b\.c': expected an integer .*, found 'x'"
    ):
        check(schema, {"a": [{"b": {}}, {"b": {"d": None, "c": "x"}}]}, PLACE.at("top"))


def test_a_message_stays_short_whatever_is_found():
    for value in ("x" * 10**6, [list(range(1000))] * 1000, {str(i): i for i in range(10**5)}, 10**4000):
        with pytest.raises(CheckpointError) as error:
            check({"a": integer()}, {"a": value}, PLACE)
        assert len(str(error.value)) < 1000
    with pytest.raises(CheckpointError) as error:
        check({"a": integer()}, {"a": 1} | {f"b{i}": 0 for i in range(10**5)}, PLACE)
    assert len(str(error.value)) < 1000


def test_a_dataclass_gives_its_own_schema():
    @dataclasses.dataclass
    class Facts:
        rate: float
        peak: float | None
        style: str
        new: int = 0

    schema = fields_of(Facts, style=one_of("a", "b"))
    check(schema, {"rate": 1, "peak": None, "style": "a"}, PLACE)
    check(schema, dataclasses.asdict(Facts(0.5, 2.0, "b", 3)), PLACE)
    wrongs = (
        {"rate": 1, "peak": None},
        {"rate": "1", "peak": None, "style": "a"},
        {"rate": 1, "peak": 1, "style": "c"},
    )
    for wrong in wrongs:
        with pytest.raises(CheckpointError):
            check(schema, wrong, PLACE)
