"""Records of a run's launches: versions, devices, commit, model size and data counts."""

from __future__ import annotations

import dataclasses
import json
import math
import platform
import subprocess
from collections.abc import Callable
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax

import jaxrl
from jaxrl.models.architecture import KernelCheck
from jaxrl.runtime.resume import read_launches
from jaxrl.training.run_state import Components
from jaxrl.utils.callables import list_user_code_folders
from jaxrl.utils.files import open_atomic, quarantine_file

PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "transformers", "numpy")


def write_environment(
    path: Path, step: int, components: Components, log: Callable[[str], None] = print
) -> None:
    """Append a record of this launch, which starts after global step `step`, to `environment.json`.

    An unreadable file is renamed and replaced.
    """
    starts = []
    try:
        starts = read_launches(path)
    except FileNotFoundError:
        if step > 0:
            log(f"warning: {path} is missing: the record of earlier starts is lost")
    except (OSError, ValueError) as error:
        log(f"warning: {error}; renamed to {quarantine_file(path).name}")
    starts = [*starts, {"step": step, **describe_environment(components)}]
    with open_atomic(path) as file:
        file.write(json.dumps(starts, indent=1, ensure_ascii=False) + "\n")


def describe_environment(components: Components) -> dict[str, Any]:
    """Return the versions, devices, model size and data counts of this process."""
    device = jax.devices()[0]
    sizes: dict[str, Any] = {"external": components.external}
    if not components.external:
        model = components.model.architecture.unwrapped
        shapes = jax.tree.leaves(model.make_abstract_params())
        sizes = {
            "layers": model.num_layers,
            "width": model.width,
            "parameters": sum(math.prod(leaf.shape) for leaf in shapes),
        }
    return {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": {
            "jaxrl": jaxrl.__version__,
            "python": platform.python_version(),
            **{name: version(name) for name in PACKAGES},
        },
        "commit": find_commit(Path(jaxrl.__file__).parent),
        "folder": str(Path.cwd()),
        "code_folders": list_user_code_folders(),
        "machine": {
            "system": platform.platform(),
            "device_kind": device.device_kind,
            "num_devices": jax.device_count(),
            "num_processes": jax.process_count(),
        },
        "model": sizes,
        **({"prompt_time": components.prompt_time} if components.prompt_time else {}),
        "kernels": [dataclasses.asdict(check) for check in collect_kernel_checks(components)],
        "num_tasks": len(components.tasks),
        "num_eval_tasks": len(components.eval_tasks),
        "num_demonstrations": len(components.demonstrations),
    }


def collect_kernel_checks(components: Components) -> tuple[KernelCheck, ...]:
    """Return the self-test results of the attention kernels and the architecture's kernels."""
    if components.external:
        return ()
    return *components.model.attention.kernel_checks, *components.model.architecture.kernel_checks


def find_commit(folder: Path) -> str | None:
    """Return the git commit of the code in `folder`, with a + for uncommitted changes.

    Return None if git does not track the code, even if the folder is inside a repository.
    """

    def run_git(*arguments: str) -> str:
        command = ["git", *arguments]
        options: dict[str, Any] = {"capture_output": True, "text": True, "check": True}
        return subprocess.run(command, cwd=folder, timeout=10, **options).stdout.strip()

    try:
        run_git("ls-files", "--error-unmatch", "__init__.py")
        changed = run_git("status", "--porcelain", "--untracked-files=no", ".")
        return run_git("rev-parse", "HEAD") + "+" * bool(changed)
    except (OSError, subprocess.SubprocessError):
        return None
