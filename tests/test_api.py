"""Runs that Python starts: what they return, and what interrupts and mistakes do to them."""

import os
import signal
import threading
import time

import pytest

from jaxrl import api, report
from tests.runs import SIZES, lasting, records, run_settings

pytestmark = [
    pytest.mark.minutes,
    pytest.mark.usefixtures("quick_compilation", "one_size", "no_pictures"),
]

SETTINGS = {
    **SIZES,
    **{"sft.num_steps": 8, "num_steps": 4, "optimizer.micro_rows": 0},
    **{"checkpoint.every_steps": 1, "checkpoint.keep": 100, "checkpoint.keep_best": 1},
    **{"eval.every_steps": 2, "eval.suites": ("greedy",), "eval.final_suites": ("greedy",)},
}
BEST = "val-core/all/exact_match/greedy"


@pytest.fixture(scope="module")
def settings(tiny_world):
    return run_settings(tiny_world, **SETTINGS, **{"eval.best_metric": BEST})


@pytest.fixture(scope="module")
def whole(settings, tmp_path_factory, quick_compilation, one_size, no_pictures):
    """A run from its beginning to its end."""
    workdir = tmp_path_factory.mktemp("runs") / "whole"
    before = settings.to_json()
    run = api.train(settings, workdir)
    assert settings.to_json() == before  # micro_rows=0 is chosen in a copy
    return run


def test_a_run_returns_what_its_folder_holds(whole):
    written = records(whole.workdir)
    table = whole.metrics.to_pylist()
    names = {name for record in written for name in record}
    assert [{name: record.get(name) for name in names} for record in written] == table
    assert [row["step"] for row in table if row["stage"] == "train"][-1] == 12
    assert whole.report is None  # the fixture leaves it out
    page = report.write_report([whole.workdir])
    assert api.open_run(whole.workdir).report == page
    assert whole.scores == {n: v for n, v in written[-1].items() if n.startswith("val-")}
    assert BEST in whole.scores


def test_the_best_checkpoint_is_that_of_the_highest_value(whole):
    values = {r["step"]: r[BEST] for r in records(whole.workdir) if BEST in r and r["step"] > 8}
    # The first of the highest, as the run itself has it.
    best = min(step for step, value in values.items() if value == max(values.values()))
    assert whole.best_checkpoint == whole.workdir / "checkpoints" / str(best)
    assert whole.best_checkpoint.is_dir()


def test_an_interrupt_saves_and_the_same_call_goes_on(whole, settings, tmp_path):
    workdir = tmp_path / "run"

    def interrupt():
        while not (workdir / "checkpoints" / "9").is_dir():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt, match="are saved in"):
        api.train(settings, workdir)
    thread.join()
    assert signal.getsignal(signal.SIGINT) is before
    done = api.open_run(workdir)
    assert 8 < done.metrics["step"].to_pylist()[-1] < 12
    again = api.train(settings, workdir)
    assert lasting(again.workdir) == lasting(whole.workdir)


def test_a_checkpoint_is_evaluated(whole, settings):
    written = records(whole.workdir)
    run = api.evaluate(settings, whole.workdir, step=10)
    assert (run.workdir / "eval" / "evaluate_10.json").is_file()
    assert (run.workdir / "steps" / "10" / "export" / "config.json").is_file()
    assert records(whole.workdir) == written


def test_mistakes_are_raised(settings, tmp_path, whole):
    wrong = settings.copy_and_resolve_references()
    wrong.optimizer.lr = -1.0
    with pytest.raises(ValueError, match=r"optimizer\.lr"):
        api.train(wrong, tmp_path / "run")
    other = settings.copy_and_resolve_references()
    other.seed = 7
    with pytest.raises(ValueError, match="seed"):
        api.train(other, whole.workdir)
    with pytest.raises(FileNotFoundError, match=r"holds no metrics\.jsonl; expected a run's"):
        api.open_run(tmp_path)
    assert not (tmp_path / "run").exists()


def test_a_run_in_another_thread(settings, tmp_path):
    """As notebooks and servers may have it, where Python delivers no signals."""
    short = settings.copy_and_resolve_references()
    short.stages = ("sft",)
    found = []
    thread = threading.Thread(target=lambda: found.append(api.train(short, tmp_path / "run")))
    thread.start()
    thread.join()
    assert found[0].metrics["step"].to_pylist()[-1] == 8
    assert found[0].scores == {}
