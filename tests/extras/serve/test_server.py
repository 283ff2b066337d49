"""The HTTP server: access, limits, disconnected clients, a full queue, errors and shutdown."""

import http.client
import itertools
import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.extras.serve.served import MAX_TOTAL, TOKENIZER, make_engine, serving

pytestmark = pytest.mark.usefixtures("quick_compilation")

CHAT = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def engine(quick_compilation):
    """An engine that tests with their own server share, one after another."""
    return make_engine()


@pytest.fixture(scope="module")
def client(quick_compilation):
    with serving(make_engine()) as (_, client):
        yield client


def get_error(client, path, body, **headers):
    """Return the status and error of a request, and check that the error has all fields."""
    status, value = client.post(path, body, **headers)
    assert value.keys() == {"error"}
    assert value["error"].keys() == {"message", "type", "param", "code"}
    assert value["error"]["message"]
    return status, value["error"]


def test_addresses_and_methods(client):
    status, _, body = client.raw("GET", "/health")
    assert (status, json.loads(body)) == (200, {"status": "ok"})
    assert client.raw("HEAD", "/health")[2] == b""
    status, _, body = client.raw("GET", "/r/some-rollout/v1/models")
    [model] = json.loads(body)["data"]
    assert (model["id"], model["max_model_len"]) == ("tiny", MAX_TOTAL)
    assert client.raw("GET", CHAT)[0] == 405
    for path in ("/", "/v1/completions", "/r/a%20b/v1/models", "/r//v1/models"):
        status, _, body = client.raw("GET", path)
        assert status == 404
        assert json.loads(body)["error"]["type"] == "not_found_error"


class TestAccess:
    def test_other_hosts_and_pages_are_rejected(self, client):
        here = f"127.0.0.1:{client.port}"
        assert client.raw("GET", "/v1/models", host=f"localhost:{client.port}")[0] == 200
        for host in ("evil.example", "127.0.0.1:1"):
            assert client.raw("GET", "/v1/models", host=host)[0] == 403
        for headers, status in [
            ({"Origin": "http://evil.example"}, 403),
            ({"Origin": "null"}, 403),
            ({"Origin": f"http://{here}"}, 200),
            ({"Sec-Fetch-Site": "cross-site"}, 403),
            ({"Sec-Fetch-Site": "same-origin"}, 200),
        ]:
            assert client.raw("GET", "/v1/models", headers=headers)[0] == status, headers

    def test_a_key_is_required_in_either_header(self, engine):
        key = "secret"
        with serving(engine, key=key) as (_, client):
            assert client.raw("GET", "/health")[0] == 200
            for sent in ({}, {"Authorization": f"Bearer {key}x"}):
                headers = {name: text.encode() for name, text in sent.items()}
                status, given, body = client.raw("GET", "/v1/models", headers=headers)
                assert (status, given["www-authenticate"]) == (401, "Bearer")
                assert json.loads(body)["error"]["code"] == "invalid_api_key"
            for sent in (
                {"Authorization": f"Bearer {key}"},
                {"x-api-key": key},
                # A client of one dialect may send another's header with a word of its own.
                {"Authorization": "Bearer none", "x-api-key": key},
            ):
                headers = {name: text.encode() for name, text in sent.items()}
                assert client.raw("GET", "/metrics", headers=headers)[0] == 200

    def test_other_machines_need_a_key(self, engine):
        with (
            pytest.raises(ValueError, match=r"--host=0\.0\.0\.0 can be reached from"),
            serving(engine, host="0.0.0.0"),
        ):
            pass
        with serving(engine, host="0.0.0.0", key="k") as (_, client):
            headers = {"Authorization": "Bearer k"}
            assert client.raw("GET", "/v1/models", headers=headers, host="any.name")[0] == 200


def test_a_large_body_is_rejected(client, monkeypatch):
    monkeypatch.setattr("jaxrl.extras.serve.server.MAX_BODY_BYTES", 10_000)
    status, error = get_error(client, CHAT, {"messages": HELLO, "user": "x" * 20_000})
    assert status == 413
    assert "10000 bytes" in error["message"]
    assert client.chat(max_tokens=1)["choices"]


@pytest.fixture
def slow_engine(engine, monkeypatch):
    """An engine whose chunks take at least 50 ms, and its longest answers six seconds."""
    step = engine.step

    def slowly(**settings):
        time.sleep(0.05)
        return step(**settings)

    monkeypatch.setattr(engine, "step", slowly)
    return engine


LONG = {"messages": HELLO, "temperature": 0.0, "max_tokens": 400}


def send_and_hold(client, body):
    """Send a request and return the connection, without reading the answer."""
    connection = http.client.HTTPConnection("127.0.0.1", client.port, timeout=60)
    connection.request("POST", CHAT, body=json.dumps(body).encode())
    return connection


@pytest.mark.parametrize("stream", [False, True])
def test_a_disconnected_client_frees_its_rows(slow_engine, stream):
    with serving(slow_engine) as (_, client):
        connection = send_and_hold(client, {**LONG, "stream": stream, "n": 6})
        client.until(lambda m: m["jaxrl_samples_running"] == 4 and m["jaxrl_samples_queued"] == 2)
        connection.close()
        metrics = client.until(lambda m: m["jaxrl_samples_cancelled_total"] == 6)
        assert metrics["jaxrl_samples_running"] == metrics["jaxrl_samples_queued"] == 0
        assert metrics["jaxrl_pages_free"] == slow_engine.num_pages
        assert metrics["jaxrl_rows_kept"] == metrics["jaxrl_samples_finished_total"] == 0
        assert client.chat(max_tokens=2, temperature=0)["choices"]


def test_few_pages_and_disconnections_change_no_answer(engine):
    """Answers stay the same if rows preempt each other and clients disconnect."""
    num = 8
    prompts = [TOKENIZER.encode(f"question {number} " + "word " * number) for number in range(num)]

    def ask(client, number):
        return client.generate(prompts[number], temperature=0.0, max_tokens=160)["token_ids"]

    with serving(engine) as (_, client), ThreadPoolExecutor(num) as pool:
        expected = list(pool.map(lambda number: ask(client, number), range(num)))
    tight = make_engine(num_pages=34)
    with serving(tight) as (server, client), ThreadPoolExecutor(num) as pool:
        answers = [pool.submit(ask, client, number) for number in range(num)]
        for _ in range(4):
            connection = send_and_hold(client, {**LONG, "temperature": 1.0, "top_p": 0.9})
            time.sleep(0.1)
            connection.close()
        assert [answer.result() for answer in answers] == expected
        metrics = client.until(lambda m: m["jaxrl_samples_cancelled_total"] == 4)
        assert metrics["jaxrl_rows_swapped_total"] > 0
        assert metrics["jaxrl_samples_running"] == 0
        assert server.shutdown(30)
    held = sum(len(set(row.pages)) for shard in tight._shards for row in shard.rows.values())
    assert held >= tight.num_pages - tight.num_free_pages  # some are shared, and none is lost


def test_a_sample_goes_on_while_a_retry_waits_for_it(slow_engine):
    """A sample is not cancelled if its client disconnects while a retry waits for it."""
    body = {**LONG, "max_tokens": 60, "temperature": 1.0}
    with serving(slow_engine) as (_, client):
        connection = send_and_hold(client, body)
        client.until(lambda m: m["jaxrl_samples_running"] == 1)
        with ThreadPoolExecutor() as pool:
            retry = pool.submit(client.post, CHAT, body, x_stainless_retry_count="1")
            time.sleep(0.3)
            connection.close()
            assert retry.result()[0] == 200
        assert client.metrics()["jaxrl_samples_total"] == 1


def test_a_retry_of_a_cancelled_request_repeats_the_sample(engine, monkeypatch):
    body = {**LONG, "max_tokens": 40, "temperature": 1.0, "return_token_ids": True}
    step, chunks, is_cancelled = engine.step, itertools.count(), threading.Event()

    def step_once(**settings):  # and then wait, or the answer may be complete too early
        assert next(chunks) == 0 or is_cancelled.wait(30)
        return step(**settings)

    monkeypatch.setattr(engine, "step", step_once)
    with serving(engine) as (server, client):
        connection = send_and_hold(client, body)
        client.until(lambda m: m["jaxrl_samples_running"] == 1)
        connection.close()
        [job] = server.endpoint.worker._jobs.values()
        client.until(lambda _: job.is_cancelled)
        is_cancelled.set()
        client.until(lambda m: m["jaxrl_samples_cancelled_total"] == 1)
        answers = [client.post(CHAT, body, x_stainless_retry_count=str(n))[1] for n in (1, 2)]
        assert answers[0] == answers[1]
        assert client.metrics()["jaxrl_samples_total"] == 2


def test_a_completion_has_a_deadline(slow_engine):
    with serving(slow_engine, deadline_s=0.5) as (_, client):
        status, error = get_error(client, CHAT, LONG)
        assert status == 504
        assert "--deadline_s" in error["message"]
        events = client.stream(CHAT, {**LONG, "stream": True})
        assert "--deadline_s" in json.loads(events[-1][1])["error"]["message"]
        metrics = client.metrics()
        assert metrics["jaxrl_samples_late_total"] == 2
        assert metrics["jaxrl_pages_free"] == slow_engine.num_pages


def test_a_full_queue_rejects_requests(slow_engine):
    with serving(slow_engine, max_queue=2) as (_, client):
        held = [send_and_hold(client, LONG) for _ in range(6)]  # four rows, and two that wait
        client.until(lambda m: m["jaxrl_samples_running"] == 4 and m["jaxrl_samples_queued"] == 2)
        status, headers, body = client.raw("POST", CHAT, json.dumps(LONG).encode())
        assert (status, headers["retry-after"]) == (429, "1")
        assert json.loads(body)["error"]["type"] == "rate_limit_error"
        assert client.metrics()["jaxrl_refused_busy_total"] == 1
        for connection in held:
            connection.close()
        client.until(lambda m: m["jaxrl_samples_cancelled_total"] == 6)
        assert client.chat(max_tokens=1)["choices"]


class TestShutdown:
    def test_shutdown_finishes_running_requests_and_rejects_new_ones(self, slow_engine):
        with serving(slow_engine) as (server, client):
            connection = send_and_hold(client, {**LONG, "max_tokens": 60})
            client.until(lambda m: m["jaxrl_samples_running"] == 1)
            with ThreadPoolExecutor() as pool:
                is_done = pool.submit(server.shutdown, 60)
                while not server.endpoint.worker.is_shutting_down:
                    time.sleep(0.01)
                status, error = get_error(client, CHAT, LONG)
                assert (status, error["type"]) == (503, "overloaded_error")
                assert client.raw("GET", "/health")[0] == 503
                answer = connection.getresponse()
                assert answer.status == 200
                [choice] = json.load(answer)["choices"]
                assert choice["finish_reason"] in ("stop", "length")
                connection.close()
                assert is_done.result()
            with pytest.raises(OSError, match="refused"):
                client.raw("GET", "/health")


def test_the_server_survives_an_engine_error(engine, monkeypatch):
    step, faults = engine.step, [RuntimeError("out of memory")]

    def faulty(**settings):
        if faults:
            raise faults.pop()
        return step(**settings)

    monkeypatch.setattr(engine, "step", faulty)
    with serving(engine) as (_, client):
        status, error = get_error(client, CHAT, LONG)
        assert (status, error["type"]) == (500, "server_error")
        assert client.chat(max_tokens=2)["choices"]
        assert client.metrics()["jaxrl_samples_failed_total"] == 1


def test_a_server_without_an_engine_is_unhealthy(engine, monkeypatch):
    def fail(**settings):
        raise RuntimeError("/secret/place.py")

    with serving(engine) as (server, client), monkeypatch.context() as patched:
        assert server.is_alive
        patched.setattr(engine, "step", fail)
        patched.setattr(engine, "clear", fail)
        # Four samples have rows and two wait: nobody waits forever.
        assert get_error(client, CHAT, {**LONG, "n": 6})[0] == 500
        server.endpoint.worker._thread.join(60)
        assert not server.is_alive
        status, _, body = client.raw("GET", "/health")
        assert (status, json.loads(body)) == (503, {"status": "ended"})
        status, error = get_error(client, CHAT, LONG)
        assert (status, error["type"]) == (503, "overloaded_error")


def test_a_server_error_shows_no_paths(client, monkeypatch):
    def fail(*_, **__):
        raise RuntimeError("/secret/place.py")

    monkeypatch.setattr("jaxrl.extras.serve.completions.build_request", fail)
    status, error = get_error(client, CHAT, LONG)
    assert status == 500
    assert "secret" not in error["message"]
