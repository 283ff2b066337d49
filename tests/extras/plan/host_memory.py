"""Planned and seen memory of a run on this machine's processors, on Linux.

Nothing that takes memory is imported: what a process has when it starts another one counts as the
other's, as `getrusage` reports it.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

LAUNCH = [sys.executable, "-m", "jaxrl.launch"]


def measure(arguments):
    """Return bytes of the plan's peak, and of the most that the process had resident at once."""
    with tempfile.TemporaryDirectory() as folder:
        plan, workdir = Path(folder) / "plan.json", Path(folder) / "run"
        planning = [*LAUNCH, *arguments, "--plan", f"--plan_json={plan}"]
        subprocess.run(planning, stdout=subprocess.DEVNULL)
        planned = json.loads(plan.read_text(encoding="utf-8"))["peak"]
        own = (f"--workdir={workdir}", "--config.compilation_cache=off")
        process = subprocess.Popen([*LAUNCH, *arguments, *own], stdout=sys.stderr)
        _, status, usage = os.wait4(process.pid, 0)
        if status:
            sys.exit(f"the run ended with {os.waitstatus_to_exitcode(status)}")
    return planned, 1024 * usage.ru_maxrss


if __name__ == "__main__":
    print(json.dumps(measure(sys.argv[1:])))
