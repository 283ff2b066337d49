"""JSON from outside: what is too deep or damaged is told in one line."""

import ast
import json

import pytest

from jaxrl.utils.json_io import MAX_DEPTH, parse_json, read_object
from tests.damage import JSON_BOMBS
from tests.helpers import ROOT

OWN = {
    "utils/json_io.py",  # the one place
    "utils/jsonl.py",  # of a whole corpus, line by line, with the same bound
    "envs/protocol.py",  # the model's text, which is told what is wrong with it
    "envs/search/corpus.py",  # a line whose check says that it was read when it was indexed
    "envs/search/bm25.py",  # a document as it was put into the index
    # What this process has just written itself, or a process that it has started.
    *(
        "envs/tools/functions.py",
        "extras/mcp/servers.py",
        "extras/endpoints/policy.py",
        "runtime/history.py",
    ),
    *("utils/worker.py", "extras/sandbox/child.py", "utils/child_process.py"),
    *("runtime/distributed.py", "runtime/monitor.py", "tokenizer.py"),
    # In a Python without jaxrl: lines of the run, and what an agent says, with the same bound.
    *("extras/serve/agents/runner.py", "extras/serve/agents/verifiers.py"),
    *("logs/writers.py", "models/defaults.py"),
}
"""Files that may read JSON in another way than by `parse_json`, and why."""


@pytest.mark.parametrize("bomb", [*JSON_BOMBS][:-1])
def test_what_cannot_be_read_is_one_line(bomb):
    for text in (JSON_BOMBS[bomb], JSON_BOMBS[bomb].decode("latin-1")):
        with pytest.raises(
            ValueError, match=r"^here is (nested too deeply|not valid JSON)"
        ) as told:
            parse_json(text, "here")
        assert len(str(told.value)) < 300
        assert "\n" not in str(told.value)


def test_the_depth_that_is_read_by_hand(tmp_path):
    def nested(depth):
        return "[" * depth + "]" * depth

    assert parse_json(nested(MAX_DEPTH), "x")
    with pytest.raises(ValueError, match="nested too deeply"):
        parse_json(nested(MAX_DEPTH + 1), "x")
    assert parse_json(json.dumps([[1]] * 1000), "x") == [[1]] * 1000  # many, and not deep
    (tmp_path / "a").write_text("[1]")
    with pytest.raises(ValueError, match=r"/a holds a list; expected a JSON object"):
        read_object(tmp_path / "a")


def test_nobody_else_parses_json():
    """A file read by `json.loads` alone could end a run in a RecursionError."""
    found = set()
    for path in (ROOT / "jaxrl").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute) and ast.unparse(node) in ("json.load", "json.loads"):
                found.add(path.relative_to(ROOT / "jaxrl").as_posix())
    assert found == OWN
