from megatron.training.report.timers import RunClock


def test_pauses_do_not_count():
    time = [100.0]
    clock = RunClock(lambda: time[0])
    start = clock.now()
    time[0] += 2.0
    with clock.paused():
        time[0] += 50.0
    time[0] += 3.0
    assert clock.now() - start == 5.0
