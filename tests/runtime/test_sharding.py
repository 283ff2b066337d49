"""The mesh, and that sampler and update compute on it what they compute on one device."""

import itertools
import json
import math
import os
import subprocess
import sys
from collections import Counter
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import jax
import pytest
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

from jaxrl.runtime import sharding
from tests.helpers import TINY, TINY_MOE, UPDATE_PROGRAMS, with_devices
from tests.mesh_worker import (
    CHUNK_TOKENS,
    EVERY_MESH,
    EXPERT_MESHES,
    GROUPS,
    NUM_ROWS,
    SHAPE,
)
from tests.vision import golden

AXES = ("data", "fsdp", "context", "expert", "tensor")
MESHES = {
    name: {"context": 1, "expert": 1} | sizes
    for group in GROUPS.values()
    for name, sizes in group.items()
}
ROOT = Path(__file__).parents[2]


def abstract_mesh(data, fsdp, tensor, context=1, expert=1):
    return AbstractMesh((data, fsdp, context, expert, tensor), AXES)


@pytest.mark.parametrize(
    "sizes",
    [
        *((3, 1, 1, 1), (4, 4, 1, 1), (4, 1, 1, 1), (-1, 3, 1, 1), (-1, -1, 1, 1), (0, 1, 1, 8)),
        *((-2, -2, 1, 2), (2, 1, 3, 1), (-1, 1, 3, 1), (-1, 1, -1, 1), (-2, 1, -2, 2)),
    ],
)
def test_mesh_that_does_not_divide_the_devices_is_refused(sizes):
    axes = dict(zip(("data", "fsdp", "context", "tensor"), sizes, strict=True))
    with pytest.raises(ValueError, match=r"config\.mesh .* the number of devices, 8; "):
        sharding.make_mesh(**axes, devices=list(range(8)))


def test_minus_one_is_what_is_left():
    mesh = sharding.make_mesh(data=1, fsdp=-1, tensor=1, devices=jax.devices()[:1])
    sizes = {"data": 1, "fsdp": 1, "context": 1, "expert": 1, "tensor": 1}
    assert dict(mesh.shape) == sizes
    assert sharding.compute_mesh_sizes(8, data=1, fsdp=2, context=-1, tensor=2)["context"] == 2


@pytest.mark.parametrize(
    ("count", "processes", "tensor"), [(8, 1, 1), (4, 2, 1), (1, 1, 2), (2, 1, 4)]
)
def test_devices_that_sample_are_some_of_each_process_and_whole_rows(count, processes, tensor):
    axes = {"data": -1, "fsdp": 1, "tensor": tensor}
    with pytest.raises(ValueError, match=rf"rollout_devices={count} .* multiple of .*{tensor} tha"):
        sharding.compute_mesh_sizes(8, **axes, rollout_devices=count, num_processes=processes)


def test_devices_that_sample_do_not_train():
    axes = {"data": -1, "fsdp": 1, "tensor": 2, "rollout_devices": 2}
    assert sharding.compute_mesh_sizes(8, **axes)["data"] == 3
    assert sharding.compute_mesh_sizes(8, **axes, num_processes=2)["data"] == 2
    with pytest.raises(ValueError, match=r"devices, 6 without those of rollout_devices; the sizes"):
        sharding.compute_mesh_sizes(8, **axes | {"data": 4})


def sizes_of(**sizes):
    return dict.fromkeys(AXES, 1) | sizes


def torus(x, y, z, host):
    """The chips of a TPU slice as JAX lists them, one host after another."""
    hosts = itertools.product(*(range(n // h) for n, h in zip((z, y, x), host[::-1], strict=True)))
    within = list(itertools.product(*(range(h) for h in host[::-1])))
    found = []
    for process, place in enumerate(hosts):
        for chip in within:
            at = [p * h + c for p, h, c in zip(place, host[::-1], chip, strict=True)]
            found.append(
                SimpleNamespace(
                    id=len(found), process_index=process, coords=tuple(at[::-1]), core_on_chip=0,
                    slice_index=0, platform="tpu", device_kind="TPU v5",
                )
            )  # fmt: skip
    return found


POD_MESHES = (
    {"fsdp": 64},
    {"fsdp": 16, "tensor": 4},
    {"data": 2, "fsdp": 8, "tensor": 4},
    {"fsdp": 8, "context": 2, "tensor": 4},
    {"fsdp": 8, "context": 8},
    {"fsdp": 16, "expert": 2, "tensor": 2},
)


def check_arranged(mesh, devices, sizes):
    assert mesh.shape == tuple(sizes.values())
    assert {device.id for device in mesh.flat} == {device.id for device in devices}
    for together in mesh.reshape(-1, sizes["expert"] * sizes["tensor"]):
        assert len({device.process_index for device in together}) == 1


@pytest.mark.parametrize("sizes", POD_MESHES)
def test_meshes_of_a_pod_keep_experts_and_heads_on_a_host(sizes):
    # Axes of 8 share a dimension of the torus of 4 x 4 x 4 with another; one of 4 along a dimension
    # would span two hosts of 2 x 2 chips.
    sizes, pod = sizes_of(**sizes), torus(4, 4, 4, host=(2, 2, 1))
    check_arranged(sharding.arrange_devices(pod, sizes), pod, sizes)


def test_a_tensor_axis_beyond_a_host_of_a_pod_is_refused():
    pod = torus(4, 4, 4, host=(2, 2, 1))
    with pytest.raises(ValueError, match=r"tensor=8 would span several .* own 4 devices; set it"):
        sharding.arrange_devices(pod, sizes_of(fsdp=8, tensor=8))


def test_devices_that_sample_leave_gaps_in_a_torus():
    pod = [
        chip for chip in torus(4, 4, 1, host=(2, 2, 1)) if chip.coords[0] % 2 + chip.coords[1] % 2
    ]
    sizes = sizes_of(fsdp=12)
    check_arranged(sharding.arrange_devices(pod, sizes, with_gaps=True), pod, sizes)


def test_gpus_of_several_hosts_are_a_mesh():
    # Each host of GPUs is a slice of its own, and JAX numbers processes and devices apart.
    gpus = [
        SimpleNamespace(
            id=n, process_index=1 - n // 8, slice_index=n // 8, platform="gpu", device_kind="H100"
        )
        for n in range(16)
    ]
    sizes = sizes_of(data=2, fsdp=2, tensor=4)
    mesh = sharding.arrange_devices(gpus, sizes)
    check_arranged(mesh, gpus, sizes)
    assert [device.id for device in mesh.flat] == [*range(8, 16), *range(8)]


def test_tensor_axis_that_cuts_a_head_is_refused():
    sharding.check_even_split(abstract_mesh(2, 2, 2), TINY)
    with pytest.raises(ValueError, match=r"config\.mesh\.tensor=4 .* 2 key-value heads"):
        sharding.check_even_split(abstract_mesh(2, 1, 4), TINY)


def test_weights_are_split_by_their_axes_and_where_they_divide():
    specs = {
        name: jax.tree.map(lambda s: s.spec, sharding.param_shardings(mesh, TINY, **settings))
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
            TINY.abstract_params()
        )


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    """What `mesh_worker` measures of a group, once, on eight virtual devices in its own process."""
    return cache(lambda group: measured(group, tmp_path_factory.mktemp("mesh") / "report.json"))


@pytest.fixture
def report(request, reports):
    return reports(request.param)


def measured(group, path, num_devices=8):
    settings = {
        "JAX_PLATFORMS": "cpu",
        **with_devices(num_devices),
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",  # of the machine code: half the compile time
    }
    result = subprocess.run(
        [sys.executable, "-m", "tests.mesh_worker", str(path), group],
        cwd=ROOT,
        env={**os.environ, **settings},
        capture_output=True,
        text=True,
        timeout=1200,
    )
    assert result.returncode == 0, result.stderr[-5000:]
    return json.loads(path.read_text())


def on_each_mesh(test):
    marks = {
        group: pytest.mark.slow(
            instead="runtime/test_sharding.py::test_gradients_are_those_of_one_device"
        )
        for group in GROUPS
    } | {"rows": pytest.mark.minutes}
    cases = [
        pytest.param(group, name, marks=marks[group], id=name)
        for group, meshes in GROUPS.items()
        for name in meshes
    ]
    return pytest.mark.parametrize(("report", "name"), cases, indirect=["report"])(test)


def num_shards(name):
    return MESHES[name]["data"] * MESHES[name]["fsdp"] * MESHES[name]["context"]


def axes_of(name, axes):
    return [axis for axis in axes if MESHES[name][axis] > 1]


def as_list(axes):
    return axes if isinstance(axes, list) else [axes]


@on_each_mesh
def test_cache_is_split_by_pages_and_heads_and_stays_so(report, name):
    sampler = report["meshes"][name]["sampler"]
    tensor = MESHES[name]["tensor"]
    for layout in (sampler["cache_before"], sampler["cache_after"]):
        shape = [NUM_ROWS // num_shards(name) * 4, 2 // tensor, 16, 16]
        assert layout["shapes"] == [shape]
        assert layout["num_parts"] == 8
    assert sampler["cache_before"] == sampler["cache_after"]
    by_page, by_head = (sampler["cache_before"]["spec"] + [None])[:2]
    assert as_list(by_page) == axes_of(name, sharding.PIECE_AXES)
    assert by_head == ("tensor" if tensor > 1 else None)


@on_each_mesh
def test_sampler_moves_no_cache_between_devices(report, name):
    # Keys of one page and layer, of the heads of one device.
    smallest = 2 // MESHES[name]["tensor"] * 16 * 16
    moved = report["meshes"][name]["sampler"]["collectives"]
    assert moved["copy"] == []
    assert {operation for operation, _ in moved["decode"]} <= {
        "all-gather",
        "all-reduce",
        "collective-permute",
    }
    rows = NUM_ROWS // num_shards(name)
    activations = rows * TINY.width
    assert all(size < smallest or size <= activations for _, size in moved["decode"])
    if MESHES[name]["tensor"] == 1:
        assert moved["decode"] == []  # every row stays on its device, its sampling included
    # The activations of the chunk that is read are summed over heads; nothing else is as large.
    activations = 64 * TINY.width
    for operation, size in moved["append"]:
        assert size < smallest or (operation == "all-reduce" and size <= activations)


@on_each_mesh
def test_each_program_compiles_once(report, name):
    sampler, update = (report["meshes"][name][part] for part in ("sampler", "update"))
    assert sampler["num_programs"] == {"append": 1, "decode": 2, "copy": 1, "swap": 1, "embed": 0}
    assert sampler["num_compilations"] == 0  # they were before
    assert update["num_compilations"] == update["num_programs"] <= UPDATE_PROGRAMS


@on_each_mesh
def test_forced_tokens_have_the_logprobs_of_one_device(report, name):
    # Sampled through two appends and many chunks on the mesh, scored on one device; and
    # given tokens scored by the training pass on both.
    measured = report["meshes"][name]
    assert measured["sampled_logprob_gap"] < 5e-5
    assert measured["scored_logprob_gap"] < 5e-5


@on_each_mesh
def test_samples_are_those_of_one_device(report, name):
    # Every uniform lies within its token's interval as one device has it, or so close to an end
    # that rounding decides; only there may samples part, and what follows is another text.
    measured = report["meshes"][name]
    assert measured["farthest_draw"] < 1e-5
    assert report["farthest_draw"] < 1e-5
    assert measured["num_differing"] <= 2
    assert report["num_sampled"] > 200


@on_each_mesh
def test_gradients_are_those_of_one_device(report, name):
    measured = report["meshes"][name]
    assert measured["gradient_distance"] < 1e-5
    assert measured["metric_gap"] < 1e-4
    assert 0 < measured["update"]["metrics"]["actor/pg_clipfrac"] < 1


@on_each_mesh
def test_an_adapter_is_split_as_the_weights_beside_it(report, name):
    measured = report["meshes"][name]["adapter"]
    assert measured["gradient_distance"] < 1e-5
    assert measured["weights_gap"] == 0
    assert measured["weights_lie"]
    assert measured["base_is_left"]
    # Where training splits no width, the sampler reads the very arrays.
    splits = "fsdp" in name or "context" in name
    assert measured["kernel_is_shared"] != splits


@on_each_mesh
def test_a_kernel_on_each_device_gives_the_gradients_of_all_rows_and_heads(report, name):
    assert report["meshes"][name]["attention_gap"] < 1e-5


@on_each_mesh
def test_update_keeps_weights_and_moments_split(report, name):
    update = report["meshes"][name]["update"]
    assert update["shardings_kept"]
    assert update["num_updates"] == 3
    split = MESHES[name]["fsdp"] * MESHES[name]["context"] * MESHES[name]["tensor"]
    for share in (update["params_share"], update["moments_share"]):
        assert 1 / split <= share < 1.05 / split  # norms are whole everywhere


@on_each_mesh
def test_update_moves_weights_rather_than_activations(report, name):
    # Each device computes its own rows whole. Otherwise the partial activations and logits of
    # other devices' rows would be summed all the time.
    update = report["meshes"][name]["update"]
    own_tokens = SHAPE.micro_rows // num_shards(name) * SHAPE.row_tokens
    most = CHUNK_TOKENS // num_shards(name)
    assert most / 2 < update["logits_tokens"] <= most
    wanted = activations_that_move(MESHES[name], TINY, own_tokens)
    assert Counter(update["activations_moved"]) == wanted


def activations_that_move(sizes, config, own_tokens):
    """Sizes of what holds tokens and moves between devices in an update, and how often it does."""
    context, tensor, found = sizes["context"], sizes["tensor"], Counter()
    if tensor > 1:  # sums over heads and the MLP: 3 forwards, 1 again backwards, 5 of gradients
        found[own_tokens * config.width] += 9
    if context > 1:
        heads = config.num_kv_heads // tensor * config.head_dim
        found[own_tokens * context] += 2  # segment ids and positions of whole rows
        found[own_tokens * heads * context] += 4  # keys and values of these, and again backwards
        found[own_tokens * heads] += 2  # the gradients of the device's own keys and values
    if sizes["data"] == 1:  # the embedding's gradient is added up in parts of the width
        parts = sizes["fsdp"] * context
        found[own_tokens * config.width // parts] += parts
        found[own_tokens * parts // tensor] += 1  # ids, of tokens shared among those of `tensor`
        found[own_tokens] += tensor > 1
    return +found


@pytest.mark.minutes
@pytest.mark.parametrize("report", ["rows"], indirect=True)
def test_no_device_adds_up_a_whole_table_of_the_embedding_s_gradient(report):
    update = report["meshes"]["fsdp 8"]["update"]
    # Each adds up its part of the width, for the tokens of all, whose gradients it gets in parts.
    assert update["embedding_gradients"] == [[TINY.vocab_size, TINY.width // 8]]
    assert update["tables_summed"] == 1  # the output layer's, of each device's own tokens
    assert set(update["activations_moved"]) == {44 * TINY.width // 8}


@on_each_mesh
def test_scores_are_split_like_the_batch(report, name):
    micro, row, *token = report["meshes"][name]["update"]["logprobs_spec"]
    assert micro is None
    assert as_list(row) == axes_of(name, sharding.BATCH_AXES)
    assert token == ["context"] * (MESHES[name]["context"] > 1)


@pytest.mark.minutes
def test_two_devices_compute_what_one_does(tmp_path):
    report = measured("two devices", tmp_path / "report.json", num_devices=2)
    for name in ("pieces of rows", "half the experts"):
        of_gradient, of_logprobs = report[name]
        assert of_gradient < 1e-5, name
        assert of_logprobs < 5e-5, name
    assert report["images"] < 1e-5
    # Where one trains and the other only samples.
    assert report["weights_on"] == [1]
    assert report["weights_gap"] == 0


@pytest.mark.slow(instead="runtime/test_sharding.py::test_two_devices_compute_what_one_does")
def test_images_on_every_mesh_have_the_gradient_of_each_sequence_alone(tmp_path):
    # However rows are packed and split, images read on the devices that have tokens of them.
    report = measured("images", tmp_path / "report.json")
    assert [mesh["sizes"] for mesh in report] == EVERY_MESH
    assert len(EVERY_MESH) == 16
    assert {mesh["num_micro"] for mesh in report} == {1, 2}
    for mesh in report:
        assert mesh["distance"] < 1e-5, mesh["sizes"]
        assert mesh["tower's"] < 1e-5, mesh["sizes"]
    # Nothing of patches moves.
    shown = [mesh for mesh in report if "activations_moved" in mesh]
    assert len(shown) == 2
    for mesh in shown:
        wanted = activations_that_move(mesh["sizes"], golden()[0], mesh["own_tokens"])
        assert Counter(mesh["activations_moved"]) == wanted


@pytest.fixture(scope="module")
def of_experts(tmp_path_factory):
    return measured("experts", tmp_path_factory.mktemp("experts") / "report.json")


@pytest.mark.slow(instead="runtime/test_sharding.py::test_two_devices_compute_what_one_does")
@pytest.mark.parametrize("name", EXPERT_MESHES)
def test_experts_on_many_devices_compute_what_one_does(of_experts, name):
    measured = of_experts[name]
    assert measured["gradient_distance"] < 1e-5
    assert measured["metric_gap"] < 1e-4
    assert measured["scored_logprob_gap"] < 5e-5
    # Sampled on the mesh, scored by the training pass of one device.
    assert measured["sampled_logprob_gap"] < 1e-4
    assert measured["num_sampled"] > 200
    assert measured["num_misrecorded"] == 0
    assert measured["shardings_kept"]
    sizes = {"context": 1} | EXPERT_MESHES[name]
    split = math.prod(sizes[axis] for axis in ("fsdp", "context", "expert", "tensor"))
    assert measured["experts_share"] == 1 / split
    # No array of the update holds tokens x experts x width, of those whose experts a device has.
    tokens = SHAPE.micro_rows * SHAPE.row_tokens
    tokens //= sizes["data"] * sizes["fsdp"] * sizes["context"]
    assert measured["largest_array"] < tokens * TINY_MOE.num_experts * TINY_MOE.width


EXPERTS = SimpleNamespace(num_experts=6, num_kv_heads=2)


def test_experts_are_split_evenly_or_the_axis_is_refused():
    sharding.check_even_split(abstract_mesh(1, 1, 1, expert=3), EXPERTS)
    with pytest.raises(
        ValueError, match=r"mesh\.expert=4 does not divide the model's 6 experts; set"
    ):
        sharding.check_even_split(abstract_mesh(1, 1, 1, expert=4), EXPERTS)
    with pytest.raises(ValueError, match=r"mesh\.expert=2 does not divide the model's 0 experts"):
        sharding.check_even_split(abstract_mesh(1, 1, 1, expert=2), TINY)


def test_weights_are_split_over_fsdp_and_expert_but_experts_over_one_each():
    mesh = abstract_mesh(1, 2, 1, expert=4)
    for for_decode, wide, expert in (
        (False, ("fsdp", "expert"), P(None, "expert", "fsdp", "tensor")),
        (True, None, P(None, "expert", None, "tensor")),
    ):
        layouts = sharding.param_shardings(mesh, TINY_MOE, for_decode=for_decode)
        assert layouts["blocks"]["moe"]["gate"]["kernel"].spec == expert
        assert layouts["blocks"]["mlp"]["gate"]["kernel"].spec == P(None, wide, "tensor")
        assert layouts["blocks"]["moe"]["router"]["kernel"].spec == P(None, wide, None)
