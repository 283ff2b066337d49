import json
import re
import subprocess

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl.data import Stream, read_tasks

KEY = "config.tasks.train.source"


def write(path, *records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


@pytest.fixture
def file(tmp_path):
    return tmp_path / "tasks.jsonl"


def test_a_whole_record(file):
    record = {"id": 7, "question": "Où ?", "answers": ["a", "b"], "data_source": "nq"}
    [task] = read_tasks(write(file, {**record, "metadata": {"hops": 2}, "other": 1}), KEY)
    assert (task.id, task.question, task.answers) == ("7", "Où ?", ("a", "b"))
    assert (task.data_source, task.metadata, task.messages) == ("nq", {"hops": 2}, None)


@pytest.mark.parametrize("answers", [{"golden_answers": ["a"]}, {"answer": "a"}, {"answers": "a"}])
def test_the_least_record(file, answers):
    [task] = read_tasks(write(file, {"question": "?", **answers}), KEY)
    assert task.answers == ("a",)
    assert (task.id, task.data_source, task.metadata) == (f"{file}:1", "default", {})


def test_messages_instead_of_a_question(file):
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "?"}]
    [task] = read_tasks(write(file, {"messages": messages, "answers": ["a"]}), KEY)
    assert (task.question, list(task.messages)) == (None, messages)


def test_blank_lines_a_byte_order_mark_and_other_line_ends(file):
    text = '\ufeff{"question": "1", "answer": "a"}\r\n\n  \n{"question": "1\u20282", "answer": "b"}'
    file.write_text(text, encoding="utf-8", newline="")
    tasks = read_tasks(file, KEY)
    assert [task.question for task in tasks] == ["1", "1\u20282"]
    assert [task.id for task in tasks] == [f"{file}:1", f"{file}:4"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"question": "x"', "is not valid JSON in UTF-8: "),
        (b'{"question": "\xff"}', "is not valid JSON in UTF-8: "),
        ("[1]", "holds a list; expected a JSON object"),
        ("[" * 100_000, "is nested too deeply to be read; flatten it"),
        ('{"question": " ", "answer": "a"}', "'question' is ' '; expected text that is not blank"),
        ('{"question": "x", "answers": ["a", " "]}', "an answer is blank"),
        ("{}", "expected either 'question' or 'messages', found the fields none"),
        (
            '{"question": "x", "messages": []}',
            "expected either 'question' or 'messages', found the fields 'question', 'messages'",
        ),
        ('{"question": 3, "answer": "a"}', "'question' is 3; expected text"),
        ('{"messages": [], "answer": "a"}', "'messages' must be a list of objects"),
        ('{"messages": [{"role": "user"}], "answer": "a"}', "'messages' must be a list of objects"),
        ('{"question": "x"}', "expected 'answers', a list of at least one text; found"),
        ('{"question": "x", "answers": []}', "expected 'answers', a list of at least one text"),
        ('{"question": "x", "answers": [1]}', "with the answers [1]"),
        ('{"question": "x", "answer": "a", "metadata": 1}', "'metadata' is 1; expected an object"),
    ],
)
def test_a_malformed_line(file, line, message):
    good = b'{"question": "x", "answer": "a"}'
    file.write_bytes(b"\n".join([good, b"", line if isinstance(line, bytes) else line.encode()]))
    with pytest.raises(ValueError, match=re.escape(message)) as raised:
        read_tasks(file, KEY)
    assert str(raised.value).startswith(f"{file}:3")


def test_two_tasks_with_one_id(file):
    tasks = [{"id": id, "question": "x", "answer": "a"} for id in ("a", 1, "b", "1")]
    with pytest.raises(ValueError, match=f"{file}:4: the id '1' is that of line 2 already; make"):
        read_tasks(write(file, *tasks), KEY)


@pytest.mark.parametrize("indent", [None, 2])
def test_an_array_of_tasks_and_how_it_is_converted(file, indent):
    file.write_text(json.dumps([{"question": "x", "answer": "a"}] * 2, indent=indent))
    with pytest.raises(ValueError, match=r"is a JSON array; expected JSONL") as raised:
        read_tasks(file, KEY)
    command = str(raised.value).partition("This converts it: ")[2]
    subprocess.run(command, shell=True, check=True)
    assert len(read_tasks(file.with_name("tasks_lines.jsonl"), KEY)) == 2


@pytest.mark.parametrize(
    ("start", "what"),
    [
        (b"PAR1", "a Parquet file"),
        (b"\x1f\x8b\x08", r"compressed \(gzip\)"),
        (b"PK\x03\x04", "a zip"),
    ],
)
def test_other_formats_are_named(file, start, what):
    file.write_bytes(start + bytes(range(256)))
    with pytest.raises(ValueError, match=f"{file} is {what}"):
        read_tasks(file, KEY)


def test_no_line_and_no_file(file):
    with pytest.raises(FileNotFoundError, match=r"is not a file; set config.tasks.train.source to"):
        read_tasks(file, KEY)
    file.write_text("\n")
    with pytest.raises(ValueError, match=r"holds no line; config.tasks.train.source must name"):
        read_tasks(file, KEY)


@settings(max_examples=20, deadline=None)
@given(size=st.integers(1, 30), seed=st.integers(0, 1000), epochs=st.integers(1, 3))
def test_an_epoch_has_each_item_once(size, seed, epochs):
    stream = Stream(range(size), seed=seed)
    taken = stream.take(0, size * epochs)
    for epoch in range(epochs):
        assert sorted(taken[epoch * size : (epoch + 1) * size]) == list(range(size))


@settings(max_examples=20, deadline=None)
@given(position=st.integers(0, 50), counts=st.lists(st.integers(0, 10), max_size=5))
def test_the_order_depends_on_the_position_alone(position, counts):
    whole = Stream(range(7), seed=3).take(position, sum(counts))
    parts, at = [], position
    for count in counts:
        parts += Stream(range(7), seed=3).take(at, count)
        at += count
    assert parts == whole


def test_epochs_and_seeds_differ_in_order():
    first, second = (Stream(range(50), seed=0).take(start, 50) for start in (0, 50))
    assert first != second
    assert first != Stream(range(50), seed=1).take(0, 50)
    assert first != list(range(50))


def test_half_a_surrogate_pair_is_refused(tmp_path):
    file = tmp_path / "tasks.jsonl"
    whole = r'{"question": "Who\ud83d\ude00?", "answers": ["Ada"]}'
    file.write_text(whole + "\n")
    assert read_tasks(file, "tasks.train.source")[0].question == "Who\U0001f600?"
    file.write_text(whole + "\n" + r'{"question": "Who?", "answers": ["x\ud83d"]}' + "\n")
    with pytest.raises(ValueError, match=r"tasks.jsonl:2 holds half of a surrogate pair"):
        read_tasks(file, "tasks.train.source")
