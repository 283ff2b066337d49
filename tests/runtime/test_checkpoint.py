"""Checkpoints: exact round trips, retention, interrupted saves and damaged files."""

import errno
import random
import shutil

import jax
import numpy as np
import optax
import pytest

from jaxrl.runtime import checkpoint
from jaxrl.runtime.checkpoint import (
    Checkpointer,
    CheckpointError,
    find_latest_complete_step,
    make_optimizer_items,
    select_steps_to_keep,
)
from jaxrl.runtime.sharding import make_mesh, make_param_shardings, make_restore_target
from jaxrl.training.update import init_state, make_state_shardings
from jaxrl.types import TrainState
from tests.helpers import TINY

pytestmark = pytest.mark.usefixtures("quick_compilation")

SMALL = {"x": np.arange(300, dtype=np.float32), "y": np.arange(5, dtype=np.int32)}


def make_state(step):
    params = {name: jax.numpy.asarray(values + step) for name, values in SMALL.items()}
    counter = jax.numpy.int32(step)
    return TrainState(
        params=params, opt_state={"mu": params}, num_updates=counter, num_skipped=counter
    )


DEVICE = jax.sharding.SingleDeviceSharding(jax.devices()[0])
STATE_TARGET = jax.tree.map(
    lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=DEVICE), make_state(0)
)


def assert_equal(got, wanted):
    assert jax.tree.structure(got) == jax.tree.structure(wanted)
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(x, y)


def restore(checkpointer, target=STATE_TARGET, **more):
    """Return the position, the state, and the items named in `more`."""
    items = {"params": target.params, "optimizer": make_optimizer_items(target), **more}
    position, restored = checkpointer.restore(lambda _: items)
    state = TrainState(params=restored["params"], **restored["optimizer"])
    return position, state, {name: restored[name] for name in more}


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "checkpoints"


@pytest.fixture
def open_checkpoints(folder):
    """Return a function that opens the folder; close everything at the end."""
    checkpointers = []

    def open_folder(**settings):
        checkpointers.append(Checkpointer(folder, **{"keep": 2, **settings}))
        return checkpointers[-1]

    yield open_folder
    for checkpointer in checkpointers:
        checkpointer.close()


def test_a_round_trip_is_exact(open_checkpoints):
    mesh = make_mesh(data=1, fsdp=1, tensor=1, devices=jax.devices()[:1])
    optimizer, rng = optax.adamw(1e-2), np.random.default_rng(0)

    def fill(leaf):
        values = np.asarray(1 + 5 * rng.random(leaf.shape)).astype(leaf.dtype)
        return jax.device_put(values, leaf.sharding)

    shapes = jax.eval_shape(
        lambda params: init_state(params, mesh, TINY, optimizer), TINY.make_abstract_params()
    )
    target = make_restore_target(shapes, make_state_shardings(mesh, TINY, optimizer))
    shardings = make_param_shardings(mesh, TINY)
    params_target = make_restore_target(TINY.make_abstract_params(), shardings)
    state, reference = jax.tree.map(fill, target), jax.tree.map(fill, params_target)
    position = {"step": 4, "stage": "train", "best": {"value": 0.25, "mark": None}}
    saving = open_checkpoints()
    saving.save(4, state, position, reference)
    saving.wait()
    # Restore with another object, as after a restart.
    got, restored, items = restore(open_checkpoints(), target, ref_params=params_target)
    assert got == position
    assert_equal(restored, state)
    assert_equal(items["ref_params"], reference)
    assert jax.tree.map(lambda x: x.sharding, restored.params) == shardings
    # Parameters alone, as for an evaluation.
    _, items = open_checkpoints().restore(lambda _: {"params": params_target})
    assert items.keys() == {"params"}
    assert_equal(items["params"], state.params)


@pytest.mark.parametrize("step", [2, 1])
def test_a_full_disk_leaves_the_latest_complete_checkpoint(
    open_checkpoints, folder, monkeypatch, step
):
    def fail(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    saving = open_checkpoints()
    saving.save(1, make_state(1), {"step": 1}, None)
    saving.wait()
    monkeypatch.setattr(checkpoint, "write_manifest", fail)
    saving.save(step, make_state(2), {"step": step}, None)
    with pytest.raises(OSError, match="No space left"):
        saving.wait()
    assert find_latest_complete_step(folder) == 1
    monkeypatch.undo()
    saving.close()
    position, state, _ = restore(open_checkpoints())
    assert position == {"step": 1}
    assert_equal(state, make_state(1))


def test_steps_to_keep_by_hand():
    values = {1: 0.5, 2: None, 3: 0.75, 4: 0.75, 5: None, 6: 0.25}
    assert select_steps_to_keep(values, 1, 0) == {6}
    assert select_steps_to_keep(values, 2, 1) == {5, 6, 3}  # the earlier of equal ones
    assert select_steps_to_keep(values, 2, 3) == {5, 6, 3, 4, 1}
    assert select_steps_to_keep(values, 9, 9) == set(values)


def test_the_latest_and_the_best_checkpoints_stay(open_checkpoints, folder):
    saving = open_checkpoints(keep_best=1)
    for step, value in [(1, 0.25), (2, 0.5), (3, None), (4, 0.5), (5, None)]:
        saving.save(step, make_state(step), {"step": step}, None, value=value)
    saving.wait()
    assert {path.name for path in folder.iterdir()} == {"2", "4", "5"}
    position, state, _ = restore(saving)
    assert position == {"step": 5}
    assert_equal(state, make_state(5))
    step, state = saving.restore_best(STATE_TARGET)
    assert step == 2
    assert_equal(state, make_state(2))


def test_saving_a_step_again_replaces_it(open_checkpoints, folder):
    saving = open_checkpoints()
    for seed in (1, 2):
        saving.save(3, make_state(seed), {"seed": seed}, None, value=float(seed))
    saving.wait()
    position, state, _ = restore(open_checkpoints())
    assert position == {"seed": 2}
    assert_equal(state, make_state(2))
    assert [path.name for path in folder.iterdir()] == ["3"]
    assert checkpoint.read_score(folder / "3") == 2.0


@pytest.mark.parametrize("moment", ["before", "during", "after"])
def test_a_killed_replacement_leaves_one_complete_checkpoint(open_checkpoints, folder, moment):
    saving = open_checkpoints()
    saving.save(3, make_state(1), {"seed": 1}, None)
    saving.wait()
    shutil.copytree(folder / "3", folder / "3.replaced")
    (folder / "saving").write_text("3")
    if moment == "before":
        shutil.rmtree(folder / "3")
    elif moment == "during":
        (folder / "3" / "manifest.json").unlink()
        (folder / "3" / "position" / "metadata").write_text("")
    assert restore(open_checkpoints())[0] == {"seed": 1}
    assert [path.name for path in folder.iterdir()] == ["3"]


def test_the_state_may_be_donated_while_it_is_saved(open_checkpoints, folder):
    update = jax.jit(lambda state: jax.tree.map(lambda x: 2 * x + 1, state), donate_argnums=0)
    state, wanted = jax.tree.map(jax.numpy.array, make_state(1)), []
    saving = open_checkpoints(keep=100)
    for step in range(4):
        wanted.append(jax.tree.map(lambda leaf: np.array(leaf, copy=True), state))
        saving.save(step, state, {}, None)
        for _ in range(3):  # overwrites the buffers that are being saved
            state = update(state)
    saving.wait()
    for step in reversed(range(4)):
        assert_equal(restore(open_checkpoints())[1], wanted[step])
        shutil.rmtree(folder / str(step))


def test_a_killed_save_leaves_no_trace(open_checkpoints, folder):
    saving = open_checkpoints()
    for step in (1, 2):
        saving.save(step, make_state(step), {"step": step}, None)
    saving.wait()
    shutil.copytree(folder / "2", folder / "3")
    (folder / "3" / "manifest.json").unlink()  # after Orbax, before the manifest
    (folder / "saving").write_text("3")
    (folder / "4.orbax-checkpoint-tmp" / "params").mkdir(parents=True)
    (folder / "1").rename(folder / "1.removed")
    messages = []
    restarted = open_checkpoints(log=messages.append)
    assert (restore(restarted)[0], messages) == ({"step": 2}, [])
    restarted.save(3, make_state(3), {"step": 3}, None)
    restarted.wait()
    assert {path.name for path in folder.iterdir()} == {"2", "3"}


def test_a_checkpoint_of_another_version_is_refused_and_left_in_place(open_checkpoints, folder):
    saving = open_checkpoints()
    saving.save(1, make_state(1), {"sizes_in_use": []}, None)
    saving.wait()
    files = list_files(folder / "1")
    with pytest.raises(CheckpointError, match=r"checkpoint 1 in .* lacks 'compiled_sizes'"):
        open_checkpoints().restore(lambda position: position["compiled_sizes"])
    assert list_files(folder / "1") == files


def list_files(step_folder):
    return sorted(path for path in step_folder.rglob("*") if path.is_file())


def read_all(folder):
    """Return all files but those of unfinished saves, which Orbax removes in the background."""
    tops = [path for path in folder.iterdir() if not path.name.endswith("-tmp")]
    files = [file for top in tops for file in (list_files(top) if top.is_dir() else [top])]
    return {file: file.read_bytes() for file in files}


def truncate(step_folder, rng):
    file = rng.choice([path for path in list_files(step_folder) if path.stat().st_size])
    data = file.read_bytes()
    file.write_bytes(data[: rng.randrange(len(data))])
    return str(file.relative_to(step_folder))


def flip_bytes(step_folder, rng):
    file = rng.choice([path for path in list_files(step_folder) if path.stat().st_size])
    data = bytearray(file.read_bytes())
    data[rng.randrange(len(data))] ^= rng.randrange(1, 256)
    file.write_bytes(bytes(data))
    return str(file.relative_to(step_folder))


def lose_file(step_folder, rng):
    file = rng.choice(list_files(step_folder))
    file.unlink()
    return str(file.relative_to(step_folder))


def become_another(step_folder, rng):
    """Replace the folder with that of another step."""
    shutil.rmtree(step_folder)
    shutil.copytree(step_folder.with_name("1"), step_folder)
    return "manifest.json"


DAMAGES = [truncate, flip_bytes, lose_file, become_another]


def add_clutter(folder):
    """Add folders and files that are not checkpoints."""
    for name in ("12x", "-3", "007", "٣", "5.bak", "7.orbax-checkpoint-tmp"):
        (folder / name).mkdir()
        (folder / name / "params").write_text("garbage")
    (folder / "notes.txt").write_text("mine")


@pytest.fixture(scope="module")
def three_checkpoints(tmp_path_factory):
    folder = tmp_path_factory.mktemp("three") / "checkpoints"
    saving = Checkpointer(folder, keep=3)
    for step in (1, 2, 3):
        saving.save(step, make_state(step), {"step": step}, None)
    saving.close()
    return folder


@pytest.mark.parametrize(
    ("damages", "seed"),
    [*(([damage], 0) for damage in DAMAGES), ([flip_bytes, truncate], 1), ([flip_bytes] * 3, 2)],
)
def test_damage_is_never_loaded_silently(three_checkpoints, folder, damages, seed):
    rng = random.Random(seed)
    shutil.copytree(three_checkpoints, folder)
    add_clutter(folder)
    # The latest checkpoints are damaged, or all of them.
    damaged = {
        step: damage(folder / str(step), rng)
        for step, damage in zip((3, 2, 1), damages, strict=False)
    }
    before, messages = read_all(folder), []
    checkpointer = Checkpointer(folder, keep=3, log=messages.append)
    if len(damaged) == 3:
        with pytest.raises(ValueError, match=r"no checkpoint in .* can be read: ") as refusal:
            restore(checkpointer)
        for step, file in damaged.items():
            assert f"checkpoint {step}: {file}: " in str(refusal.value)
        assert read_all(folder) == before
        checkpointer.close()
        return
    latest = 3 - len(damaged)
    position, state, _ = restore(checkpointer)
    assert position == {"step": latest}
    assert_equal(state, make_state(latest))
    *warnings, last = messages
    assert last == f"using checkpoint {latest} instead"
    for warning, (step, file) in zip(warnings, damaged.items(), strict=True):
        assert warning.startswith(f"warning: checkpoint {step} is damaged ({file}: ")
        assert (folder / "damaged" / str(step)).exists()
    # The same steps can be saved again and are restored next.
    for step in range(latest + 1, 4):
        checkpointer.save(step, make_state(10 * step), {"step": step}, None)
    checkpointer.close()
    checkpointer = Checkpointer(folder, keep=3, log=messages.append)
    position, state, _ = restore(checkpointer)
    checkpointer.close()
    assert position == {"step": 3}
    assert_equal(state, make_state(30))
    assert messages[-1] is last


def test_an_undamaged_checkpoint_that_does_not_fit_is_left_alone(three_checkpoints, folder):
    # After a change of the optimizer, say. An earlier checkpoint would lose the later steps.
    shutil.copytree(three_checkpoints, folder)
    checkpointer = Checkpointer(folder, keep=3)
    with pytest.raises(CheckpointError, match=r"checkpoint 3 in .* is undamaged, but rest"):
        checkpointer.restore(
            lambda _: {
                "params": STATE_TARGET.params,
                "optimizer": {"opt_state": {"nu": STATE_TARGET.params}},
            }
        )
    checkpointer.close()
    assert {path.name for path in folder.iterdir()} == {"1", "2", "3"}
