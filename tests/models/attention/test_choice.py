"""Selection of attention kernels."""

import jax
import jax.numpy as jnp
import pytest

from jaxrl.config.schema import ATTENTION
from jaxrl.models.attention.choice import (
    PAGED_KERNELS,
    TRAIN_KERNELS,
    resolve_kernel_name,
    select_kernels,
)
from jaxrl.models.attention.reference import XLA
from jaxrl.runtime.sharding import make_mesh
from tests.helpers import TINY


def test_a_cpu_gets_xla():
    mesh = make_mesh(data=1, fsdp=1, tensor=1, devices=jax.devices()[:1])
    kernels = select_kernels("auto", mesh, TINY)
    assert (kernels.name, kernels.reason) == ("xla", "since the devices are cpus")
    assert kernels.attend_packed is XLA.attend_packed


@pytest.mark.parametrize(("name", "platform"), [("mosaic_gpu", "gpu"), ("mosaic", "tpu")])
def test_each_platform_has_its_kernel_for_heads_that_fit(name, platform):
    assert resolve_kernel_name("auto", platform, 128)[0] == name
    assert resolve_kernel_name(name, platform, 128)[0] == name
    assert resolve_kernel_name("auto", platform, 320)[0] == "xla"


def test_float32_gets_no_kernel_for_bfloat16():
    assert resolve_kernel_name("auto", "gpu", 128, jnp.float32)[0] == "triton"
    assert resolve_kernel_name("auto", "gpu", 128, "bfloat16")[0] == "mosaic_gpu"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("mosaic_gpu", "gpu", 128, jnp.dtype("float32")), "kernels multiply 16-bit floats, but"),
        (("triton", "cpu", 64), "'triton', whose kernels are for gpus, but the devices are"),
        (("mosaic", "tpu", 320), "of at most 256, but the model's are 320; set it to 'auto'"),
    ],
)
def test_a_kernel_that_cannot_run_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        resolve_kernel_name(*arguments)


def test_every_kernel_can_be_configured():
    names = {name for kernels in TRAIN_KERNELS.values() for name in kernels}
    assert {"auto", "xla", *names} == set(ATTENTION)
    assert {platform: list(kernels) for platform, kernels in PAGED_KERNELS.items()} == {
        platform: list(kernels) for platform, kernels in TRAIN_KERNELS.items()
    }
