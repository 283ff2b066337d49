import json
import re
import shutil
from pathlib import Path

import pytest

from examples import tfds_tasks
from jaxrl.data.stream import Stream
from jaxrl.data.tasks import describe_overlap, read_tasks
from jaxrl.envs.base import Task

ROOT = Path(__file__).parents[2]
KEY = "tasks.train"


def write(path, *records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


@pytest.fixture
def file(tmp_path):
    return tmp_path / "tasks.jsonl"


def test_a_record_with_all_fields(file):
    record = {"id": 7, "question": "Où ?", "answers": ["a", "b"], "data_source": "nq"}
    [task] = read_tasks(write(file, {**record, "metadata": {"hops": 2}, "other": 1}), KEY)
    assert (task.id, task.question, task.answers) == ("7", "Où ?", ("a", "b"))
    assert (task.data_source, task.metadata, task.messages) == (
        "nq",
        {"other": 1, "hops": 2},
        None,
    )


@pytest.mark.parametrize("answers", [{"golden_answers": ["a"]}, {"answer": "a"}, {"answers": "a"}])
def test_a_record_with_the_fewest_fields(file, answers):
    [task] = read_tasks(write(file, {"question": "?", **answers}), KEY)
    assert task.answers == ("a",)
    assert (task.id, task.data_source, task.metadata) == (f"{file}:1", "default", {})


def test_messages_take_the_place_of_a_question(file):
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "?"}]
    [task] = read_tasks(write(file, {"messages": messages, "answers": ["a"]}), KEY)
    assert (task.question, list(task.messages)) == (None, messages)


CALL = {"id": "a", "type": "function", "function": {"name": "f", "arguments": {"n": 1}}}


@pytest.mark.parametrize(
    ("message", "read"),
    [
        ({"tool_calls": [CALL]}, {"content": "", "tool_calls": [CALL]}),
        (
            {"content": "x", "tool_calls": [{"function": {"name": "f", "arguments": '{"n": 1}'}}]},
            {
                "content": "x",
                "tool_calls": [{"function": {"name": "f", "arguments": {"n": 1}}}],
            },
        ),
        (
            {"tool_calls": [{"name": "f", "arguments": "n = 1", "id": None}]},
            {"content": "", "tool_calls": [{"function": {"name": "f", "arguments": "n = 1"}}]},
        ),
        (
            {"content": None, "reasoning_content": "hm", "tool_calls": None, "name": None},
            {"content": "", "reasoning_content": "hm"},
        ),
        ({"content": [{"type": "text", "text": "x", "image": None}]}, {"content": "x"}),
    ],
)
def test_fields_of_messages_are_kept(file, message, read):
    messages = [{"role": "user", "content": "?"}, {"role": "assistant", **message}]
    [task] = read_tasks(write(file, {"messages": messages, "answers": ["a"]}), KEY)
    assert list(task.messages) == [messages[0], {"role": "assistant", **read}]


@pytest.mark.parametrize(
    "message",
    [
        {"role": "assistant", "content": None},
        {"role": "assistant", "content": None, "tool_calls": [{"function": {"arguments": {}}}]},
        {"role": "user", "content": [{"type": "text", "text": "x", "image": "a.png"}]},
    ],
)
def test_malformed_messages_are_refused_with_their_line(file, message):
    good = {"messages": [{"role": "user", "content": "?"}], "answers": ["a"]}
    bad = {"messages": [*good["messages"], message], "answers": ["a"]}
    with pytest.raises(ValueError, match=re.escape(f"{file}:2: ")):
        read_tasks(write(file, good, bad), KEY)


def test_chats_with_other_calls_do_not_overlap():
    chats = [
        Task(id=str(n), messages=({"role": "assistant", "content": "", "tool_calls": [n]},))
        for n in (0, 0, 1)
    ]
    assert describe_overlap(chats[:1], chats[2:]) == ""
    assert describe_overlap(chats[:1], chats[1:]).startswith("warning: 1 of 2 held-out questions")


def test_blank_lines_a_byte_order_mark_and_other_line_ends(file):
    text = '\ufeff{"question": "1", "answer": "a"}\r\n\n  \n{"question": "1\u20282", "answer": "b"}'
    file.write_text(text, encoding="utf-8", newline="")
    tasks = read_tasks(file, KEY)
    assert [task.question for task in tasks] == ["1", "1\u20282"]
    assert [task.id for task in tasks] == [f"{file}:1", f"{file}:4"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"question": "x"\n', "is not valid JSON: Expecting ',' delimiter"),
        (b'{"question": "\xff"}', "is not valid JSON in UTF-8: "),
        (
            '{"question": "x", "answer": "a", "metadata": ' + '{"a": [' * 60 + "]}" * 60 + "}",
            "is nested too deeply to be read; flatten it",
        ),
        ('{"question": "x", "answers": ["a", " "]}', "an answer is blank"),
        ('{"question": "x"}', "expected 'answers', a list of at least one text, found"),
        ('{"question": "x", "answers": [true]}', "expected text, a number, or a list of these"),
    ],
)
def test_a_malformed_line_is_named(file, line, message):
    good = b'{"question": "x", "answer": "a"}'
    file.write_bytes(b"\n".join([good, b"", line if isinstance(line, bytes) else line.encode()]))
    with pytest.raises(ValueError, match=re.escape(message)) as raised:
        read_tasks(file, KEY)
    assert str(raised.value).startswith(f"{file}:3")


def test_an_empty_or_missing_file_is_refused(file):
    with pytest.raises(FileNotFoundError, match=r"is not a file; set config.tasks.train.source to"):
        read_tasks(file, KEY)
    file.write_text("\n")
    with pytest.raises(ValueError, match=r"config.tasks.train.source: .* contains no tasks"):
        read_tasks(file, KEY)


@pytest.mark.parametrize(("size", "seed", "epochs"), [(1, 0, 3), (2, 7, 3), (30, 1, 2)])
def test_an_epoch_has_each_item_once(size, seed, epochs):
    stream = Stream(range(size), seed=seed)
    taken = stream.get_items(0, size * epochs)
    for epoch in range(epochs):
        assert sorted(taken[epoch * size : (epoch + 1) * size]) == list(range(size))


@pytest.mark.parametrize(("position", "counts"), [(0, [3, 0, 4, 9]), (5, [2, 2, 10]), (50, [1])])
def test_the_order_depends_on_the_position_alone(position, counts):
    whole = Stream(range(7), seed=3).get_items(position, sum(counts))
    parts, start = [], position
    for count in counts:
        parts += Stream(range(7), seed=3).get_items(start, count)
        start += count
    assert parts == whole


def test_half_a_surrogate_pair_is_refused(tmp_path):
    file = tmp_path / "tasks.jsonl"
    whole = r'{"question": "Who\ud83d\ude00?", "answers": ["Ada"]}'
    file.write_text(whole + "\n")
    assert read_tasks(file, "tasks.train.source")[0].question == "Who\U0001f600?"
    file.write_text(whole + "\n" + r'{"question": "Who?", "answers": ["x\ud83d"]}' + "\n")
    with pytest.raises(ValueError, match=r"tasks.jsonl:2 is not valid JSON in UTF-8"):
        read_tasks(file, "tasks.train.source")


RECORDS = (
    {"id": "q1", "question": "Où ?", "answers": ["a", "b"], "data_source": "nq"},
    {"id": "q2", "question": "Who?", "answer": "c", "metadata": {"hops": 2, "by": ["x"]}},
    {"id": "q3", "messages": [{"role": "user", "content": "é?"}], "golden_answers": ["d"]},
)


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """The folder of a data set, and the JSONL that it was made from."""
    folder = tmp_path_factory.mktemp("tfds")
    train = write(folder / "train.jsonl", *RECORDS)
    test = write(folder / "test.jsonl", {"question": "?", "answers": ["a"]})
    out = [f"--out={folder}", "--name=bridges", "--version=1.2.0"]
    tfds_tasks.main([*out, f"train={train}", f"test={test}"])
    return folder / "bridges" / "1.2.0", train


class TestTfds:
    """Data sets prepared by TensorFlow Datasets, as array_record."""

    @pytest.fixture
    def copy(self, prepared, tmp_path):
        return shutil.copytree(prepared[0], tmp_path / "bridges" / "1.2.0")

    def test_the_same_tasks_as_from_jsonl(self, prepared):
        folder, train = prepared
        tasks = read_tasks(train, KEY)
        assert read_tasks(folder, KEY, split="train") == tasks
        assert read_tasks(folder, KEY, split="train[1:]") == tasks[1:]

    @pytest.mark.parametrize(
        ("split", "message"),
        [
            ("trin", r"config.tasks.train.split is 'trin'.* Unknown split 'trin'.*'train', 'test'"),
            ("train[3:]", r"contains no tasks"),
        ],
    )
    def test_an_unknown_or_empty_split_is_refused(self, prepared, split, message):
        with pytest.raises(ValueError, match=message) as raised:
            read_tasks(prepared[0], KEY, split=split)
        assert "\n" not in str(raised.value)

    def test_only_array_record_is_read(self, copy):
        # From Parquet, TFDS would count all examples and return only a part of them.
        file = copy / "dataset_info.json"
        info = json.loads(file.read_text())
        file.write_text(json.dumps(info | {"fileFormat": "parquet"}))
        with pytest.raises(ValueError, match=r"holds parquet files.*array_record"):
            read_tasks(copy, KEY)

    @pytest.mark.parametrize("damage", ["features", "cut"])
    def test_damage_is_refused_in_one_line(self, copy, damage):
        if damage == "cut":
            [data] = copy.glob("*-train.*")
            data.write_bytes(data.read_bytes()[:100])
        else:
            (copy / "features.json").write_text("{")
        with pytest.raises(ValueError, match=re.escape(str(copy))) as raised:
            read_tasks(copy, KEY)
        assert "\n" not in str(raised.value)
