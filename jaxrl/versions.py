"""What a run was made with: versions, devices, the code's commit, the model's size."""

from __future__ import annotations

import json
import math
import platform
import subprocess
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax

import jaxrl
from jaxrl.assemble import Parts
from jaxrl.files import written_whole
from jaxrl.models.qwen import abstract_params

PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "transformers", "numpy")


def write_environment(path: Path, step: int, parts: Parts) -> None:
    """Adds this start of the run, after global step `step`, to its `environment.json`."""
    try:
        starts = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        starts = []  # the first start, or a file that something else has damaged
    starts = [*(starts if isinstance(starts, list) else []), {"step": step, **environment(parts)}]
    with written_whole(path) as file:
        file.write(json.dumps(starts, indent=1, ensure_ascii=False) + "\n")


def environment(parts: Parts) -> dict[str, Any]:
    """This process's versions and devices, and what it works on."""
    device, model = jax.devices()[0], parts.model_config
    shapes = jax.tree.leaves(abstract_params(model))
    return {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": {
            "jaxrl": jaxrl.__version__,
            "python": platform.python_version(),
            **{name: version(name) for name in PACKAGES},
        },
        "commit": commit(Path(jaxrl.__file__).parent),
        "machine": {
            "system": platform.platform(),
            "device_kind": device.device_kind,
            "num_devices": jax.device_count(),
            "num_processes": jax.process_count(),
        },
        "model": {
            "layers": model.num_layers,
            "width": model.width,
            "parameters": sum(math.prod(leaf.shape) for leaf in shapes),
        },
        "num_tasks": len(parts.tasks),
        "num_eval_tasks": len(parts.eval_tasks),
        "num_demonstrations": len(parts.demonstrations),
    }


def commit(folder: Path) -> str | None:
    """The git commit of the code in `folder`, with a + where files differ from it.

    None where git does not know these files, even if the folder lies inside another repository.
    """
    try:
        _git(folder, "ls-files", "--error-unmatch", "__init__.py")
        changed = _git(folder, "status", "--porcelain", "--untracked-files=no", ".")
        return _git(folder, "rev-parse", "HEAD") + "+" * bool(changed)
    except (OSError, subprocess.SubprocessError):
        return None


def _git(folder: Path, *arguments: str) -> str:
    done = subprocess.run(
        ["git", *arguments], cwd=folder, capture_output=True, text=True, check=True, timeout=10
    )
    return done.stdout.strip()
