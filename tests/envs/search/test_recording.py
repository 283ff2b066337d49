"""Searches on disk: whole whenever a process is killed, the same for all processes."""

import json
import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jaxrl.config import default_config
from jaxrl.envs.base import OutageError, ToolError
from jaxrl.envs.search.base import EmptySearch, SearchEngine
from jaxrl.envs.search.recording import Recording, recorded_engines
from jaxrl.envs.search.resilient import ResilientSearch, RetryConfig

ENGINE = {"engine": "http", "settings": {"url": "http://127.0.0.1:1/", "topk": 3}}


def policy(**changes):
    keys = default_config().search
    quick = {"backoff_s": 0.0, "outage_deadline_s": 0.1}
    return RetryConfig(
        **{name: keys[name] for name in RetryConfig.__dataclass_fields__} | quick | changes
    )


def test_what_is_kept_is_found_again_and_can_be_read(tmp_path):
    one = Recording(tmp_path, ENGINE)
    assert one.get("q") is None
    assert list(tmp_path.iterdir()) == []  # nothing is written before there is a result
    one.add("q", "Zoë\nsaid <b>")
    one.add("q", "something else")  # the first one stays
    again = Recording(tmp_path, ENGINE)
    assert (again.get("q"), len(again)) == ("Zoë\nsaid <b>", 1)
    [folder] = tmp_path.iterdir()
    assert json.loads((folder / "engine.json").read_text()) == ENGINE
    [line] = (folder / "process_0.jsonl").read_text().splitlines()
    assert "Zoë" in line
    fields = json.loads(line)
    assert list(fields) == ["key", "query", "result", "digest"]
    assert (fields["query"], fields["result"]) == ("q", "Zoë\nsaid <b>")


def test_another_engine_or_other_settings_are_another_recording(tmp_path):
    Recording(tmp_path, ENGINE).add("q", "found")
    other = {**ENGINE, "settings": {**ENGINE["settings"], "topk": 4}}
    assert Recording(tmp_path, other).get("q") is None
    assert Recording(tmp_path, {**ENGINE, "engine": "web"}).get("q") is None
    Recording(tmp_path, other).add("q", "more")
    assert Recording(tmp_path, ENGINE).get("q") == "found"
    assert len(recorded_engines(tmp_path)) == 2


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    st.dictionaries(
        st.text(st.characters(exclude_categories=())), st.text(st.characters(exclude_categories=()))
    )
)
def test_any_text_comes_back_as_it_was(tmp_path, results):
    folder = tmp_path / str(abs(hash(tuple(results.items()))))
    one = Recording(folder, ENGINE)
    for query, result in results.items():
        one.add(query, result)
        assert one.get(query) == result
    again = Recording(folder, ENGINE)
    assert {query: again.get(query) for query in results} == results


@pytest.mark.parametrize("cut", [2, 5, 30])
def test_a_line_that_a_kill_has_cut_costs_only_itself(tmp_path, cut):
    one = Recording(tmp_path, ENGINE)
    for query in "abc":
        one.add(query, f"about {query}")
    [path] = tmp_path.glob("*/process_0.jsonl")
    path.write_bytes(path.read_bytes()[:-cut])
    again = Recording(tmp_path, ENGINE)
    assert [again.get(query) for query in "abc"] == ["about a", "about b", None]
    again.add("c", "about c, asked again")
    again.add("d", "about d")
    third = Recording(tmp_path, ENGINE)
    found = [third.get(query) for query in "abcd"]
    assert found == ["about a", "about b", "about c, asked again", "about d"]


def test_a_process_goes_by_what_it_was_told_itself(tmp_path):
    both = [Recording(tmp_path, ENGINE, process=index) for index in range(2)]
    for index, one in enumerate(both):  # neither knows of the other's
        one.add("q", f"told {index}")
    found = [Recording(tmp_path, ENGINE, process=index).get("q") for index in range(3)]
    assert found == ["told 0", "told 1", "told 0"]


class Counting(SearchEngine):
    """Tells how often it was asked, so that no two answers are alike; fails for some queries."""

    def __init__(self):
        self.count = 0

    def run(self, query):
        self.count += 1
        if "bad" in query:
            raise ToolError("no", is_permanent=True)
        return f"{query} {self.count}"


def test_what_is_recorded_is_not_asked_again_and_needs_no_engine(tmp_path):
    settings = policy(cache_mib=0.0)
    recorded = ResilientSearch(Counting(), settings, recording=Recording(tmp_path, ENGINE))
    found = recorded.run_batch(["a", "b", "a", "bad"])
    assert found[0] == found[2]
    assert found[0].startswith("a ")
    assert recorded.run("a") == found[0]
    assert len(Recording(tmp_path, ENGINE)) == 2  # a failure is never in it
    replay = ResilientSearch(
        EmptySearch(), settings, recording=Recording(tmp_path, ENGINE), is_replay=True
    )
    answers = replay.answer_all(["b", "a"])
    assert [answer.found for answer in answers] == [found[1], found[0]]
    assert [answer.record.source for answer in answers] == ["replay", "replay"]
    [missing] = replay.run_batch(["bad"])
    assert isinstance(missing, OutageError)
    assert missing.fallback is None
    assert "config.search.replay is 'only', and " in str(missing)
    assert "has no result for the query 'bad'. This run differs from the recorded" in str(missing)


def test_a_result_that_cannot_be_recorded_ends_the_run(tmp_path):
    recording = Recording(tmp_path / "searches", ENGINE)
    (tmp_path / "searches").write_text("a file where the folder belongs")
    search = ResilientSearch(Counting(), policy(), recording=recording)
    [found] = search.run_batch(["a"])
    assert isinstance(found, OutageError)
    assert "a result of the search engine could not be recorded: " in str(found)


def test_what_is_no_result_any_more_is_asked_again(tmp_path):
    Recording(tmp_path, ENGINE).add("a", "first")
    recording = Recording(tmp_path, ENGINE)
    [path] = tmp_path.glob("*/process_0.jsonl")
    line = json.loads(path.read_text())
    for damaged in ("", "x" * 500, json.dumps(line | {"result": None}), "[" * 9_000):
        path.write_text(damaged)
        recording = Recording(tmp_path, ENGINE)
        assert recording.get("a") is None
        recording.add("a", "second")
        assert recording.get("a") == "second"
        path.write_text(damaged)  # while a run reads it
        assert recording.get("a") is None
        recording.add("a", "third")
        assert recording.get("a") == "third"


def test_a_flipped_bit_is_told_or_changes_no_result(tmp_path):
    results = {f"q{i}": f'Zoë said "{i}" \\ \n<b>' for i in range(3)}
    recording = Recording(tmp_path, ENGINE)
    for query, result in results.items():
        recording.add(query, result)
    [path] = tmp_path.glob("*/process_*.jsonl")
    whole = path.read_bytes()
    for bit in random.Random(0).sample(range(8 * len(whole)), 200):
        damaged = bytearray(whole)
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        warnings = []
        again = Recording(tmp_path, ENGINE, log=warnings.append)
        found = {query: again.get(query) for query in results}
        assert len(warnings) <= 1
        assert all(found[query] in (None, result) for query, result in results.items())
        assert bool(warnings) or found == results, bit


def test_lines_of_before_there_were_digests_are_read(tmp_path):
    Recording(tmp_path, ENGINE).add("q", "seven")
    [path] = tmp_path.glob("*/process_0.jsonl")
    line = json.loads(path.read_text())
    earlier = {name: line[name] for name in ("key", "query", "result")}
    path.write_text(json.dumps(earlier) + "\n")
    told = []
    assert Recording(tmp_path, ENGINE, log=told.append).get("q") == "seven"
    assert told == []
    path.write_text(json.dumps(earlier | {"digets": "0" * 64}) + "\n")
    assert Recording(tmp_path, ENGINE, log=told.append).get("q") is None
    [warning] = told
    assert warning.startswith(f"warning: {path} has damaged lines (1), which are ignored")
