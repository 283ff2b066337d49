"""The live and the static page in Chromium: charts, tables, and escaped text."""

import contextlib
import itertools
import json

import pytest

from jaxrl.extras.view.report import write_report
from tests.browser import Browser, needs_chromium
from tests.extras.view.workdirs import (
    change_records,
    make_hostile,
    make_run,
    served,
    step_file,
    trajectory,
    write_lines,
    write_trajectories,
)

pytestmark = pytest.mark.minutes


@pytest.fixture(params=["live", "static"])
def open_page(request, tmp_path):
    """Return a function that opens the page of some runs, in both of its forms."""
    with contextlib.ExitStack() as stack:
        browser = stack.enter_context(Browser(tmp_path))

        def open_page(*runs):
            if request.param == "static":
                browser.open(write_report(runs).as_uri(), "overview")
            else:
                server = stack.enter_context(served(*runs))
                browser.open(f"http://{server.hosts[0]}/", "overview")
            return browser

        yield open_page
        assert browser.errors == []


def texts(browser, selector):
    """Return the texts of all elements that match."""
    code = f"[...document.querySelectorAll({json.dumps(selector)})].map((e) => e.textContent)"
    return browser.evaluate(code)


def values(browser, chart):
    """Return the last value of each line of a chart, by label."""
    selector = json.dumps(f'[data-chart="{chart}"] [data-label]')
    pairs = browser.evaluate(
        f"[...document.querySelectorAll({selector})].map((e) => [e.dataset.label, e.dataset.value])"
    )
    return {label: float(value) for label, value in pairs}


@needs_chromium
def test_overview_of_a_run(tmp_path, open_page):
    run = make_run(tmp_path / "run")
    write_trajectories(run)
    write_lines(step_file(run, 3), [trajectory(reward=0.5, reward_reason="IDK encouraged")])
    sign = {"sign": "entropy_rise", "text": "it rose", "action": "warn"}
    write_lines(run / "sentinel.jsonl", [{"step": 4, "stage": "train", **sign}])
    browser = open_page(run)
    assert browser.text("h1") == "runfinished"
    assert texts(browser, ".tile .big") == ["0.750+0.500", "0.250"]
    assert "entropy rise, first at step 2: it rose (warn)" in browser.text(".alert")
    assert values(browser, "exact match") == {"sampled": 0.75, "search finds nothing": 0.25}
    assert values(browser, "Reward") == {"reward": 0.75}
    # Five points of two suites have an error bar each; the sign is a line in charts of training.
    assert len(texts(browser, '[data-chart="exact match"] circle')) == 3
    assert texts(browser, '[data-chart="Reward"] .mark title') == ["entropy_rise, step 2: it rose"]
    assert texts(browser, '[data-chart="exact match"] .mark') == []
    rows = texts(browser, "section:first-of-type tbody tr")
    assert "exact match0.250 → 0.7500.625 to 0.8750.2500.125 to 0.375" in rows
    assert "Wrong, evidence found" in browser.text()
    browser.evaluate("document.querySelector('.card td a, .card th a').click()")
    browser.wait("document.documentElement.dataset.ready === 'answers'")
    assert [text.startswith("Where is d?") for text in texts(browser, "summary")] == [True]
    browser.go("trajectory", "run=0&step=3&line=0")
    assert "reward0.5 IDK encouraged" in texts(browser, ".facts > span")


@needs_chromium
def test_hostile_text_stays_text_and_in_its_place(tmp_path, open_page):
    run = make_hostile(tmp_path / "run <img src=x onerror='window.hit=9'>")
    change_records(run, lambda record: record | {"<script>window.hit=5</script>": 1.0})
    browser = open_page(run, make_run(tmp_path / "other run with quite a long name"))
    start = browser.evaluate("location.href").split("#")[0]
    for name, query in (
        *(("overview", "run=0"), ("curves", "q=hit"), ("answers", ""), ("trajectories", "")),
        *(("trajectory", "run=0&step=3&line=0"), ("trajectory", "run=0&step=3&line=1")),
        ("details", "q=prompt.system"),
    ):
        browser.go(name, query)
        browser.evaluate("document.querySelectorAll('details').forEach((e) => { e.open = true; })")
        if name == "answers":
            browser.wait("document.querySelectorAll('.segment').length > 4")
        shown = browser.text("main")
        assert "window.hit" in shown, name
        assert not {"\x00", "\x1b", "\u202e"} & set(shown)
        assert browser.evaluate("window.hit === undefined")
        assert texts(browser, "img, iframe, form, [onerror], [onmouseover]") == []
        for width in (390, 1280):
            size = {"width": width, "height": 860, "deviceScaleFactor": 1, "mobile": False}
            browser.call("Emulation.setDeviceMetricsOverride", **size)
            assert browser.evaluate("document.scrollingElement.scrollWidth") <= width, name
    assert all(url.startswith((start, "about:", "data:")) for url in browser.requests)
    # Not even the page's own script can make elements of text, or ask another server.
    refused = "(() => { try { document.body.innerHTML = 'x'; } catch (error) { return true; } })()"
    assert browser.evaluate(refused)
    assert browser.evaluate("fetch('http://127.0.0.1:9/').then(() => false, () => true)")
    browser.errors.clear()  # the two that were provoked


@needs_chromium
def test_labels_stay_readable(tmp_path, open_page):
    """Tick labels of a narrow range differ, and names of views stay on one line."""
    run = make_run(tmp_path / "run")
    change_records(run, lambda record: record | {"actor/entropy": 6.28 + 0.002 * record["step"]})
    browser = open_page(run)
    labels = [float(text) for text in texts(browser, '[data-chart="Entropy"] .tick')]
    gaps = [after - before for before, after in itertools.pairwise(labels)]
    assert len(gaps) > 1
    assert min(gaps) > 0
    assert max(gaps) == pytest.approx(min(gaps), rel=0.2)
    narrow = {"width": 390, "height": 860, "deviceScaleFactor": 1, "mobile": False}
    browser.call("Emulation.setDeviceMetricsOverride", **narrow)
    heights = browser.evaluate(
        "[...document.querySelectorAll('nav a')].map((e) => e.getClientRects()[0].height)"
    )
    assert max(heights) < 50


@needs_chromium
def test_each_environment_has_its_charts(tmp_path, open_page):
    run = make_run(tmp_path / "run")

    def add_environments(record):
        if "critic/rewards/mean" not in record:
            return record
        rewards = {"search": record["critic/rewards/mean"] + 1, "math": -record["step"]}
        metrics = {f"env/{name}/critic/rewards/mean": reward for name, reward in rewards.items()}
        return {**record, **metrics, "env/search/share": 0.75, "env/math/share": 0.25}

    change_records(run, add_environments)
    for path in (run / "eval").glob("*.json"):
        content = json.loads(path.read_text())
        for suite, means in content["summary"].items():
            means["search"] = {"exact_match": means["all"]["exact_match"] / 2}
            content["intervals"][suite]["search"] = {"exact_match": [0.0, 1.0]}
        path.write_text(json.dumps(content))
    browser = open_page(run)
    assert values(browser, "Reward") == {"reward": 0.75}
    assert values(browser, "Reward: search") == {"reward": 1.75}
    assert values(browser, "Reward: math") == {"reward": -5}
    actual = values(browser, "exact match: search")
    assert actual == {"sampled": 0.375, "search finds nothing": 0.125}
    assert values(browser, "exact match: math") == {}
