"""Hosts, pages and keys; refusals; clients that leave; a full queue; the end."""

import contextlib
import http.client
import itertools
import json
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import jax
import pytest

from jaxrl.extras.serve import server as server_module
from tests.extras.serve.served import MAX_TOTAL, PARAMS, TOKENIZER, make_engine, serving

pytestmark = pytest.mark.usefixtures("quick_compilation")

CHAT, IDS = "/v1/chat/completions", "/inference/v1/generate"
HELLO = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def engine(quick_compilation):
    """An engine for servers of single tests, one after another."""
    return make_engine()


@pytest.fixture(scope="module")
def client(quick_compilation):
    with serving(make_engine()) as (_, client):
        yield client


def test_what_there_is(client):
    status, _, body = client.raw("GET", "/health")
    assert (status, json.loads(body)) == (200, {"status": "ok"})
    status, _, body = client.raw("GET", "/r/some-rollout/v1/models")
    [model] = json.loads(body)["data"]
    assert (model["id"], model["max_model_len"]) == ("tiny", MAX_TOTAL)
    status, headers, body = client.raw("GET", "/metrics")
    assert headers["content-type"].startswith("text/plain; version=0.0.4")
    names = [line.split()[2] for line in body.decode().splitlines() if line.startswith("# TYPE")]
    assert len(names) == len(set(names)) > 15


def refusal(client, path, body, **headers):
    """Status and error of a request, which has the shape that clients read."""
    status, value = client.post(path, body, **headers)
    assert value.keys() == {"error"}
    assert value["error"].keys() == {"message", "type", "param", "code"}
    assert value["error"]["message"]
    return status, value["error"]


def test_addresses_and_methods(client):
    assert client.raw("GET", CHAT)[0] == 405
    assert client.raw("POST", "/v1/models")[0] == 405
    for path in ("/", "/v1", "/v1/completions", "/r/a b/v1/models", "/r//v1/models", "/r/a"):
        status, _, body = client.raw("GET", path.replace(" ", "%20"))
        assert status == 404
        assert json.loads(body)["error"]["type"] == "not_found_error"
    assert client.raw("HEAD", "/health")[2] == b""
    # What Anthropic's library asks for with the base URL of OpenAI's.
    status, _, body = client.raw("POST", "/r/a/v1/v1/messages")
    assert status == 404
    message = json.loads(body)["error"]["message"]
    assert "/v1/v1/messages" in message
    assert "/v1/messages" in message.replace("/v1/v1/messages", "")


def test_a_session_is_named_in_whole_or_refused(client):
    name = "s" * 256
    assert client.chat(max_tokens=1, headers={"X_Session_ID": name})["choices"]
    status, error = refusal(client, CHAT, LONG, X_Session_ID=name + "s")
    assert (status, error["param"]) == (400, "X-Session-ID")
    assert "257 characters; expected at most 256" in error["message"]


class TestWhoMayAsk:
    def test_another_host_or_page_is_refused(self, client):
        here = f"127.0.0.1:{client.port}"
        assert client.raw("GET", "/v1/models", host=f"localhost:{client.port}")[0] == 200
        assert client.raw("GET", "/v1/models", host="evil.example")[0] == 403
        assert client.raw("GET", "/v1/models", host="127.0.0.1:1")[0] == 403
        for headers, status in [
            ({"Origin": "http://evil.example"}, 403),
            ({"Origin": "null"}, 403),
            ({"Origin": "http://["}, 403),
            ({"Origin": f"http://{here}"}, 200),
            ({"Sec-Fetch-Site": "cross-site"}, 403),
            ({"Sec-Fetch-Site": "same-origin"}, 200),
        ]:
            assert client.raw("GET", "/v1/models", headers=headers)[0] == status, headers

    def test_a_key_is_asked_for_where_there_is_one(self, engine):
        key = "schlüssel-鍵"
        with serving(engine, key=key) as (_, client):
            assert client.raw("GET", "/health")[0] == 200
            for sent in ({}, {"Authorization": f"Bearer {key}x"}, {"Authorization": key}):
                headers = {name: text.encode() for name, text in sent.items()}
                status, given, body = client.raw("GET", "/v1/models", headers=headers)
                assert (status, given["www-authenticate"]) == (401, "Bearer")
                assert json.loads(body)["error"]["code"] == "invalid_api_key"
            for sent in (
                {"Authorization": f"Bearer {key}"},
                {"x-api-key": key},
                # A client of one dialect may send another's header with a word of its own.
                {"Authorization": "Bearer none", "x-api-key": key},
                {"Authorization": f"Bearer {key}", "x-api-key": "none"},
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


def test_bodies_have_a_largest_size(engine):
    with serving(engine, max_body_mib=0.01) as (_, client):
        status, error = refusal(client, CHAT, {"messages": HELLO, "user": "x" * 20_000})
        assert status == 413
        assert "10485 bytes" in error["message"]
        # The same without a length, of which the server reads no more than it takes.
        connection = http.client.HTTPConnection("127.0.0.1", client.port, timeout=20)
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            chunks = (b"x" * 1000 for _ in range(20_000))
            connection.request("POST", CHAT, body=chunks, encode_chunked=True,
                               headers={"Transfer-Encoding": "chunked"})  # fmt: skip
            assert connection.getresponse().status == 413
        connection.close()
        assert client.chat(max_tokens=1)["choices"]


def test_a_slow_body_is_refused(engine, monkeypatch):
    monkeypatch.setattr(server_module, "BODY_TIMEOUT_S", 0.3)
    with serving(engine) as (_, client):
        with socket.create_connection(("127.0.0.1", client.port), timeout=20) as slow:
            head = f"POST {CHAT} HTTP/1.1\r\nHost: 127.0.0.1:{client.port}\r\n"
            slow.sendall(f"{head}Content-Length: 100\r\n\r\n{{".encode())
            assert slow.recv(1000).startswith(b"HTTP/1.1 408 ")
        assert client.chat(max_tokens=1)["choices"]


@pytest.fixture
def slow_engine(engine, monkeypatch):
    """An engine with chunks of at least 50 ms: an answer of full length takes six seconds."""
    step = engine.step

    def slowly(**settings):
        time.sleep(0.05)
        return step(**settings)

    monkeypatch.setattr(engine, "step", slowly)
    return engine


LONG = {"messages": HELLO, "temperature": 0.0, "max_tokens": 400}


def send_and_hold(client, body):
    """A connection on which a request was sent, whose answer nobody has read."""
    connection = http.client.HTTPConnection("127.0.0.1", client.port, timeout=60)
    connection.request("POST", CHAT, body=json.dumps(body).encode())
    return connection


@pytest.mark.parametrize("stream", [False, True])
def test_who_leaves_frees_the_row(slow_engine, stream):
    with serving(slow_engine) as (_, client):
        connections = [send_and_hold(client, {**LONG, "stream": stream, "n": 6})]
        client.until(lambda m: m["jaxrl_samples_running"] == 4 and m["jaxrl_samples_queued"] == 2)
        for connection in connections:
            connection.close()
        found = client.until(lambda m: m["jaxrl_samples_cancelled_total"] == 6)
        assert found["jaxrl_samples_running"] == found["jaxrl_samples_queued"] == 0
        assert found["jaxrl_pages_free"] == slow_engine.num_pages
        assert found["jaxrl_rows_kept"] == found["jaxrl_samples_finished_total"] == 0
        assert client.chat(max_tokens=2, temperature=0)["choices"]


def test_few_pages_and_clients_that_leave(engine):
    """Rows take pages from each other and clients leave, and every answer is as with many pages."""
    prompts = [TOKENIZER.encode(f"question {number} " + "word " * number) for number in range(8)]

    def ask(client, number):
        return client.generate(prompts[number], temperature=0.0, max_tokens=160)["token_ids"]

    with serving(engine) as (_, client), ThreadPoolExecutor(4) as pool:
        wanted = list(pool.map(lambda number: ask(client, number), range(8)))
    tight = make_engine(num_pages=34)
    with serving(tight) as (server, client), ThreadPoolExecutor(8) as pool:
        asked = [pool.submit(ask, client, number) for number in range(8)]
        for _ in range(4):
            connection = send_and_hold(client, {**LONG, "temperature": 1.0, "top_p": 0.9})
            time.sleep(0.1)
            connection.close()
        assert [one.result() for one in asked] == wanted
        found = client.until(lambda m: m["jaxrl_samples_cancelled_total"] == 4)
        assert found["jaxrl_rows_swapped_total"] > 0
        assert found["jaxrl_samples_running"] == 0
        assert server.shutdown(30)
    held = sum(len(set(row.pages)) for shard in tight._shards for row in shard.rows.values())
    assert held >= tight.num_pages - tight.num_free_pages  # some are shared, and none is lost


def test_a_retry_goes_on_where_another_reader_is(slow_engine):
    """The first client leaves while a second one waits for the same sample: it is not cancelled."""
    body = {**LONG, "max_tokens": 60, "temperature": 1.0}
    with serving(slow_engine) as (_, client):
        connection = send_and_hold(client, body)
        client.until(lambda m: m["jaxrl_samples_running"] == 1)
        found = []
        again = threading.Thread(
            target=lambda: found.append(client.post(CHAT, body, x_stainless_retry_count="1"))
        )
        again.start()
        time.sleep(0.3)
        connection.close()
        again.join()
        assert found[0][0] == 200
        assert client.metrics()["jaxrl_samples_total"] == 1


def test_a_retry_of_what_was_broken_off_draws_the_same(engine, monkeypatch):
    body = {**LONG, "max_tokens": 40, "temperature": 1.0, "return_token_ids": True}
    step, chunks, is_missed = engine.step, itertools.count(), threading.Event()

    def waits(**settings):  # behind the first chunk, or the answer may be whole by then
        assert next(chunks) == 0 or is_missed.wait(30)
        return step(**settings)

    monkeypatch.setattr(engine, "step", waits)
    with serving(engine) as (server, client):
        connection = send_and_hold(client, body)
        client.until(lambda m: m["jaxrl_samples_running"] == 1)
        connection.close()
        [job] = server.endpoint.worker._jobs.values()
        client.until(lambda _: job.is_cancelled)
        is_missed.set()
        client.until(lambda m: m["jaxrl_samples_cancelled_total"] == 1)
        answers = [client.post(CHAT, body, x_stainless_retry_count=str(n))[1] for n in (1, 2)]
        assert answers[0] == answers[1]
        assert client.metrics()["jaxrl_samples_total"] == 2


def test_an_answer_has_a_deadline(slow_engine):
    with serving(slow_engine, deadline_s=0.5) as (_, client):
        status, error = refusal(client, CHAT, LONG)
        assert status == 504
        assert "--deadline_s" in error["message"]
        events = client.stream(CHAT, {**LONG, "stream": True})
        assert "--deadline_s" in json.loads(events[-1][1])["error"]["message"]
        found = client.metrics()
        assert found["jaxrl_samples_late_total"] == 2
        assert found["jaxrl_pages_free"] == slow_engine.num_pages


def test_a_full_queue_is_told(slow_engine):
    with serving(slow_engine, max_queue=2) as (_, client):
        held = [send_and_hold(client, LONG) for _ in range(6)]  # four rows, and two that wait
        client.until(lambda m: m["jaxrl_samples_running"] == 4 and m["jaxrl_samples_queued"] == 2)
        status, headers, body = client.raw("POST", CHAT, json.dumps(LONG).encode())
        assert (status, headers["retry-after"]) == (429, "1")
        assert json.loads(body)["error"]["type"] == "rate_limit_error"
        assert client.metrics()["jaxrl_refused_busy_total"] == 1
        # More than ever find a place are no matter of time.
        status, error = refusal(client, CHAT, {**LONG, "n": 7})
        assert (status, error["param"]) == (400, "n")
        assert "at most 6" in error["message"]
        for connection in held:
            connection.close()
        client.until(lambda m: m["jaxrl_samples_cancelled_total"] == 6)
        assert client.chat(max_tokens=1)["choices"]


class TestEnding:
    def test_what_runs_is_finished_and_what_is_new_refused(self, slow_engine):
        with serving(slow_engine) as (server, client):
            connection = send_and_hold(client, {**LONG, "max_tokens": 60})
            client.until(lambda m: m["jaxrl_samples_running"] == 1)
            ended = []
            ending = threading.Thread(target=lambda: ended.append(server.shutdown(60)))
            ending.start()
            while not server.endpoint.worker.is_shutting_down:
                time.sleep(0.01)
            status, error = refusal(client, CHAT, LONG)
            assert (status, error["type"]) == (503, "overloaded_error")
            assert client.raw("GET", "/health")[0] == 503
            answer = connection.getresponse()
            assert answer.status == 200
            [choice] = json.load(answer)["choices"]
            assert choice["finish_reason"] in ("stop", "length")
            connection.close()
            ending.join()
            assert ended == [True]
            with pytest.raises(OSError, match="refused"):
                client.raw("GET", "/health")

    def test_what_takes_too_long_is_broken_off(self, slow_engine):
        with serving(slow_engine) as (server, client):
            connection = send_and_hold(client, {**LONG, "ignore": 1, "max_tokens": 480})
            client.until(lambda m: m["jaxrl_samples_running"] == 1)
            assert server.shutdown(0.2) is False
            answer = connection.getresponse()
            assert answer.status == 503
            connection.close()


def test_a_fault_of_the_engine_is_told_and_survived(engine, monkeypatch):
    step, faults = engine.step, [RuntimeError("out of memory")]

    def faulty(**settings):
        if faults:
            raise faults.pop()
        return step(**settings)

    monkeypatch.setattr(engine, "step", faulty)
    with serving(engine) as (_, client):
        status, error = refusal(client, CHAT, LONG)
        assert (status, error["type"]) == (500, "server_error")
        assert error["message"] == ("the engine failed with RuntimeError; see the server's log.")
        assert client.chat(max_tokens=2)["choices"]
        assert client.metrics()["jaxrl_samples_failed_total"] == 1


def test_a_server_whose_engine_has_ended_says_so(engine, monkeypatch):
    def fault(**settings):
        raise RuntimeError("/secret/place.py")

    with serving(engine) as (server, client), monkeypatch.context() as patched:
        assert server.is_alive
        patched.setattr(engine, "step", fault)
        patched.setattr(engine, "clear", fault)
        assert refusal(client, CHAT, LONG)[0] == 500
        server.endpoint.worker._thread.join(60)
        assert not server.is_alive
        status, _, body = client.raw("GET", "/health")
        assert (status, json.loads(body)) == (503, {"status": "ended"})
        status, error = refusal(client, CHAT, LONG)
        assert (status, error["type"]) == (503, "overloaded_error")
        assert "restart the server" in error["message"]


def test_a_fault_of_the_server_shows_no_paths(client, monkeypatch):
    def fault(*_, **__):
        raise RuntimeError("/secret/place.py")

    monkeypatch.setattr("jaxrl.extras.serve.completions.build_request", fault)
    status, error = refusal(client, CHAT, LONG)
    assert (status, error["message"]) == (
        500,
        "the server failed with RuntimeError; see its log.",
    )


def test_a_model_that_gives_no_numbers_is_told(capsys):
    damaged = make_engine(jax.tree.map(lambda array: array * float("nan"), PARAMS))
    messages = {"messages": HELLO, "max_tokens": 3}
    with serving(damaged) as (_, client):
        for path, body in [
            (CHAT, LONG),
            ("/v1/messages", messages),
            (IDS, {"token_ids": [1, 2], "sampling_params": {"max_tokens": 3}}),
        ]:
            status, value = client.post(path, body)
            assert (status, value["error"]["message"]) == (
                500,
                "the model returns NaN: its weights are damaged.",
            )
        for path in (CHAT, "/v1/messages"):
            [*_, (_, last)] = client.stream(path, {**messages, "stream": True})
            assert "its weights are damaged" in json.loads(last)["error"]["message"]
        status, _, body = client.raw("GET", "/health")
        assert (status, json.loads(body)) == (503, {"status": "damaged"})
        found = client.metrics()
        assert found["jaxrl_samples_failed_total"] == 5
        assert found["jaxrl_pages_free"] == damaged.num_pages
    assert capsys.readouterr().err.count("its weights are damaged") == 1
