"""Recorded searches: complete after any kill, and the same for all processes."""

import json
import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jaxrl.config import default_config
from jaxrl.envs.base import OutageError, ToolError
from jaxrl.envs.search.base import EmptySearch, SearchEngine
from jaxrl.envs.search.recording import Recording, list_recorded_engines
from jaxrl.envs.search.resilient import ResilientSearch, RetryConfig

ENGINE = {"engine": "http", "settings": {"url": "http://127.0.0.1:1/", "topk": 3}}


def make_retry_config(**changes):
    keys = default_config().search
    quick = {"backoff_s": 0.0, "outage_deadline_s": 0.1}
    return RetryConfig(
        **{name: keys[name] for name in RetryConfig.__dataclass_fields__} | quick | changes
    )


def test_a_recording_is_written_as_readable_json(tmp_path):
    recording = Recording(tmp_path, ENGINE)
    assert recording.get("q") is None
    assert list(tmp_path.iterdir()) == []  # nothing is written before the first result
    recording.add("q", "Zoë\nsaid <b>")
    recording.add("q", "something else")  # the first one stays
    reopened = Recording(tmp_path, ENGINE)
    assert (reopened.get("q"), len(reopened)) == ("Zoë\nsaid <b>", 1)
    [folder] = tmp_path.iterdir()
    assert json.loads((folder / "engine.json").read_text()) == ENGINE
    [line] = (folder / "process_0.jsonl").read_text().splitlines()
    assert "Zoë" in line
    fields = json.loads(line)
    assert list(fields) == ["key", "query", "result", "digest"]
    assert (fields["query"], fields["result"]) == ("q", "Zoë\nsaid <b>")


def test_another_engine_or_other_settings_are_another_recording(tmp_path):
    Recording(tmp_path, ENGINE).add("q", "first")
    other = {**ENGINE, "settings": {**ENGINE["settings"], "topk": 4}}
    assert Recording(tmp_path, other).get("q") is None
    assert Recording(tmp_path, {**ENGINE, "engine": "web"}).get("q") is None
    Recording(tmp_path, other).add("q", "second")
    assert Recording(tmp_path, ENGINE).get("q") == "first"
    assert len(list_recorded_engines(tmp_path)) == 2


any_text = st.text(st.characters(exclude_categories=()))


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.dictionaries(any_text, any_text))
def test_any_text_survives(tmp_path, results):
    folder = tmp_path / str(abs(hash(tuple(results.items()))))
    recording = Recording(folder, ENGINE)
    for query, result in results.items():
        recording.add(query, result)
        assert recording.get(query) == result
    reopened = Recording(folder, ENGINE)
    assert {query: reopened.get(query) for query in results} == results


@pytest.mark.parametrize("cut", [2, 30])
def test_a_truncated_line_costs_only_itself(tmp_path, cut):
    recording = Recording(tmp_path, ENGINE)
    for query in "abc":
        recording.add(query, f"about {query}")
    [path] = tmp_path.glob("*/process_0.jsonl")
    path.write_bytes(path.read_bytes()[:-cut])
    reopened = Recording(tmp_path, ENGINE)
    assert [reopened.get(query) for query in "abc"] == ["about a", "about b", None]
    reopened.add("c", "about c, again")
    reopened.add("d", "about d")
    results = [Recording(tmp_path, ENGINE).get(query) for query in "abcd"]
    assert results == ["about a", "about b", "about c, again", "about d"]


def test_a_process_prefers_its_own_results(tmp_path):
    recordings = [Recording(tmp_path, ENGINE, process=index) for index in range(2)]
    for index, recording in enumerate(recordings):  # opened before the other had a result
        recording.add("q", f"result {index}")
    results = [Recording(tmp_path, ENGINE, process=index).get("q") for index in range(3)]
    assert results == ["result 0", "result 1", "result 0"]


class Counting(SearchEngine):
    """Counts its calls, so that no two results are alike; fails for some queries."""

    def __init__(self):
        self.count = 0

    def run(self, query):
        self.count += 1
        if "bad" in query:
            raise ToolError("no", is_permanent=True)
        return f"{query} {self.count}"


def test_replay_needs_no_engine(tmp_path):
    config = make_retry_config(cache_mib=0.0)
    search = ResilientSearch(Counting(), config, recording=Recording(tmp_path, ENGINE))
    results = search.run_batch(["a", "b", "a", "bad"])
    assert results[0] == results[2]
    assert results[0].startswith("a ")
    assert search.run("a") == results[0]
    assert len(Recording(tmp_path, ENGINE)) == 2  # failures are never recorded
    recording = Recording(tmp_path, ENGINE)
    replay = ResilientSearch(EmptySearch(), config, recording=recording, is_replay=True)
    answers = replay.call_batch(["b", "a"])
    assert [answer.result for answer in answers] == [results[1], results[0]]
    assert [answer.record.source for answer in answers] == ["replay", "replay"]
    [missing] = replay.run_batch(["bad"])
    assert isinstance(missing, OutageError)
    assert missing.fallback is None
    assert "has no result for the query 'bad'" in str(missing)


def test_a_result_that_cannot_be_recorded_ends_the_run(tmp_path):
    recording = Recording(tmp_path / "searches", ENGINE)
    (tmp_path / "searches").write_text("a file instead of a folder")
    search = ResilientSearch(Counting(), make_retry_config(), recording=recording)
    [result] = search.run_batch(["a"])
    assert isinstance(result, OutageError)
    assert "a result of the search engine could not be recorded: " in str(result)


def test_a_damaged_result_is_recorded_again(tmp_path):
    Recording(tmp_path, ENGINE).add("a", "first")
    [path] = tmp_path.glob("*/process_0.jsonl")
    line = json.loads(path.read_text())
    for damaged in ("", json.dumps(line | {"result": None}), "[" * 9_000):
        path.write_text(damaged)
        recording = Recording(tmp_path, ENGINE)
        assert recording.get("a") is None
        recording.add("a", "second")
        assert recording.get("a") == "second"
        path.write_text(damaged)  # while a run reads it
        assert recording.get("a") is None
        recording.add("a", "third")
        assert recording.get("a") == "third"


def test_a_flipped_bit_is_reported_or_changes_no_result(tmp_path):
    results = {f"q{i}": f'Zoë said "{i}" \\ \n<b>' for i in range(3)}
    recording = Recording(tmp_path, ENGINE)
    for query, result in results.items():
        recording.add(query, result)
    [path] = tmp_path.glob("*/process_*.jsonl")
    whole = path.read_bytes()
    for bit in random.Random(0).sample(range(8 * len(whole)), 60):
        damaged = bytearray(whole)
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        warnings = []
        reopened = Recording(tmp_path, ENGINE, log=warnings.append)
        read = {query: reopened.get(query) for query in results}
        assert len(warnings) <= 1
        assert all(read[query] in (None, result) for query, result in results.items())
        assert bool(warnings) or read == results, bit
