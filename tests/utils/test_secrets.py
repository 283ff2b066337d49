"""Registered secrets in texts, errors, results and files."""

import io
import json
import sys
import urllib.parse

import pytest

from jaxrl.envs.base import OutageError, ToolError
from jaxrl.envs.images import Picture, TextWithImages, get_attached_images
from jaxrl.envs.search.http_retriever import HttpRetriever
from jaxrl.envs.search.recording import Recording
from jaxrl.envs.search.resilient import ResilientSearch, RetryConfig
from jaxrl.envs.tools.base import Tool, run_as_batch, run_call
from jaxrl.extras.endpoints.judges import JudgeEndpoint, JudgeSettings
from jaxrl.utils import secrets
from jaxrl.utils.concurrency import format_error_report
from jaxrl.utils.secrets import redact, redact_output, register_secret
from tests.servers import Reply, served

KEY = 'sk-Ab9/x+"Q7&w\\mnop'

FORMS = {
    "plain": KEY,
    "json": r"sk-Ab9/x+\"Q7&w\\mnop",
    "json, escaped slashes": r"sk-Ab9\/x+\"Q7&w\\mnop",
    "percent": "sk-Ab9%2Fx%2B%22Q7%26w%5Cmnop",
    "percent, small letters": "sk-Ab9%2fx%2b%22Q7%26w%5cmnop",
    "percent, slashes left": "sk-Ab9/x%2B%22Q7%26w%5Cmnop",
}


@pytest.fixture(autouse=True)
def no_registered_secrets(monkeypatch):
    monkeypatch.setattr(secrets, "_patterns", {})


def test_a_secret_is_redacted_in_each_form():
    text = " ".join(FORMS.values())
    assert redact(text) == text
    register_secret(KEY)
    assert redact(text) == " ".join(["***"] * len(FORMS))
    # The forms are those that libraries write.
    assert redact(json.dumps([KEY])) == '["***"]'
    for quote in (urllib.parse.quote, urllib.parse.quote_plus):
        assert redact(quote(KEY)) == "***"
    register_secret("pass word é")
    for text in ("pass word é", "pass%20word%20%C3%A9", "pass+word+%c3%a9", r"pass word \u00e9"):
        assert redact(text) == "***"


def test_only_texts_in_json_are_redacted():
    register_secret(KEY)
    value = {"a": [1, 2.5, None, True, KEY[:-1]], KEY: {"b": f"see {KEY}"}, "c": (KEY, "d")}
    assert redact(value) == {
        "a": [1, 2.5, None, True, KEY[:-1]],
        "***": {"b": "see ***"},
        "c": ("***", "d"),
    }


def test_a_short_secret_is_redacted_only_as_a_whole_word():
    register_secret("EMPTY")
    register_secret("x.1")
    assert redact("EMPTY: (x.1) EMPTYNESS, NONEMPTY, ax.1, x.12, x_1") == (
        "***: (***) EMPTYNESS, NONEMPTY, ax.1, x.12, x_1"
    )


def test_overlapping_secrets_are_redacted_completely():
    register_secret("abcdefgh")
    register_secret("fghijklm")
    register_secret("abcdefghxyz")
    assert redact("-abcdefghijklm-") == "-***-"
    assert redact("-abcdefghxyz-") == "-***-"
    assert redact("abcdefghfghijklm fghijklm") == "****** ***"


class Leaky(Tool):
    """A user's tool that repeats the key."""

    name, blank = "leaky", ""

    def run(self, call):
        match call:
            case "raise":
                raise RuntimeError(f"no access with {KEY}")
            case "fail":
                raise ToolError(f"no access with {KEY}", status=403)
            case "out":
                raise OutageError(f"down: {KEY}", fallback="x")
            case "show":
                return TextWithImages(f"see {KEY}", [Picture(data=b"x")])
        return f"with {KEY}"


def test_answers_and_errors_of_a_tool_are_redacted():
    register_secret(KEY)
    results = [run_call(Leaky(), call) for call in ("say", "raise", "fail", "out", "show")]
    assert [str(result) for result in results] == [
        "with ***",
        "RuntimeError: no access with ***",
        "no access with ***",
        "down: ***",
        "see ***",
    ]
    assert results[2].status == 403
    assert get_attached_images(results[4]) == (Picture(data=b"x"),)
    assert run_as_batch(Leaky(), ["say", "say"]) == ["with ***"] * 2


def test_errors_are_redacted_before_they_are_truncated():
    key = "sk-live-" + "0123456789abcdef" * 8
    register_secret(key)
    for length in (1900, 1960):  # so that the key would be cut in two
        error = ValueError("x" * length + key)
        error.add_note(key)
        assert "012345" not in format_error_report(error)


def echo(request):
    """Answer with the request's key in all forms, as results or errors."""
    key = request.headers["authorization"].removeprefix("Bearer ")
    echoed = " ".join(FORMS.values())
    assert key == KEY
    match request.path.split("/")[1]:
        case "retrieve":
            return {"result": [[{"document": {"id": echoed, "contents": f'"{echoed}"\n{key}'}}]]}
        case "chat":
            message = {"content": f"{echoed} Score: 7", echoed: echoed}
            return {"choices": [{"message": message, "finish_reason": "stop"}], "id": echoed}
        case "redirect":
            return Reply(echoed, 307, {"Location": f"http://h/{urllib.parse.quote(key)}?q={key}"})
        case "broken":
            return Reply(f'{{"result": {echoed}')
        case "long":
            return Reply(" " * 150 + "x" * 190 + echoed, 418)
    return Reply(echoed, 500)


def test_a_server_that_echoes_the_key_leaks_it_nowhere(monkeypatch, tmp_path, capfd, caplog):
    monkeypatch.setenv("A_KEY", KEY)
    quick = RetryConfig(
        cache_mib=1.0, cache_ttl_s=0.0, queries_per_second=0.0, max_concurrent=2, deadline_s=5.0,
        retries=0, backoff_s=0.0, breaker_failures=0, breaker_rest_s=0.0, outage_deadline_s=0.1,
        on_outage="empty",
    )  # fmt: skip
    texts = []
    with served(echo) as server:
        for path in ("retrieve", "redirect", "broken", "long", "500"):
            engine = HttpRetriever(f"{server.url}/{path}", key_env="A_KEY")
            recording = Recording(tmp_path / path, {"url": path})
            search = ResilientSearch(engine, quick, recording=recording, log=texts.append)
            result = run_call(search, "q")
            texts += [str(result), repr(result), repr(engine.retrieve(["q"], 3))]
        for path in ("chat", "long"):
            settings = JudgeSettings(
                url=f"{server.url}/{path}", model="m", prompt="{response}", key_env="A_KEY"
            )
            judge = JudgeEndpoint(settings, "reward.judges")
            try:
                texts.append(repr(judge.send_request({"m": 1})))
            except ToolError as error:
                texts.append(repr(error))
            texts.append(repr(run_call(judge, "grade")))
        assert len(server.requests) > 10
    files = [path.read_text() for path in tmp_path.rglob("*.json*")]
    texts += [*files, *capfd.readouterr(), caplog.text]
    assert sum("***" in text for text in texts) > 10
    assert any("***" in text for text in files)
    for form in (*FORMS.values(), KEY[:8]):
        assert [text for text in texts if form in text] == []


def test_characters_that_stdout_cannot_encode_are_replaced(monkeypatch):
    out = io.TextIOWrapper(io.BytesIO(), encoding="ascii", errors="strict")
    monkeypatch.setattr(sys, "stdout", out)
    with redact_output():
        print("run \u00e9")
        sys.stdout.writelines(["line \u00e9\n"])
    out.flush()
    assert out.buffer.getvalue() == b"run ?\nline ?\n"
    assert out.errors == "strict"  # the user's stream is unchanged


@redact_output()
def print_and_raise(error):
    print("to out", KEY)
    print("to err", FORMS["percent"], file=sys.stderr)
    sys.stderr.writelines([KEY, "\n"])
    raise error


def test_output_and_exceptions_are_redacted(monkeypatch):
    register_secret(KEY)
    out, err = io.StringIO(), io.StringIO()
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", err)
    for error in (SystemExit(f"error: {KEY}"), ValueError(f"error: {KEY}", 3), KeyError(KEY)):
        with pytest.raises(type(error)) as raised:
            print_and_raise(error)
        assert KEY not in repr(raised.value)
        assert "***" in str(raised.value)
    assert (out.getvalue(), sys.stdout) == ("to out ***\n" * 3, out)
    assert err.getvalue() == "to err ***\n***\n" * 3
