import platform
from pathlib import Path

import pytest

import megatron.core
from megatron.training.guard import startup_check
from megatron.training.guard.startup_check import StartupMismatchError, compare_across_ranks, config_text

CONFIG = {"num_layers": 4, "lr": 1e-4, "data_path": ("a", "b"), "save": None}


class Told:
    """A meeting whose other ranks say what `others` makes of this rank's facts; configurations by their digest."""

    def __init__(self, others, configurations=None):
        self.others = others
        self.configurations = configurations or {}
        self.said = []

    def decide(self, mine, texts, judge):
        self.said.append(mine)
        texts = {**texts, **{name: config_text(config) for name, config in self.configurations.items()}}
        return judge([mine, *self.others(mine)], texts.__getitem__)


def run(others, config=CONFIG, configurations=None, **kw):
    meeting = Told(others, configurations)
    return compare_across_ranks(meeting, config, backend="gloo", torch_version="2.13.0", **kw), meeting.said


def test_equal_ranks_pass():
    common, said = run(lambda mine: [dict(mine)] * 3)
    assert said == [common]
    assert common["torch version"] == "2.13.0"
    assert common["Python version"] == platform.python_version()
    assert common["backend"] == "gloo"
    assert len(common["code"]) == len(common["configuration"]) == 64


@pytest.mark.parametrize("field", ["torch version", "Python version", "code", "backend"])
def test_rank_and_field_are_named(field):
    with pytest.raises(StartupMismatchError) as caught:
        run(lambda mine: [mine, {**mine, field: "2.12.0"}, mine])
    assert f"  {field}: rank 2 has 2.12.0, rank 0 " in str(caught.value)
    assert str(caught.value).count("\n") == 2


def test_configuration_names_the_flag_and_both_values():
    configurations = {"a": {**CONFIG, "lr": 3e-4}, "b": {**CONFIG, "lr": 3e-4, "seed": 7}}
    with pytest.raises(StartupMismatchError) as caught:
        run(
            lambda mine: [{**mine, "configuration": "a"}, {**mine, "configuration": "b"}],
            CONFIG,
            configurations,
        )
    text = str(caught.value)
    assert "  lr: rank 0 has 0.0001, rank 1 0.0003" in text, "the majority is the reference"
    assert "  seed: rank 2 has 7, rank 0 no value" in text
    assert "configuration" not in text.split("Start every")[0].replace("not started alike", "")


def test_two_ranks_rank_0_is_the_reference():
    with pytest.raises(StartupMismatchError, match=r"torch version: rank 1 has 2\.9, rank 0 2\.13\.0"):
        run(lambda mine: [{**mine, "torch version": "2.9"}])


def test_many_ranks_are_abridged():
    with pytest.raises(StartupMismatchError, match=r"ranks 11, 12, 13, 14, 15, 16, 17, 18, \.\.\. have 2\.9"):
        run(lambda mine: [mine] * 10 + [{**mine, "torch version": "2.9"}] * 9)


def test_code_digest_sees_names_and_contents(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "a.py").write_text("x = 1\n")
    (tmp_path / "sub" / "b.py").write_text("y = 1\n")
    first = startup_check.code_digest(tmp_path)
    (tmp_path / "notes.txt").write_text("not code")
    assert startup_check.code_digest(tmp_path) == first
    (tmp_path / "a.py").write_text("x = 2\n")
    second = startup_check.code_digest(tmp_path)
    (tmp_path / "a.py").rename(tmp_path / "c.py")
    third = startup_check.code_digest(tmp_path)
    assert len({first, second, third}) == 3
    assert len(startup_check.code_digest()) == 64


def test_the_whole_package_is_compared():
    assert Path(megatron.core.__file__).parents[1] == startup_check.PACKAGE_DIR


def test_unusual_values_do_not_stop_the_comparison():
    run(lambda mine: [mine], {"path": platform, "inf": float("inf")})
