"""What stays visible beside the live line, on real terminals."""

import pytest

from tests.terminal import run_on_terminal, visible_lines

PROGRAM = """
import logging, os, signal, sys, time
from absl import app
from jaxrl import launch
from jaxrl.utils.secrets import redact_output
from jaxrl.logs.display import Display
from jaxrl.runtime.watchdog import watchdog
from jaxrl.runtime.preemption import stop_on_signals

NUMBERS = {"reward": 0.123456, "exact match": 0.25, "searches": 1.5, "tokens/s": 16_759.3}

def main(argv):
    with redact_output(), stop_on_signals():
        display = Display()
        writes = [
            lambda: display.log("warning: before the first step"),
            lambda: print("printed before the first step", file=sys.stderr),
            lambda: display.start("train", 0, 600),
            lambda: display.step(100, NUMBERS),
            lambda: display.log("warning: " + "long " * 40 + "end"),
            lambda: display.log("exact match 0.250"),
            lambda: print("printed by a library", file=sys.stderr),
            lambda: logging.getLogger("my_reward").warning("logged by a reward"),
            lambda: os.kill(os.getpid(), signal.SIGINT),
            lambda: display.step(101, NUMBERS),
        ]
        for write in writes:
            display.activity("something [under] way")
            time.sleep(0.2)  # several refreshes of the live line
            write()
        with watchdog(display, 0.2):
            time.sleep(0.4)
        display.activity("")
        display.stop()

app.run(main, flags_parser=launch.parse_flags)
"""
WARNINGS = [
    "warning: before the first step",
    "printed before the first step",
    "warning: " + "long " * 40 + "end",
    "printed by a library",
    "logged by a reward",
    "SIGINT: stopping; send it again to exit immediately",
    "warning: no progress for 0 s",
    "Thread MainThread:",
]


@pytest.mark.parametrize("columns", [80, 160])
def test_everything_stays_above_the_live_line(columns):
    lines = run_on_terminal(PROGRAM, columns=columns)
    screen = "\n".join(lines)
    text = "".join(line.ljust(columns) for line in lines)
    places = [text.find(line) for line in [*WARNINGS, "exact match 0.250"]]
    assert -1 not in places, screen
    # Nothing of a live line remains but the last one.
    [live_line] = [number for number, line in enumerate(lines) if line.startswith("train 10")]
    assert max(places) < live_line * columns, screen
    assert text.count("16,759") == 1, screen
    assert "[under]" not in text, screen


def test_warnings_go_to_a_file_for_standard_error(tmp_path):
    file = tmp_path / "errors"
    lines = run_on_terminal(PROGRAM, columns=160, stderr=file)
    screen, errors = "\n".join(lines), file.read_text()
    assert [line for line in WARNINGS if line not in errors] == []
    assert [line for line in WARNINGS if line in screen] == []
    assert "exact match 0.250" in screen
    assert "train 101/600" in screen


def test_the_lines_of_a_terminal():
    # A line that wraps, a live line of two rows that is erased, and one in its place.
    text = "abcdef\r\nlive\r\nline\r\x1b[2K\x1b[1A\x1b[2K\x1b[1mup\x1b[0m\r\n"
    assert visible_lines(text, 4) == ["abcd", "ef", "up"]
