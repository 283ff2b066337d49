"""The shell scripts of `launch/`: clean, and what they would run."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

LAUNCH = Path(__file__).parents[1] / "launch"
SHELLCHECK = Path(sys.executable).parent / "shellcheck"
SCRIPTS = sorted(LAUNCH.glob("*.sh"))
ARGUMENTS = ["--config=configs/my.py", "--workdir=runs/my run", "--config.stages=('train',)"]


def show(script, **environment):
    """What a script prints with DRY_RUN=1, started from another folder."""
    done = subprocess.run(
        [LAUNCH / script, *ARGUMENTS],
        capture_output=True,
        text=True,
        cwd="/",
        env=os.environ | {"DRY_RUN": "1", "PYTHON": "/bin/python3"} | environment,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_shellcheck_finds_nothing(script):
    done = subprocess.run(
        [SHELLCHECK, "-x", script], capture_output=True, text=True, cwd=LAUNCH.parent
    )
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    ("script", "command"),
    [
        ("one_host.sh", "exec /bin/python3 -m jaxrl.launch"),
        ("tpu_pod.sh", "exec /bin/python3 -m jaxrl.launch --cluster=tpu"),
        ("slurm.sh", "srun --wait=60 /bin/python3 -m jaxrl.launch --cluster=slurm"),
    ],
)
def test_arguments_arrive_whole(script, command):
    assert shlex.split(show(script)) == [*command.split(), *ARGUMENTS]


@pytest.mark.parametrize(
    ("code", "restarts", "is_queued"),
    [
        (75, 0, True),
        (76, 3, True),
        (137, 0, True),
        (75, 100, False),
        (69, 0, False),
        (1, 0, False),
        (0, 0, False),
    ],
)
def test_which_slurm_jobs_are_queued_again(tmp_path, code, restarts, is_queued):
    for name, exit_code in {"srun": code, "scontrol": 0}.items():
        (tmp_path / name).write_text(f'#!/bin/sh\necho {name} "$@"\nexit {exit_code}\n')
        (tmp_path / name).chmod(0o755)
    environment = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "SLURM_JOB_ID": "12",
        "SLURM_RESTART_COUNT": str(restarts),
        "PYTHON": "p",
    }
    done = subprocess.run([LAUNCH / "slurm.sh"], capture_output=True, text=True, env=environment)
    assert done.returncode == code
    assert ("scontrol requeue 12" in done.stdout) == is_queued


def test_the_gke_manifest():
    shown = show("gke.sh", IMAGE="registry/jaxrl:1", CLAIM="disk", NUM_HOSTS="8")
    service, job = yaml.safe_load_all(shown)
    assert service["spec"]["clusterIP"] == "None"
    assert (job["spec"]["completions"], job["spec"]["parallelism"]) == (8, 8)
    pod = job["spec"]["template"]["spec"]
    [container] = pod["containers"]
    assert container["args"] == ARGUMENTS
    assert container["command"] == ["/jaxrl/launch/tpu_pod.sh"]
    assert pod["volumes"][0]["persistentVolumeClaim"] == {"claimName": "disk"}


def test_gke_does_not_start_again_what_docs_restarts_says_would_come_again():
    _, job = yaml.safe_load_all(show("gke.sh", IMAGE="registry/jaxrl:1", CLAIM="disk"))
    [rule] = job["spec"]["podFailurePolicy"]["rules"]
    pod = job["spec"]["template"]["spec"]
    assert pod["restartPolicy"] == "Never"  # Kubernetes refuses the rules with another
    assert rule["action"] == "FailJob"
    assert rule["onExitCodes"]["containerName"] == pod["containers"][0]["name"]
    text = (LAUNCH.parent / "docs" / "restarts.md").read_text(encoding="utf-8")
    [codes] = re.findall(r"restart on every code but ([^:]+?), where a person", text)
    named = {int(code) for code in re.findall(r"\b\d+\b", codes)}
    assert rule["onExitCodes"]["operator"] == "In"
    assert {0, *rule["onExitCodes"]["values"]} == named


def test_gke_needs_an_image():
    done = subprocess.run([LAUNCH / "gke.sh"], capture_output=True, text=True)
    assert done.returncode != 0
    assert "set IMAGE" in done.stderr
