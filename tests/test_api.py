"""Runs started from Python, such as the notebook's: results, interrupts and errors."""

import contextlib
import json
import os
import signal
import sys
import threading
import time

import pytest
from matplotlib import pyplot

from jaxrl import api
from jaxrl.config import default_config
from jaxrl.extras.view import report
from tests.helpers import ROOT
from tests.runs import lasting, records

pytestmark = [
    pytest.mark.minutes,
    pytest.mark.usefixtures("quick_compilation", "one_size", "no_pictures"),
]

NOTEBOOK = json.loads((ROOT / "examples" / "from_python.ipynb").read_text(encoding="utf-8"))
CODE = [cell for cell in NOTEBOOK["cells"] if cell["cell_type"] == "code"]
BEST = "val-core/all/exact_match/mean@1"


SMALLER = {
    **{"sft.num_steps": 8, "num_steps": 6, "eval.every_steps": 3, "checkpoint.every_steps": 3},
    "model.remat": "none",  # compiles faster
}


@pytest.fixture(scope="module")
def notebook(tmp_path_factory, quick_compilation, one_size, no_pictures):
    """Run the notebook's cells with fewer steps; yield their names, in the folder of the run."""
    names = {}
    with pytest.MonkeyPatch.context() as patch, contextlib.chdir(tmp_path_factory.mktemp("day")):
        patch.setattr(sys, "path", [*sys.path])
        patch.setattr(pyplot, "show", lambda: pyplot.close("all"))
        for index, cell in enumerate(CODE):
            exec(compile("".join(cell["source"]), f"cell {index} of the notebook", "exec"), names)
            if "config" in names and "run" not in names:
                names["config"].update_from_flattened_dict(SMALLER)
        yield names


@pytest.fixture
def settings(notebook):
    return notebook["config"].copy_and_resolve_references()


@pytest.fixture
def whole(notebook):
    """Return the notebook's run, trained and evaluated."""
    return notebook["run"]


def test_outputs_of_the_notebook_are_of_one_run():
    assert [cell["execution_count"] for cell in CODE] == [*range(1, len(CODE) + 1)]
    outputs = json.dumps([{**output, "data": ""} for cell in CODE for output in cell["outputs"]])
    assert "Traceback" not in outputs
    assert str(ROOT) not in outputs


def test_a_run_returns_what_its_folder_holds(whole, settings):
    written = records(whole.workdir)
    table = whole.metrics.to_pylist()
    names = {name for record in written for name in record}
    assert [{name: record.get(name) for name in names} for record in written] == table
    steps = settings.sft.num_steps + settings.num_steps
    assert [row["step"] for row in table if row["stage"] == "train"][-1] == steps
    assert "critic/rewards/mean" in names  # which the documents plot
    assert whole.report is None  # the fixture leaves it out
    page = report.write_report([whole.workdir])
    assert api.load_run(whole.workdir).report == page
    last = written[-1]
    assert whole.scores["exact_match"] == last["val-core/all/exact_match/mean@4"]
    assert whole.scores["exact_match/greedy"] == last["val-core/all/exact_match/greedy"]
    first = next(r for r in written if "val-core/all/exact_match/greedy" in r)
    assert whole.scores_before["exact_match/greedy"] == first["val-core/all/exact_match/greedy"]
    assert whole._repr_html_().count("<polyline") == 3  # reward, entropy, searches


def test_evaluation_finds_the_modules_of_the_run(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "beside_the_script.py").write_text("Env = 3\n")
    config = default_config()
    config.env.name = "beside_the_script.Env"
    with pytest.raises(ValueError, match="No module named 'beside_the_script'"):
        api.evaluate(config, tmp_path / "run")
    (tmp_path / "run").mkdir()
    start = {"code_folders": [str(tmp_path)]}
    (tmp_path / "run" / "environment.json").write_text(json.dumps([start]))
    with pytest.raises(ValueError, match=r"'beside_the_script\.Env', which lacks"):
        api.evaluate(config, tmp_path / "run")


def test_the_best_checkpoint_has_the_highest_score(whole, settings):
    start = settings.sft.num_steps
    scores = {r["step"]: r[BEST] for r in records(whole.workdir) if BEST in r and r["step"] > start}
    best = max(scores, key=scores.get)  # the first of equals
    assert whole.best_checkpoint == whole.workdir / "checkpoints" / str(best)
    assert whole.best_checkpoint.is_dir()


def test_an_interrupt_saves_and_the_same_call_goes_on(whole, settings, tmp_path):
    workdir = tmp_path / "run"
    first, last = settings.sft.num_steps, settings.sft.num_steps + settings.num_steps
    saved = workdir / "checkpoints" / str(first + settings.checkpoint.every_steps)

    def interrupt():
        while not saved.is_dir():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt, match="are saved in"):
        api.train(settings, workdir)
    thread.join()
    assert signal.getsignal(signal.SIGINT) is before
    done = api.load_run(workdir)
    assert first < done.metrics["step"].to_pylist()[-1] < last
    again = api.train(settings, workdir)
    trained = [record for record in lasting(whole.workdir) if record["stage"] != "evaluate"]
    assert lasting(again.workdir) == trained


def test_evaluates_a_checkpoint(whole, settings):
    written = records(whole.workdir)
    step = settings.sft.num_steps + settings.num_steps - settings.checkpoint.every_steps
    run = api.evaluate(settings, whole.workdir, step=step)
    assert (run.workdir / "eval" / f"evaluate_{step}.json").is_file()
    assert (run.workdir / "steps" / str(step) / "export" / "config.json").is_file()
    assert records(whole.workdir) == written


def test_errors_are_raised(settings, tmp_path, whole):
    settings.seed = 7
    with pytest.raises(ValueError, match="seed"):
        api.train(settings, whole.workdir)
    settings.optimizer.lr = -1.0
    with pytest.raises(ValueError, match=r"optimizer\.lr"):
        api.train(settings, tmp_path / "run")
    with pytest.raises(FileNotFoundError, match=r"holds no metrics\.jsonl; expected a run's"):
        api.load_run(tmp_path)
    assert not (tmp_path / "run").exists()


def test_trains_in_a_thread_that_receives_no_signals(settings, tmp_path):
    """Notebooks and servers may call from such a thread."""
    settings.stages, settings.sft.num_steps = ("sft",), 2
    settings.optimizer.micro_rows = settings.sft.optimizer.micro_rows = 0
    before = settings.to_json()
    runs = []
    thread = threading.Thread(target=lambda: runs.append(api.train(settings, tmp_path / "run")))
    thread.start()
    thread.join()
    assert runs[0].metrics["step"].to_pylist()[-1] == 2
    assert runs[0].scores == {}
    assert settings.to_json() == before  # micro_rows=0 is replaced in a copy
