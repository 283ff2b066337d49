"""How a run begins and ends around its stages."""

from types import SimpleNamespace

import pytest

from jaxrl import run
from jaxrl.config import default_config
from jaxrl.logs.display import Display
from jaxrl.train import train
from jaxrl.training.run_state import Progress, RunState
from tests.helpers import settings_of


def test_a_start_that_fails_closes_the_checkpoints(tmp_path, monkeypatch):
    def record_start():
        raise OSError("full")

    def close(checkpointer, close=run.Checkpointer.close):
        closed.append(checkpointer)
        close(checkpointer)

    closed, textual = [], SimpleNamespace(processor=None)
    monkeypatch.setattr(run.Checkpointer, "close", close)
    with pytest.raises(OSError, match="full"):
        run.run(
            settings_of(default_config()), tmp_path, textual, Display(), record_start=record_start
        )
    assert len(closed) == 1


def test_more_steps_are_done_than_are_asked_for():
    told, stages = [], {"train": SimpleNamespace(num_steps=2)}
    run_state = RunState(
        settings=settings_of(default_config()),
        workdir=None,
        components=SimpleNamespace(num_steps={"train": 2}, stages=stages, method=None),
        checkpointer=None,
        metrics_log=None,
        display=SimpleNamespace(log=told.append),
        progress=Progress(stage="train", stage_step=6),
        restored={},
        should_stop=lambda: False,
        run_suites=None,
        write_samples=None,
        origin={},
        failures=None,
    )
    assert train(run_state, "weights") == "weights"
    [line] = told
    assert line.startswith("train: 6 steps are done, and config.num_steps is 2: nothing is left")


def test_a_rate_of_zero_is_named():
    assert "config.optimizer.lr is 0" in run.describe_no_learning(4, 0.0)
    assert "NOTHING WAS LEARNED in the 4 steps" in run.describe_no_learning(4, 1e-6)
    assert "NOTHING WAS LEARNED in the one step of" in run.describe_no_learning(1, 1e-6)
