"""Training runs that search on a server, which may fail in every way or stay down."""

import numpy as np
import pytest

from configs import debug_tiny
from jaxrl.builders import components
from jaxrl.builders.resolved import resolve_names
from jaxrl.builders.validation import validate
from jaxrl.config.registry import instantiate
from jaxrl.envs.base import OutageError
from jaxrl.envs.search.resilient import PROBE_QUERY
from jaxrl.logs.display import Display
from jaxrl.run import run
from tests.envs.fault_server import MIX, FaultServer
from tests.helpers import ROOT, blocks, build, settings_of
from tests.runs import (
    assert_same_weights,
    base_config,
    evaluation,
    lasting,
    records,
    trajectories,
    without_usage,
)

pytestmark = [
    pytest.mark.minutes,
    pytest.mark.usefixtures("quick_compilation", "no_pictures", "one_size"),
]

DEADLINES = {
    "search.http.timeout_s": 0.4,
    "search.deadline_s": 2.0,
    "search.outage_deadline_s": 20.0,
    "search.retries": 12,
    "search.backoff_s": 0.02,
    "search.breaker_rest_s": 0.1,
}
LONGEST_S = DEADLINES["search.deadline_s"] + DEADLINES["search.outage_deadline_s"]


def faulty(world, model, server, **changes):
    """Return a small run on this server, with a policy that searches."""
    config = base_config(world, model)
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


def outputs(workdir):
    """Return metrics and trajectories without what the clock decides, and all search records."""
    lines, searches = [], []
    for record in records(workdir):
        for line in trajectories(workdir, record["step"]) if record["step"] else []:
            searches += [record for turn in line["turns"] for record in turn["records"]]
            lines.append(without_usage(line))
    return lasting(workdir), lines, searches


@pytest.fixture(scope="module", autouse=True)
def one_engine():
    """Share the sampler of all runs with the same sizes: it compiles for longer than they take."""
    engines, build_engine = {}, components.build_engine

    def build_once(config, *args, **settings):
        sizes = config.rollout.to_json(), *components.list_sampling_methods(config)
        engines[sizes] = engines.get(sizes) or build_engine(config, *args, **settings)
        return engines[sizes]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(components, "build_engine", build_once)
        yield


@pytest.fixture(scope="module")
def faulty_run(tiny_world, warm_model, tmp_path_factory, quick_compilation, no_pictures):
    """Workdir, server and configuration of a recorded run through a mix of faults."""
    workdir = tmp_path_factory.mktemp("faults") / "served"
    with FaultServer(MIX, seed=3, late_s=0.1) as server:
        config = faulty(tiny_world, warm_model, server, **{"search.replay": "record"})
        play(config, workdir)
    return workdir, server, config


def test_a_run_through_faults_loses_nothing(faulty_run):
    """No trajectory failed, no search waited too long, and the server's counts are the records'."""
    workdir, server, _ = faulty_run
    assert sum(server.did.values()) > server.did["ok"] > 0
    _, lines, searches = outputs(workdir)
    assert len(lines) == 32
    assert {line["outcome"] for line in lines} <= {"answered", "malformed", "out_of_budget"}
    assert all(line["reward"] is not None for line in lines)
    assert max(search["waited_s"] for search in searches) < LONGEST_S
    assert all(search["error"] is None for search in searches)
    num_requests = server.asked.total() - server.asked[PROBE_QUERY]
    assert sum(search["attempts"] for search in searches) == num_requests
    in_metrics = [record for record in records(workdir) if "perf/search/calls" in record]
    for name, counted in {
        "calls": len(searches),
        "attempts": num_requests,
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


def test_a_recorded_run_is_replayed_without_its_server(faulty_run, tmp_path):
    workdir, server, config = faulty_run
    num_requests = server.asked.total()
    config = config.copy_and_resolve_references()
    config.search.replay, config.search.replay_folder = "only", str(workdir / "searches")
    play(config, tmp_path / "again")
    metrics, lines, searches = outputs(tmp_path / "again")
    assert (metrics, lines) == outputs(workdir)[:2]
    assert_same_weights(tmp_path / "again" / "export", workdir / "export")
    assert {search["source"] for search in searches} <= {"replay", "cache", "shared"}
    assert server.asked.total() == num_requests


def test_an_outage_stops_the_run_which_then_resumes_bit_for_bit(faulty_run, tmp_path):
    workdir, server, config = faulty_run
    config = config.copy_and_resolve_references()
    config.search.replay, config.search.outage_deadline_s = "off", 0.5
    stopped = tmp_path / "stopped"

    def die_after_the_first_step():
        file = stopped / "metrics.jsonl"
        server.is_dead = file.exists() and file.read_bytes().count(b"\n") >= 2
        return False

    server.faults = {}
    with server:
        with pytest.raises(OutageError, match=r"has not answered for .* saved; once it responds"):
            play(config, stopped, should_stop=die_after_the_first_step)
        assert server.did["dead"] > 0
        assert [record["step"] for record in records(stopped)] == [0, 1]
        assert [path.name for path in (stopped / "checkpoints").iterdir()] == ["1"]
        server.is_dead = False
        play(config, stopped)
    assert outputs(stopped)[:2] == outputs(workdir)[:2]
    assert_same_weights(stopped / "export", workdir / "export")


def test_episodes_without_results_are_environment_errors_and_no_zero_rewards(faulty_run, tmp_path):
    _, server, config = faulty_run
    config = config.copy_and_resolve_references()
    config.num_steps = 1
    config.search.replay, config.search.on_outage = "off", "empty"
    config.search.outage_deadline_s = 0.3
    server.is_dead = True
    with server:
        play(config, tmp_path)
    server.is_dead = False
    _, lines, searches = outputs(tmp_path)
    failed = [line for line in lines if line["outcome"] == "environment_error"]
    assert failed == [line for line in lines if any(turn["tool_call"] for turn in line["turns"])]
    assert len(lines) == 16  # none is sampled again
    for line in failed:
        assert (line["reward"], line["advantage"]) == (None, 0)
        assert "No information found" in line["generated_text"]
        assert any("has not answered" in (turn["error"] or "") for turn in line["turns"])
    [_, step] = records(tmp_path)
    assert 0 < step["outcome/environment_error"] == len(failed) / len(lines)
    scored = [line for line in lines if line not in failed]
    mean = pytest.approx(np.mean([line["reward"] for line in scored])) if scored else None
    assert step["critic/rewards/mean"] == mean
    for line in scored:
        of_group = [each["reward"] for each in scored if each["group_id"] == line["group_id"]]
        assert line["advantage"] == pytest.approx(line["reward"] - np.mean(of_group), abs=1e-6)
    assert {search["source"] for search in searches} == {"fallback"}
    assert max(search["waited_s"] for search in searches) < 0.3 + LONGEST_S


class MortalServer(FaultServer):
    """Server that resets all connections once it has answered `left` requests."""

    left = 10**9

    def handle(self, request):
        self.left -= 1
        self.is_dead = self.left < 0
        super().handle(request)


@pytest.mark.slow(
    instead="test_search_in_runs.py::test_an_outage_stops_the_run_which_then_resumes_bit_for_bit"
)
@pytest.mark.parametrize("ahead", [0, 1])
def test_an_outage_at_any_time_is_no_score_and_the_run_resumes(
    tiny_world, warm_model, tmp_path, ahead
):
    """In a rollout, in one that runs ahead, in evaluations before, between and after steps."""
    changes = {
        "stages": ("train", "evaluate"), "eval.every_steps": 1, "eval.suites": ("greedy",),
        "eval.final_suites": ("sampled",), "search.outage_deadline_s": 0.3, "search.cache_mib": 0.0,
        "rollout.async_level": ahead, "loss.correction.level": "token",
    }  # fmt: skip
    with MortalServer() as server:
        config = faulty(tiny_world, warm_model, server, **changes)
        play(config, tmp_path / "base")
        wanted, lines, _ = outputs(tmp_path / "base")
        files = sorted(path.name for path in (tmp_path / "base" / "eval").glob("*.json"))
        scores = {name: evaluation(tmp_path / "base", name) for name in files}
        num_requests, lengths = sum(server.did.values()), set()
        for share in (0.03, 0.2, 0.4, 0.6, 0.75, 0.95):
            workdir = tmp_path / str(share)
            server.left = int(share * num_requests)
            with pytest.raises(OutageError, match="has not answered for"):
                play(config, workdir)
            server.left = 10**9
            # Where the first query failed already, nothing was begun.
            before = lasting(workdir) if (workdir / "metrics.jsonl").exists() else []
            lengths.add(len(before))
            assert before == wanted[: len(before)]
            for path in (workdir / "eval").glob("*.json"):
                assert evaluation(workdir, path.name) == scores[path.name]
            play(config, workdir)
            after, again, _ = outputs(workdir)
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
        assert len(lengths) > 2


def test_the_documented_configurations_are_valid(monkeypatch):
    monkeypatch.setenv("BRAVE_API_KEY", "k3y")
    shown = [
        code
        for code in blocks(ROOT / "docs" / "search.md", "python")
        if code.startswith("config.search.engine")
    ]
    elsewhere = ("my_engine.", "examples.", '"dense"', '"hybrid"')  # tested where these are
    shown = [code for code in shown if not any(name in code for name in elsewhere)]
    assert len(shown) == 3
    for code in shown:
        config = debug_tiny.get_config()
        exec(code, {"config": config})
        validate(config)
        if config.search.engine != "local":
            settings = config.search[config.search.engine].to_dict()
            engine = instantiate("search", resolve_names(config).engine_class, settings)
            assert engine.topk in (3, 5)
