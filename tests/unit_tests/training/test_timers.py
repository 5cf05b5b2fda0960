import re

import pytest

from megatron.training.report.timers import Timers, format_block, time_scalars


class FakeClock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now

    def pass_(self, seconds):
        self.now += seconds


def make(level=2, option="minmax", **kw):
    clock = FakeClock()
    return Timers(level, option, clock=clock, **kw), clock


def test_sum_over_starts_and_reset():
    timers, clock = make()
    for _ in range(3):
        timers("step", log_level=0).start()
        clock.pass_(0.5)
        timers("step").stop()
        clock.pass_(7.0)
    assert timers("step").elapsed(reset=False) == pytest.approx(1.5)
    assert timers("step").elapsed() == pytest.approx(1.5)
    assert timers("step").elapsed() == 0.0


def test_elapsed_of_a_running_timer_keeps_it_running():
    timers, clock = make()
    timer = timers("interval-time", log_level=0)
    timer.start()
    clock.pass_(2.0)
    assert timer.elapsed() == pytest.approx(2.0)
    clock.pass_(1.0)
    assert timer.elapsed() == pytest.approx(1.0)


def test_context_manager_stops_on_error():
    timers, clock = make()

    def body():
        with timers("data", log_level=1):
            clock.pass_(0.25)
            raise KeyError

    with pytest.raises(KeyError):
        body()
    assert timers("data").elapsed() == pytest.approx(0.25)


def test_levels_silence_timers_and_never_synchronize():
    calls = []
    timers, clock = make(level=1, synchronize=lambda: calls.append("sync"))
    with timers("deep", log_level=2):
        clock.pass_(1.0)
    with timers("unlevelled"):  # without a level: the deepest
        clock.pass_(1.0)
    assert calls == []
    with timers("shallow", log_level=1):
        clock.pass_(1.0)
    assert calls == ["sync", "sync"]
    assert timers.values() == {"shallow": pytest.approx(1.0)}
    with pytest.raises(AssertionError, match="timing-log-level"):
        timers("deep").elapsed()
    with pytest.raises(AssertionError, match="barrier"):
        timers("deep").start(barrier=True)


def test_misuse_is_refused():
    timers, _ = make()
    with pytest.raises(AssertionError, match="level 3"):
        timers("x", log_level=3)
    timers("y", log_level=1).start()
    with pytest.raises(AssertionError, match="already running"):
        timers("y").start()
    with pytest.raises(AssertionError, match="asked for 2"):
        timers("y", log_level=2)
    with pytest.raises(AssertionError, match="not running"):
        timers("z", log_level=0).stop()
    with pytest.raises(AssertionError, match="--timing-log-level 5"):
        Timers(5)
    with pytest.raises(AssertionError, match="--timing-log-option mean"):
        Timers(0, "mean")


def test_barrier_is_called_when_asked():
    calls = []
    timers, _ = make(barrier=lambda: calls.append("barrier"), synchronize=lambda: calls.append("sync"))
    timers("a", log_level=0).start(barrier=True)
    timers("a").stop(barrier=True)
    assert calls == ["barrier", "sync", "barrier", "sync"]


def test_minmax_block_as_scripts_parse_it():
    ranks = [{"forward-backward": 0.1, "optimizer": 0.004}, {"forward-backward": 0.3}, {"optimizer": 0.002}]
    block = format_block(ranks, "minmax", normalizer=2.0)
    title, *lines = block.split("\n")
    assert title == "(min, max) time across ranks (ms):"
    assert lines[0] == "    forward-backward " + "." * 31 + ": (50.00, 150.00)"
    found = [re.match(r"^ {4}([a-z-]+) \.+: \(([\d.]+), ([\d.]+)\)$", line) for line in lines]
    assert [f.groups() for f in found] == [
        ("forward-backward", "50.00", "150.00"),
        ("optimizer", "1.00", "2.00"),
    ]
    assert {line.index(": (") for line in lines} == {4 + 48}


def test_max_and_all_blocks():
    ranks = [{"a": 0.1}, {"a": 0.3}]
    assert format_block(ranks, "max").split("\n") == [
        "max time across ranks (ms):",
        "    a " + "." * 46 + ": 300.00",
    ]
    assert format_block(ranks, "all").split("\n") == [
        "times across ranks (ms):",
        "  a:",
        "     rank  0: 100.00",
        "     rank  1: 300.00",
    ]
    assert format_block([{}, {"a": 0.0}], "max") is None


def test_log_and_write():
    timers, clock = make(level=0, option="max")
    with timers("a", log_level=0):
        clock.pass_(1.0)
    ranks = [timers.values(), {"a": 3.0}]
    assert format_block(ranks, "max", normalizer=10.0).endswith(": 300.00")
    assert time_scalars(ranks, normalizer=10.0) == {"a-time": pytest.approx(0.3)}
    assert format_block([timers.values()], "max") is None  # reset by the first look
