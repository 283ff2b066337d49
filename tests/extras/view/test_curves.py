"""Metrics that are followed as they are written, cut and begun anew."""

import json
import os

import numpy as np

from jaxrl.extras.view.curves import Curves
from tests.extras.view.made import make_run, write_lines


def line(step, **metrics):
    return json.dumps({"step": step, "stage": "train", **metrics}) + "\n"


def series(curves, name, num_known=0):
    """Steps and values of a metric."""
    return curves.since([name], curves.generation, num_known)["series"][name]


def append(path, text):
    with path.open("a") as file:
        file.write(text)


def test_points_are_those_of_the_file(tmp_path):
    make_run(tmp_path / "run")
    curves = Curves(tmp_path / "run")
    curves.refresh()
    records = [json.loads(text) for text in (tmp_path / "run" / "metrics.jsonl").open()]
    for name in ("critic/rewards/mean", "actor/entropy", "sentinel/entropy_rise"):
        expected = {"steps": [1, 2, 3, 4, 5], "values": [record[name] for record in records]}
        assert series(curves, name) == expected
    assert series(curves, "actor/entropy", 3)["steps"] == [4, 5]
    assert series(curves, "response_length/mean") == {"steps": [], "values": []}
    assert series(curves, "none such") == {"steps": [], "values": []}


def test_lines_in_pieces(tmp_path):
    path = tmp_path / "metrics.jsonl"
    curves = Curves(tmp_path)
    curves.refresh()
    whole = "".join(line(step, a=step / 4, b=None if step % 2 else 1.0) for step in range(40))
    rng, begin = np.random.default_rng(0), 0
    while begin < len(whole):
        end = begin + int(rng.integers(1, 60))
        append(path, whole[begin:end])
        curves.refresh()
        assert len(curves.steps) == whole[:end].count("\n")
        begin = end
    assert series(curves, "a")["values"] == [step / 4 for step in range(40)]
    assert series(curves, "b")["steps"] == list(range(0, 40, 2))
    assert (curves.generation, curves.problems) == (0, [])


def test_damaged_lines_are_counted(tmp_path):
    path = tmp_path / "metrics.jsonl"
    bad = ["{", "[]", "3", '{"stage": "train"}', '{"step": true}', '{"step": 1, "stage": 2}', "\0"]
    path.write_text(line(1, a=1) + "\n".join(["", *bad, "  "]) + "\n" + line(2, a=2) + '{"step": 3')
    curves = Curves(tmp_path)
    curves.refresh()
    assert series(curves, "a") == {"steps": [1, 2], "values": [1.0, 2.0]}
    assert curves.problems == ["7 lines of metrics.jsonl are damaged and left out"]


def test_a_restart_begins_the_file_anew(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text(line(1, a=1) + line(2, a=2) + "{\n")
    curves = Curves(tmp_path)
    curves.refresh()
    # As a restart does it: another file takes its place, here even a longer one.
    (tmp_path / "new").write_text(line(1, a=5) + line(2, a=6) + line(3, a=7))
    os.replace(tmp_path / "new", path)
    curves.refresh()
    assert series(curves, "a")["values"] == [5.0, 6.0, 7.0]
    assert (curves.generation, curves.problems) == (1, [])
    path.write_text(line(1, a=8))  # cut
    curves.refresh()
    assert (series(curves, "a")["values"], curves.generation) == ([8.0], 2)
    path.unlink()
    curves.refresh()
    assert (curves.names(), curves.generation) == ([], 3)


def test_numbers_that_no_axis_has(tmp_path):
    (tmp_path / "metrics.jsonl").write_text(
        '{"step": 1, "a": NaN, "b": Infinity, "c": true, "d": "1", "e": 1e400, "f": 2}\n'
    )
    curves = Curves(tmp_path)
    curves.refresh()
    assert curves.names() == ["f"]


def test_marks_are_the_signs_of_the_sentinel(tmp_path):
    # A sign stays in the metrics while it lasts, and is a mark where it was new.
    for step in (2, 3, 4):
        append(tmp_path / "metrics.jsonl", line(step, **{"sentinel/rise": 1}))
    told = {"step": 2, "stage": "train", "sign": "rise", "text": "it rose", "action": "stopped"}
    write_lines(tmp_path / "sentinel.jsonl", [told, "{", {"step": 2}])
    curves = Curves(tmp_path)
    curves.refresh()
    rise = {"step": 2, "stage": "train", "name": "rise"}
    assert curves.shown_marks() == [rise | {"text": "it rose", "action": "stopped"}]
    assert curves.problems == ["2 lines of sentinel.jsonl are damaged and left out"]
