"""The mesh, and equality of sampler and update on a mesh and on one device."""

import itertools
import os
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import jax
import pytest
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

from jaxrl.runtime import sharding
from tests.helpers import ROOT, TINY, TINY_MOE, with_devices

AXES = ("data", "fsdp", "context", "expert", "tensor")


def abstract_mesh(data, fsdp, tensor, context=1, expert=1):
    return AbstractMesh((data, fsdp, context, expert, tensor), AXES)


@pytest.mark.parametrize(
    "sizes", [(3, 1, 1, 1), (-1, 3, 1, 1), (-1, -1, 1, 1), (0, 1, 1, 8), (-2, -2, 1, 2)]
)
def test_a_mesh_that_does_not_divide_the_devices_is_refused(sizes):
    axes = dict(zip(("data", "fsdp", "context", "tensor"), sizes, strict=True))
    with pytest.raises(ValueError, match=r"config\.mesh .* the number of devices, 8; "):
        sharding.make_mesh(**axes, devices=list(range(8)))


def test_minus_one_takes_the_remaining_devices():
    mesh = sharding.make_mesh(data=1, fsdp=-1, tensor=1, devices=jax.devices()[:1])
    assert dict(mesh.shape) == dict.fromkeys(AXES, 1)
    assert sharding.compute_mesh_sizes(8, data=1, fsdp=2, context=-1, tensor=2)["context"] == 2


@pytest.mark.parametrize(("count", "processes", "tensor"), [(8, 1, 1), (1, 1, 2), (2, 1, 4)])
def test_rollout_devices_must_be_whole_rows_of_each_process(count, processes, tensor):
    axes = {"data": -1, "fsdp": 1, "tensor": tensor}
    with pytest.raises(ValueError, match=rf"rollout_devices={count} .* multiple of .*{tensor} tha"):
        sharding.compute_mesh_sizes(8, **axes, rollout_devices=count, num_processes=processes)


def test_rollout_devices_do_not_train():
    axes = {"data": -1, "fsdp": 1, "tensor": 2, "rollout_devices": 2}
    assert sharding.compute_mesh_sizes(8, **axes)["data"] == 3
    assert sharding.compute_mesh_sizes(8, **axes, num_processes=2)["data"] == 2


def complete(**sizes):
    return dict.fromkeys(AXES, 1) | sizes


def torus(x, y, z, host):
    """Return the chips of a TPU slice as JAX lists them, one host after another."""
    hosts = itertools.product(*(range(n // h) for n, h in zip((z, y, x), host[::-1], strict=True)))
    within = list(itertools.product(*(range(h) for h in host[::-1])))
    chips = []
    for process, origin in enumerate(hosts):
        for chip in within:
            coords = [p * h + c for p, h, c in zip(origin, host[::-1], chip, strict=True)]
            chips.append(
                SimpleNamespace(
                    id=len(chips), process_index=process, coords=tuple(coords[::-1]),
                    core_on_chip=0, slice_index=0, platform="tpu", device_kind="TPU v5",
                )
            )  # fmt: skip
    return chips


def check_arranged(mesh, devices, sizes):
    assert mesh.shape == tuple(sizes.values())
    assert {device.id for device in mesh.flat} == {device.id for device in devices}
    for group in mesh.reshape(-1, sizes["expert"] * sizes["tensor"]):
        assert len({device.process_index for device in group}) == 1


@pytest.mark.parametrize(
    "sizes",
    [
        {"fsdp": 16, "tensor": 4},
        {"fsdp": 8, "context": 2, "tensor": 4},
        {"fsdp": 8, "context": 8},
        {"fsdp": 16, "expert": 2, "tensor": 2},
    ],
)
def test_meshes_of_a_pod_keep_experts_and_heads_on_a_host(sizes):
    # Axes of 8 share a dimension of the 4 x 4 x 4 torus with another axis; an axis of 4 along a
    # dimension would span two hosts of 2 x 2 chips.
    sizes, pod = complete(**sizes), torus(4, 4, 4, host=(2, 2, 1))
    check_arranged(sharding.arrange_devices(pod, sizes), pod, sizes)


def test_a_tensor_axis_beyond_a_host_of_a_pod_is_refused():
    pod = torus(4, 4, 4, host=(2, 2, 1))
    with pytest.raises(ValueError, match=r"tensor=8 would span several .* own 4 devices; set it"):
        sharding.arrange_devices(pod, complete(fsdp=8, tensor=8))


def test_rollout_devices_leave_gaps_in_a_torus():
    pod = [
        chip for chip in torus(4, 4, 1, host=(2, 2, 1)) if chip.coords[0] % 2 + chip.coords[1] % 2
    ]
    sizes = complete(fsdp=12)
    check_arranged(sharding.arrange_devices(pod, sizes, with_gaps=True), pod, sizes)


def test_gpus_of_several_hosts_form_a_mesh():
    # Each host of GPUs is its own slice, and JAX numbers processes and devices independently.
    gpus = [
        SimpleNamespace(
            id=n, process_index=1 - n // 8, slice_index=n // 8, platform="gpu", device_kind="H100"
        )
        for n in range(16)
    ]
    sizes = complete(data=2, fsdp=2, tensor=4)
    mesh = sharding.arrange_devices(gpus, sizes)
    check_arranged(mesh, gpus, sizes)
    assert [device.id for device in mesh.flat] == [*range(8, 16), *range(8)]


def test_a_tensor_axis_that_splits_a_head_is_refused():
    sharding.check_even_split(abstract_mesh(2, 2, 2), TINY)
    with pytest.raises(ValueError, match=r"config\.mesh\.tensor=4 .* 2 key-value heads"):
        sharding.check_even_split(abstract_mesh(2, 1, 4), TINY)


def test_weights_are_split_along_axes_that_divide_them():
    specs = {
        name: jax.tree.map(lambda s: s.spec, sharding.make_param_shardings(mesh, TINY, **settings))
        for name, mesh, settings in [
            ("train", abstract_mesh(1, 2, 2), {}),
            ("decode", abstract_mesh(1, 2, 2), {"for_decode": True}),
            ("odd", abstract_mesh(1, 3, 1), {}),
            ("long", abstract_mesh(1, 2, 1, context=2), {}),
            ("half odd", abstract_mesh(1, 2, 1, context=3), {}),
        ]
    }
    mlp = {name: spec["blocks"]["mlp"]["down"]["kernel"] for name, spec in specs.items()}
    assert mlp["train"] == P(None, "tensor", "fsdp")
    assert mlp["decode"] == P(None, "tensor", None)
    assert mlp["odd"] == P(None, "tensor", None)  # 3 does not divide a width of 64
    assert mlp["long"] == P(None, "tensor", ("fsdp", "context"))
    assert mlp["half odd"] == P(None, "tensor", "fsdp")
    assert specs["train"]["embed"]["embedding"] == P("tensor", "fsdp")
    assert specs["train"]["blocks"]["attention"]["q"]["bias"] == P(None, "tensor")
    assert specs["train"]["norm"]["scale"] == P(None)
    for spec in specs.values():
        assert jax.tree.structure(spec, is_leaf=lambda x: isinstance(x, P)) == jax.tree.structure(
            TINY.make_abstract_params()
        )


def run_check(name, num_devices=8):
    """Run a check of `mesh_worker` in a process with virtual devices."""
    environment = {
        "JAX_PLATFORMS": "cpu",
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",  # half the compile time
        **with_devices(num_devices),
    }
    command = [sys.executable, "-m", "tests.mesh_worker", name]
    subprocess.run(command, cwd=ROOT, env=os.environ | environment, check=True, timeout=1200)


@pytest.mark.minutes
def test_data_fsdp_and_tensor_meshes_compute_what_one_device_does():
    run_check("rows")


@pytest.mark.minutes
def test_four_devices_compute_what_one_does():
    run_check("four devices", num_devices=4)


@pytest.mark.slow(instead="runtime/test_sharding.py::test_four_devices_compute_what_one_does")
@pytest.mark.parametrize("name", ["context", "images", "experts"])
def test_more_meshes_compute_what_one_device_does(name):
    run_check(name)


def test_an_expert_axis_that_does_not_divide_the_experts_is_refused():
    model = replace(TINY_MOE, num_experts=6)
    sharding.check_even_split(abstract_mesh(1, 1, 1, expert=3), model)
    with pytest.raises(ValueError, match=r"mesh\.expert=4 does not divide the model's 6 experts"):
        sharding.check_even_split(abstract_mesh(1, 1, 1, expert=4), model)


def test_experts_are_split_over_expert_and_other_weights_over_fsdp_and_expert():
    mesh = abstract_mesh(1, 2, 1, expert=4)
    for for_decode, wide, expert in (
        (False, ("fsdp", "expert"), P(None, "expert", "fsdp", "tensor")),
        (True, None, P(None, "expert", None, "tensor")),
    ):
        layouts = sharding.make_param_shardings(mesh, TINY_MOE, for_decode=for_decode)
        assert layouts["blocks"]["moe"]["gate"]["kernel"].spec == expert
        assert layouts["blocks"]["mlp"]["gate"]["kernel"].spec == P(None, wide, "tensor")
        assert layouts["blocks"]["moe"]["router"]["kernel"].spec == P(None, wide, None)
