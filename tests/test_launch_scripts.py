"""The shell scripts of `launch/`: free of findings, and what they run."""

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

LAUNCH = Path(__file__).parents[1] / "launch"
SHELLCHECK = Path(sys.executable).parent / "shellcheck"
ARGUMENTS = ["--config=configs/my.py", "--workdir=runs/my run", "--config.stages=('train',)"]


def dry_run(script, **environment):
    """Return what a script prints with DRY_RUN=1, started from another folder."""
    done = subprocess.run(
        [LAUNCH / script, *ARGUMENTS],
        capture_output=True,
        text=True,
        cwd="/",
        env=os.environ | {"DRY_RUN": "1", "PYTHON": "/bin/python3"} | environment,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_shellcheck_finds_nothing():
    command = [SHELLCHECK, "-x", *LAUNCH.glob("*.sh")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=LAUNCH.parent)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    ("script", "command"),
    [
        ("one_host.sh", "exec /bin/python3 -m jaxrl.launch"),
        ("tpu_pod.sh", "exec /bin/python3 -m jaxrl.launch --cluster=tpu"),
        ("slurm.sh", "srun --wait=60 /bin/python3 -m jaxrl.launch --cluster=slurm"),
    ],
)
def test_arguments_are_passed_on_whole(script, command):
    assert shlex.split(dry_run(script)) == [*command.split(), *ARGUMENTS]


@pytest.mark.parametrize("name", ["default", "venv", "named"])
def test_one_host_runs_in_the_users_folder_with_their_interpreter(tmp_path, name):
    user_folder, repository = tmp_path / "my folder", tmp_path / "jaxrl"
    python = {
        "default": tmp_path / "bin" / "python3",
        "venv": user_folder / ".venv" / "bin" / "python",
        "named": tmp_path / "bin" / "mine",
    }[name]
    for path in (tmp_path / "bin" / "python3", python):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text('#!/bin/sh\nprintf "%s\\n" "$0" "$PWD" "$PYTHONPATH" "$@"\n')
        path.chmod(0o755)
    user_folder.mkdir(exist_ok=True)
    shutil.copytree(LAUNCH, repository / "launch")  # without an environment of its own
    environment = {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "PYTHONPATH": "/mine"}
    if name == "named":
        environment["PYTHON"] = str(python)
    done = subprocess.run(
        [repository / "launch" / "one_host.sh", *ARGUMENTS],
        **{"capture_output": True, "text": True, "cwd": user_folder, "env": environment},
    )
    program, folder, path, *arguments = done.stdout.splitlines()
    assert (program, folder) == (str(python), str(user_folder)), done.stderr
    assert path == f"/mine:{repository}"  # so that shipped configurations find one another
    assert arguments == ["-m", "jaxrl.launch", *ARGUMENTS]


@pytest.mark.parametrize(
    ("code", "restarts", "is_queued"),
    [
        (75, 0, True),
        (76, 3, True),
        (137, 0, True),
        (130, 0, False),  # somebody pressed Ctrl-C twice
        (75, 100, False),
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


def test_gke_starts_a_pod_for_each_host():
    manifests = dry_run("gke.sh", IMAGE="registry/jaxrl:1", CLAIM="disk", NUM_HOSTS="8")
    service, job = yaml.safe_load_all(manifests)
    assert service["spec"]["clusterIP"] == "None"
    assert (job["spec"]["completions"], job["spec"]["parallelism"]) == (8, 8)
    pod = job["spec"]["template"]["spec"]
    [container] = pod["containers"]
    assert container["args"] == ARGUMENTS
    assert container["command"] == ["/jaxrl/launch/tpu_pod.sh"]
    assert pod["volumes"][0]["persistentVolumeClaim"] == {"claimName": "disk"}


def test_gke_passes_variables_and_secrets_and_keeps_its_cache():
    variables = {
        "ENVIRONMENT": "SEARCH_URL EMPTY NO",
        "NO": "a word that YAML 1.1 takes for false",
        "SEARCH_URL": 'http://it\'s: "here"\nand there',
        "EMPTY": "",
        "SECRETS": "SERPER_API_KEY=search WANDB_API_KEY=logs:wandb-key",
        "SERPER_API_KEY": "not to be seen",
    }
    manifests = dry_run("gke.sh", IMAGE="registry/jaxrl:1", CLAIM="disk", **variables)
    assert "not to be seen" not in manifests
    _, job = yaml.safe_load_all(manifests)
    [container] = job["spec"]["template"]["spec"]["containers"]
    assert container["env"] == [
        {"name": "XDG_CACHE_HOME", "value": "/shared/cache"},
        {"name": "SEARCH_URL", "value": variables["SEARCH_URL"]},
        {"name": "EMPTY", "value": ""},
        {"name": "NO", "value": variables["NO"]},
        *(
            {"name": name, "valueFrom": {"secretKeyRef": {"name": secret, "key": key}}}
            for name, secret, key in [
                ("SERPER_API_KEY", "search", "SERPER_API_KEY"),
                ("WANDB_API_KEY", "logs", "wandb-key"),
            ]
        ),
    ]
    [mount] = container["volumeMounts"]
    assert container["env"][0]["value"].startswith(mount["mountPath"] + "/")


def test_gke_does_not_restart_after_errors_that_need_a_person():
    _, job = yaml.safe_load_all(dry_run("gke.sh", IMAGE="registry/jaxrl:1", CLAIM="disk"))
    [rule] = job["spec"]["podFailurePolicy"]["rules"]
    pod = job["spec"]["template"]["spec"]
    assert pod["restartPolicy"] == "Never"  # Kubernetes refuses the rules with another
    assert rule["action"] == "FailJob"
    assert rule["onExitCodes"]["containerName"] == pod["containers"][0]["name"]
    assert rule["onExitCodes"]["operator"] == "In"
    # An error, an outage, a sign of collapse, a spent budget, and a second Ctrl-C.
    assert {*rule["onExitCodes"]["values"]} == {1, 69, 70, 78, 130}
