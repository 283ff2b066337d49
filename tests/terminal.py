"""A pseudo-terminal, and what a person sees on it."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from collections import defaultdict
from pathlib import Path

LINES = 200  # more than any test writes, so that nothing scrolls

_PIECE = re.compile(r"\x1b\[([?\d;]*)([A-Za-z])|(.)", re.DOTALL)


def run_on_terminal(code: str, *, columns: int, stderr: Path | None = None) -> list[str]:
    """Run Python code on a terminal of its own, and return the lines that remain visible.

    Args:
        code: Program to run.
        columns: Width of the terminal.
        stderr: File that receives standard error instead of the terminal.
    """
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", LINES, columns, 0, 0))
    names = {"COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"}
    environment = {name: value for name, value in os.environ.items() if name not in names}
    with open(stderr or os.devnull, "wb") as file:
        process = subprocess.Popen(
            [sys.executable, "-c", code],
            stdin=subprocess.DEVNULL,
            stdout=theirs,
            stderr=file if stderr else theirs,
            env={**environment, "TERM": "xterm-256color", "JAX_PLATFORMS": "cpu"},
        )
    os.close(theirs)
    written = b""
    while block := _read(ours):
        written += block
    os.close(ours)
    text = written.decode()
    assert process.wait() == 0, text
    return visible_lines(text, columns)


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 2**16)
    except OSError:  # the program has ended and closed the other side
        return b""


def visible_lines(text: str, columns: int) -> list[str]:
    """Return the lines that a terminal shows after `text`, without trailing blanks.

    It knows line feeds, carriage returns, the cursor's moves up, erased lines and the wrap at the
    last column. Colors and the cursor's visibility change nothing.
    """
    cells: dict[int, dict[int, str]] = defaultdict(dict)
    row = column = 0
    for parameters, command, character in _PIECE.findall(text):
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
    lines = [
        "".join(cells[row].get(column, " ") for column in range(columns)).rstrip()
        for row in range(max(cells, default=-1) + 1)
    ]
    return lines
