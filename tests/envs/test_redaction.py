"""No key in any text, however a server writes it: against a real server that echoes keys."""

import base64
import html
import io
import json
import random
import string
import subprocess
import sys
import textwrap
import threading
import time
import traceback
import urllib.error
import urllib.parse

import pytest

from jaxrl.envs import redaction
from jaxrl.envs.base import OutageError, ToolError
from jaxrl.envs.calls import failure_report
from jaxrl.envs.http_retriever import HttpRetriever
from jaxrl.envs.images import Picture, Pictured, images_behind
from jaxrl.envs.recording import Recording
from jaxrl.envs.redaction import hide, redact_error, redacted, redacted_content, redacted_output
from jaxrl.envs.resilient import Policy, ResilientSearch
from jaxrl.envs.tools import Tool, run_one, run_together
from jaxrl.extras.endpoints.completions import Completions
from jaxrl.extras.endpoints.judges import Endpoint as JudgeEndpoint
from jaxrl.extras.endpoints.judges import JudgeSettings
from jaxrl.extras.opensearch.engine import OpenSearchRetriever
from jaxrl.extras.web_search.engine import WebSearch
from tests.servers import Reply, served

KEY = "sk-Ab9/x+\"Q\\=z&7w<mnop>'Z"


QUICK = Policy(
    cache_mib=1.0, cache_ttl_s=0.0, queries_per_second=0.0, max_concurrent=2, deadline_s=5.0,
    retries=0, backoff_s=0.0, breaker_failures=0, breaker_rest_s=0.0, outage_deadline_s=0.1,
    on_outage="empty",
)  # fmt: skip


@pytest.fixture(autouse=True)
def no_other_keys(monkeypatch):
    monkeypatch.setattr(redaction, "_needles", {})
    monkeypatch.setattr(redaction, "_words", {})
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    monkeypatch.setattr(threading, "excepthook", threading.excepthook)


def in_base64(text, before="", after="", is_url=False, is_padded=True):
    encode = base64.urlsafe_b64encode if is_url else base64.b64encode
    coded = encode(f"{before}{text}{after}".encode()).decode()
    return coded if is_padded else coded.rstrip("=")


def in_lines(text):
    return "\n".join(textwrap.wrap(text, 60))


SPELLINGS = {
    "plain": lambda key: key,
    "json": json.dumps,
    "json, slashes escaped": lambda key: json.dumps(key).replace("/", "\\/"),
    "json of json of json": lambda key: json.dumps(json.dumps(json.dumps(key))),
    "json, all escaped": lambda key: "".join(f"\\u{ord(c):04x}" for c in key),
    "json, in capitals": lambda key: "".join(f"\\u{ord(c):04X}" for c in key),
    "every other escaped": lambda key: "".join(
        f"\\u{ord(c):04X}" if i % 2 else json.dumps(c)[1:-1] for i, c in enumerate(key)
    ),
    "percent": lambda key: urllib.parse.quote(key, safe=""),
    "percent, in small letters": lambda key: "".join(f"%{ord(c):02x}" for c in key),
    "percent, slashes left": urllib.parse.quote,
    "percent twice": lambda key: urllib.parse.quote(urllib.parse.quote(key, safe=""), safe=""),
    "form": urllib.parse.quote_plus,
    "html": html.escape,
    "html twice": lambda key: html.escape(html.escape(key)),
    "html, numbers": lambda key: "".join(f"&#{ord(c)};" for c in key),
    "html, hexadecimal": lambda key: "".join(f"&#X00{ord(c):x};" for c in key),
    "repr": repr,
    "repr of bytes": lambda key: repr(key.encode()),
    "repr of repr": lambda key: repr(repr(key)),
    "repr, hexadecimal": lambda key: "".join(f"\\x{ord(c):02x}" for c in key),
    "hex": lambda key: key.encode().hex(),
    "hex, in capitals": lambda key: key.encode().hex().upper(),
    **{
        f"base64 {before!r} {after!r} {is_url} {is_padded}": lambda key, s=(
            before, after, is_url, is_padded,
        ): in_base64(key, *s)
        for before in ("", "u:", "user:", "Bearer ")
        for after in ("", "!", "!!")
        for is_url in (False, True)
        for is_padded in (False, True)
    },
    "hex, colons": lambda key: key.encode().hex(":"),
    "hex, spaces": lambda key: key.encode().hex(" "),
    "base64 twice": lambda key: in_base64(in_base64(key)),
    "base64 in lines": lambda key: in_lines(in_base64(key, "hello world, " * 5)),
    "two lines": lambda key: f"{key[:11]}\r\n {key[11:]}",
    "UTF-16": lambda key: key.encode("utf-16-le").decode(),
    "braces": lambda key: "".join(f"\\u{{{ord(c):x}}}" for c in key),
    "eight digits": lambda key: "".join(f"\\U{ord(c):08x}" for c in key),
    "percent, u": lambda key: "".join(f"%u{ord(c):04X}" for c in key),
    "base64, percent": lambda key: urllib.parse.quote(in_base64(key, "u:"), safe=""),
    "base64, json": lambda key: in_base64(key, "u:").replace("/", "\\/").replace("=", "\\u003d"),
}  # fmt: skip


# No six characters of a key stand together in these, or they do in plain.
LOOSE = ("base64", "hex, ", "two lines", "UTF-16")


def parts_left(text, key=KEY):
    """Whether five characters of the key stand in a text, in a spelling."""
    return [
        name
        for name, spell in SPELLINGS.items()
        if not name.startswith(LOOSE) and any(
            spell(key[i : i + 6]).strip("\"'b") in text for i in range(len(key) - 6)
        )
    ]  # fmt: skip


@pytest.mark.parametrize("name", SPELLINGS)
def test_a_key_is_left_out_in_every_spelling(name):
    spelled = SPELLINGS[name](KEY)
    assert redacted(f"[{spelled}]") == f"[{spelled}]"
    hide(KEY)
    for text in (redacted(f"[{spelled}]"), redacted_content({"a": [spelled]})["a"][0]):
        assert redaction.SHOWN in text
        # What is around the key stays: in one spelling 65 bytes of a greeting, coded with it.
        assert len(text) < len(spelled) / 2 + (64 if name == "base64 in lines" else 16)
        assert parts_left(text) == []


@pytest.mark.parametrize("seed", range(12))
def test_any_key_is_left_out_where_each_character_is_escaped_by_another_hand(seed):
    rng = random.Random(seed)
    key = "".join(rng.choices(string.printable.strip(), k=rng.randrange(12, 60)))
    hide(key)
    hands = [
        lambda c: c,
        lambda c: f"%{ord(c):02X}",
        lambda c: f"\\u{ord(c):04x}",
        lambda c: f"&#{ord(c)};",
        lambda c: json.dumps(c)[1:-1],
        html.escape,
    ]
    assert redacted("<" + "".join(rng.choice(hands)(c) for c in key) + ">") == "<***>"
    other = "the quick brown fox " * 5
    assert redacted(other) == other


def test_what_is_in_a_key_is_one_too():
    hide("Bearer tok-12345678")
    hide("Basic " + in_base64("ann:pass-word-1"))
    hide("postgres://ann:db-pass-9@host/db")
    hide("joe:other-pass-2")
    text = redacted("a tok-12345678 b pass-word-1 c db-pass-9 d other-pass-2 e Bearer ann Basic")
    assert text == "a *** b *** c *** d *** e Bearer ann Basic"


@pytest.mark.parametrize(
    ("key", "part"),
    [
        ('Token token="abcdef1234567"', "abcdef1234567"),
        ("session=abcdef1234567; path=/", "abcdef1234567"),
        ("Basic " + in_base64("ann:pass-word-1", is_padded=False), "pass-word-1"),
        ("postgres://ann:p%40ss-word@host/db", "p@ss-word"),
    ],
)
def test_the_secret_part_of_a_key_is_one(key, part):
    hide(key)
    assert redacted(f"<{part}>") == "<***>"


@pytest.mark.parametrize("spell", [json.dumps, urllib.parse.quote])
def test_a_key_may_have_any_letters(spell):
    hide("gehe\u00efm\u20ac\u20ac12")
    assert redacted(spell("gehe\u00efm\u20ac\u20ac12")).strip('"') == "***"
    assert (
        redacted("f\u00fcr \u20ac: gehe\u00efm\u20ac\u20ac12 \u20ac")
        == "f\u00fcr \u20ac: *** \u20ac"
    )


def test_a_key_may_be_a_number_in_json():
    value = {"a": 123456789012, "b": [12, True, None]}
    hide("123456789012")
    assert redacted_content(value) == {"a": "***", "b": [12, True, None]}


def test_a_key_may_be_split_over_texts():
    hide(KEY)
    assert redacted_content([f"one {KEY[:9]}", f"{KEY[9:]} two", "three"]) == [
        "one ***", "*** two", "three",
    ]  # fmt: skip


def test_what_is_behind_a_key_stays():
    hide(KEY)
    for key in (KEY, in_base64(KEY, is_padded=False), KEY.encode().hex()):
        assert redacted_content({key: [key, "contents"]}) == {"***": ["***", "contents"]}
        assert redacted(f"{key}\n\nab {key} ab") == "***\n\nab *** ab"


def test_a_word_for_a_key_is_left_out_of_messages_alone():
    for word in ("EMPTY", "placeholder", "x1"):
        hide(word)
    assert redacted_content("EMPTY placeholder x1") == "EMPTY placeholder x1"
    assert redacted("EMPTY: a placeholder, x1 of EMPTYNESS") == "***: a ***, *** of EMPTYNESS"


def test_nothing_else_changes():
    hide(KEY)
    value = {"a": [1, 2.5, None, True, "sk-", KEY[:-1]], KEY: {"b": Pictured("x", [])}}
    assert redacted_content(value) == {
        "a": [1, 2.5, None, True, "sk-", KEY[:-1]], "***": {"b": "x"},
    }  # fmt: skip
    picture = Picture(data=b"x")
    shown = redacted_content(Pictured(f"see {KEY}", [picture]))
    assert (shown, images_behind(shown)) == ("see ***", (picture,))


def test_keys_with_backslashes_take_no_longer():
    key = "ab" + 9 * "\\" + "cdZ9"
    hide(key)
    start = time.process_time()
    assert redacted(f"{json.dumps(key)} ab{80 * chr(92)}x").startswith('"***" ab')
    assert time.process_time() - start < 0.5


@pytest.mark.parametrize(
    ("text", "limit_s"),
    [("the quick brown fox jumps " * 160_000, 1.0), (3 * "\\" + "u0061", 1.0)],
)
def test_a_long_text_is_read_quickly(text, limit_s):
    for key in (KEY, "Basic dXNlcjpwYXNzd29yZDEyMw==", "a" * 20 + "1"):
        hide(key)
    start = time.process_time()
    redacted((text * 50_000)[: 4 * 2**20] if len(text) < 99 else text)
    assert time.process_time() - start < limit_s


@pytest.mark.parametrize(
    "evil",
    ["\\", "%25", "%5c", "&amp;", "&#0", "sk-Ab9", "s", "%25%5c", "\\u00", "c2st", KEY[:-1]],
)
def test_a_long_text_takes_time_by_its_length(evil):
    hide(KEY)
    start = time.process_time()
    redacted(evil * (2**20 // len(evil)))
    assert time.process_time() - start < 10


def echoes(request):
    """All spellings of the key that a request came with, in an object."""
    return {name: spell(KEY) for name, spell in SPELLINGS.items()}


def everywhere(request):
    told = " ".join(echoes(request).values())
    match request.path.split("/")[1:]:
        case ["retrieve"]:
            return {"result": [[{"document": {"id": told, "contents": f'"{told}"\n{told}'}}]]}
        case ["raw", *_]:
            return Reply(f'{{"result": {told}')
        case ["status", *_]:
            return Reply(" " * 1000 + told + " " * 2**18 + KEY, 418)
        case ["redirect", *_]:
            quoted = urllib.parse.quote(KEY, safe="")
            return Reply(told[:3], 307, {"Location": f"http://{quoted}@h/{quoted}/{KEY}?{KEY}"})
        case ["wrong", *_]:
            return {"result": told, told: told}
        case ["_msearch"]:
            hit = {"_id": told, "_source": {"title": told, "text": told}}
            return {"responses": [{"hits": {"hits": [hit]}}]}
        case ["cluster", "_msearch"]:
            return {"responses": [{"error": {"type": told, "reason": told}, "status": 400}]}
        case ["search"]:
            return {"results": [{"url": told, "title": told, "content": told}]}
        case ["chat", *_]:
            message = {"content": f"{told} Score: 7", told: told}
            return {"choices": [{"message": message, "finish_reason": "stop"}], "id": told}
        case ["odd", *_]:
            message = {"content": f"{told} none"}
            return {"choices": [{"message": message, "finish_reason": told}], "id": told}
    return Reply(told, 500)


def test_a_server_that_echoes_keys_everywhere(monkeypatch, tmp_path, capfd, caplog):
    monkeypatch.setenv("A_KEY", KEY)
    texts = []
    with served(everywhere) as server:
        engines = [
            *(
                HttpRetriever(server.url + path, key_env="A_KEY")
                for path in ("/retrieve", "/raw/x", "/status/x", "/redirect/x", "/wrong/x", "/500/")
            ),
            OpenSearchRetriever(server.url, "i", auth="bearer:A_KEY"),
            OpenSearchRetriever(f"{server.url}/cluster", "i", auth="basic:A_KEY"),
            WebSearch("searxng", url=server.url, key_env="A_KEY"),
        ]
        for engine in engines:
            recording = Recording(tmp_path / type(engine).__name__, {"url": "x"})
            asked = ResilientSearch(engine, QUICK, recording=recording, log=texts.append)
            found = run_one(asked, "q")
            texts += [str(found), repr(found), str(getattr(found, "__dict__", ""))]
            texts += [repr(engine.retrieve(["q"], 3))]
        for path in ("chat", "odd", "status"):
            completions = Completions(
                f"{server.url}/{path}", section="s", key_env="A_KEY", timeout_s=5, connections=1
            )
            try:
                texts.append(repr(completions.ask({"m": 1})))
            except ToolError as error:
                texts.append(repr(error))
            judge = JudgeSettings(
                url=f"{server.url}/{path}", model="m", prompt="{response}", key_env="A_KEY"
            )
            texts.append(repr(run_one(JudgeEndpoint(judge), "grade")))
        assert len(server.requests) > 15
        assert all(KEY in r.headers["authorization"] for r in server.requests[:6])
    texts += [path.read_text() for path in tmp_path.rglob("*.json*")]
    texts += [*capfd.readouterr(), caplog.text]
    assert sum("***" in text for text in texts) >= 20
    assert [(t[:80], parts_left(t)) for t in texts if parts_left(t)] == []
    for text in texts:
        for name, spell in SPELLINGS.items():
            assert spell(KEY) not in text, name


def test_a_key_that_is_split_over_places_is_in_none(monkeypatch):
    monkeypatch.setenv("A_KEY", KEY)

    question = {"Location": f"http://h/{WITH_QUERY}"}
    monkeypatch.setenv("B_KEY", WITH_QUERY)
    with served(lambda request: Reply("", 307, question)) as server:
        error = run_one(HttpRetriever(server.url, key_env="B_KEY"), "q")
    assert "redirecting to http://h/***: ''" in str(error)

    places = {"Location": f"http://h/{KEY[:12]}", "location": f"http://h/{KEY[12:]}"}
    with served(lambda request: Reply("", 307, places)) as server:
        error = run_one(HttpRetriever(server.url, key_env="A_KEY"), "q")
    assert "redirecting to 2 places: ''" in str(error)


WITH_QUERY = "sk-Live9aZq8?Bx7Lm3cD5"


@pytest.mark.parametrize("length", range(1900, 2000, 20))
def test_an_error_is_cut_behind_its_key(length):
    key = "sk-live-" + "0123456789abcdef" * 8
    hide(key)
    error = run_one(Failing(), "x" * length + key)
    assert "012345" not in str(error)
    assert "012345" not in failure_report(ValueError("x" * length + key))
    [cause] = [redaction.redacted_start("x" * (2**18 - n) + key, 2**18) for n in [50]]
    assert "012345" not in cause


class Failing(Tool):
    name, blank = "failing", ""

    def run(self, call):
        raise RuntimeError(call)


class Loose(Tool):
    """A user's tool, which tells what it should not."""

    name, blank = "loose", ""

    def run(self, call):
        if call == "raise":
            raise RuntimeError(f"no access with {KEY}")
        if call == "fail":
            raise ToolError(f"no access with {KEY}", status=403)
        if call == "out":
            raise OutageError(f"down: {KEY}", fallback="x")
        return f"with {KEY}"


def test_a_users_tool_tells_no_key():
    hide(KEY)
    found = [run_one(Loose(), call) for call in ("say", "raise", "fail", "out")]
    assert [str(one) for one in found] == [
        "with ***", "RuntimeError: no access with ***", "no access with ***", "down: ***",
    ]  # fmt: skip
    assert found[2].status == 403
    assert run_together(Loose(), ["say", "say"]) == ["with ***"] * 2


def test_what_is_printed_or_raised_holds_no_key(monkeypatch):
    hide(KEY)
    out, err = io.StringIO(), io.StringIO()
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", err)
    try:
        raise ValueError(KEY)
    except ValueError as error:
        cause = error
    raised = None
    try:
        with redacted_output():
            print("to out", KEY)
            print("to err", SPELLINGS["base64, percent"](KEY), file=sys.stderr)
            sys.stderr.writelines([KEY, "\n"])
            raise SystemExit(f"error: {KEY}") from cause
    except SystemExit as error:
        raised = error
    assert (out.getvalue(), sys.stdout) == ("to out ***\n", out)
    assert err.getvalue().startswith("to err ")
    assert err.getvalue().count("***") == 2
    assert raised.code == "error: ***"
    assert str(raised.__cause__) == "***"


def test_what_stdout_cannot_encode_ends_nothing(monkeypatch):
    out = io.TextIOWrapper(io.BytesIO(), encoding="ascii", errors="strict")
    monkeypatch.setattr(sys, "stdout", out)
    with redacted_output():
        print("run \u00e9")
    out.flush()
    assert out.buffer.getvalue() == b"run ?\n"
    assert out.errors == "strict"  # the user's stream stays as it is


def test_groups_of_errors_hold_no_key():
    hide(KEY)
    group = ExceptionGroup("g", [ValueError(KEY, 3), ExceptionGroup("h", [KeyError(KEY)])])
    redact_error(group)
    assert KEY not in repr(group)
    assert group.exceptions[0].args == ("***", 3)


class OwnTextError(Exception):
    def __init__(self, text):
        super().__init__()
        self.text = [text]

    def __str__(self):
        return self.text[0]


def errors():
    noted = ValueError("x")
    noted.add_note(f"see {KEY}")
    return [
        *(noted, FileNotFoundError(2, "no", KEY), OSError(5, f"bad {KEY}"), OwnTextError(KEY)),
        UnicodeDecodeError("utf-8", KEY.encode(), 0, 1, f"bad {KEY}"),
        urllib.error.HTTPError("http://x", 401, f"no {KEY}", {}, None),
        *(ValueError({"a": KEY}), ValueError([KEY]), ValueError(ValueError(KEY))),
        *(ValueError(KEY.encode()), SyntaxError(KEY)),
    ]  # fmt: skip


@pytest.mark.parametrize("error", errors(), ids=lambda error: type(error).__name__)
def test_no_part_of_an_error_holds_a_key(error):
    hide(KEY)
    redact_error(error)
    shown = "".join(traceback.format_exception(error))
    assert "***" in shown
    assert parts_left(shown) == []


RAISES = """
import sys, threading
from jaxrl.envs.redaction import hide, redacted_output
hide("SECRETKEY12345")
key = sys.argv[1]

class Odd(Exception):
    def __str__(self):
        return f"told {key}"

def fail():
    raise ExceptionGroup(f"group {key}", [Odd()])

with redacted_output():
    thread = threading.Thread(target=fail)
    thread.start()
    thread.join()
    fail()
"""


def test_what_nobody_catches_shows_no_key():
    command = [sys.executable, "-c", RAISES, "SECRETKEY12345"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert done.stderr.count("group ***") == done.stderr.count("told ***") == 2
    assert "SECRETKEY" not in done.stderr


def test_random_texts_stay_as_they_are():
    hide(KEY)
    rng = random.Random(0)
    for _ in range(200):
        text = "".join(rng.choices(string.printable, k=200))
        assert redacted(text) == text
