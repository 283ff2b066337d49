"""A hybrid with experts on a mesh of virtual devices."""

import os
import subprocess
import sys

import pytest

from tests.helpers import ROOT, with_devices


@pytest.mark.minutes
def test_a_mesh_computes_what_one_device_does():
    environment = {
        "JAX_PLATFORMS": "cpu",
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",  # half the compile time
        **with_devices(8),
    }
    command = [sys.executable, "-m", "tests.extras.hybrid_moe.mesh_worker"]
    subprocess.run(command, cwd=ROOT, env=os.environ | environment, check=True, timeout=1200)
