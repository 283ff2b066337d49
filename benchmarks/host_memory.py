"""Planned and seen memory of a run on the processors of this machine, on Linux.

    python -m benchmarks.host_memory --config=configs/quickstart.py --config.stages="('sft',)"

The arguments are those of `jaxrl.launch`, whose run gets a workdir of its own. Programs are
compiled anew, as in a first run: that takes memory too. With `--json=FILE` the sizes go there, in
bytes.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

LAUNCH = [sys.executable, "-m", "jaxrl.launch"]


def measure(arguments: Sequence[str]) -> dict[str, int]:
    """Bytes of the plan's peak, and the most that the process had resident at once.

    Nothing that takes memory is imported here: what a process has when it starts another one counts
    as the other's, as `getrusage` tells it.
    """
    with tempfile.TemporaryDirectory() as folder:
        plan, workdir = Path(folder) / "plan.json", Path(folder) / "run"
        subprocess.run(
            [*LAUNCH, *arguments, "--plan", f"--plan_json={plan}"], stdout=subprocess.DEVNULL
        )
        planned = json.loads(plan.read_text(encoding="utf-8"))["peak"]
        own = (f"--workdir={workdir}", "--config.compilation_cache=off")
        process = subprocess.Popen([*LAUNCH, *arguments, *own], stdout=sys.stderr)
        _, status, usage = os.wait4(process.pid, 0)
        if status:
            sys.exit(f"the run ended with {os.waitstatus_to_exitcode(status)}")
    return {"planned": planned, "seen": 1024 * usage.ru_maxrss}


def main(argv: Sequence[str]) -> None:
    """Prints both, and by how much the plan is off."""
    files = [one.removeprefix("--json=") for one in argv if one.startswith("--json=")]
    sizes = measure([one for one in argv if not one.startswith("--json=")])
    planned, seen = (sizes[name] / 2**30 for name in ("planned", "seen"))
    print(f"planned {planned:.2f} GiB, seen {seen:.2f} GiB: {planned / seen - 1:+.0%}")
    for file in files:
        Path(file).write_text(json.dumps(sizes) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
