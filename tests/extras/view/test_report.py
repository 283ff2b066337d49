"""The static page, and runs compared on the terminal."""

import json
import re
from html.parser import HTMLParser

import pytest

from jaxrl.extras.view import report
from jaxrl.extras.view.report import write_report, write_report_or_warn
from tests.extras.view.workdirs import (
    make_hostile,
    make_run,
    question,
    step_file,
    trajectory,
    view,
    write_evaluation,
    write_lines,
    write_trajectories,
)


class Page(HTMLParser):
    """Elements and attributes of a page as a browser parses them, and its data."""

    def __init__(self, path):
        super().__init__()
        self.tags, self.attributes, self.texts, self.current = [], [], {}, ""
        self.text = path.read_text(encoding="utf-8")
        self.feed(self.text)
        self.data = json.loads(self.texts["data"])

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        self.current = dict(attrs).get("id", tag)

    def handle_data(self, data):
        self.texts[self.current] = self.texts.get(self.current, "") + data


@pytest.fixture
def run(tmp_path):
    run = make_run(tmp_path / "run")
    write_trajectories(run)
    return run


class TestStaticPage:
    def test_its_data_are_the_answers_of_the_live_page(self, run):
        data = Page(write_report([run])).data
        viewer = view(run)
        assert {address.split("/")[0] for address in data} == {
            *("overview", "curves", "answers", "answer", "trajectories", "trajectory"),
        }
        assert len(data) == 1 + 1 + 2 + (8 + 4) + 1 + 12
        for address, answer in data.items():
            if not address.startswith("trajectories"):
                assert answer == json.loads(json.dumps(viewer.respond(address))), address
        table, live = data["trajectories/0/0/0/0"], viewer.respond("trajectories/0/0/0/0")
        assert sorted(table["rows"]) == sorted(live["rows"])
        assert table["tasks"] == [list(task) for task in live["tasks"]]

    def test_it_is_one_file_that_asks_for_nothing(self, run):
        page = Page(write_report([run]))
        assert page.tags.count("script") == 2
        links = [value for name, value in page.attributes if name in ("href", "src", "action")]
        assert all(link.startswith(("#", "data:")) for link in links)
        markup = page.text.replace(page.texts["data"], "")
        assert set(re.findall(r"https?://[^\s\"'`]+", markup)) == {"http://www.w3.org/2000/svg"}

    def test_answers_and_trajectories_are_limited(self, run, monkeypatch):
        many = [question(f"q{i}", right=1.0) for i in range(12)]
        write_evaluation(run, "evaluate", 5, {"sampled": many})
        write_lines(step_file(run, 6), [trajectory(f"new {i}") for i in range(8)])
        monkeypatch.setattr(report, "MAX_ANSWERS", 10)
        monkeypatch.setattr(report, "MAX_TRAJECTORIES", 6)
        data = Page(write_report([run])).data
        assert [row["task_id"] for row in data["answers/0/0"]] == [f"q{i}" for i in range(10)]
        rows = data["trajectories/0/0/0/0"]["rows"]
        assert [row[:2] for row in rows] == [[3, 0], [3, 1], [3, 2], [6, 0], [6, 1], [6, 2]]
        assert data["overview"]["runs"][0]["num_trajectories"] == 20
        monkeypatch.setattr(report, "MAX_DETAIL_BYTES", 1)
        data = Page(write_report([run])).data
        details = [key for key in data if "answer/" in key or "ory/" in key]
        assert details == ["trajectory/0/3/0"]  # the first one, whatever its size

    def test_a_damaged_trajectory_is_an_error_in_its_place(self, run):
        path = step_file(run, 3)
        path.write_text(path.read_text().replace('"loss_mask": [', '"loss_mask": [x', 1))
        data = Page(write_report([run])).data
        assert "step_000003.jsonl:1 is not valid JSON" in data["trajectory/0/3/0"]["error"]

    def test_hostile_text_is_only_data(self, tmp_path):
        run = make_hostile(tmp_path / "<b>run")
        page = Page(write_report([run]))
        assert "img" not in page.tags
        assert page.tags.count("script") == 2
        assert not [name for name, _ in page.attributes if name.startswith("on")]
        assert "<script>window.hit" not in page.text
        text = json.dumps(page.data)
        assert "<script>window.hit=1" in text
        assert not {"\x00", "\x1b", "\u202e"} & set(page.data["answers/0/0"][0]["question"])


def test_a_run_ends_in_its_scores_and_the_page_or_a_warning(run, monkeypatch):
    lines = []
    write_report_or_warn(run, lines.append)
    assert lines == [
        "exact match: sampled 0.250 -> 0.750",
        "controls, exact match: search finds nothing 0.250",
        f"report: {run / 'report.html'}",
    ]
    monkeypatch.setattr(report, "render_page", lambda _: 1 / 0)
    write_report_or_warn(run, lines.append)
    assert lines[-1].startswith("warning: no report: ZeroDivisionError")
