import math
import os
import signal

import pytest

from jaxrl.stopping import EXIT_TRY_AGAIN, Best, stop_on_signals, update_best


def test_best_and_patience_by_hand():
    best = Best()
    values = [0.25, 0.25, 0.375, 0.4375, 0.375, math.nan, 0.4375, 0.75]
    seen = []
    for step, value in enumerate(values, start=1):
        best = update_best(best, step, value, min_delta=0.125)
        seen.append((best.value, best.step, best.mark, best.num_stale))
    assert seen == [
        (0.25, 1, 0.25, 0),
        (0.25, 1, 0.25, 1),  # equal is not better
        (0.375, 3, 0.25, 2),  # better, by exactly min_delta: patience does not begin anew
        (0.4375, 4, 0.4375, 0),  # two small improvements made one of more than min_delta
        (0.4375, 4, 0.4375, 1),
        (0.4375, 4, 0.4375, 1),  # nothing could be scored
        (0.4375, 4, 0.4375, 2),
        (0.75, 8, 0.75, 0),
    ]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_first_signal_asks_and_the_second_ends(number, capfd):
    arrived = []
    before = signal.signal(number, lambda *_: arrived.append(number))
    try:
        with stop_on_signals() as should_stop:
            assert not should_stop()
            os.kill(os.getpid(), number)
            assert should_stop()
            assert arrived == []
            os.kill(os.getpid(), number)
            assert arrived == [number]  # as it would have gone without us
        with stop_on_signals():
            pass
        os.kill(os.getpid(), number)
        assert arrived == [number, number]
    finally:
        signal.signal(number, before)
    name = signal.Signals(number).name
    assert capfd.readouterr().err == f"{name}: saving; once more to end at once\n"


def test_the_code_is_the_one_of_sysexits():
    assert EXIT_TRY_AGAIN == os.EX_TEMPFAIL
