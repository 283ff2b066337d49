"""The page in a browser: figures of the files, text that stays text, runs that grow."""

import json
import shutil

import numpy as np
import pytest

from tests.browser import Browser, needs_chromium
from tests.extras.view.made import (
    HOSTILE,
    TOKENIZER,
    Served,
    drawn_record,
    evaluation,
    make_run,
    step_file,
    write_lines,
)

pytestmark = pytest.mark.minutes


@pytest.fixture
def browser(tmp_path):
    with Browser(tmp_path) as found:
        yield found
        assert found.errors == []


def texts(browser, selector):
    """Texts of all elements that match."""
    code = f"[...document.querySelectorAll({json.dumps(selector)})].map((one) => one.textContent)"
    return browser.evaluate(code)


def click(browser, selector):
    browser.evaluate(f"document.querySelector({json.dumps(selector)}).click()")


@needs_chromium
def test_curves_show_the_last_values_and_the_marks(tmp_path, browser):
    runs = [make_run(tmp_path / name, seed=seed) for seed, name in enumerate("ab")]
    with Served(*runs) as served:
        browser.open(served.address, "curves")
        for run, workdir in enumerate(runs):
            last = json.loads((workdir / "metrics.jsonl").read_text().splitlines()[-1])
            for metric in ("critic/rewards/mean", "actor/entropy"):
                shown = f'[data-metric="{metric}"] [data-run="{run}"]'
                value = browser.evaluate(
                    f"document.querySelector({json.dumps(shown)}).dataset.value"
                )
                assert float(value) == last[metric]
                assert texts(browser, f"{shown} b") == [f"{last[metric]:.4g}"]
        assert texts(browser, "figcaption") == ["critic/rewards/mean", "actor/entropy"]
        [mark, _] = texts(browser, '[data-metric="actor/entropy"] .mark title')
        assert mark == "entropy_rise at step 3\nit rose\nthen: told\nrun: a"
        assert texts(browser, "[data-mark]")[0] == " step 3: entropy rise: it rose → told"
        # A run that is switched off is in no curve.
        click(browser, ".run")
        assert texts(browser, '[data-metric="actor/entropy"] .mark title')[0].endswith("run: b")
        assert len(texts(browser, '[data-metric="actor/entropy"] path')) == 1


@needs_chromium
def test_metrics_are_found_by_their_names(tmp_path, browser):
    with Served(make_run(tmp_path / "run")) as served:
        browser.open(served.address, "curves")
        browser.evaluate(
            "const box = document.querySelector('.choice input'); box.value = 'RISE sent';"
            "box.dispatchEvent(new Event('input'))"
        )
        assert texts(browser, ".choice li") == ["sentinel/entropy_rise"]
        click(browser, ".choice li input")
        browser.wait("document.querySelectorAll('figure').length === 3")
        assert texts(browser, "figcaption")[0] == "sentinel/entropy_rise"
        # The choice is in the address, so that it can be kept and sent.
        address = browser.evaluate("location.href")
        browser.open(address, "curves")
        assert texts(browser, "figcaption")[0] == "sentinel/entropy_rise"


@needs_chromium
def test_the_list_and_its_filters(tmp_path, browser):
    run = make_run(tmp_path / "run", num=40)
    records = [
        json.loads(line) for path in (run / "trajectories").iterdir() for line in path.open()
    ]
    with Served(run) as served:
        browser.open(f"{served.address}#trajectories", "trajectories")
        assert texts(browser, "#counts b") == ["120"]
        browser.evaluate(
            "const box = document.querySelector('[name=text]'); box.value = 'ÉLYSÉE';"
            "box.dispatchEvent(new Event('input'))"
        )
        expected = [record for record in records if "élysée" in record["query"].lower()]
        browser.wait(f"document.querySelector('#counts b').dataset.count === '{len(expected)}'")
        rewards = [r["reward"] for r in expected if r["reward"] is not None]
        assert f"mean reward {np.mean(rewards):.4g}" in browser.text("#counts")
        rows = texts(browser, "tbody tr")
        assert len(rows) == min(50, len(expected))
        assert all("l'Élysée" in row for row in rows)


@needs_chromium
def test_a_trajectory_token_by_token(tmp_path, browser):
    run = make_run(tmp_path / "run")
    record = drawn_record(np.random.default_rng(3), TOKENIZER, outcome="answered", reward=0.75)
    write_lines(step_file(run, 2), [record])
    with Served(run) as served:
        place = "run=0&step=2&line=0"
        browser.open(f"{served.address}#trajectory?{place}&by=entropy", "trajectory")
        assert browser.text("#reward") == "0.75"
        shown = texts(browser, "#tokens [data-i]")
        whole = "".join(shown).replace("↵\n", "\n").replace("·", "")
        assert whole == TOKENIZER.decode(record["token_ids"])
        colored = browser.evaluate(
            "[...document.querySelectorAll('#tokens [data-i]')].map((one) => one.style.background)"
        )
        strengths = [float(one.rsplit(", ", 1)[1][:-1]) if one else 0.0 for one in colored]
        values = record["rollout_entropies"]
        # The stronger the colour, the higher the entropy; nothing else has one.
        pairs = sorted(zip(values, strengths, strict=True))
        assert [s for _, s in pairs] == sorted(strengths)
        assert max(strengths) == 0.8
        assert all(one == 0 for one, m in zip(strengths, record["loss_mask"], strict=True) if not m)
        assert "entropy of the sampler" in browser.text("#legend")
        assert "nats" in browser.text("#legend")
        # What a token's numbers are is shown when the pointer is over it.
        i = record["loss_mask"].index(1)
        browser.evaluate(
            f"document.querySelector('[data-i=\"{i}\"]').dispatchEvent("
            "new PointerEvent('pointermove', {bubbles: true, clientX: 50, clientY: 50}))"
        )
        tip = browser.text("#tip")
        assert f"id {record['token_ids'][i]}, place {i}" in tip
        assert f"entropy{values[i]:.6g} nats" in tip
        ratio = np.exp(record["new_logprobs"][i] - record["old_logprobs"][i])
        assert f"ratio{ratio:.6g}" in tip
        click(browser, '[data-by="clip"]')
        browser.wait("location.hash.endsWith('by=clip')")
        assert "of" in browser.text("#legend")


@needs_chromium
def test_what_is_not_recorded_is_told(tmp_path, browser):
    run = make_run(tmp_path / "run", has_tokenizer=False)
    record = drawn_record(np.random.default_rng(3), TOKENIZER, has_lists=False)
    write_lines(step_file(run, 2), [record])
    with Served(run) as served:
        browser.open(f"{served.address}#trajectory?run=0&step=2&line=0", "trajectory")
        lacking = browser.evaluate(
            "[...document.querySelectorAll('[data-by]:disabled')].map((one) => one.dataset.by)"
        )
        assert lacking == ["reference", "ratio", "clip", "gap", "kl_weight", "token_weight"]
        assert "config.log.tokens" in browser.text('[data-why="gap"]')
        ids = " ".join(map(str, record["token_ids"])) + " "
        assert "".join(texts(browser, "#tokens [data-i]")) == ids
        assert "no tokenizer" in browser.text("main")
        assert "as said" in browser.text("main")


@needs_chromium
def test_the_beginning_of_a_later_context_is_told_from_what_was_inserted(tmp_path, browser):
    run = make_run(tmp_path / "run")
    record = drawn_record(np.random.default_rng(3), TOKENIZER)
    count, prompt = len(record["token_ids"]), record["prompt_length"]
    lists = {n: v for n, v in record.items() if isinstance(v, list) and len(v) == count}
    # The episode once more behind itself, as a context that begins with the prompt and two tokens.
    twice = {name: [*values, *values] for name, values in lists.items()}
    twice["loss_mask"][count : count + prompt + 2] = [0] * (prompt + 2)
    twice["loss_mask"][count + prompt + 2] = 0  # inserted
    twice["loss_mask"][count - 1] = 1  # so that the contexts do not run into one another
    write_lines(step_file(run, 2), [record | twice | {"contexts": [[count, prompt + 2]]}])
    with Served(run) as served:
        browser.open(f"{served.address}#trajectory?run=0&step=2&line=0", "trajectory")
        told = texts(browser, "#tokens .whose")
        again = told.index(f"again{prompt + 2} tokens")
        assert told[again - 1].startswith("model")
        assert told[again + 1].startswith("inserted")
        assert told[0] == f"prompt{prompt} tokens"


def hostile_run(workdir):
    """A run whose every text would like to be more than text."""
    run = make_run(workdir, steps=(1,))
    ids = TOKENIZER.encode(HOSTILE)
    lists = {"token_ids": ids, "loss_mask": [1] * len(ids), "prompt_length": 0}
    lists |= {"contexts": [[1, "x"], "<b>", 3, None]}
    zeros = dict.fromkeys(
        ("rollout_logprobs", "rollout_entropies", "policy_versions"), [0] * len(ids)
    )
    turn = {"text": HOSTILE, "tool_call": HOSTILE, "tool": HOSTILE, "observation": HOSTILE}
    turn |= {"error": HOSTILE, "latency_s": HOSTILE}
    record = {
        **{name: HOSTILE for name in ("query", "question", "final_answer", "generated_text")},
        **{"task_id": HOSTILE, "outcome": HOSTILE, "answers": [HOSTILE, HOSTILE], "more": HOSTILE},
        **{"reward": 1.0, "reward_parts": {HOSTILE: 1.0}, "is_correct": True, "advantage": 1.0},
        **{"turns": [turn], "reward_records": [{"call": HOSTILE, "tool": HOSTILE}]},
    }
    write_lines(step_file(run, 2), [record | lists | zeros, record | lists | {"turns": HOSTILE}])
    odd = record | {"turns": [3, None, {"records": 3}], "answers": {"a": 1}, "reward_parts": [1]}
    write_lines(step_file(run, 3), [odd | lists | zeros | {"reward": HOSTILE, "outcome": "x"}])
    metrics = {"step": 6, "stage": "train", f"sentinel/{HOSTILE}": 1, HOSTILE: 2.0, "a": 1}
    told = {"step": 6, "sign": HOSTILE, "text": HOSTILE, "action": HOSTILE}
    write_lines(run / "metrics.jsonl", [metrics | {"step": 5}, metrics])
    write_lines(run / "sentinel.jsonl", [told])
    content = evaluation(5, (HOSTILE, HOSTILE, True))
    (run / "eval" / "train_5.json").write_text(json.dumps(content))
    return run


@needs_chromium
def test_hostile_text_stays_text(tmp_path, browser):
    run = hostile_run(tmp_path / "run <img src=x onerror='window.hit=9'>")
    with Served(run) as served:
        browser.open(f"{served.address}#curves", "curves")
        click(browser, ".choice input[type=checkbox]")
        views = [
            ("curves", ""),
            ("trajectories", ""),
            ("trajectory", "run=0&step=2&line=0"),
            ("trajectory", "run=0&step=2&line=1"),
            ("trajectory", "run=0&step=3&line=0"),
            ("questions", ""),
        ]
        key = served.pages._key(HOSTILE)
        for view, query in [*views, ("question", f"key={key}")]:
            browser.go("none")
            browser.go(view, query)
            assert browser.evaluate("document.querySelectorAll('script').length") == 1
            assert (
                browser.evaluate("document.querySelectorAll('img, iframe, object, form').length")
                == 0
            )
            assert browser.evaluate("window.hit === undefined")
            attributes = browser.evaluate(
                "[...document.querySelectorAll('*')].flatMap((one) => one.getAttributeNames())"
                ".filter((name) => name.startsWith('on'))"
            )
            assert attributes == []
            shown = browser.text()
            assert "<script>window.hit=1</script>" in shown, view
            assert not {"\x00", "\x1b", "\u202e"} & set(shown)
        click(browser, "button.one")
        browser.wait(
            "document.querySelector('button.one + pre').textContent.includes('window.hit=1')"
        )
        # Not even the page's own script could make elements of text.
        refused = browser.evaluate(
            "(() => { try { document.body.innerHTML = '<b>x</b>'; return false; }"
            " catch (error) { return error instanceof TypeError; } })()"
        )
        assert refused
        own = [request for request in browser.requests if request != "about:blank"]
        assert own
        assert all(request.startswith(served.address) for request in own)
        browser.errors.clear()  # the one that was provoked


@needs_chromium
def test_a_run_that_grows(tmp_path, browser):
    run = make_run(tmp_path / "run")
    with Served(run, follows=True) as served:
        browser.open(served.address, "curves")
        with (run / "metrics.jsonl").open("a") as file:
            file.write('{"step": 6, "stage": "train", "actor/entropy": 0.8125, "new/one": 3}\n')
        shown = "[data-metric=\"actor/entropy\"] [data-run='0']"
        browser.wait(f"document.querySelector({json.dumps(shown)}).dataset.value === '0.8125'")
        assert "step 6" in browser.text(".run")
        browser.wait("document.querySelector('.choice').textContent.includes('new/one')")
        browser.go("trajectories")
        browser.wait("document.querySelector('#counts b').dataset.count === '21'")
        rng = np.random.default_rng(8)
        write_lines(step_file(run, 6), [drawn_record(rng, TOKENIZER), '{"task_id": "cut'])
        browser.wait("document.querySelector('#counts b').dataset.count === '22'")
        browser.wait("document.querySelector('#told').textContent.includes('is damaged and left')")
        # A restart: the record begins anew, with fewer steps.
        lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
        (run / "new").write_text("".join(lines[:4]))
        (run / "new").replace(run / "metrics.jsonl")
        shutil.rmtree(run / "trajectories")
        browser.wait("document.querySelector('#counts b').dataset.count === '0'")
        browser.go("curves")
        browser.wait(f"document.querySelector({json.dumps(shown)}).textContent.includes('step 4')")


@needs_chromium
@pytest.mark.parametrize("width", [390, 820, 1600])
def test_nothing_sticks_out(tmp_path, width):
    run = hostile_run(tmp_path / "run with quite a long name that does not end soon")
    with Served(run) as served, Browser(tmp_path, width=width) as browser:
        browser.open(f"{served.address}#curves", "curves")
        for view, query in (
            *(("curves", ""), ("trajectories", ""), ("questions", "")),
            *(("trajectory", "run=0&step=1&line=0"), ("trajectory", "run=0&step=2&line=0")),
            ("question", f"key={served.pages._key('task 1')}"),
        ):
            browser.go("none")
            browser.go(view, query)
            wide = browser.evaluate("document.scrollingElement.scrollWidth")
            assert wide <= width, view
