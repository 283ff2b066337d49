"""The page in Chromium, live and static: what it draws, and that text stays text."""

import json
import shutil

import pytest

from jaxrl.extras.view.report import write_report
from jaxrl.utils.text import escape_control_chars
from tests.browser import Browser, needs_chromium
from tests.extras.view.workdirs import (
    LAST,
    TOKENIZER,
    change_records,
    make_hostile,
    make_run,
    served,
    step_file,
    trajectory,
    write_evaluation,
    write_lines,
    write_trajectories,
)

pytestmark = pytest.mark.minutes


@pytest.fixture
def browser(tmp_path):
    with Browser(tmp_path) as browser:
        yield browser
        assert browser.errors == []


@pytest.fixture(params=["live", "static"])
def open_page(request, browser):
    """A function that opens the page of some runs, in both of its forms."""
    servers = []

    def open_page(*runs):
        if request.param == "static":
            browser.open(write_report(runs).as_uri(), "overview")
        else:
            servers.append(served(*runs))
            browser.open(f"http://{servers[-1].__enter__().hosts[0]}/", "overview")

    yield open_page
    for server in servers:
        server.__exit__(None, None, None)


def texts(browser, selector):
    """Texts of all elements that match."""
    code = f"[...document.querySelectorAll({json.dumps(selector)})].map((e) => e.textContent)"
    return browser.evaluate(code)


def values(browser, chart):
    """Last value of each line of a chart, by label."""
    selector = json.dumps(f'[data-chart="{chart}"] [data-label]')
    pairs = browser.evaluate(
        f"[...document.querySelectorAll({selector})].map((e) => [e.dataset.label, e.dataset.value])"
    )
    return {label: float(value) for label, value in pairs}


def fill(browser, selector, value):
    browser.evaluate(
        f"(() => {{ const box = document.querySelector({json.dumps(selector)});"
        f"box.value = {json.dumps(value)}; box.dispatchEvent(new Event('input')); }})()"
    )


def click(browser, selector):
    browser.evaluate(f"document.querySelector({json.dumps(selector)}).click()")


def make_full(workdir, **settings):
    run = make_run(workdir, **settings)
    write_trajectories(run)
    return run


@needs_chromium
def test_overview_of_a_run(tmp_path, browser, open_page):
    run = make_full(tmp_path / "run")
    sign = {"sign": "entropy_rise", "text": "it rose", "action": "warn"}
    write_lines(run / "sentinel.jsonl", [{"step": 4, "stage": "train", **sign}])
    open_page(run)
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
    click(browser, ".card td a, .card th a")
    browser.wait("document.documentElement.dataset.ready === 'answers'")
    assert [text.startswith("Where is d?") for text in texts(browser, "summary")] == [True]


@needs_chromium
def test_runs_and_seeds_are_compared(tmp_path, browser, open_page):
    rewards = {0: (0.0, 0.5, 1.0), 1: (0.5, 0.5, 0.5)}
    runs = [make_full(tmp_path / f"s{seed}", seed=seed, rewards=r) for seed, r in rewards.items()]
    runs.append(make_full(tmp_path / "warm", **{"optimizer.lr": 3e-4}))
    open_page(*runs)
    assert values(browser, "Reward") == {"s0 (2 seeds)": 0.75, "warm": 0.75}
    assert len(texts(browser, '[data-chart="Reward"] .band')) == 1
    rows = texts(browser, "tbody tr")
    assert rows[0].strip().startswith("s0optimizer.lr=1e-06")
    assert "0.250 ± 0.000 → 0.750 ± 0.000of 2 finished" in rows[2]
    # A run that is hidden is in no curve and no row.
    click(browser, "#runs button")
    browser.wait("document.querySelectorAll('tbody tr').length === 3")
    assert values(browser, "Reward") == {"s1": 0.5, "warm": 0.75}
    browser.go("curves")
    click(browser, "label:last-of-type input")
    browser.wait("document.querySelectorAll('[data-chart=Reward] .s2').length > 1")
    assert values(browser, "Reward") == {"s1": 0.5, "warm": 0.75}
    browser.go("overview", "run=2")
    assert browser.text("h1") == "warmfinished"


@needs_chromium
def test_answers_before_and_after(tmp_path, browser, open_page):
    open_page(make_full(tmp_path / "run"))
    browser.go("answers")
    assert len(texts(browser, "summary")) == 4
    fill(browser, "[name=show]", "became right")
    browser.wait("document.querySelectorAll('summary').length === 2")
    fill(browser, "[name=text]", "IS A?")
    browser.wait("document.querySelectorAll('summary').length === 1")
    click(browser, "summary")
    browser.wait("document.querySelectorAll('.segment').length === 4")
    assert texts(browser, ".segment") == [
        *("answerOslo", "searchq", "resultDoc 1(Title: X) born in Tarvik.", "answerTarvik"),
    ]


@needs_chromium
def test_a_trajectory_token_by_token(tmp_path, browser, open_page):
    run = make_full(tmp_path / "run")
    record = trajectory(
        "one", contexts=[[9, 2]], old_logprobs=[0.0], reward_records=[{"tool": "j", "call": "ok?"}]
    )
    write_lines(step_file(run, 6), [record, trajectory("one", reward=0.0)])
    open_page(run)
    browser.go("trajectory", "run=0&step=6&line=0&by=entropy")
    tokens = "[...document.querySelectorAll('#tokens [data-i]')]"
    whole = "".join(texts(browser, "#tokens [data-i]")).replace("↵\n", "\n").replace("·", "")
    assert whole == escape_control_chars(TOKENIZER.decode(record["token_ids"]))
    colors = browser.evaluate(f"{tokens}.map((e) => e.style.background)")
    strengths = [float(c.rsplit("/", 1)[1][:-1]) if c else 0.0 for c in colors]
    # The entropies grow with the position, and so do the colors of sampled tokens.
    sampled = [s for s, flag in zip(strengths, record["loss_mask"], strict=True) if flag]
    assert sampled == sorted(sampled)
    assert (max(strengths), strengths.count(0.0)) == (0.8, record["loss_mask"].count(0))
    position = record["loss_mask"].index(1)
    browser.evaluate(
        f"document.querySelector('[data-i=\"{position}\"]').dispatchEvent("
        "new PointerEvent('pointermove', {bubbles: true, clientX: 50, clientY: 50}))"
    )
    tip = browser.text("#tip")
    assert f"id {record['token_ids'][position]}, position {position}" in tip
    assert f"entropy at sampling{record['rollout_entropies'][position]:g} nats" in tip
    assert "old_logprobs does not have one number per token" in browser.text("details")
    kinds = texts(browser, "#tokens .tokens-row small:first-child")
    assert (kinds[0], "model" in kinds, "inserted" in kinds) == ("prompt", True, True)
    assert texts(browser, ".chip") == ["step 4 ✓ 1", "step 4 ✗ 0"]
    assert texts(browser, "pre.call") == ["字"]
    click(browser, '[data-by="advantage"]')
    browser.wait("location.hash.endsWith('by=advantage')")
    assert texts(browser, '[aria-pressed="true"]') == ["advantage"]


@needs_chromium
def test_hostile_text_stays_text_and_in_its_place(tmp_path, browser, open_page):
    run = make_hostile(tmp_path / "run <img src=x onerror='window.hit=9'>")
    change_records(run, lambda record: record | {"<script>window.hit=5</script>": 1.0})
    open_page(run, make_run(tmp_path / "other run with quite a long name"))
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
def test_a_run_that_grows_is_drawn_again(tmp_path, browser):
    run = make_full(tmp_path / "run")
    with served(run) as server:
        browser.open(f"http://{server.hosts[0]}/", "overview")
        chart = "document.querySelector('[data-chart=\"Reward\"] [data-label]').dataset.value"
        with (run / "metrics.jsonl").open("a") as file:
            file.write('{"step": 6, "stage": "train", "critic/rewards/mean": 0.8125, "new/x": 1}\n')
        browser.wait(f"{chart} === '0.8125'")
        write_evaluation(run, "train", 6, {"sampled": LAST, "greedy": LAST})
        browser.wait("document.querySelectorAll('.tile').length === 3")
        browser.go("trajectories")
        fill(browser, "[name=text]", "task")
        write_lines(step_file(run, 6), [trajectory("task 9"), '{"task_id": "cut'])
        browser.wait("document.querySelector('#count').textContent === '13'")
        shutil.rmtree(run / "trajectories")
        browser.wait("document.querySelector('#count').textContent === '0'")
