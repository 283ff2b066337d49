"""Trainings against a retrieval server that fails in every way, and one that stays away."""

import os
import subprocess
import sys

import pytest

from jaxrl.builders import components
from jaxrl.builders.validation import validate
from jaxrl.envs.base import OutageError
from jaxrl.envs.search.resilient import PROBE_QUERY
from jaxrl.logs.display import Display
from jaxrl.run import run
from jaxrl.runtime.preemption import EXIT_UNAVAILABLE
from tests.envs.fault_server import MIX, FaultServer
from tests.helpers import build, settings_of
from tests.runs import (
    assert_same_weights,
    base_config,
    evaluation,
    lasting,
    records,
    trajectories,
    warm_start,
    without_usage,
)

pytestmark = [pytest.mark.minutes, pytest.mark.usefixtures("quick_compilation", "no_pictures")]

DEADLINES = {
    "search.http.timeout_s": 0.4,
    "search.deadline_s": 2.0,
    "search.outage_deadline_s": 20.0,
    "search.retries": 12,
    "search.backoff_s": 0.02,
    "search.breaker_rest_s": 0.1,
}
LONGEST_S = DEADLINES["search.deadline_s"] + DEADLINES["search.outage_deadline_s"]


def faulty(world, folder, server, **changes):
    """A small run that searches on this server, with a policy that searches."""
    config = base_config(world, warm_start(world, folder.parent))
    config.update_from_flattened_dict(
        {
            "search.engine": "http",
            "search.http.url": server.url,
            "search.http.batch_size": 3,
            "log.trajectories": -1,
            "checkpoint.every_steps": 1,
            "checkpoint.keep": 9,
            **DEADLINES,
            **changes,
        }
    )
    return config


def play(config, workdir, *, should_stop=lambda: False):
    validate(config)
    workdir.mkdir(exist_ok=True, parents=True)
    parts = build(config, workdir=workdir, log=print)
    run(settings_of(config), workdir, parts, Display(), should_stop)


def told(workdir):
    """Records and trajectories without what the clock decides, and the records of all searches."""
    lines, searches = [], []
    for record in records(workdir):
        for line in trajectories(workdir, record["step"]) if record["step"] else []:
            searches += [record for turn in line["turns"] for record in turn["records"]]
            lines.append(without_usage(line))
    return lasting(workdir), lines, searches


@pytest.fixture(scope="module", autouse=True)
def one_engine():
    """The sampler of all runs here with the same sizes: it compiles for longer than they play."""
    made, make = {}, components.build_engine

    def kept(config, *given, **settings):
        sizes = config.rollout.to_json(), *components.select_sampling_kinds(config)
        made[sizes] = made.get(sizes) or make(config, *given, **settings)
        return made[sizes]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(components, "build_engine", kept)
        yield


@pytest.fixture(scope="module")
def served(tiny_world, tmp_path_factory, quick_compilation, no_pictures):
    """A training through a mix of faults, recorded: its workdir, its server, its configuration."""
    workdir = tmp_path_factory.mktemp("faults") / "served"
    with FaultServer(MIX, seed=3, late_s=0.1) as server:
        config = faulty(tiny_world, workdir, server, **{"search.replay": "record"})
        play(config, workdir)
    return workdir, server, config


def assert_nothing_is_lost(workdir, server, num_trajectories):
    """No trajectory failed, no search waited too long, and the records are the server's count."""
    _, lines, searches = told(workdir)
    assert len(lines) == num_trajectories
    assert {line["outcome"] for line in lines} <= {"answered", "malformed", "out_of_budget"}
    assert all(line["reward"] is not None for line in lines)
    assert max(search["waited_s"] for search in searches) < LONGEST_S
    assert all(search["error"] is None for search in searches)
    asked = server.asked.total() - server.asked[PROBE_QUERY]
    assert sum(search["attempts"] for search in searches) == asked
    in_metrics = [record for record in records(workdir) if "perf/search/calls" in record]
    for name, counted in {
        "calls": len(searches),
        "attempts": asked,
        "cache_hits": [s["source"] for s in searches].count("cache"),
        "shared": [s["source"] for s in searches].count("shared"),
        "failed": 0,
    }.items():
        assert sum(record[f"perf/search/{name}"] for record in in_metrics) == counted
    for line in lines:
        for turn in line["turns"]:  # no document wrote a tag
            body = (turn["observation"] or "").strip()
            assert body.count("<information>") == body.count("</information>") <= 1
            assert "<answer>" not in body


def test_a_training_through_faults_loses_nothing(served):
    workdir, server, _ = served
    assert sum(server.did.values()) > server.did["ok"] > 0
    assert_nothing_is_lost(workdir, server, 32)


def test_a_recorded_training_is_given_again_without_its_server(served, tmp_path):
    workdir, server, config = served
    asked = sum(server.asked.values())
    config = config.copy_and_resolve_references()
    config.search.replay, config.search.replay_folder = "only", str(workdir / "searches")
    play(config, tmp_path / "again")
    kept, lines, searches = told(tmp_path / "again")
    assert (kept, lines) == told(workdir)[:2]
    assert_same_weights(tmp_path / "again" / "export", workdir / "export")
    assert {search["source"] for search in searches} <= {"replay", "cache", "shared"}
    assert sum(server.asked.values()) == asked


def test_an_outage_stops_the_run_and_it_goes_on_as_if_there_had_been_none(served, tmp_path):
    workdir, server, config = served
    config = config.copy_and_resolve_references()
    config.search.replay, config.search.outage_deadline_s = "off", 0.5
    stopped = tmp_path / "stopped"

    def dies_after_the_first_step():
        file = stopped / "metrics.jsonl"
        server.is_dead = file.exists() and file.read_bytes().count(b"\n") >= 2
        return False

    server.faults = {}
    with server:
        with pytest.raises(OutageError, match=r"has not answered for .* saved; once it responds"):
            play(config, stopped, should_stop=dies_after_the_first_step)
        assert server.did["dead"] > 0
        assert [record["step"] for record in records(stopped)] == [0, 1]
        assert [path.name for path in (stopped / "checkpoints").iterdir()] == ["1"]
        server.is_dead = False
        play(config, stopped)
    assert told(stopped)[:2] == told(workdir)[:2]
    assert_same_weights(stopped / "export", workdir / "export")


def test_without_results_episodes_end_as_environment_errors(served, tmp_path):
    _, server, config = served
    config = config.copy_and_resolve_references()
    config.num_steps = 1
    config.search.replay, config.search.on_outage = "off", "empty"
    config.search.outage_deadline_s = 0.3
    server.is_dead = True
    with server:
        play(config, tmp_path)
    server.is_dead = False
    _, lines, searches = told(tmp_path)
    failed = [line for line in lines if line["outcome"] == "environment_error"]
    searched = [line for line in lines if any(turn["tool_call"] for turn in line["turns"])]
    assert failed == searched != []
    assert len(lines) == 16  # none is drawn again
    for line in failed:
        assert (line["reward"], line["advantage"]) == (None, 0)
        assert "No information found" in line["generated_text"]
        assert any("has not answered" in (turn["error"] or "") for turn in line["turns"])
    assert {search["source"] for search in searches} == {"fallback"}
    assert max(search["waited_s"] for search in searches) < 0.3 + LONGEST_S


class Mortal(FaultServer):
    """Resets all connections once it has answered `left` requests."""

    left = 10**9

    def handle(self, request):
        self.left -= 1
        self.is_dead = self.left < 0
        super().handle(request)


@pytest.mark.slow(
    instead="test_faults.py::test_an_outage_stops_the_run_and_it_goes_on_as_if_there_had_been_none"
)
@pytest.mark.parametrize("ahead", [0, 1])
def test_an_outage_at_any_time_is_no_score_and_the_run_goes_on(tiny_world, tmp_path, ahead):
    """In a rollout, in one that runs ahead, in evaluations before, between and after steps."""
    changes = {
        "stages": ("train", "evaluate"), "eval.every_steps": 1, "eval.suites": ("greedy",),
        "eval.final_suites": ("sampled",), "search.outage_deadline_s": 0.3, "search.cache_mib": 0.0,
        "rollout.async_level": ahead, "loss.correction.level": "token",
    }  # fmt: skip
    with Mortal() as server:
        config = faulty(tiny_world, tmp_path / "base", server, **changes)
        play(config, tmp_path / "base")
        wanted, lines, _ = told(tmp_path / "base")
        files = sorted(path.name for path in (tmp_path / "base" / "eval").glob("*.json"))
        scores = {name: evaluation(tmp_path / "base", name) for name in files}
        num_requests, places = sum(server.did.values()), set()
        for share in (0.03, 0.2, 0.4, 0.6, 0.75, 0.95):
            workdir = tmp_path / str(share)
            server.left = int(share * num_requests)
            with pytest.raises(OutageError, match="has not answered for"):
                play(config, workdir)
            server.left = 10**9
            # Where the first query failed already, nothing was begun.
            before = lasting(workdir) if (workdir / "metrics.jsonl").exists() else []
            places.add(len(before))
            assert before == wanted[: len(before)]
            for path in (workdir / "eval").glob("*.json"):
                assert evaluation(workdir, path.name) == scores[path.name]
            play(config, workdir)
            after, again, _ = told(workdir)
            assert [r["step"] for r in after] == [r["step"] for r in wanted]
            assert {line["outcome"] for line in again} == {line["outcome"] for line in lines}
            assert all(line["reward"] is not None for line in again)
            # What could not be sampled ahead is sampled by the weights after the update.
            if [r.get("rollout/lag") for r in after] == [r.get("rollout/lag") for r in wanted]:
                assert (after, again) == (wanted, lines)
                assert {name: evaluation(workdir, name) for name in files} == scores
                assert_same_weights(workdir / "export", tmp_path / "base" / "export")
            else:
                assert ahead
        assert len(places) > 2


@pytest.mark.slow(instead="test_launch.py::test_a_run_that_ends_early_says_how")
def test_the_command_ends_with_its_code_and_goes_on(
    served, tmp_path, tiny_world, quick_compilation
):
    workdir, server, config = served
    path = tmp_path / "values.json"
    path.write_text(config.to_json_best_effort())
    command = [
        *(sys.executable, "-m", "jaxrl.launch", f"--config=configs/debug_tiny.py:{tiny_world}"),
        *(f"--values={path}", f"--workdir={tmp_path / 'run'}"),
        *("--config.search.replay=off", "--config.search.outage_deadline_s=0.5"),
    ]
    server.faults, server.is_dead = {}, True
    with server:
        dead = subprocess.run(
            command, capture_output=True, text=True, env=os.environ | quick_compilation, timeout=600
        )
        assert dead.returncode == EXIT_UNAVAILABLE == 69, dead.stderr
        last = dead.stderr.strip().splitlines()[-1]
        assert last.startswith("error: the search engine has not answered for ")
        assert "Traceback" not in dead.stderr
        server.is_dead = False
        done = subprocess.run(
            command, capture_output=True, text=True, env=os.environ | quick_compilation, timeout=600
        )
        assert done.returncode == 0, done.stderr
    assert told(tmp_path / "run")[:2] == told(workdir)[:2]
