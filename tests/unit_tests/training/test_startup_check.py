import platform

import pytest

from megatron.training import startup_check
from megatron.training.startup_check import StartupMismatchError, compare_across_ranks

CONFIG = {"num_layers": 4, "lr": 1e-4, "data_path": ("a", "b"), "save": None}


def gather_with(others):
    """A gather whose other ranks answer each round with `others(mine, round)`."""
    rounds = []

    def gather(mine):
        rounds.append(mine)
        return [mine, *others(mine, len(rounds) - 1)]

    return gather, rounds


def run(others, **kw):
    gather, rounds = gather_with(others)
    return compare_across_ranks(gather, CONFIG, torch_version="2.13.0", **kw), rounds


def test_equal_ranks_pass_in_one_round():
    common, rounds = run(lambda mine, _: [dict(mine)] * 3)
    assert len(rounds) == 1
    assert common["torch version"] == "2.13.0"
    assert common["Python version"] == platform.python_version()
    assert len(common["code"]) == len(common["configuration"]) == 64


@pytest.mark.parametrize("field", ["torch version", "Python version", "code"])
def test_rank_and_field_are_named(field):
    with pytest.raises(StartupMismatchError) as caught:
        run(lambda mine, _: [mine, {**mine, field: "2.12.0"}, mine])
    assert f"  {field}: rank 2 has 2.12.0, rank 0 " in str(caught.value)
    assert str(caught.value).count("\n") == 2


def test_configuration_names_the_flag_and_both_values():
    def others(mine, number):
        if number == 0:
            return [{**mine, "configuration": "0" * 64}] * 2
        return [{**mine, "lr": "0.0003"}, {**mine, "lr": "0.0003", "seed": "7"}]

    with pytest.raises(StartupMismatchError) as caught:
        run(others)
    text = str(caught.value)
    assert "  lr: rank 0 has 0.0001, rank 1 0.0003" in text, "the majority is the reference"
    assert "  seed: rank 2 has 7, rank 0 no value" in text
    assert "configuration" not in text.split("Start every")[0].replace("not started alike", "")


def test_two_ranks_rank_0_is_the_reference():
    with pytest.raises(StartupMismatchError, match=r"torch version: rank 1 has 2\.9, rank 0 2\.13\.0"):
        run(lambda mine, _: [{**mine, "torch version": "2.9"}])


def test_many_ranks_are_abridged():
    with pytest.raises(StartupMismatchError, match=r"ranks 11, 12, 13, 14, 15, 16, 17, 18, \.\.\. have 2\.9"):
        run(lambda mine, _: [mine] * 10 + [{**mine, "torch version": "2.9"}] * 9)


def test_ignored_names_may_differ():
    digests = []

    def gather(mine):
        digests.append(mine["configuration"])
        return [mine]

    for node in ("a", "b"):
        compare_across_ranks(gather, {**CONFIG, "scratch": node}, torch_version="2", ignore={"scratch"})
    compare_across_ranks(gather, {**CONFIG, "lr": 1.0}, torch_version="2", ignore={"scratch"})
    assert digests[0] == digests[1] != digests[2]


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


def test_unusual_values_do_not_stop_the_comparison():
    gather, _ = gather_with(lambda mine, _: [mine])
    compare_across_ranks(gather, {"path": platform, "inf": float("inf")}, torch_version="2")
