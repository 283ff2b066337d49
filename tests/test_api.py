"""Runs that Python starts, the notebook's first: what they return, interrupts and mistakes."""

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


@pytest.fixture(scope="module")
def notebook(tmp_path_factory, quick_compilation, one_size, no_pictures):
    """The names of the notebook after its last cell, in the folder where it ran."""
    names = {}
    with pytest.MonkeyPatch.context() as patch, contextlib.chdir(tmp_path_factory.mktemp("day")):
        patch.setattr(sys, "path", [*sys.path])
        patch.setattr(pyplot, "show", lambda: pyplot.close("all"))
        for index, cell in enumerate(CODE):
            exec(compile("".join(cell["source"]), f"cell {index} of the notebook", "exec"), names)
        yield names


@pytest.fixture
def settings(notebook):
    return notebook["config"].copy_and_resolve_references()


@pytest.fixture
def whole(notebook):
    """The notebook's run, trained and evaluated."""
    return notebook["run"]


def test_the_notebook_is_kept_as_it_ran():
    assert [cell["execution_count"] for cell in CODE] == [*range(1, len(CODE) + 1)]
    outputs = [output for cell in CODE for output in cell["outputs"]]
    kinds = {output["output_type"] for output in outputs}
    assert kinds <= {"stream", "display_data", "execute_result"}
    assert any("image/png" in output.get("data", {}) for output in outputs)
    told = json.dumps([{**output, "data": ""} for output in outputs])
    assert "Traceback" not in told
    assert str(ROOT) not in told


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
    assert api.load_run(whole.workdir).report.resolve() == page
    last = written[-1]
    assert whole.scores["exact_match"] == last["val-core/all/exact_match/mean@4"]
    assert whole.scores["exact_match/greedy"] == last["val-core/all/exact_match/greedy"]
    first = next(r for r in written if "val-core/all/exact_match/greedy" in r)
    assert whole.scores_before["exact_match/greedy"] == first["val-core/all/exact_match/greedy"]


def test_a_run_prints_in_five_lines_and_shows_as_a_table(whole):
    lines = str(whole).splitlines()
    assert len(lines) == 5
    assert f"{whole.scores['exact_match']:.3f}" in lines[1]
    page = whole._repr_html_()
    assert f"<td>{whole.scores['exact_match/greedy']:.3f}</td>" in page
    assert page.count("<polyline") == 3  # reward, entropy, searches


def test_modules_are_found_where_the_run_found_them(tmp_path, monkeypatch):
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


def test_the_best_checkpoint_is_that_of_the_highest_value(whole, settings):
    first = settings.sft.num_steps
    values = {r["step"]: r[BEST] for r in records(whole.workdir) if BEST in r and r["step"] > first}
    # The first of the highest, as the run itself has it.
    best = min(step for step, value in values.items() if value == max(values.values()))
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


def test_a_checkpoint_is_evaluated(whole, settings):
    written = records(whole.workdir)
    step = settings.sft.num_steps + settings.num_steps - settings.checkpoint.every_steps
    run = api.evaluate(settings, whole.workdir, step=step)
    assert (run.workdir / "eval" / f"evaluate_{step}.json").is_file()
    assert (run.workdir / "steps" / str(step) / "export" / "config.json").is_file()
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
        api.load_run(tmp_path)
    assert not (tmp_path / "run").exists()


def test_a_run_in_another_thread(settings, tmp_path):
    """As notebooks and servers may have it, where Python delivers no signals."""
    settings.stages, settings.sft.num_steps = ("sft",), 8
    settings.optimizer.micro_rows = settings.sft.optimizer.micro_rows = 0
    before = settings.to_json()
    found = []
    thread = threading.Thread(target=lambda: found.append(api.train(settings, tmp_path / "run")))
    thread.start()
    thread.join()
    assert found[0].metrics["step"].to_pylist()[-1] == 8
    assert found[0].scores == {}
    assert settings.to_json() == before  # micro_rows=0 is chosen in a copy
