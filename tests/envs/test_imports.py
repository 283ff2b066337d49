"""Environments know text only: they import no JAX, and of jaxrl only `utils`."""

import subprocess
import sys
from pathlib import Path

import jaxrl.envs

MODULES = sorted(path.stem for path in Path(jaxrl.envs.__path__[0]).glob("*.py"))

SHOW = """
import importlib, sys
for name in sys.argv[1:]:
    importlib.import_module(f"jaxrl.envs.{name}".removesuffix(".__init__"))
print("\\n".join(sys.modules))
"""


def test_environments_import_no_jax_and_little_of_jaxrl():
    command = [sys.executable, "-c", SHOW, *MODULES]
    loaded = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    assert {f"jaxrl.envs.{name}" for name in ("search_env", "math_env", "protocol")} <= set(loaded)
    ours = [name for name in loaded if name.split(".")[0] == "jaxrl"]
    rooms = ("jaxrl.envs.", "jaxrl.utils.")
    assert [name for name in ours if not f"{name}.".startswith(rooms)] == ["jaxrl"]
    foreign = {"jax", "jaxlib", "flax", "numpy", "ml_collections", "transformers"}
    assert not foreign & {name.split(".")[0] for name in loaded}
