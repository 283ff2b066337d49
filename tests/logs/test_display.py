import io
import math

import pytest
from rich.console import Console
from rich.table import Table

from jaxrl.logs.console import make_console
from jaxrl.logs.display import Display

NUMBERS = {"reward": 0.123456, "exact match": 0.25, "searches": 1.5, "tokens/s": 16_759.3}


@pytest.fixture
def clock(monkeypatch):
    now = [1000.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    return now


def make_display(*, width=80, terminal=False, **settings):
    """Return a display that writes to memory."""
    display = Display(**settings)
    display.console = Console(
        file=io.StringIO(), width=width, force_terminal=terminal, highlight=False
    )
    return display


class TestDisplay:
    def test_lines_are_written_at_intervals(self, clock):
        display = make_display(interval_s=5)
        display.start("train", 10, 70)
        for step in range(11, 71):
            clock[0] += 2 if step > 11 else 100  # the first step compiles
            display.show_step(step, NUMBERS)
        display.stop()
        lines = display.console.file.getvalue().splitlines()
        numbers = "reward 0.123  exact match 0.25  searches 1.5  tokens/s 16,759"
        assert lines[0] == f"train 11/70  {numbers}  --:-- left"
        assert lines[1] == f"train 14/70  {numbers}  1:52 left"
        assert lines[-1] == f"train 70/70  {numbers}  0:00 left"
        assert len(lines) == 1 + 19 + 1

    def test_lines_are_written_at_steps(self, clock):
        display = make_display(interval_s=5)
        display.start("train", 2, 10, every_steps=4)
        for step in range(3, 11):
            clock[0] += 60
            display.show_step(step, {})
        lines = display.console.file.getvalue().splitlines()
        assert [line.split()[1] for line in lines] == ["4/10", "8/10", "10/10"]

    def test_a_resumed_stage_shows_the_hours_left(self, clock):
        display = make_display()
        display.start("sft", 0, 101)
        display.show_step(1, {})
        clock[0] += 60
        display.show_step(2, {"loss": math.nan})
        assert display.console.file.getvalue().endswith("\nsft 2/101  loss nan  1:39:00 left\n")

    def test_hostile_text_is_escaped_on_a_terminal(self):
        display = make_display(width=80, terminal=True)
        display.log("a :heart: [red] \x1b[2J\ud800 b")
        assert display.console.file.getvalue() == "a :heart: [red] \\x1b[2J\ufffd b\n"

    def test_parts_of_a_step_are_shown_after_a_long_silence(self, clock):
        display = make_display(activity_interval_s=30)
        count = display.make_progress_callback("trajectories")
        for done in range(0, 100, 10):
            clock[0] += 7
            count(done, 1000)
        display.start("train", 0, 2)
        display.show_step(1, {})
        clock[0] += 29
        count(5, 8)
        lines = display.console.file.getvalue().splitlines()
        assert lines == [
            "trajectories 40/1,000",
            "trajectories 90/1,000",
            "train 1/2    --:-- left",
        ]

    def test_a_terminal_shows_parts_of_a_step_on_a_live_line(self):
        display = make_display(terminal=True, width=120)
        display.show_activity("building the index of [c].jsonl, documents 1,000")
        display.log("attention: xla")
        display.start("train", 0, 2)
        display.show_activity("trajectories 3/8")
        display.stop()
        text = display.console.file.getvalue()
        assert text.index("of [c].jsonl, documents 1,000") < text.index("attention: xla")
        assert "trajectories 3/8" in text
        assert text.count("\x1b[?25l") == text.count("\x1b[?25h") == 2  # the cursor is back


def test_a_notebook_gets_the_text_that_a_file_gets(monkeypatch):
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    out = io.StringIO()
    console = make_console(file=out, width=40)
    console.print(Table("suite", "score", title="scores"))
    assert "suite" in out.getvalue()
    assert not console.is_terminal
