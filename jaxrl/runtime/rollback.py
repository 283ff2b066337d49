"""Going back to an earlier checkpoint: written down first, so a kill on the way changes nothing.

`roll_backs.jsonl` has a line for each time: its `number` from 1, `sign`, `from_step`, `to_step`,
`lr_scale`, and what had been spent by then (`ledger`). What the run had measured and written after
the step it goes back to is set aside in `rolled_back/<number>/`; checkpoints of later steps are
removed.
"""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxrl.utils.files import taking_place, written_whole
from jaxrl.utils.json_io import parse_json

FILE = "roll_backs.jsonl"
ASIDE = "rolled_back"

_OF_STEP = re.compile(r"(?:step|sft|train|evaluate)_(\d+)\.\w+")


def write_down(workdir: Path, line: Mapping[str, Any]) -> None:
    """Adds a decision to go back, which this start or, after a kill, the next one carries out."""
    (workdir / ASIDE).mkdir(exist_ok=True)  # fails now rather than at every start from then on
    lines = [*read(workdir), line]
    with written_whole(workdir / FILE) as file:
        file.writelines(json.dumps(one) + "\n" for one in lines)


def read(workdir: Path) -> list[dict[str, Any]]:
    """The decisions to go back, oldest first.

    Raises:
        ValueError: a line is damaged.
    """
    path = workdir / FILE
    if not path.exists():
        return []
    lines = path.read_bytes().splitlines()
    decisions = [parse_json(line, f"{path}:{number}") for number, line in enumerate(lines, start=1)]
    for number, line in enumerate(decisions, start=1):
        if not _is_decision(line):
            raise ValueError(
                f"{path}:{number} is {json.dumps(line):.80}; expected an object with number, sign, "
                "from_step, to_step, lr_scale and ledger. Bring it back from a copy, or name "
                "another --workdir."
            )
    return decisions


def _is_decision(line: Any) -> bool:
    counts = ("number", "from_step", "to_step")
    return (
        isinstance(line, dict)
        and all(type(line.get(name)) is int and line[name] >= 0 for name in counts)
        and type(line.get("lr_scale")) in (int, float)
        and math.isfinite(line["lr_scale"])
        and 0 < line["lr_scale"] <= 1
        and isinstance(line.get("sign"), str)
        and isinstance(line.get("ledger"), dict)
    )


def set_aside_after(workdir: Path, step: int, number: int) -> None:
    """Sets aside what a run has written after a step, for its return number `number` to it.

    Trajectories and evaluations are moved, `metrics.jsonl` and `sentinel.jsonl` are copied whole.
    What a kill has interrupted is finished; what is done is left alone.
    """
    aside = workdir / ASIDE / str(number)
    done = aside / "done"
    if done.exists():
        return
    for path in (workdir / "metrics.jsonl", workdir / "sentinel.jsonl"):
        if path.exists() and not (aside / path.name).exists():
            aside.mkdir(parents=True, exist_ok=True)
            with taking_place(aside / path.name) as unfinished:
                shutil.copyfile(path, unfinished)
    for path in [*workdir.glob("trajectories/*"), *workdir.glob("eval/*")]:
        name = _OF_STEP.fullmatch(path.name)
        if name and int(name[1]) > step:
            (aside / path.parent.name).mkdir(parents=True, exist_ok=True)
            shutil.move(path, aside / path.parent.name / path.name)  # may lie elsewhere
    aside.mkdir(parents=True, exist_ok=True)
    done.touch()


def remove_later_files(workdir: Path, step: int) -> None:
    """Removes what a killed run wrote after the step it is resumed from."""
    for path in [*workdir.glob("trajectories/*"), *workdir.glob("eval/*")]:
        name = _OF_STEP.fullmatch(path.name)
        if path.name.endswith(".unfinished") or (name and int(name[1]) > step):
            path.unlink()
