"""What stays visible beside the live line, on real terminals."""

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from collections import defaultdict

LINES = 200  # more than any test writes, so that nothing scrolls

PIECE = re.compile(r"\x1b\[([?\d;]*)([A-Za-z])|(.)", re.DOTALL)


def run_on_terminal(code, *, columns, stderr=None):
    """Run Python code on a terminal of its own, and return the lines that remain visible.

    Args:
        code: Program to run.
        columns: Width of the terminal.
        stderr: File that receives standard error instead of the terminal.
    """
    controller, device = pty.openpty()
    fcntl.ioctl(device, termios.TIOCSWINSZ, struct.pack("HHHH", LINES, columns, 0, 0))
    names = {"COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"}
    environment = {name: value for name, value in os.environ.items() if name not in names}
    with open(stderr or os.devnull, "wb") as file:
        process = subprocess.Popen(
            [sys.executable, "-c", code],
            stdin=subprocess.DEVNULL,
            stdout=device,
            stderr=file if stderr else device,
            env={**environment, "TERM": "xterm-256color", "JAX_PLATFORMS": "cpu"},
        )
    os.close(device)
    written = b""
    while block := read_block(controller):
        written += block
    os.close(controller)
    text = written.decode()
    assert process.wait() == 0, text
    return visible_lines(text, columns)


def read_block(terminal):
    try:
        return os.read(terminal, 2**16)
    except OSError:  # the program has ended and closed the other side
        return b""


def visible_lines(text, columns):
    """Return the lines that a terminal shows after `text`, without trailing blanks.

    It knows line feeds, carriage returns, the cursor's moves up, erased lines and the wrap at the
    last column. Colors and the cursor's visibility change nothing.
    """
    cells = defaultdict(dict)
    row = column = 0
    for parameters, command, character in PIECE.findall(text):
        if command == "A":
            row = max(0, row - int(parameters or 1))
        elif command == "K":
            assert parameters == "2"
            cells.pop(row, None)
        elif character == "\r":
            column = 0
        elif character == "\n":
            row += 1
        elif character:
            if column == columns:
                row, column = row + 1, 0
            cells[row][column] = character
            column += 1
        else:
            assert command in ("m", "h", "l"), f"unknown sequence {command}"
    return [
        "".join(cells[row].get(column, " ") for column in range(columns)).rstrip()
        for row in range(max(cells, default=-1) + 1)
    ]


PROGRAM = """
import logging, os, signal, sys, time
from absl import app
from jaxrl import launch
from jaxrl.utils.secrets import redact_output
from jaxrl.logs.display import Display
from jaxrl.runtime.watchdog import watchdog
from jaxrl.runtime.preemption import watch_stop_signals

NUMBERS = {"reward": 0.123456, "exact match": 0.25, "searches": 1.5, "tokens/s": 16_759.3}

def main(argv):
    with redact_output(), watch_stop_signals():
        display = Display()
        writes = [
            lambda: display.log("warning: before the first step"),
            lambda: print("printed before the first step", file=sys.stderr),
            lambda: display.start("train", 0, 600),
            lambda: display.show_step(100, NUMBERS),
            lambda: display.log("warning: " + "long " * 40 + "end"),
            lambda: display.log("exact match 0.250"),
            lambda: print("printed by a library", file=sys.stderr),
            lambda: logging.getLogger("my_reward").warning("logged by a reward"),
            lambda: os.kill(os.getpid(), signal.SIGINT),
            lambda: display.show_step(101, NUMBERS),
        ]
        for write in writes:
            display.show_activity("something [under] way")
            time.sleep(0.2)  # several refreshes of the live line
            write()
        with watchdog(display, 0.2):
            time.sleep(0.4)
        display.show_activity("")
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


def test_everything_stays_above_the_live_line():
    columns = 80
    lines = run_on_terminal(PROGRAM, columns=columns)
    screen = "\n".join(lines)
    text = "".join(line.ljust(columns) for line in lines)
    positions = [text.find(line) for line in [*WARNINGS, "exact match 0.250"]]
    assert -1 not in positions, screen
    # Nothing of a live line remains but the last one.
    [live_line] = [number for number, line in enumerate(lines) if line.startswith("train 10")]
    assert max(positions) < live_line * columns, screen
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
