"""MLflow, Trackio and W&B, with the real packages on local stores."""

import contextlib
import json
import math
import re
import warnings

import pytest

from jaxrl.config import default_config
from jaxrl.logs.trackers import open_metrics_log
from tests.episodes import make_failure, make_trajectory
from tests.helpers import settings_of

pytestmark = pytest.mark.minutes

SAMPLES = [make_trajectory(reward=1.0, parts={"exact_match": 1.0}), make_failure()]
ENTROPY, SCORE = "actor/entropy", "val-core/all/exact_match/mean@1"


def write(workdir, name, first, values, log=print):
    """Resume a run after its first records, and write a record with samples for each value."""
    config = default_config()
    config.log.trackers, config.log.project = ("tensorboard", name), workdir.parent.name
    metrics_log = open_metrics_log(workdir, first, settings_of(config), log, is_writer=True)
    for index, value in enumerate(values, start=first):
        metrics_log.add_samples("train", SAMPLES)
        metrics_log.write(10 + index, "train", {ENTROPY: value, SCORE: value, "nothing": math.nan})
    return metrics_log


def check_table(columns, rows):
    """Check the samples that `write` has written: columns, and one list of values per row."""
    first, failed = (dict(zip(columns, row, strict=True)) for row in rows)
    assert (first["question"], first["answers"], first["reward"]) == ("Où ?", "x", 1.0)
    assert first["response"] == SAMPLES[0].generated_text
    assert (first["outcome"], failed["outcome"]) == ("answered", "environment_error")
    assert (first["reward/exact_match"], failed["reward"]) == (1.0, None)


@pytest.fixture
def run(tmp_path):
    (tmp_path / "run").mkdir()
    return tmp_path / "run"


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """The folder of an MLflow database, which takes seconds to create."""
    pytest.importorskip("mlflow")
    from mlflow.tracking import MlflowClient

    folder = tmp_path_factory.mktemp("mlflow")
    with warnings.catch_warnings(action="ignore"), contextlib.chdir(folder):
        MlflowClient(f"sqlite:///{folder}/mlflow.db").search_experiments()
    return folder


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # MLflow's use of SQLAlchemy
class TestMLflow:
    @pytest.fixture(autouse=True)
    def client(self, store, run, monkeypatch):
        from mlflow.tracking import MlflowClient

        self.experiment = run.parent.name
        monkeypatch.chdir(store)
        monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{store}/mlflow.db")
        return MlflowClient()

    def find_run(self, client):
        experiment = client.get_experiment_by_name(self.experiment)
        [found] = client.search_runs([experiment.experiment_id])
        return found

    def read(self, client, name):
        history = client.get_metric_history(self.find_run(client).info.run_id, name)
        return [(metric.step, metric.value) for metric in history]

    def test_a_killed_run_continues_without_repeating_a_step(self, run, client):
        write(run, "mlflow", 0, [0.5, 0.25, 0.125])  # killed: nothing closes it
        assert self.find_run(client).info.status == "RUNNING"
        write(run, "mlflow", 1, [7.0, 8.0, 0.75]).close()
        expected = [(0, 0.5), (1, 0.25), (2, 0.125), (3, 0.75)]
        assert self.read(client, ENTROPY) == expected
        assert self.read(client, "val-core/all/exact_match/mean_at_1") == expected
        assert self.read(client, "step") == [(0, 10), (1, 11), (2, 12), (3, 13)]
        assert self.read(client, "nothing") == []
        found = self.find_run(client)
        assert (found.info.run_name, found.info.status) == ("run", "FINISHED")
        assert found.data.params["log.project"] == self.experiment

    def test_samples_are_tables(self, run, client):
        write(run, "mlflow", 0, [0.5]).close()
        info = self.find_run(client).info
        # MLflow limits the length of the tag that lists the tables.
        names = [f"samples/random_search/{index:06d}.json" for index in range(100)]
        listed = [{"path": name, "type": "table"} for name in names]
        client.set_tag(info.run_id, "mlflow.loggedArtifacts", json.dumps(listed))
        write(run, "mlflow", 1, [0.5]).close()
        tag = json.loads(self.find_run(client).data.tags["mlflow.loggedArtifacts"])
        path = "samples/train/000001.json"
        assert [table["path"] for table in tag] == [*names[1:], path]
        table = client.load_table(info.experiment_id, path, run_ids=[info.run_id])
        content = json.loads(table.to_json(orient="split"))
        check_table(content["columns"], content["data"])

    def test_a_failure_in_the_middle_leaves_it_out_with_one_warning(self, run, client):
        lines = []
        metrics_log = write(run, "mlflow", 0, [0.5], lines.append)
        client.delete_run(self.find_run(client).info.run_id)
        for step in (11, 12):
            metrics_log.write(step, "train", {ENTROPY: 1.0})
        metrics_log.close()
        [warning] = lines
        assert warning.startswith("warning: the tracker 'mlflow' failed")
        assert len((run / "metrics.jsonl").read_text().splitlines()) == 3

    def test_a_server_that_does_not_respond_leaves_it_out(self, run, monkeypatch):
        lines = []
        monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
        monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
        write(run, "mlflow", 0, [0.5, 0.25], lines.append).close()
        [warning] = lines
        assert warning.startswith("warning: the tracker 'mlflow' failed")
        assert len((run / "metrics.jsonl").read_text().splitlines()) == 2


@pytest.fixture(scope="module")
def storage(tmp_path_factory):
    """The store of Trackio, which reads its folder when it is imported."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRACKIO_DIR", str(tmp_path_factory.mktemp("trackio")))
        pytest.importorskip("trackio")
        from trackio.sqlite_storage import SQLiteStorage

    return SQLiteStorage


class TestTrackio:
    def test_a_restarted_run_continues_without_repeating_a_step(self, run, storage):
        write(run, "trackio", 0, [0.5, 0.25, 0.125]).close()
        write(run, "trackio", 1, [7.0, 8.0, 0.75]).close()
        project = run.parent.name
        [name] = storage.get_runs(project)
        assert name.startswith("run-")
        records = storage.get_logs(project, name)
        values = [(r["step"], r[ENTROPY], r[SCORE]) for r in records]
        assert values == [(0, 0.5, 0.5), (1, 0.25, 0.25), (2, 0.125, 0.125), (3, 0.75, 0.75)]
        assert not any("nothing" in record for record in records)
        for record in records:
            table = record["samples/train"]["_value"]
            check_table([*table[0]], [[*row.values()] for row in table])


class TestWandB:
    def test_an_offline_run_resumes_under_the_same_id(self, run, monkeypatch):
        pytest.importorskip("wandb")
        monkeypatch.setenv("WANDB_MODE", "offline")
        for first in (0, 1):
            write(run, "wandb", first, [0.5]).close()
        folders = list((run / "wandb").glob("offline-run-*"))
        run_id = (run / "wandb" / "run_id").read_text()
        assert len(folders) == 2
        # The same run; W&B appends a number to a folder that starts in the same second.
        names = [re.sub(r"^offline-run-\d+_\d+-", "", folder.name) for folder in folders]
        assert {re.sub(r"-\d$", "", name) for name in names} == {run_id}
        for folder in folders:
            [file] = folder.rglob("*.table.json")
            table = json.loads(file.read_text(encoding="utf-8"))
            check_table(table["columns"], table["data"])
