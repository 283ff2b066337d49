"""A hybrid model on meshes of virtual devices."""

import os
import subprocess
import sys

import pytest

from jaxrl.runtime import sharding
from tests.extras.delta_net.models import TINY_HYBRID
from tests.helpers import ROOT, with_devices
from tests.runtime.test_sharding import abstract_mesh


@pytest.mark.minutes
def test_meshes_compute_what_one_device_does():
    environment = {
        "JAX_PLATFORMS": "cpu",
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",  # half the compile time
        **with_devices(8),
    }
    command = [sys.executable, "-m", "tests.extras.delta_net.mesh_worker"]
    subprocess.run(command, cwd=ROOT, env=os.environ | environment, check=True, timeout=1200)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"context": 2}, r"mesh\.context=2 splits sequences"),
        ({"tensor": 4}, r"mesh\.tensor=4 does not divide the model's 2 "),
        ({"tensor": 3}, r"mesh\.tensor=3 does not divide the model's 2 "),
    ],
)
def test_meshes_that_cannot_split_the_model_are_refused(sizes, message):
    mesh = abstract_mesh(**{"data": 1, "fsdp": 1, "tensor": 1, **sizes})
    with pytest.raises(ValueError, match=message):
        sharding.check_even_split(mesh, TINY_HYBRID)
