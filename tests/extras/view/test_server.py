"""Answers over HTTP, what is refused, and the command."""

import http.client
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from urllib.parse import urlencode

import numpy as np
import pytest

from jaxrl.extras.view.__main__ import main
from jaxrl.extras.view.pages import PAGE_ROWS, open_runs
from jaxrl.extras.view.server import ANSWERS, FILES
from tests.extras.view.made import (
    Served,
    drawn_record,
    evaluation,
    make_run,
    step_file,
    write_lines,
)
from tests.helpers import ROOT
from tests.qwen import qwen3


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Two runs, of which the second has more trajectories than a page of the list."""
    folder = tmp_path_factory.mktemp("runs")
    make_run(folder / "a", seed=1)
    make_run(folder / "b", seed=2, num=30)
    return [folder / "a", folder / "b"]


@pytest.fixture(scope="module")
def served(runs):
    with Served(*runs) as found:
        yield found


def get(served, path, parameters=()):
    query = urlencode(parameters)
    with urllib.request.urlopen(f"{served.address}{path}?{query}".rstrip("?")) as answer:
        return json.load(answer)


def request(served, *, method="GET", path="/api/state", host=None, headers=None):
    """Status, headers and body of one request, whatever it is."""
    connection = http.client.HTTPConnection("127.0.0.1", served.server.server_port, timeout=20)
    connection.putrequest(method, path, skip_host=True)
    given = {"Host": host or f"127.0.0.1:{served.server.server_port}", **(headers or {})}
    for name, value in given.items():
        connection.putheader(name, value)
    connection.endheaders()
    answer = connection.getresponse()
    found = answer.status, dict(answer.getheaders()), answer.read().decode()
    connection.close()
    return found


def records_of(run):
    """Run's records with step and line, by plain JSON."""
    return [
        (int(path.stem[5:]), line, json.loads(text))
        for path in sorted((run / "trajectories").iterdir())
        for line, text in enumerate(path.read_text().splitlines())
    ]


class TestTrajectories:
    def test_counts_are_those_of_the_files(self, served, runs):
        records = [record for run in runs for *_, record in records_of(run)]
        found = get(served, "api/trajectories")
        assert found["count"] == found["total"] == len(records) == 111
        assert found["outcomes"] == Counter(record["outcome"] for record in records)
        scored = [record for record in records if record["outcome"] != "environment_error"]
        num_right = sum(record["is_correct"] for record in scored)
        assert found["correct"] == {
            "right": num_right,
            "wrong": len(scored) - num_right,
            "unscored": len(records) - len(scored),
        }
        mean = np.mean([r["reward"] for r in records if r["reward"] is not None])
        assert found["mean_reward"] == pytest.approx(mean)

    @pytest.mark.parametrize(
        ("sort", "order"), [("reward", "up"), ("reward", "down"), ("length", "up")]
    )
    def test_pages_in_order(self, served, runs, sort, order):
        rows = []
        for page in range(3):
            found = get(served, "api/trajectories", {"sort": sort, "order": order, "page": page})
            assert len(found["rows"]) == min(PAGE_ROWS, 111 - page * PAGE_ROWS)
            rows += found["rows"]
        assert len({(row["run"], row["step"], row["line"]) for row in rows}) == 111
        key = {"reward": "reward", "length": "tokens"}[sort]
        values = [row[key] for row in rows]
        known = [value for value in values if value is not None]
        assert known == sorted(known, reverse=order == "down")
        assert values == known + [None] * (len(values) - len(known))

    def test_the_newest_come_first(self, served):
        found = get(served, "api/trajectories", {"run": 0})
        assert [row["step"] for row in found["rows"]] == [5] * 7 + [2] * 7 + [1] * 7

    def test_a_run_alone(self, served, runs):
        found = get(served, "api/trajectories", {"run": 0, "text": "ada"})
        expected = [r for *_, r in records_of(runs[0]) if "ada" in r["query"].lower()]
        assert (found["count"], found["total"]) == (len(expected), 21)


class TestTrajectory:
    def test_it_is_the_record_with_its_tokens(self, served, runs):
        step, line, record = records_of(runs[1])[40]
        found = get(served, "api/trajectory", {"run": 1, "step": step, "line": line})
        assert found["record"]["turns"] == record["turns"]
        assert found["record"]["reward_parts"] == record["reward_parts"]
        tokens, ids = found["tokens"], record["token_ids"]
        assert (tokens["ids"], tokens["sampled"]) == (ids, record["loss_mask"])
        assert "".join(tokens["texts"]) == qwen3().decode(ids)
        by_name = {one["name"]: one for one in found["quantities"]}
        for name, of in {"entropy": "rollout_entropies", "token_weight": "token_weights"}.items():
            expected = [
                value if one else None
                for value, one in zip(record[of], record["loss_mask"], strict=True)
            ]
            assert by_name[name]["values"] == expected
        assert by_name["entropy"]["unit"] == "nats"
        same = [
            r for s, _, r in records_of(runs[1]) if (s, r["task_id"]) == (step, record["task_id"])
        ]
        assert [row["reward"] for row in found["group"]] == [r["reward"] for r in same]

    def test_a_line_with_damage_in_its_lists(self, tmp_path):
        make_run(tmp_path / "run")
        path = step_file(tmp_path / "run", 1)
        lines = path.read_text().splitlines()
        lines[0] = lines[0].replace('"loss_mask": [', '"loss_mask": [x')
        path.write_text("\n".join(lines))
        with Served(tmp_path / "run") as served:
            status, _, body = request(served, path="/api/trajectory?run=0&step=1&line=0")
            assert status == 409
            assert "step_000001.jsonl:1 is not valid JSON" in body
            assert request(served, path="/api/trajectory?run=0&step=1&line=1")[0] == 200


class TestQuestions:
    def test_means_by_step(self, served, runs):
        rows = {(row["run"], row["task"]): row for row in get(served, "api/questions")["rows"]}
        for run, workdir in enumerate(runs):
            records = records_of(workdir)
            for task in {record["task_id"] for *_, record in records}:
                own = [(step, r["reward"]) for step, _, r in records if r["task_id"] == task]
                steps = sorted({step for step, _ in own})
                row = rows[run, task]
                assert (row["count"], row["steps"]) == (len(own), len(steps))
                for name, step in (("first", steps[0]), ("last", steps[-1])):
                    paid = [amount for s, amount in own if s == step and amount is not None]
                    assert row[name] == (pytest.approx(np.mean(paid)) if paid else None)
        assert rows[0, "held out"]["answers"] == 1
        assert rows[0, "task 1"]["answers"] == 1

    def test_one_over_steps_and_evaluations(self, served, runs):
        found = get(served, "api/questions", {"text": "TASK 1"})["rows"]
        [key] = {row["key"] for row in found}
        told = get(served, "api/question", {"key": key})
        assert (told["task"], told["accepted"]) == ("task 1", ["Kerr"])
        for run, workdir in enumerate(runs):
            expected = [(s, n) for s, n, r in records_of(workdir) if r["task_id"] == "task 1"]
            rows = told["runs"][run]["rows"]
            assert [(row["step"], row["line"]) for row in rows] == expected
            [answer] = told["evaluations"][run]["answers"]
            # 1 times an exact match of 1, half of a format of 0.5.
            assert (answer["reward"], answer["exact_match"], answer["answer"]) == (
                1.25,
                1.0,
                "Kerr",
            )
        place = {name: answer[name] for name in ("stage", "step", "suite", "row")}
        record = get(served, "api/answer", {"run": 1, **place})
        assert record["response"] == "<answer> Kerr </answer>"

    def test_evaluations_in_the_order_of_the_run(self, tmp_path):
        run = make_run(tmp_path / "run")
        for stage, step in (("evaluate", 5), ("train", 10), ("sft", 5)):
            content = evaluation(step, ("held out", f"{stage} {step}", False), stage=stage)
            (run / "eval" / f"{stage}_{step}.json").write_text(json.dumps(content))
        with Served(run) as served:
            [row] = get(served, "api/questions", {"text": "held out"})["rows"]
            [told] = get(served, "api/question", {"key": row["key"]})["evaluations"]
        assert [one["answer"] for one in told["answers"]] == [
            *("sft 5", "Oslo", "evaluate 5", "train 10"),
        ]

    def test_a_question_of_an_evaluation_alone(self, served):
        [row, _] = get(served, "api/questions", {"text": "held out"})["rows"]
        told = get(served, "api/question", {"key": row["key"]})
        assert [one["rows"] for one in told["runs"]] == [[], []]
        assert told["question"] == "About held out?"

    def test_keys_hold_in_another_server(self, served, runs):
        key = get(served, "api/trajectories")["rows"][0]["key"]
        with Served(*runs) as other:
            assert get(other, "api/question", {"key": key})["task"].startswith("task")

    def test_an_evaluation_that_is_damaged_is_told(self, tmp_path):
        run = make_run(tmp_path / "run")
        (run / "eval" / "train_6.json").write_text("{")
        odd = evaluation(7, ("task 1", "Kerr", True))
        odd["questions"] |= {"other": 3, "more": [4, {"task_id": 5}]}
        (run / "eval" / "train_7.json").write_text(json.dumps(odd))
        with Served(run) as served:
            [state] = get(served, "api/state")["runs"]
            assert "eval/train_6.json cannot be read" in " ".join(state["problems"])
            assert state["answers"] == 3


class TestSeries:
    def test_only_what_is_new(self, tmp_path):
        run = make_run(tmp_path / "run")
        with Served(run) as served:
            [first] = get(served, "api/series", {"name": "actor/entropy"})["runs"]
            assert (first["from"], first["records"]) == (0, 5)
            with (run / "metrics.jsonl").open("a") as file:
                file.write('{"step": 6, "actor/entropy": 0.125}\n')
            served.pages.refresh_curves()
            since = [("name", "actor/entropy"), ("since", "0.0.5")]
            [more] = get(served, "api/series", since)["runs"]
            assert more["series"]["actor/entropy"] == {"steps": [6], "values": [0.125]}
            other = [("name", "actor/entropy"), ("since", "0.3.5")]
            assert get(served, "api/series", other)["runs"][0]["from"] == 0


def test_a_thread_that_fails_is_told_and_goes_on(tmp_path, monkeypatch):
    run = make_run(tmp_path / "run")
    monkeypatch.setattr("jaxrl.extras.view.pages.POLL_S", 0.01)
    with Served(run) as served:
        curves = served.pages.runs[0].curves
        with monkeypatch.context() as patched:
            patched.setattr(curves, "refresh", lambda: 1 / 0)
            served.pages.follow()
            while not (told := get(served, "api/state")["failures"]):
                time.sleep(0.01)
        assert told[0].startswith("refresh_curves failed and is tried again: ZeroDivisionError(")
        while get(served, "api/state")["failures"]:
            time.sleep(0.01)


class TestRefusals:
    @pytest.mark.parametrize(
        "host",
        [
            *("evil.example", "evil.example:{port}", "127.0.0.1", "127.0.0.1:1", "localhost"),
            *("127.0.0.1.evil.example:{port}", "0.0.0.0:{port}", "[::]:{port}", "127.1:{port}"),
        ],
    )
    def test_other_hosts(self, served, host):
        status, _, body = request(served, host=host.format(port=served.server.server_port))
        assert status == 403
        assert "the Host is" in body

    @pytest.mark.parametrize("name", ["localhost", "127.0.0.1", "[::1]", "LOCALHOST"])
    def test_this_machine(self, served, name):
        assert request(served, host=f"{name}:{served.server.server_port}")[0] == 200

    def test_no_host_or_two(self, served):
        port = served.server.server_port
        for hosts in ("", f"Host: 127.0.0.1:{port}\r\nHost: evil.example\r\n"):
            with socket.create_connection(("127.0.0.1", port), timeout=20) as connection:
                connection.sendall(f"GET / HTTP/1.1\r\n{hosts}\r\n".encode())
                assert b" 403 " in connection.recv(1000).split(b"\r\n")[0]

    @pytest.mark.parametrize(
        "method", ["POST", "PUT", "DELETE", "HEAD", "OPTIONS", "TRACE", "QUERY"]
    )
    def test_other_methods(self, served, method):
        status, headers, _ = request(served, method=method)
        assert (status, headers["Allow"]) == (405, "GET")

    def test_bodies(self, served):
        for headers in ({"Content-Length": "3"}, {"Transfer-Encoding": "chunked"}):
            assert request(served, headers=headers)[0] == 400

    def test_pages_of_other_sites(self, served):
        for site, status in (("cross-site", 403), ("same-site", 403), ("same-origin", 200)):
            assert request(served, headers={"Sec-Fetch-Site": site})[0] == status
            assert request(served, path="/page.js", headers={"Sec-Fetch-Site": site})[0] == status
        assert request(served, path="/", headers={"Sec-Fetch-Site": "cross-site"})[0] == 200

    @pytest.mark.parametrize(
        "path",
        [
            *("/../../etc/passwd", "/%2e%2e/%2e%2e/etc/passwd", "//etc/passwd", "/page.py"),
            *("/server.py", "/api", "/api/", "/api/state/", "/page.css/..", "/trajectories"),
            *("/%00", "/page.html", "file:///etc/passwd", "/api/../api/state"),
        ],
    )
    def test_addresses_are_no_paths(self, served, path):
        status, _, body = request(served, path=path)
        assert (status, body) == (404, '{"error": "there is no such page."}')

    @pytest.mark.parametrize(
        ("query", "status", "told"),
        [
            ("trajectories?step_min=-1", 400, "step_min is '-1'; expected a whole number"),
            ("trajectories?reward_min=nan", 400, "reward_min is 'nan'; expected a number"),
            ("trajectories?sort=size", 400, "sort is 'size'; expected step, reward"),
            ("trajectories?page=1&page=2", 400, "page is given 2 times; expected once"),
            ("trajectories?folder=/etc", 400, "unknown: 'folder'"),
            ("trajectories?" + "&".join(["run=0"] * 300), 400, "the address cannot be read"),
            ("trajectory?run=0&step=1", 400, "line is missing; expected a whole number"),
            ("trajectory?run=7&step=1&line=0", 404, "there is no run number 7; there are 2"),
            ("trajectory?run=0&step=9&line=0", 404, "no trajectory at step 9, line 1"),
            ("trajectory?run=0&step=../1&line=0", 400, "step is '../1'"),
            ("question?key=../../etc/passwd", 404, "there is no such question"),
            ("answer?run=0&stage=../x&step=5&suite=greedy&row=0", 404, "no evaluation ../x_5"),
            ("answer?run=0&stage=train&step=5&suite=greedy&row=99", 404, "no answer 100"),
            ("series?since=1.2", 400, "since is '1.2'; expected run.generation.records"),
        ],
    )
    def test_parameters(self, served, query, status, told):
        found, _, body = request(served, path=f"/api/{query}")
        assert found == status
        assert told in json.loads(body)["error"]

    def test_a_page_that_does_not_exist_is_empty(self, served):
        assert get(served, "api/trajectories", {"page": 10**8})["rows"] == []

    def test_what_is_no_http(self, served):
        with socket.create_connection(("127.0.0.1", served.server.server_port), 20) as connection:
            connection.sendall(b"\x16\x03\x01\x00\r\n\r\n")
            assert b"Bad request syntax" in connection.recv(3000)
        assert request(served)[0] == 200


def test_every_answer_has_the_policy(served):
    for path in (*FILES, *ANSWERS, "/none"):
        _, headers, _ = request(served, path=path)
        policy = headers["Content-Security-Policy"].split("; ")
        assert policy[0] == "default-src 'none'"
        assert not [part for part in policy if "unsafe" in part or "*" in part or "http" in part]
        assert headers["X-Content-Type-Options"] == "nosniff"
        assert headers["Cross-Origin-Resource-Policy"] == "same-origin"
        assert "Access-Control-Allow-Origin" not in headers


def test_only_the_loopback_is_listened_on(served):
    assert served.server.server_address[0] == "127.0.0.1"


class TestRuns:
    def test_names_are_as_long_as_they_must_be(self, tmp_path):
        for name in ("x/seed0", "y/seed0", "z/seed1"):
            make_run(tmp_path / name, steps=())
        found = open_runs([tmp_path / "x/seed0", tmp_path / "z/seed1", tmp_path / "x/seed0"])
        assert [run.name for run in found] == ["seed0", "seed1"]
        found = open_runs([tmp_path / "x/seed0", tmp_path / "y/seed0"])
        assert [run.name for run in found] == ["x/seed0", "y/seed0"]

    def test_a_run_without_anything_yet(self, tmp_path):
        run = make_run(tmp_path / "run", steps=())
        shutil.rmtree(run / "eval")
        (run / "metrics.jsonl").unlink()
        with Served(run) as served:
            assert get(served, "api/trajectories")["rows"] == []
            assert get(served, "api/questions")["rows"] == []
            assert get(served, "api/metrics")["names"] == []


class TestCommand:
    @pytest.mark.parametrize("kind", ["missing", "empty", "file"])
    def test_no_run(self, tmp_path, kind):
        path = tmp_path / "run"
        if kind == "empty":
            path.mkdir()
        elif kind == "file":
            path.write_text("")
        told = "is no run: it holds none of" if kind == "empty" else "error: there is no run"
        with pytest.raises(SystemExit, match=told):
            main([str(path)])

    def test_a_port_in_use(self, runs, served):
        with pytest.raises(SystemExit, match=r"port \d+ is in use by another program; .* --port=N"):
            main([str(runs[0]), f"--port={served.server.server_port}"])

    def test_a_port_that_is_none(self, runs):
        with pytest.raises(SystemExit, match="--port=70000; expected 0 to 65535"):
            main([str(runs[0]), "--port=70000"])

    def test_it_serves_until_a_signal(self, runs, tmp_path):
        code = "from jaxrl.cli import main; main()"
        command = [sys.executable, "-c", code, "view", str(runs[0]), "--port=0"]
        env = os.environ | {"PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": str(tmp_path / "cache")}
        with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) as process:
            address = process.stdout.readline().split()[0]
            with urllib.request.urlopen(f"{address}api/state") as answer:
                assert json.load(answer)["runs"][0]["name"] == "a"
            process.send_signal(signal.SIGTERM)
            assert process.wait(20) == 128 + signal.SIGTERM

    def test_it_imports_no_jax(self):
        code = "import sys, jaxrl.extras.view.__main__; sys.exit('jax' in sys.modules)"
        assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


def test_files_of_the_runs_stay_as_they_are(tmp_path):
    run = make_run(tmp_path / "run")
    write_lines(step_file(run, 9), ["{", drawn_record(np.random.default_rng(0), qwen3())])
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    with Served(run) as served:
        [state] = get(served, "api/state")["runs"]
        assert state["problems"] == ["1 line of trajectories/ is damaged and left out"]
        get(served, "api/trajectories")
        get(served, "api/trajectory", {"run": 0, "step": 9, "line": 1})
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before
