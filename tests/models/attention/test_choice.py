"""Which kernels a run gets, and what is refused."""

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
    chosen = select_kernels("auto", mesh, TINY)
    assert (chosen.name, chosen.reason) == ("xla", "since the devices are cpus")
    assert chosen.attend_packed is XLA.attend_packed


@pytest.mark.parametrize(("name", "platform"), [("mosaic_gpu", "gpu"), ("mosaic", "tpu")])
def test_each_platform_has_its_own(name, platform):
    assert resolve_kernel_name("auto", platform, 128) == (
        name,
        f"since the devices are {platform}s",
    )
    assert resolve_kernel_name(name, platform, 128) == (name, "set by config.model.attention")
    assert resolve_kernel_name("xla", platform, 320) == ("xla", "set by config.model.attention")
    wide = f"since heads of 320 are too wide for {name}"
    assert resolve_kernel_name("auto", platform, 320) == ("xla", wide)


def test_kernels_for_16_bits_are_not_tried_with_float32():
    assert resolve_kernel_name("auto", "gpu", 128, jnp.float32) == (
        "triton", "since the devices are gpus and mosaic_gpu is for bfloat16"
    )  # fmt: skip
    assert resolve_kernel_name("auto", "gpu", 128, "bfloat16")[0] == "mosaic_gpu"
    with pytest.raises(
        ValueError,
        match=r"kernels multiply 16-bit floats, but config\.model\.dtype is 'float32'",
    ):
        resolve_kernel_name("mosaic_gpu", "gpu", 128, jnp.dtype("float32"))


def test_what_does_not_run_here_is_refused():
    with pytest.raises(
        ValueError, match="'triton', whose kernels are for gpus, but the devices are"
    ):
        resolve_kernel_name("triton", "cpu", 64)
    with pytest.raises(
        ValueError, match="of at most 256, but the model's are 320; set it to 'auto'"
    ):
        resolve_kernel_name("mosaic", "tpu", 320)
    assert {"auto", "xla", *(name for line in TRAIN_KERNELS.values() for name in line)} == set(
        ATTENTION
    )
    assert {place: list(line) for place, line in PAGED_KERNELS.items()} == {
        place: list(line) for place, line in TRAIN_KERNELS.items()
    }
