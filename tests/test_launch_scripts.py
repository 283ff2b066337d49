"""The shell scripts of `launch/`: clean, and what they would run."""

import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.specifiers import SpecifierSet

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


@pytest.mark.parametrize("name", ["python", "own", "named"])
def test_one_host_runs_in_the_users_own_folder(tmp_path, name):
    """Relative paths are those of the user; the interpreter is theirs where they have one."""
    told = '#!/bin/sh\nprintf "%s\\n" "$0" "$PWD" "$PYTHONPATH" "$@"\n'
    mine = tmp_path / "my folder"
    stub = {
        "python": tmp_path / "bin" / "python3",
        "own": mine / ".venv" / "bin" / "python",
        "named": tmp_path / "bin" / "mine",
    }[name]
    for path in (tmp_path / "bin" / "python3", stub):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(told)
        path.chmod(0o755)
    mine.mkdir(exist_ok=True)
    repository = tmp_path / "jaxrl"
    shutil.copytree(LAUNCH, repository / "launch")  # without an environment of its own
    environment = {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "PYTHONPATH": "/mine"}
    if name == "named":
        environment["PYTHON"] = str(stub)
    done = subprocess.run(
        [repository / "launch" / "one_host.sh", "--config=my_run.py", "--workdir=runs/my"],
        capture_output=True,
        text=True,
        cwd=mine,
        env=environment,
    )
    program, folder, path, *arguments = done.stdout.splitlines()
    assert (program, folder) == (str(stub), str(mine)), done.stderr
    assert path == f"/mine:{repository}"  # so that shipped configurations find one another
    assert arguments == ["-m", "jaxrl.launch", "--config=my_run.py", "--workdir=runs/my"]


@pytest.mark.parametrize(
    ("code", "restarts", "is_queued"),
    [
        (75, 0, True),
        (76, 3, True),
        (137, 0, True),
        (143, 0, True),
        (130, 0, False),  # somebody pressed Ctrl-C twice
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


def test_gke_passes_variables_and_secrets_and_keeps_its_cache():
    given = {
        "ENVIRONMENT": "SEARCH_URL EMPTY NO",
        "NO": "a word that YAML 1.1 takes for false",
        "SEARCH_URL": 'http://it\'s: "here"\nand there',
        "EMPTY": "",
        "SECRETS": "SERPER_API_KEY=search WANDB_API_KEY=logs:wandb-key",
        "SERPER_API_KEY": "not to be seen",
    }
    shown = show("gke.sh", IMAGE="registry/jaxrl:1", CLAIM="disk", **given)
    assert "not to be seen" not in shown
    _, job = yaml.safe_load_all(shown)
    [container] = job["spec"]["template"]["spec"]["containers"]
    assert container["env"] == [
        {"name": "XDG_CACHE_HOME", "value": "/shared/cache"},
        {"name": "SEARCH_URL", "value": given["SEARCH_URL"]},
        {"name": "EMPTY", "value": ""},
        {"name": "NO", "value": given["NO"]},
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


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"ENVIRONMENT": "NOT_SET"}, "ENVIRONMENT names NOT_SET, which is not set"),
        ({"ENVIRONMENT": "A-B"}, "ENVIRONMENT has 'A-B'; expected names of variables"),
        ({"SECRETS": "KEY"}, "SECRETS has 'KEY'; expected NAME=secret or NAME=secret:key"),
        ({"SECRETS": "KEY=a b"}, "SECRETS has 'b'; expected NAME=secret or NAME=secret:key"),
    ],
)
def test_gke_refuses_what_it_cannot_pass(given, told):
    done = subprocess.run(
        [LAUNCH / "gke.sh"],
        capture_output=True,
        text=True,
        env=os.environ | {"IMAGE": "a", "CLAIM": "b", "DRY_RUN": "1"} | given,
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(f"error: {told}")
    assert done.stderr.count("\n") == 1


def test_the_dockerfile_puts_the_repository_where_gke_starts_it():
    text = (LAUNCH / "Dockerfile").read_text(encoding="utf-8")
    steps = dict(re.findall(r"^([A-Z]+) (.+)$", text, re.MULTILINE))
    project = tomllib.loads((LAUNCH.parent / "pyproject.toml").read_text())["project"]
    python = re.fullmatch(r"python:(3\.\d+)-slim", steps["FROM"])[1]
    assert f"{python}.0" in SpecifierSet(project["requires-python"])
    _, job = yaml.safe_load_all(show("gke.sh", IMAGE="a", CLAIM="b"))
    [container] = job["spec"]["template"]["spec"]["containers"]
    [script] = container["command"]
    assert steps["WORKDIR"] == str(Path(script).parents[1])
    assert steps["COPY"] == ". ."


def test_gke_does_not_start_again_after_what_a_person_has_to_fix():
    _, job = yaml.safe_load_all(show("gke.sh", IMAGE="registry/jaxrl:1", CLAIM="disk"))
    [rule] = job["spec"]["podFailurePolicy"]["rules"]
    pod = job["spec"]["template"]["spec"]
    assert pod["restartPolicy"] == "Never"  # Kubernetes refuses the rules with another
    assert rule["action"] == "FailJob"
    assert rule["onExitCodes"]["containerName"] == pod["containers"][0]["name"]
    assert rule["onExitCodes"]["operator"] == "In"
    # An error, an outage, a sign of collapse, a spent budget, and a second Ctrl-C.
    assert {*rule["onExitCodes"]["values"]} == {1, 69, 70, 78, 130}


def test_gke_needs_an_image():
    done = subprocess.run([LAUNCH / "gke.sh"], capture_output=True, text=True)
    assert done.returncode != 0
    assert "set IMAGE" in done.stderr
