"""The agent of Pydantic AI: its search is ours, its episodes are worth what its answers are.

What needs the framework runs in the interpreter that JAXRL_PYDANTIC_AI_PYTHON names.
"""

import json
import os
import random
import subprocess
from pathlib import Path

import pytest

from examples import framework_agent, quickstart_world
from jaxrl.envs.search.bm25 import LocalSearch
from jaxrl.extras.serve.schemas import ChatBody
from tests.servers import served

PYTHON = os.environ.get("JAXRL_PYDANTIC_AI_PYTHON", "")
FILE = Path(framework_agent.__file__)
DOCUMENTS = [
    {"id": "1", "title": "Ada Kerr", "text": "Ada Kerr is a baker."},
    {"id": "2", "title": "Ivo Kerr", "text": "Ivo Kerr is a tailor."},
]


def test_its_search_finds_what_the_environments_finds(tmp_path):
    people = quickstart_world.make_people(200, 20, random.Random(0))
    corpus = tmp_path / "corpus.jsonl"
    quickstart_world.write_jsonl(corpus, quickstart_world.documents(people.values()))
    own, theirs = framework_agent.Corpus(corpus), LocalSearch(corpus, tmp_path / "index")
    names = [name.split() for name in people]
    queries = [" ".join(name) for name in names] + [last for _, last in names[:40]]
    queries += [f"{first} job" for first, _ in names[:40]] + ["job", "", "a baker, taught by Ada"]
    assert len(queries) > 280
    for query in queries:
        assert own.search(query, 3) == theirs.run(query)


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("<answer> the Baker. </answer>", "the Baker."),
        ("<answer>a</answer> no <answer> tailor </answer>", "tailor"),
        ("baker", ""),
        ("<answer> baker", ""),
    ],
)
def test_the_answer_is_what_the_last_tag_holds(text, answer):
    assert framework_agent.final_answer(text) == answer


def call(query):
    function = {"name": "search", "arguments": json.dumps({"query": query})}
    return {
        "content": "<think> find </think>",
        "tool_calls": [{"id": "c1", "type": "function", "function": function}],
    }


def played(tmp_path, messages):
    """Return the result of `play` and the requests, for an endpoint that sends these messages."""
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text("".join(json.dumps(document) + "\n" for document in DOCUMENTS))
    left = list(messages)

    def answer(request):
        message = {"role": "assistant", **left.pop(0)}
        reason = "tool_calls" if "tool_calls" in message else "stop"
        choice = {"index": 0, "message": message, "finish_reason": reason}
        fields = {"id": "1", "object": "chat.completion", "created": 1, "model": "any"}
        return {**fields, "choices": [choice]}

    code = (
        "import asyncio, json, sys; sys.path.insert(0, sys.argv[1]); import framework_agent\n"
        "task = {'question': 'What is the job of Ada Kerr?', 'answers': ['baker']}\n"
        "place = {'base_url': sys.argv[2], 'api_key': 'k', 'model': 'any'}\n"
        "found = asyncio.run(framework_agent.play(task, **place, corpus=sys.argv[3]))\n"
        "print(json.dumps(found))"
    )
    with served(answer) as server:
        command = [PYTHON, "-c", code, str(FILE.parent), f"{server.url}/r/1/v1", str(corpus)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    return json.loads(done.stdout), [json.loads(request.body) for request in server.requests]


needs_framework = pytest.mark.skipif(
    not PYTHON, reason="JAXRL_PYDANTIC_AI_PYTHON names no interpreter with pydantic-ai-slim[openai]"
)


@needs_framework
@pytest.mark.parametrize(("said", "reward"), [("baker", 1.0), ("tailor", 0.0)])
def test_an_episode(tmp_path, said, reward):
    answer = {"content": f"<answer> {said} </answer>"}
    found, bodies = played(tmp_path, [call(" Ada Kerr"), answer])
    assert found == {"reward": reward, "is_correct": reward == 1.0, "final_answer": said}
    first, second = bodies
    assert first["messages"] == [
        {"role": "system", "content": framework_agent.SYSTEM},
        {"role": "user", "content": "What is the job of Ada Kerr?"},
    ]
    *_, sent_back, result = second["messages"]
    messages = [{"role": "assistant", **call(" Ada Kerr")}, sent_back]
    sampled, received = ChatBody.model_validate({"messages": messages}).chat()
    assert received.match_key == sampled.match_key  # so its ids go on
    assert (result["role"], result["tool_call_id"]) == ("tool", "c1")
    assert result["content"] == (
        "Doc 1(Title: Ada Kerr) Ada Kerr is a baker.\nDoc 2(Title: Ivo Kerr) Ivo Kerr is a tailor."
    )
