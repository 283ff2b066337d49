"""Sources of every format, checked alike; mixtures, large sources, overlap with held-out tasks."""

import collections
import csv
import io
import json
import re
import sys

import datasets
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tensorflow_datasets
from hypothesis import given, settings
from hypothesis import strategies as st

from configs import debug_tiny
from examples import tfds_tasks
from jaxrl.builders.components import open_all_tasks
from jaxrl.builders.resolved import resolve_names
from jaxrl.builders.validation import validate
from jaxrl.config import default_config
from jaxrl.data import tasks as tasks_module
from jaxrl.data.stream import Mixture, Source, Stream, count_items_by_source, locate_item
from jaxrl.data.tasks import (
    TaskSource,
    describe_overlap,
    list_task_files,
    open_tasks,
    read_tasks,
    resolve_sources,
    split_holdout,
)
from jaxrl.envs.base import Task
from jaxrl.envs.images import Picture
from jaxrl.logs.display import Display
from jaxrl.run import run
from jaxrl.training.collect import NotEnoughGroupsError, draw_tasks
from jaxrl.training.controllers import SkipSet
from jaxrl.utils.callables import UserCodeError
from tests.helpers import ROOT, build, settings_of
from tests.images import drawn, encoded
from tests.runs import base_config, killed, lasting, records, trajectories

KEY = "tasks.train"
ROWS = [
    {"id": f"q{i}", "question": f"What is {i}+{i}?", "answers": [str(2 * i), f"{i} twice"]}
    for i in range(25)
]


def write_jsonl(path, rows=ROWS):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def write_csv(path, rows=ROWS, **settings):
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]), **settings)
        writer.writeheader()
        cells = [
            {k: v if isinstance(v, str) else json.dumps(v) for k, v in row.items()} for row in rows
        ]
        writer.writerows(cells)
    return path


def write_parquet(path, rows=ROWS, group=4):
    pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=group)
    return path


def write_hf(folder, rows=ROWS):
    datasets.Dataset.from_list(rows).save_to_disk(str(folder))
    return folder


def write_tfds(folder, rows=ROWS):
    lines = write_jsonl(folder.with_suffix(".jsonl"), rows)
    tfds_tasks.main([f"--out={folder}", "--name=sums", f"train={lines}"])
    return folder / "sums" / "1.0.0"


WRITERS = {
    "tasks.jsonl": write_jsonl,
    "tasks.csv": write_csv,
    "tasks.parquet": write_parquet,
    "hf": write_hf,
    "tfds": write_tfds,
}

WITHOUT_TFDS = [name for name in WRITERS if name != "tfds"]  # which is written from checked tasks


def open_source(source, **fields):
    [opened] = open_tasks([TaskSource(key=KEY, source=str(source), **fields)]).sources
    return opened.items


@pytest.fixture
def many(monkeypatch):
    """Treat every source as large, so that none is cached."""
    monkeypatch.setattr(tasks_module, "MAX_CACHED_TASKS", 0)
    monkeypatch.setattr(tasks_module, "_BLOCK_SIZE", 7)


class TestFormats:
    @pytest.mark.parametrize("held", [0, 100])
    @pytest.mark.parametrize("name", WRITERS)
    def test_each_gives_the_same_tasks_in_the_same_order(self, name, held, tmp_path, monkeypatch):
        monkeypatch.setattr(tasks_module, "MAX_CACHED_TASKS", held)
        expected = read_tasks(write_jsonl(tmp_path / "expected.jsonl"), KEY)
        got = open_source(WRITERS[name](tmp_path / name))
        assert list(got) == expected
        assert [got[i] for i in (24, 3, 3, 0)] == [expected[i] for i in (24, 3, 3, 0)]

    @pytest.mark.parametrize("name", WITHOUT_TFDS)
    def test_a_malformed_row_is_named(self, name, tmp_path, many):
        source = WRITERS[name](tmp_path / name, [*ROWS[:5], {**ROWS[5], "id": "q2"}])
        line = 7 if name == "tasks.csv" else 6  # below the names
        message = rf"{re.escape(str(source))}:{line}: the id 'q2' is already used in .*:[34]"
        with pytest.raises(ValueError, match=message):
            open_source(source)

    def test_files_of_a_folder_and_of_a_pattern_are_read_in_order(self, tmp_path, many):
        folder = tmp_path / "parts"
        folder.mkdir()
        for start in (10, 0, 20):
            write_parquet(folder / f"train-{start:03}.parquet", ROWS[start : start + 10])
        ids = [row["id"] for row in ROWS]
        for source in (folder, folder / "train-*.parquet"):
            got = open_source(source)
            assert [task.id for task in got] == ids
            assert [got[i].id for i in (22, 1, 12)] == ["q22", "q1", "q12"]
        write_jsonl(folder / "more.jsonl")
        assert open_source(folder, format="parquet")[24].id == "q24"

    def test_columns_of_other_names(self, tmp_path):
        rows = [{"problem": "1+1?", "gold": 2, "solution": "long", "level": 3}]
        columns = {"problem": "question", "gold": "answers", "solution": ""}
        for file in (
            write_csv(tmp_path / "a.csv", rows),
            write_parquet(tmp_path / "a.parquet", rows),
        ):
            [task] = open_source(file, columns=columns)
            assert (task.question, task.answers) == ("1+1?", ("2",))
            assert {name: int(value) for name, value in task.metadata.items()} == {"level": 3}
        with pytest.raises(
            ValueError,
            match=r"config.tasks.train.columns is .*none of them has 'gald'",
        ):
            open_source(file, columns=columns | {"gald": "answers"})


QUESTION = {"id": "1", "question": "Who?"}


def with_answers(name, folder, rows):
    """Return the answers of tasks in a format, whose columns may have other types."""
    rows = [{**QUESTION, "id": str(i), **row} for i, row in enumerate(rows)]
    folder.mkdir(exist_ok=True)
    source = write_rows_tfds(folder, rows) if name == "tfds" else WRITERS[name](folder / name, rows)
    return [task.answers for task in open_source(source)]


def write_rows_tfds(folder, rows):
    """Prepare rows as they are: a list is a sequence of the type of its first item."""
    kinds = tensorflow_datasets.features

    def kind(value):
        if isinstance(value, list):
            return kinds.Sequence(kind(value[0]))
        return {str: kinds.Text(), int: np.int64, float: np.float32, bool: np.bool_}[type(value)]

    info = {field: kind(value) for field, value in rows[0].items()}
    return tfds_tasks.write_dataset(folder, "rows", "1.0.0", info, {"train": rows})


class TestAnswers:
    """What counts as an accepted answer, alike in every format."""

    @pytest.mark.parametrize("name", WITHOUT_TFDS)  # which has none
    @pytest.mark.parametrize("field", ["answers", "target"])
    def test_nulls_are_dropped(self, name, field, tmp_path):
        values = [["Ada", None], [None, "Bo", None, "Cy"], [None]]
        rows = [{field: value} for value in values]
        if field == "target":
            rows = [{**VERL, "reward_model": {"ground_truth": row}} for row in rows]
        assert with_answers(name, tmp_path, rows[:2]) == [("Ada",), ("Bo", "Cy")]
        with pytest.raises(ValueError, match=r":[34]: (expected 'answers'|'reward_model' has)"):
            with_answers(name, tmp_path / "none", rows)

    @pytest.mark.parametrize("row", [{"answers": [None, None]}, {"answers": []}])
    def test_a_row_without_an_answer_is_named(self, row, tmp_path):
        with pytest.raises(ValueError, match=r":2: expected 'answers'"):
            with_answers("tasks.jsonl", tmp_path, [{"answers": ["Ada"]}, row])

    @pytest.mark.parametrize("name", WRITERS)
    @pytest.mark.parametrize(
        ("numbers", "texts"),
        [
            ([42, -7], ["42", "-7"]),
            # Whole numbers as pandas writes them beside a gap; in TFDS all have 32 bits.
            ([42.0, 0.1, -3.14, -0.0, 1e-5], ["42", "0.1", "-3.14", "0", "0.00001"]),
        ],
    )
    def test_numbers_become_the_text_that_people_write(self, name, numbers, texts, tmp_path):
        rows = [{"answers": numbers}, {"answers": numbers[::-1]}]
        assert with_answers(name, tmp_path / "a", rows) == [tuple(texts), tuple(texts[::-1])]
        if name != "tasks.csv":  # whose cells are texts
            rows = [{"answer": number} for number in numbers]
            assert with_answers(name, tmp_path / "b", rows) == [(text,) for text in texts]

    def test_columns_of_pandas(self, tmp_path):
        """Lists are NumPy's arrays there, gaps are NaN, and numbers may have 32 bits."""
        frame = pd.DataFrame({"question": ["a", "b", "c"]})
        frame["answers"] = [np.array(["x", None], object), np.array(["y"], object), ["z"]]
        file = tmp_path / "a.parquet"
        frame.to_parquet(file)
        assert [task.answers for task in open_source(file)] == [("x",), ("y",), ("z",)]
        frame["answers"] = [1.0, np.nan, 2.0]
        frame.to_parquet(file)
        with pytest.raises(ValueError, match=r"a.parquet:2: expected 'answers'"):
            open_source(file)

    @pytest.mark.parametrize("name", WITHOUT_TFDS)
    @pytest.mark.parametrize("value", [[True], {"text": ["x"], "start": [1]}, [float("inf")]])
    def test_values_that_are_no_answers_are_refused(self, name, value, tmp_path):
        with pytest.raises(ValueError, match=r":[12]: .*answer"):
            with_answers(name, tmp_path, [{"answers": value}])


class TestCsvLists:
    @pytest.mark.parametrize(
        ("cell", "answers"),
        [
            ("('x', 'y')", ("x", "y")), ('["x", null]', ("x",)), ("['x', None]", ("x",)),
            ("['a\\nb', 'é, [ü]', 3]", ("a\nb", "é, [ü]", "3")),
        ],
    )  # fmt: skip
    def test_a_list_in_a_cell_is_a_list(self, tmp_path, cell, answers):
        for column in ("answers", "answer"):
            rows = [{"question": "Who?", column: cell}]
            [task] = open_source(write_csv(tmp_path / f"{column}.csv", rows))
            assert task.answers == answers

    def test_pandas_writes_what_is_read(self, tmp_path):
        rows = [["x", "y"], ["it's", '"q"'], [None, "[z]"], ["a\nb"], [1, 2.5]]
        frame = pd.DataFrame({"question": list("abcde"), "answers": rows})
        frame.to_csv(tmp_path / "a.csv")
        answers = [task.answers for task in open_source(tmp_path / "a.csv")]
        assert answers == [("x", "y"), ("it's", '"q"'), ("[z]",), ("a\nb",), ("1", "2.5")]
        pd.DataFrame([VERL]).to_csv(tmp_path / "b.csv")
        [task] = open_source(tmp_path / "b.csv")
        assert (task.messages, task.answers) == (tuple(CHAT), ("Jane Austen", "Austen"))
        assert task.metadata["extra_info"] == VERL["extra_info"]

    @pytest.mark.parametrize(
        "cell",
        [
            "['x' 'y']",  # NumPy's array as text; Python would read it as the one text 'xy'
            "array(['x', 'y'], dtype=object)",
            "['x', 'y'",
            "['x', nan]",
            "{'text': ['x'], 'answer_start': [3]}",
            "['\\frac{1}{2}']",  # no text of Python's: \f is a form feed there
            "[None]",
        ],
    )
    def test_a_list_that_cannot_be_read_is_refused_with_its_row(self, tmp_path, cell):
        file = write_csv(tmp_path / "a.csv", [{"question": "Who?", "answers": cell}])
        with pytest.raises(ValueError, match=r"a.csv:2: "):
            open_source(file)

    @pytest.mark.parametrize(
        ("cell", "answers"),
        [
            ("[1, 2)", ("[1, 2)",)), (r"\{1, 2\}", (r"\{1, 2\}",)), ("[1, 2]", ("[1, 2]",)),
            ("[Redacted]", ("[Redacted]",)), ("[[1, 2], [3, 4]]", ("[[1, 2], [3, 4]]",)),
        ],
    )  # fmt: skip
    def test_other_brackets_are_text(self, tmp_path, cell, answers):
        [task] = open_source(write_csv(tmp_path / "a.csv", [{"question": "Who?", "answer": cell}]))
        assert task.answers == answers


class TestCsv:
    def test_quotes_line_ends_and_marks(self, tmp_path):
        file = tmp_path / "tasks.csv"
        text = (
            '\ufeffquestion,answer,metadata\r\n"Who, said\r\n""x""?",Ada,"{""hops"": 2}"\r\n'
            '\r\n1+1,"[1, 2)",\r\nBoth?,"[""a"", ""b""]",\r\n'
        )
        file.write_text(text, encoding="utf-8", newline="")
        tasks = open_source(file)
        assert [task.question for task in tasks] == ['Who, said\r\n"x"?', "1+1", "Both?"]
        assert [task.answers for task in tasks] == [("Ada",), ("[1, 2)",), ("a", "b")]
        assert [task.id for task in tasks] == [f"{file}:{line}" for line in (2, 5, 6)]
        assert (tasks[0].metadata, tasks[1].metadata) == ({"hops": 2}, {})

    @settings(max_examples=25, deadline=None)
    @given(
        st.lists(st.text(st.characters(exclude_categories=("Cs", "Cc"))), min_size=1, max_size=8)
    )
    def test_whatever_the_csv_module_writes_is_read_row_by_row(self, tmp_path_factory, texts):
        rows = [{"question": f"q{text}", "answer": "a\nb"} for text in texts]
        tasks = open_source(write_csv(tmp_path_factory.mktemp("csv") / "tasks.csv", rows))
        assert [task.question for task in tasks] == [row["question"] for row in rows]
        assert [tasks[i].answers for i in range(len(rows))] == [("a\nb",)] * len(rows)

    def test_a_delimiter_of_its_own(self, tmp_path):
        file = write_csv(tmp_path / "tasks.csv", delimiter=";")
        assert len(open_source(file, settings={"delimiter": ";"})) == 25
        assert len(open_source(write_csv(tmp_path / "tasks.tsv", delimiter="\t"))) == 25

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("question,answer\na,b,c\n", r"tasks.csv:2 has 3 cells, and 2 columns have names"),
            ("question,question\na,b\n", "expected a line of unique"),
            ("question,answer\n", "contains no tasks"),
            ('question,answer\n"a,b\n', "tasks.csv:2 is not valid UTF-8 CSV: unexpected end"),
            ('question,answer,metadata\na,b,{"x"\n', r"tasks.csv:2: 'metadata' is not valid JSON"),
        ],
    )
    def test_a_malformed_csv_file_is_refused_with_its_row(self, tmp_path, text, message):
        (tmp_path / "tasks.csv").write_text(text)
        with pytest.raises(ValueError, match=message):
            open_source(tmp_path / "tasks.csv")


CHAT = [{"role": "user", "content": "Answer with <answer>. Who wrote Emma?"}]
VERL = {
    "data_source": "searchR1_nq",
    "prompt": CHAT,
    "ability": "fact-reasoning",
    "reward_model": {"style": "rule", "ground_truth": {"target": ["Jane Austen", "Austen"]}},
    "extra_info": {"split": "train", "index": 0, "question": "who wrote emma", "need_tools": None},
    "agent_name": "tool_agent",
}


class TestVerl:
    """Rows as verl's scripts write them: GSM8K's, Search-R1's, DAPO's."""

    def test_rows_are_read_unchanged(self, tmp_path):
        [task] = open_source(write_parquet(tmp_path / "train.parquet", [VERL]))
        assert (task.messages, task.question) == (tuple(CHAT), None)
        assert (task.answers, task.data_source) == (("Jane Austen", "Austen"), "searchR1_nq")
        assert task.id == f"{tmp_path}/train.parquet:1"
        further = ("reward_model", "extra_info", "ability", "agent_name")
        assert task.metadata == {name: VERL[name] for name in further}
        [again] = open_source(write_jsonl(tmp_path / "train.jsonl", [VERL]))
        assert (again.answers, again.metadata) == (task.answers, task.metadata)

    @pytest.mark.parametrize(
        ("truth", "answers"),
        [
            ("72", ("72",)), (34, ("34",)), (["a", "b"], ("a", "b")), ({"target": "a"}, ("a",)),
            ({"tests": ["assert f(1) == 2"]}, ('{"tests": ["assert f(1) == 2"]}',)),
        ],
    )  # fmt: skip
    def test_ground_truths(self, tmp_path, truth, answers):
        row = {**VERL, "reward_model": {"style": "rule", "ground_truth": truth}}
        [task] = open_source(write_parquet(tmp_path / "a.parquet", [row]))
        assert task.answers == answers
        assert task.metadata["reward_model"]["ground_truth"] == truth


class TestParquet:
    def test_damage_is_one_line(self, tmp_path):
        file = write_parquet(tmp_path / "a.parquet")
        file.write_bytes(file.read_bytes()[:-20])
        with pytest.raises(ValueError, match=r"a.parquet cannot be read as Parquet: ") as raised:
            open_source(file)
        assert "\n" not in str(raised.value)

    @pytest.mark.parametrize("name", ["tasks.jsonl", "tasks.parquet", "hf"])
    def test_tool_calls_keep_only_their_own_arguments(self, name, tmp_path):
        arguments = [{"query": "x"}, {"place": {"city": "y"}}]
        calls = [[{"function": {"name": "f", "arguments": given}}] for given in arguments]
        rows = [
            {"messages": [*CHAT, {"role": "assistant", "tool_calls": call}], "answers": ["a"]}
            for call in calls
        ]
        tasks = open_source(WRITERS[name](tmp_path / name, rows))
        assert [task.messages[-1]["tool_calls"] for task in tasks] == calls


class TestHuggingFace:
    def test_splits_of_a_dictionary(self, tmp_path):
        splits = {"train": ROWS[:3], "test": ROWS[3:5]}
        splits = {name: datasets.Dataset.from_list(rows) for name, rows in splits.items()}
        datasets.DatasetDict(splits).save_to_disk(str(tmp_path / "d"))
        assert [task.id for task in open_source(tmp_path / "d", split="test")] == ["q3", "q4"]
        with pytest.raises(
            ValueError, match=r"config.tasks.train.split is 'dev'; .* 'train', 'test'"
        ):
            open_source(tmp_path / "d", split="dev")

    def test_columns_of_images_are_not_decoded(self, tmp_path):
        """Else the library would open them, in any format that Pillow knows, such as EPS."""
        data = b"\xc5\xd0\xd3\xc6" + bytes(26) + b"%!PS"
        kinds = {"question": datasets.Value("string"), "images": [datasets.Image()]}
        columns = {"question": ["<image>How many?"], "images": [[{"bytes": data}]], "answer": ["3"]}
        kinds["answer"] = datasets.Value("string")
        dataset = datasets.Dataset.from_dict(columns, features=datasets.Features(kinds))
        dataset.save_to_disk(str(tmp_path / "d"))
        [task] = open_source(tmp_path / "d")
        assert task.images == (Picture(data=data),)

    def test_verl_rows_and_a_damaged_folder(self, tmp_path):
        folder = write_hf(tmp_path / "d", [VERL])
        [task] = open_source(folder)
        assert task.metadata["extra_info"]["question"] == "who wrote emma"
        (folder / "state.json").write_text("{")
        with pytest.raises(ValueError, match=f"{folder} cannot be read: "):
            open_source(folder)
        with pytest.raises(ValueError, match="none cannot be read"):
            open_source(tmp_path / "none", format="hf")


def test_images_in_tfds_are_refused_before_any_is_decoded(tmp_path):
    kinds = tensorflow_datasets.features
    info = {"question": kinds.Text(), "pictures": kinds.Sequence({"a": kinds.Image()})}
    row = {"question": "q", "pictures": [{"a": io.BytesIO(encoded(drawn()))}]}
    folder = tfds_tasks.write_dataset(tmp_path, "seen", "1.0.0", info, {"train": [row]})
    with pytest.raises(ValueError, match="has images or sound in 'pictures/a', which are not read"):
        open_source(folder)


class TestGenerated:
    def test_tasks_are_a_function_of_the_seed(self):
        settings = {"size": 12, "seed": 3, "max_terms": 3}
        source = {"format": "reasoning_gym", "settings": settings}
        tasks, again = (open_source("chain_sum", **source) for _ in range(2))
        assert list(tasks) == list(again)
        task = tasks[4]
        assert (task.id, task.data_source) == ("chain_sum:3:5", "chain_sum")
        expression = task.metadata["expression"]
        assert expression in task.question
        assert eval(expression) == int(task.answers[0])
        other = open_source("chain_sum", format="reasoning_gym", settings={**settings, "seed": 4})
        assert [t.question for t in other] != [t.question for t in tasks]


def test_a_missing_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ValueError, match=r"pip install 'jaxrl\[datasets\]'"):
        open_source("x", format="hf")


class TestHoldout:
    def split(self, folder, rows, holdout=0.2, seed=0):
        """Return the questions to train on and the held-out ones, by source."""
        files = [write_jsonl(folder / f"{i}.jsonl", part) for i, part in enumerate(rows)]
        sources = [
            TaskSource(key=f"{KEY}.sources[{i}]", source=str(file), weight=i + 1.0)
            for i, file in enumerate(files)
        ]
        splits = split_holdout(open_tasks(sources), holdout, seed=seed)
        assert {s.weight for s in splits[0].sources} == {i + 1.0 for i in range(len(rows))}
        return [[task.question for task in tasks] for tasks in splits]

    @pytest.mark.parametrize(("holdout", "count"), [(0.2, 5), (7, 7), (0.5, 12), (24, 24)])
    def test_tasks_are_on_one_side_each_whatever_their_order(self, tmp_path, holdout, count):
        trained, held_out = self.split(tmp_path, [ROWS], holdout)
        assert len(held_out) == count
        assert sorted(trained + held_out) == sorted(row["question"] for row in ROWS)
        other_order = self.split(tmp_path, [[{**row, "id": None} for row in ROWS[::-1]]], holdout)
        assert [trained[::-1], held_out[::-1]] == other_order
        assert held_out != self.split(tmp_path, [ROWS], holdout, seed=1)[1]

    def test_no_question_is_on_both_sides(self, tmp_path):
        chat = [{"role": "user", "content": "?"}]
        again = [
            {"messages": chat, "answer": "x", "metadata": {"question": row["question"].upper()}}
            for row in ROWS[:20]
        ]
        trained, held_out = self.split(tmp_path, [ROWS, again], 8)
        assert len(held_out) in (8, 9)  # a pair may add one
        same = {q.upper() for q in trained if q} & {q.upper() for q in held_out if q}
        assert (same, held_out.count(None), trained.count(None)) == (set(), len(held_out) // 2, 16)

    @pytest.mark.parametrize(("holdout", "sizes"), [(0.01, [25]), (25, [25]), (0.9, [20, 1])])
    def test_a_split_without_tasks_on_a_side_is_refused(self, tmp_path, holdout, sizes):
        rows, parts = iter(ROWS), []
        for size in sizes:
            parts.append([next(rows) for _ in range(size)])
        with pytest.raises(
            ValueError, match=r"config\.tasks\.eval\.holdout is .*not all of a source"
        ):
            self.split(tmp_path, parts, holdout)

    def test_an_evaluation_has_the_tasks_that_training_left_out(self, tiny_world):
        config = debug_tiny.get_config(str(tiny_world))
        config.tasks.eval.source, config.tasks.eval.holdout = "", 0.25
        trained, held_out = open_all_tasks(validate(config), print)
        assert {*trained.sources[0].items.id_hashes} & {
            *held_out.sources[0].items.id_hashes
        } == set()
        config.stages, config.tasks.train.split = ("evaluate",), "train"
        nothing, evaluated = open_all_tasks(validate(config), print)
        assert ([*nothing], [*evaluated]) == ([], [*held_out])


class TestLargeSources:
    def test_only_what_is_drawn_is_parsed(self, tmp_path, many):
        tasks = open_source(write_jsonl(tmp_path / "a.jsonl"))
        parsed = []
        read = tasks._reader.read
        tasks._reader.read = lambda indices: parsed.extend(indices) or read(indices)
        Stream(tasks, seed=0).get_items(3, 4)
        assert len(parsed) == 4
        few = tasks.select(np.arange(25) % 5 == 0)
        assert [task.id for task in few] == ["q0", "q5", "q10", "q15", "q20"]
        assert (few[3].id, len(few), few.id_hashes.shape) == ("q15", 5, (5,))

    def test_a_file_that_changes_during_the_run_is_reported(self, tmp_path, many):
        file = write_jsonl(tmp_path / "a.jsonl")
        tasks = open_source(file)
        file.write_text(file.read_text().replace("What", "Who"))
        with pytest.raises(UserCodeError, match=r"a.jsonl was changed while the run was reading"):
            tasks[3]


class TestMixtures:
    @settings(max_examples=25, deadline=None)
    @given(shares=st.lists(st.integers(1, 9), min_size=1, max_size=5), count=st.integers(0, 200))
    def test_each_source_is_drawn_by_its_share_and_one_by_one(self, shares, count):
        drawn = [locate_item(shares, position) for position in range(count)]
        for source, share in enumerate(shares):
            own = [index for number, index in drawn if number == source]
            assert own == list(range(len(own)))
            # Each of the shares before it may round.
            assert abs(len(own) - count * share / sum(shares)) <= source + 1
        assert count_items_by_source(shares, count) == [
            [n for n, _ in drawn].count(i) for i in range(len(shares))
        ]

    def test_two_to_one_by_hand(self):
        mixture = Mixture([Source(items="abc", weight=2.0), Source(items=range(2), weight=1)])
        # Of every three draws two are of the first source, of every six all three twice.
        first = Stream(mixture, seed=0).get_items(0, 12)
        kinds = ["text" if isinstance(item, str) else "number" for item in first]
        assert kinds == ["text", "text", "number"] * 4
        texts = [item for item in first if isinstance(item, str)]
        assert sorted(texts[:3]) == sorted(texts[3:6]) == ["a", "b", "c"]
        assert sorted(item for item in first if not isinstance(item, str)) == [0, 0, 1, 1]

    def test_the_first_source_keeps_its_order_whatever_is_mixed_in(self):
        first, second = list(range(50)), list(range(100, 130))
        mixture = Mixture([Source(items=first), Source(items=second, weight=0.5)])
        drawn = [item for item in Stream(mixture, seed=4).get_items(0, 90) if item < 100]
        assert drawn == Stream(first, seed=4).get_items(0, 60)

    @settings(max_examples=5, deadline=None)
    @given(counts=st.lists(st.integers(0, 7), max_size=8), weight=st.floats(0.1, 10))
    def test_draws_depend_on_the_position_alone(self, counts, weight):
        weight = round(weight, 2)
        mixture = Mixture(
            [Source(items=range(5), weight=weight), Source(items=range(9, 20)), Source(items="xy")]
        )
        at, drawn = 0, []
        for count in counts:
            drawn += Stream(mixture, seed=1).get_items(at, count)
            at += count
        assert drawn == Stream(mixture, seed=1).get_items(0, at)

    def test_epochs_are_each_sources_own(self):
        mixture = Mixture(
            [Source(items=range(4), weight=2, name="a"), Source(items=range(10), name="b")]
        )
        stream = Stream(mixture, seed=0)
        assert stream.compute_metrics(12) == {
            "tasks/a/taken": 8, "tasks/a/epochs": 2.0, "tasks/b/taken": 4, "tasks/b/epochs": 0.4,
        }  # fmt: skip
        assert stream.epoch_length == 30  # a third of the draws are of b, which has ten

    def test_solved_tasks_are_skipped_by_their_ids_in_each_source(self):
        first = [Task(id=f"a/{i}", question="?") for i in range(2)]
        second = [Task(id=f"b/{i}", question="?") for i in range(3)]
        mixture = Mixture([Source(items=first, weight=9), Source(items=second)])
        stream = Stream(mixture, seed=0)
        draws, position = draw_tasks(stream, 0, 4, SkipSet({"a/0": 0.0, "a/1": 0.0, "b/1": 0.0}))
        assert {d.task.id for d in draws} == {"b/0", "b/2"}
        assert [d.stream_index % 10 for d in draws] == [9] * 4
        assert position == draws[-1].stream_index + 1
        with pytest.raises(NotEnoughGroupsError, match="all 5 tasks are solved"):
            draw_tasks(stream, 0, 1, SkipSet({task.id: 0.0 for task in mixture}))

    def test_an_id_in_two_sources_is_refused_with_both_lines(self, tmp_path):
        files = write_jsonl(tmp_path / "a.jsonl"), write_csv(tmp_path / "b.csv", ROWS[3:4])
        sources = [
            TaskSource(key=f"{KEY}.sources[{i}]", source=str(file)) for i, file in enumerate(files)
        ]
        message = rf"{files[1]}:2: the id 'q3' is already used in {files[0]}:4"
        with pytest.raises(ValueError, match=message):
            open_tasks(sources)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": "xml"}, "config.tasks.train.format is 'xml'; expected one of jsonl, csv"),
        ({"sources": ({"source": "b"},)}, "source is 'a'; expected no value together with tasks"),
        (
            {"source": "", "sources": ({"source": "b", "weight": 0},)},
            r"config.tasks.train.sources\[0\].weight is 0; expected a number above 0",
        ),
    ],
)
def test_malformed_sources_are_refused_before_anything_is_read(changes, message):
    config = default_config()
    config.model.path = config.tasks.eval.source = config.search.local.corpus = "a"
    config.tasks.train.source = "a"
    config.update_from_flattened_dict({f"tasks.train.{k}": v for k, v in changes.items()})
    with pytest.raises(ValueError, match=message):
        validate(config)


class TestOverlap:
    @pytest.mark.parametrize("held", [0, 100])
    def test_formats_mixtures_and_large_sources(self, tmp_path, monkeypatch, held):
        monkeypatch.setattr(tasks_module, "MAX_CACHED_TASKS", held)
        rows = [
            {"id": "v0", **VERL},
            *({**VERL, "prompt": CHAT * 2, "id": f"v{i}"} for i in (1, 2)),
        ]
        rows[1]["extra_info"] = rows[2]["extra_info"] = {"question": "another"}
        train = open_tasks(
            [
                TaskSource(key="a", source=str(write_csv(tmp_path / "a.csv"))),
                TaskSource(key="b", source=str(write_parquet(tmp_path / "b.parquet", rows))),
            ]
        )
        questions = ("WHAT is  7+7", "Who wrote Emma?", "Who wrote Persuasion?", "What is 7-7?")
        held_out = [{"question": q, "answer": "a", "id": f"e{i}"} for i, q in enumerate(questions)]
        chat = {"id": "e4", "messages": CHAT * 2, "answer": "a"}
        evaluated = open_source(write_jsonl(tmp_path / "eval.jsonl", [*held_out, chat]))
        line = describe_overlap(train, evaluated)
        assert line.startswith("warning: 3 of 5 held-out questions are also training tasks")
        assert line.endswith(
            "'WHAT is  7+7', 'e0' in config.tasks.eval and 'q7' in config.tasks.train"
        )
        assert (
            describe_overlap(train, open_source(write_jsonl(tmp_path / "c.jsonl", held_out[2:4])))
            == ""
        )


def test_a_changed_weight_is_told_apart_from_a_moved_file(tmp_path):
    config = default_config()
    entry = {"source": str(write_jsonl(tmp_path / "a.jsonl")), "weight": 2.0}
    config.tasks.train.sources = (entry, {"source": "chain_sum", "format": "reasoning_gym"})
    before = list_task_files(resolve_sources(config, "train"))
    assert list(before) == ["tasks.train.sources/0", "tasks.train.sources/1"]
    config.tasks.train.sources = ({**entry, "weight": 3.0}, config.tasks.train.sources[1])
    after = list_task_files(resolve_sources(config, "train"))
    assert after["tasks.train.sources/0"] != before["tasks.train.sources/0"]
    moved = {**entry, "source": str(write_jsonl(tmp_path / "b.jsonl")), "weight": 2.0}
    config.tasks.train.sources = (moved, {"source": "leg_counting", "format": "reasoning_gym"})
    after = list_task_files(resolve_sources(config, "train"))
    assert after["tasks.train.sources/0"][1] == before["tasks.train.sources/0"][1]
    assert after["tasks.train.sources/1"] != before["tasks.train.sources/1"]


@pytest.mark.minutes
@pytest.mark.usefixtures("quick_compilation", "no_pictures", "one_size")
def test_a_run_trains_on_a_mixture_of_every_format(tiny_world, tmp_path, monkeypatch):
    """Two thirds of the draws are of CSV; a run that is killed resumes with the same tasks."""
    monkeypatch.syspath_prepend(str(ROOT / "tests" / "extending"))
    lines = (tiny_world / "questions_train.jsonl").read_text().splitlines()
    rows = [{k: v for k, v in json.loads(line).items() if k != "metadata"} for line in lines]
    chats = [
        {**VERL, "prompt": [{"role": "user", "content": row["question"]}]} for row in rows[:12]
    ]
    ours = {"format": "my_tasks.Sums", "settings": {"count": 9}, "data_source": "own"}
    gym = {"source": "chain_sum", "format": "reasoning_gym", "settings": {"size": 5}}
    sources = (
        {"source": str(write_csv(tmp_path / "t.csv", rows)), "weight": 10.0, "data_source": "csv"},
        {"source": str(write_parquet(tmp_path / "t.parquet", chats)), "data_source": "verl"},
        {"source": str(write_hf(tmp_path / "hf", rows)), "data_source": "hf"},
        {"source": str(write_tfds(tmp_path / "tfds", rows)), "data_source": "tfds"},
        ours,
        gym,
    )
    config = base_config(tiny_world)
    changes = {
        "tasks.train.source": "", "tasks.train.sources": sources, "num_steps": 3,
        "rollout.overlong_prompts": "truncate_left", "rollout.group_size": 2,
        "rollout.tasks_per_step": 5, "checkpoint.every_steps": 1, "log.trajectories": -1,
    }  # fmt: skip
    held_out = ({**ours, "settings": {"count": 5, "seed": 1}, "data_source": "sums"}, {**gym})
    changes |= {"tasks.eval.source": "", "tasks.eval.sources": held_out, "eval.max_tasks": 2}
    config.update_from_flattened_dict(changes | {"eval.suites": ("greedy",)})
    validate(config)
    (tmp_path / "run").mkdir()
    parts = build(config)
    run(settings_of(config), tmp_path / "run", parts, Display())
    drawn = [t["task_id"] for step in (1, 2, 3) for t in trajectories(tmp_path / "run", step)][::2]
    counts = collections.Counter(re.split("[/:]", id)[0] for id in drawn)
    others = ("verl", "hf", "tfds", "own", "chain_sum")
    assert counts == {"csv": 10, **dict.fromkeys(others, 1)}
    stream = Stream(parts.tasks, seed=config.seed)
    assert [task.id for task in stream.get_items(0, 15)] == drawn
    last = records(tmp_path / "run")[-1]
    assert (last["tasks/csv/taken"], last["tasks/own/taken"]) == (10, 1)
    assert last["tasks/chain_sum/epochs"] == 1 / 5
    assert last["rollout/partial_groups"] == 0
    copy = killed(tmp_path / "run", tmp_path / "again", after=1)
    run(settings_of(config), copy, parts, Display())
    assert lasting(copy) == lasting(tmp_path / "run")
    assert any("(66.7% of draws)" in note for note in parts.notes)
    # Two of each held-out source, each with scores of its own.
    sets = [task.data_source for task in parts.eval_tasks]
    assert sets == ["sums", "sums", "chain_sum", "chain_sum"]
    assert {
        f"val-core/{name}/exact_match/greedy" for name in ("all", "sums", "mean")
    } <= last.keys()
    # And what is generated alike for both is reported.
    assert any(note.startswith("warning: 2 of 4 held-out questions are") for note in parts.notes)


def write_environments(folder, sizes, weights):
    """Write training tasks `0`, `1`, ... for each source of each environment; return a config."""
    environments = {}
    for name, counts in sizes.items():
        sources = []
        for index, (count, weight) in enumerate(counts):
            path = folder / f"{name}{index}.jsonl"
            lines = (json.dumps({"id": f"{index}-{i}", "question": f"{name} {index} {i}?",
                                 "answers": ["x"]}) for i in range(count))  # fmt: skip
            path.write_text("\n".join(lines))
            sources.append({"source": str(path), "weight": weight})
        environments[name] = {"weight": weights[name], "tasks.train.sources": tuple(sources)}
        environments[name] |= {"tasks.eval.source": str(path)}
    config = default_config()
    config.stages = ("train",)
    config.environments = environments
    return config


@settings(max_examples=25, deadline=None)
@given(
    counts=st.lists(
        st.lists(st.tuples(st.integers(1, 5), st.sampled_from([1.0, 0.25, 3.0])), min_size=1,
                 max_size=2), min_size=2, max_size=3),
    weights=st.lists(st.sampled_from([0.1, 0.3, 0.7, 1.0, 2.5]), min_size=3, max_size=3),
    start=st.integers(0, 1000),
    length=st.integers(1, 300),
)  # fmt: skip
def test_any_stretch_of_the_stream_follows_the_weights(
    tmp_path_factory, counts, weights, start, length
):
    names = ("search", "math", "code")[: len(counts)]
    weights = dict(zip(names, weights, strict=False))
    folder = tmp_path_factory.mktemp("environments")
    config = write_environments(folder, dict(zip(names, counts, strict=True)), weights)
    tasks, held_out = open_all_tasks(resolve_names(config), print)
    stream = Stream(tasks, seed=3)
    drawn = stream.get_items(start, length)
    num_sources = sum(map(len, counts))
    for name in names:
        share = weights[name] / sum(weights.values())
        count = sum(task.environment == name for task in drawn)
        # The counts up to each end are within the number of sources.
        assert abs(count - share * length) <= 2 * num_sources
    # The position decides each draw.
    assert stream.get_items(start + length // 2, 1) == drawn[length // 2 : length // 2 + 1]
    assert Stream(tasks, seed=3).get_items(start, length) == drawn
    # Files with the same ids do not collide, and no environment has another's tasks.
    assert len({task.id for task in tasks}) == len(tasks)
    assert all(task.id.startswith(f"{task.environment}/") for task in (*tasks, *held_out))
    assert all(task.question.startswith(f"{task.environment} ") for task in (*tasks, *held_out))


def test_the_first_draws_of_two_environments_by_hand(tmp_path):
    sizes = {"search": [(50, 1.0)], "math": [(50, 1.0)]}
    config = write_environments(tmp_path, sizes, {"search": 0.7, "math": 0.3})
    tasks, _ = open_all_tasks(resolve_names(config), print)
    stream = Stream(tasks, seed=0)
    # Of the first n draws, ceil(0.7 n) are of the first environment.
    first = [task.environment for task in stream.get_items(0, 10)]
    assert [first[:n].count("search") for n in range(1, 11)] == [1, 2, 3, 3, 4, 5, 5, 6, 7, 7]
    assert stream.compute_metrics(10) == {
        "tasks/search/taken": 7, "tasks/search/epochs": 7 / 50,
        "tasks/math/taken": 3, "tasks/math/epochs": 3 / 50,
    }  # fmt: skip
