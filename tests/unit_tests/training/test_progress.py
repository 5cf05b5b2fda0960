import io
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.core.words import age, duration
from megatron.training.report.progress import EtaEstimator, ProgressLine


def run_eta(durations):
    """(estimate, truth) of the time left after each iteration."""
    eta, now, ends = EtaEstimator(len(durations)), 0.0, []
    estimates = []
    for i, seconds in enumerate(durations, start=1):
        now += seconds
        eta.update(i, now)
        estimates.append(eta.eta_s())
        ends.append(now)
    return [(estimate, now - end) for estimate, end in zip(estimates, ends, strict=True)]


def worst(pairs, start=0.05, stop=0.9):
    middle = pairs[int(len(pairs) * start) : int(len(pairs) * stop)]
    return max(abs(estimate - truth) / truth for estimate, truth in middle)


def test_steady_pace_is_exact_from_the_second_update():
    pairs = run_eta([0.5] * 40)
    assert pairs[0][0] is None
    assert all(estimate == pytest.approx(truth) for estimate, truth in pairs[1:])
    assert pairs[-1][0] == 0.0


def test_slow_start_noise_evaluations_and_saves_stay_within_a_fifth():
    rng = random.Random(1)
    durations = [rng.uniform(0.8, 1.2) for _ in range(1000)]
    durations[0] = 60.0
    for i in range(49, 1000, 50):
        durations[i] += 5.0
    assert worst(run_eta(durations)) < 0.2


def test_a_change_of_pace_is_followed():
    pairs = run_eta([1.0] * 200 + [2.0] * 800)
    assert worst(pairs, start=0.45) < 0.2


@given(pace=st.floats(1e-3, 1e3), total=st.integers(20, 400), first=st.integers(0, 10**6))
def test_any_pace_and_any_start(pace, total, first):
    eta = EtaEstimator(first + total)
    for i in range(total // 2):
        eta.update(first + i, 17.0 + i * pace)
    left = total - (total // 2 - 1)
    assert eta.eta_s() == pytest.approx(left * pace, rel=1e-3)


def test_memory_of_the_estimator_is_bounded():
    eta = EtaEstimator(30_000)
    for i in range(20_001):
        eta.update(i, i * 0.25)
    assert len(eta._samples) <= 1024
    assert eta.eta_s() == pytest.approx(10_000 * 0.25)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        *((None, "not known"), (0.4, "0:00:00"), (70, "0:01:10"), (3599.6, "1:00:00")),
        *((93784, "1 day 02:03:04"), (2e5, "2 days 07:33:20")),
    ],
)
def test_durations(seconds, text):
    assert duration(seconds) == text


@pytest.mark.parametrize(("seconds", "text"), [(12.4, "12 s ago"), (180, "3 min ago"), (9000, "2.5 h ago")])
def test_ages(seconds, text):
    assert age(seconds) == text


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def test_plain_lines_every_ten_seconds_without_control_codes():
    out, clock = io.StringIO(), Clock()
    progress = ProgressLine(100, stream=out, clock=clock)
    progress.figures(loss=3.21, tokens_per_s=12345.6)
    for i in range(1, 101):
        clock.now += 1.0
        if i == 30:
            progress.checkpoint_saved()
        progress.update(i)
        progress.show()
    progress.close()
    lines = out.getvalue().splitlines()
    assert [line.split("|")[1].strip() for line in lines] == [
        f"step {i}/100" for i in (2, 12, 22, 32, 42, 52, 62, 72, 82, 92, 100)
    ]
    assert lines[3] == (
        " progress:  32.0% | step 32/100 | loss 3.2100 | tokens/s 12,346 | ETA 0:01:08"
        " | last checkpoint 2 s ago"
    )
    assert lines[0].endswith(" | no checkpoint yet")
    assert "\x1b" not in out.getvalue()
    assert "\r" not in out.getvalue()


def test_a_loss_that_is_not_known():
    out, clock = io.StringIO(), Clock()
    progress = ProgressLine(1, stream=out, clock=clock)
    progress.figures(loss=None, tokens_per_s=1.0)
    progress.update(1)
    progress.show()
    assert "loss not known" in out.getvalue()


def test_live_line_on_a_terminal():
    bars, clock = [], Clock()
    progress = ProgressLine(10, clock=clock, show_bar=bars.append, first_iteration=3)
    progress.figures(loss=1.5, tokens_per_s=10.0)
    for i in range(3, 11):
        clock.now += 1.0
        progress.update(i)
        progress.show()
    progress.close()
    progress.close()
    assert bars.pop() is None, "the terminal is not given back"
    text = "\n".join(bars)
    assert "20.0% | 2/10" not in text, "nothing is shown before the first update"
    assert "30.0% | 3/10" in text
    assert "100.0% | 10/10" in text
    assert "loss 1.5000" in text


def test_a_file_or_pipe_gets_plain_lines():
    out = io.StringIO()
    progress = ProgressLine(1, stream=out)
    progress.update(1)
    progress.show()
    assert out.getvalue().startswith(" progress: 100.0% | step 1/1 | ")
