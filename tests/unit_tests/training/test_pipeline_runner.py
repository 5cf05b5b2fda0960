"""The runner of a run: which steps it measures, and its end."""

import contextlib
from types import SimpleNamespace

import pytest

from megatron.core.device import Device
from megatron.core.pipeline_parallel.plan.residency import Residency
from megatron.core.pipeline_parallel.runtime.profiler import Profiler
from megatron.core.transport.parallel_state import single_process
from megatron.training.guard.signals import SignalHandler
from megatron.training.report.timers import Timers
from megatron.training.run import training
from megatron.training.run.arguments import parse_config
from megatron.training.run.pipeline import PipelineRunner
from tests.harness import launch


class ClosedError(Exception):
    """Told by a recorder that was closed."""


def test_closing_a_runner_closes_its_recorder():
    def close():
        raise ClosedError

    ps, engine = (
        single_process(Device("cpu")),
        SimpleNamespace(
            chunks=[], model=SimpleNamespace(residency=lambda *_: Residency("no_shard"), has_peers=False)
        ),
    )

    config = parse_config([*launch.TINY, "--train-iters", "9"])
    session = SimpleNamespace(config=config, ps=ps, timers=Timers(0))
    planner = config.planner()

    def runner(recorder):
        return PipelineRunner(session, engine, None, planner, recorder=recorder).close()

    runner(None)
    with pytest.raises(ClosedError):
        runner(SimpleNamespace(close=close))


@pytest.mark.parametrize("error", [None, FloatingPointError("no number")])
def test_a_run_closes_its_runner_whichever_way_it_ends(monkeypatch, error):
    log = []

    def loop_run(_provider):
        log.append("run")
        if error is not None:
            raise error
        return "ending"

    session = SimpleNamespace(
        config=SimpleNamespace(extra={}),
        planner=None,
        settings=dict,
        ps=SimpleNamespace(rank=1, world_size=2),
        device=None,
        tokenizer=None,
        timers=None,
        watchdog=SimpleNamespace(phase=lambda _words: contextlib.nullcontext()),
    )
    for name, value in {
        "initialize": session,
        "build_engine": None,
        "build_runner": SimpleNamespace(close=lambda: log.append("close")),
        "TrainingLoop": SimpleNamespace(run=loop_run),
    }.items():
        monkeypatch.setattr(training, name, lambda *_args, value=value: value)
    for name in ("publish", "provide"):
        monkeypatch.setattr(training.global_vars, name, lambda *_args, **_kwargs: None)
    run = object.__new__(training._Run)
    run.env, run.config, run.folder = SimpleNamespace(rank=1, faked=None), None, None
    run.signals = SignalHandler()
    with pytest.raises(FloatingPointError) if error else contextlib.nullcontext():
        assert run.run(None, None, None) == "ending"
    assert log == ["run", "close"]


@pytest.mark.parametrize(("kind", "measured"), [("cpu", [3, 4, 5, 6]), ("cuda", [3, 4])])
def test_only_the_window_is_measured_where_measuring_waits(kind, measured):
    """On a device that queues its work, --log-interval measures nothing."""
    window = "--zero-bubble-pipeline-timers-start-iter 3 --zero-bubble-pipeline-timers-end-iter 5"
    config = parse_config([*launch.TINY, "--train-iters", "9", *window.split()])
    start, end = config.parallel.timers_window
    interval = config.logging.log_interval
    profiler = Profiler(Device(kind), (0, 1), start=start, end=end, interval=interval)
    assert [number for number in range(3, 7) if profiler.watches(number)] == measured
