import dataclasses
import errno
import random
import shutil

import jax
import numpy as np
import optax
import pytest

from jaxrl.models.attention.reference import XLA
from jaxrl.models.policy import Model
from jaxrl.runtime import checkpoint
from jaxrl.runtime.checkpoint import (
    Checkpointer,
    CheckpointError,
    latest_complete_step,
    make_optimizer_items,
    select_steps_to_keep,
)
from jaxrl.runtime.sharding import make_mesh, make_restore_target, param_shardings
from jaxrl.training.packing import BatchShape
from jaxrl.training.update import UpdateStep, init_state, put_batch, state_shardings
from jaxrl.types import TrainState
from tests.helpers import NUM_TOKENS, TINY, pack_all, policy_loss, random_sequences

pytestmark = pytest.mark.usefixtures("quick_compilation")

OPTIMIZER = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2))


@pytest.fixture(scope="module")
def mesh():
    return make_mesh(data=1, fsdp=1, tensor=1, devices=jax.devices()[:1])


def abstract_state(mesh):
    shapes = jax.eval_shape(
        lambda params: init_state(params, mesh, TINY, OPTIMIZER), TINY.abstract_params()
    )
    return make_restore_target(shapes, state_shardings(mesh, TINY, OPTIMIZER))


def filled(shapes, seed):
    """Arrays of these shapes, none of them zero."""
    rng = np.random.default_rng(seed)

    def fill(leaf):
        values = np.asarray(1 + 5 * rng.random(leaf.shape)).astype(leaf.dtype)
        return jax.device_put(values, leaf.sharding)

    return jax.tree.map(fill, shapes)


def make_state(mesh, seed):
    return filled(abstract_state(mesh), seed)


def assert_equal(got, wanted):
    assert jax.tree.structure(got) == jax.tree.structure(wanted)
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(one, other)


def targets_for(state, **more):
    return lambda position: {
        "params": state.params,
        "optimizer": make_optimizer_items(state),
        **more,
    }


def as_state(items):
    return TrainState(params=items["params"], **items["optimizer"])


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "checkpoints"


@pytest.fixture
def opened(folder):
    """Opens the folder, and closes it in the end."""
    made = []

    def open_folder(**settings):
        made.append(Checkpointer(folder, **{"keep": 2, **settings}))
        return made[-1]

    yield open_folder
    for one in made:
        one.close()


def test_a_round_trip_is_exact(opened, mesh):
    state = make_state(mesh, 1)
    shardings = param_shardings(mesh, TINY)
    shapes = make_restore_target(TINY.abstract_params(), shardings)
    reference = filled(shapes, 5)
    position = {"step": 4, "stage": "train", "best": {"value": 0.25, "mark": None}}
    saving = opened()
    saving.save(4, state, position, reference)
    saving.wait()
    # As after a restart, by another object.
    got, items = opened().restore(targets_for(abstract_state(mesh), ref_params=shapes))
    assert got == position
    assert_equal(as_state(items), state)
    assert_equal(items["ref_params"], reference)
    assert jax.tree.map(lambda x: x.sharding, items["params"]) == shardings
    # Parameters alone, as for an evaluation.
    _, items = opened().restore(lambda _: {"params": shapes})
    assert items.keys() == {"params"}
    assert_equal(items["params"], state.params)


@pytest.mark.parametrize("step", [2, 1])
def test_a_full_disk_leaves_the_newest_whole_one(opened, mesh, folder, monkeypatch, step):
    def fill(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    state = make_state(mesh, 1)
    saving = opened()
    saving.save(1, state, {"step": 1}, None)
    saving.wait()
    monkeypatch.setattr(checkpoint, "write_manifest", fill)
    saving.save(step, state, {"step": step}, None)
    with pytest.raises(OSError, match="No space left"):
        saving.wait()
    assert latest_complete_step(folder) == 1
    monkeypatch.undo()
    saving.close()
    got, items = opened().restore(targets_for(abstract_state(mesh)))
    assert got == {"step": 1}
    assert_equal(as_state(items), state)


def test_what_stays_by_hand():
    values = {1: 0.5, 2: None, 3: 0.75, 4: 0.75, 5: None, 6: 0.25}
    assert select_steps_to_keep(values, 1, 0) == {6}
    assert select_steps_to_keep(values, 2, 1) == {5, 6, 3}  # of equal ones the earlier
    assert select_steps_to_keep(values, 2, 3) == {5, 6, 3, 4, 1}
    assert select_steps_to_keep(values, 9, 9) == set(values)


def test_the_newest_and_the_best_stay(opened, mesh, folder):
    saving = opened(keep_best=1)
    for step, value in [(1, 0.25), (2, 0.5), (3, None), (4, 0.5), (5, None)]:
        saving.save(step, make_state(mesh, step), {"step": step}, None, value=value)
    saving.wait()
    assert {path.name for path in folder.iterdir()} == {"2", "4", "5"}
    got, items = saving.restore(targets_for(abstract_state(mesh)))
    assert got == {"step": 5}
    assert_equal(as_state(items), make_state(mesh, 5))
    step, state = saving.restore_best(abstract_state(mesh))
    assert step == 2
    assert_equal(state, make_state(mesh, 2))


def test_saving_a_step_again_replaces_it(opened, mesh, folder):
    saving = opened()
    for seed in (1, 2):
        saving.save(3, make_state(mesh, seed), {"seed": seed}, None, value=float(seed))
    saving.wait()
    got, items = opened().restore(targets_for(abstract_state(mesh)))
    assert got == {"seed": 2}
    assert_equal(as_state(items), make_state(mesh, 2))
    assert [path.name for path in folder.iterdir()] == ["3"]
    assert checkpoint.read_value(folder / "3") == 2.0


@pytest.mark.parametrize("moment", ["before", "during", "after"])
def test_a_replacement_that_was_killed(opened, mesh, folder, moment):
    saving = opened()
    saving.save(3, make_state(mesh, 1), {"seed": 1}, None)
    saving.wait()
    shutil.copytree(folder / "3", folder / "3.replaced")
    (folder / "saving").write_text("3")
    if moment == "before":
        shutil.rmtree(folder / "3")
    elif moment == "during":
        (folder / "3" / "manifest.json").unlink()
        (folder / "3" / "position" / "metadata").write_text("")
    assert opened().restore(targets_for(abstract_state(mesh)))[0] == {"seed": 1}
    assert [path.name for path in folder.iterdir()] == ["3"]


def test_the_state_may_be_donated_at_once(opened, mesh):
    # The update writes over the very buffers that are being saved.
    model = Model(TINY, mesh, XLA, num_tokens=NUM_TOKENS)
    update = UpdateStep(model, policy_loss(), OPTIMIZER)
    shape = BatchShape.for_sequences(4, micro_rows=2, row_tokens=32)
    packed = pack_all(random_sequences([20, 24, 28, 30]), shape)
    batch = put_batch(mesh, packed.batch)
    state, _ = update(make_state(mesh, 1), batch, packed)
    saving = opened(keep=100)
    wanted = []
    for step in range(6):
        wanted.append(jax.tree.map(lambda leaf: np.array(leaf, copy=True), state))
        saving.save(step, state, {}, None)
        for _ in range(3):
            state, _ = update(state, batch, packed)
    saving.wait()
    for step in reversed(range(6)):
        _, items = opened().restore(targets_for(abstract_state(mesh)))
        assert_equal(as_state(items), wanted[step])
        shutil.rmtree(saving._folder / str(step))


def test_a_save_that_was_killed_is_as_if_it_had_not_begun(opened, mesh, folder):
    saving = opened()
    for step in (1, 2):
        saving.save(step, make_state(mesh, step), {"step": step}, None)
    saving.wait()
    shutil.copytree(folder / "2", folder / "3")
    (folder / "3" / "manifest.json").unlink()  # Orbax was done, the manifest was not
    (folder / "saving").write_text("3")
    (folder / "4.orbax-checkpoint-tmp" / "params").mkdir(parents=True)
    (folder / "1").rename(folder / "1.removed")
    said = []
    other = opened(log=said.append)
    got, _ = other.restore(targets_for(abstract_state(mesh)))
    assert (got, said) == ({"step": 2}, [])
    other.save(3, make_state(mesh, 3), {"step": 3}, None)
    other.wait()
    assert {path.name for path in folder.iterdir()} == {"2", "3"}


SMALL = {"x": np.arange(300, dtype=np.float32), "y": np.arange(5, dtype=np.int32)}


def small_state(step):
    params = {name: jax.numpy.asarray(values + step) for name, values in SMALL.items()}
    counter = jax.numpy.int32(step)
    return TrainState(
        params=params, opt_state={"mu": params}, num_updates=counter, num_skipped=counter
    )


DEVICE = jax.sharding.SingleDeviceSharding(jax.devices()[0])
SMALL_STATE = jax.tree.map(
    lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=DEVICE), small_state(0)
)


def files_of(step_folder):
    return sorted(path for path in step_folder.rglob("*") if path.is_file())


def contents(folder):
    """All files but those of unfinished saves, which Orbax removes in the background."""
    tops = [path for path in folder.iterdir() if not path.name.endswith("-tmp")]
    files = [file for top in tops for file in (files_of(top) if top.is_dir() else [top])]
    return {file: file.read_bytes() for file in files}


def truncate(step_folder, rng):
    """Cuts a file, or takes away all of it."""
    file = rng.choice([path for path in files_of(step_folder) if path.stat().st_size])
    data = file.read_bytes()
    file.write_bytes(data[: rng.randrange(len(data))])
    return str(file.relative_to(step_folder))


def flip(step_folder, rng):
    """Changes some bytes of a file and leaves its size."""
    file = rng.choice([path for path in files_of(step_folder) if path.stat().st_size])
    data = bytearray(file.read_bytes())
    for _ in range(rng.choice([1, 64])):
        data[rng.randrange(len(data))] ^= rng.randrange(1, 256)
    if bytes(data) == file.read_bytes():
        data[0] ^= 1
    file.write_bytes(bytes(data))
    return str(file.relative_to(step_folder))


def lose_file(step_folder, rng):
    file = rng.choice(files_of(step_folder))
    file.unlink()
    return str(file.relative_to(step_folder))


def lose_manifest(step_folder, rng):
    (step_folder / "manifest.json").unlink()
    return "manifest.json"


def lose_everything(step_folder, rng):
    shutil.rmtree(step_folder)
    step_folder.mkdir()
    return "manifest.json"


def become_a_file(step_folder, rng):
    shutil.rmtree(step_folder)
    step_folder.write_text("?")
    return "manifest.json"


def become_another(step_folder, rng):
    """The whole folder of another step, under this one's name."""
    shutil.rmtree(step_folder)
    shutil.copytree(step_folder.with_name("1"), step_folder)
    return "manifest.json"


DAMAGES = (
    *(truncate, flip, lose_file, lose_manifest),
    *(lose_everything, become_a_file, become_another),
)


def clutter(folder, rng):
    """What else may lie about; none of it is a checkpoint, none of it may be in the way."""
    for name in rng.sample(["x", "12x", "-3", "007", "٣", "5.bak", "1e3"], rng.randrange(4)):
        (folder / name).mkdir()
        (folder / name / "params").write_text("garbage")
    if rng.random() < 0.5:
        unfinished = folder / f"{rng.randrange(9)}.orbax-checkpoint-tmp" / "params"
        unfinished.mkdir(parents=True)
    if rng.random() < 0.3:
        (folder / "notes.txt").write_text("mine")


@pytest.fixture(scope="module")
def three_checkpoints(tmp_path_factory):
    folder = tmp_path_factory.mktemp("three") / "checkpoints"
    saving = Checkpointer(folder, keep=3)
    for step in (1, 2, 3):
        saving.save(step, small_state(step), {"step": step}, None)
    saving.close()
    return folder


@pytest.mark.parametrize("seed", range(12))
def test_damage_is_never_loaded_silently(three_checkpoints, folder, seed):
    rng = random.Random(seed)
    shutil.copytree(three_checkpoints, folder)
    clutter(folder, rng)
    # The newest ones are damaged; in every fourth case all are.
    num_damaged = rng.choice([1, 1, 2, 3])
    damaged = {}
    for step in (3, 2, 1)[:num_damaged]:
        damage = DAMAGES[seed % len(DAMAGES)] if step == 3 else rng.choice(DAMAGES[:-1])
        damaged[step] = damage(folder / str(step), rng)
    before = contents(folder)
    said = []
    opened = Checkpointer(folder, keep=3, log=said.append)
    if num_damaged == 3:
        with pytest.raises(ValueError, match=r"no checkpoint in .* can be read: ") as refusal:
            opened.restore(targets_for(SMALL_STATE))
        for step, file in damaged.items():
            assert f"checkpoint {step}: {file}: " in str(refusal.value)
        assert contents(folder) == before
        opened.close()
        return
    best = 3 - num_damaged
    position, items = opened.restore(targets_for(SMALL_STATE))
    assert position == {"step": best}
    assert_equal(as_state(items), small_state(best))
    *warnings, last = said
    assert last == f"using checkpoint {best} instead"
    assert len(warnings) == num_damaged
    for warning, (step, file) in zip(warnings, damaged.items(), strict=True):
        assert warning.startswith(f"warning: checkpoint {step} is damaged ({file}: ")
        assert warning.endswith(f"moved to {folder / 'damaged' / str(step)}")
        assert (folder / "damaged" / str(step)).exists()
    # The same steps can be saved again, and are what is found next.
    for step in range(best + 1, 4):
        opened.save(step, small_state(10 * step), {"step": step}, None)
    opened.close()
    opened = Checkpointer(folder, keep=3, log=said.append)
    position, items = opened.restore(targets_for(SMALL_STATE))
    opened.close()
    assert position == {"step": 3}
    assert_equal(as_state(items), small_state(30))
    assert said[-1] is last  # nothing more to tell


def test_a_checkpoint_that_is_whole_but_cannot_be_restored(three_checkpoints, folder):
    # As after a change of the optimizer, or for want of memory: the fault is not the checkpoint's,
    # and taking the one before it would throw away what was done since.
    shutil.copytree(three_checkpoints, folder)
    other = dataclasses.replace(SMALL_STATE, opt_state={"nu": SMALL_STATE.params})
    opened = Checkpointer(folder, keep=3)
    with pytest.raises(CheckpointError, match=r"checkpoint 3 in .* is undamaged, but rest"):
        opened.restore(targets_for(other))
    opened.close()
    assert {path.name for path in folder.iterdir()} == {"1", "2", "3"}
