import jax
import numpy as np
import optax
import pytest

from jaxrl.checkpoint import Checkpointer, abstract
from jaxrl.models.qwen import abstract_params
from jaxrl.sharding import make_mesh, param_shardings
from jaxrl.update import init_state, state_shardings
from tests.helpers import TINY

OPTIMIZER = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2))


@pytest.fixture(scope="module")
def mesh():
    return make_mesh(data=1, fsdp=1, tensor=1, devices=jax.devices()[:1])


def abstract_state(mesh):
    shapes = jax.eval_shape(
        lambda params: init_state(params, mesh, TINY, OPTIMIZER), abstract_params(TINY)
    )
    return abstract(shapes, state_shardings(mesh, TINY, OPTIMIZER))


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


@pytest.fixture
def checkpointer(tmp_path):
    made = Checkpointer(tmp_path / "checkpoints", keep=2)
    yield made
    made.close()


def test_nothing_yet(checkpointer):
    assert checkpointer.latest_position() is None


def test_a_round_trip_is_exact(checkpointer, mesh, tmp_path):
    state = make_state(mesh, 1)
    shardings = param_shardings(mesh, TINY)
    shapes = abstract(abstract_params(TINY), shardings)
    reference = filled(shapes, 5)
    position = {"step": 4, "stage": "train", "stage_step": 1, "items_taken": 32, "num_records": 5}
    checkpointer.save(4, state, position, reference)
    # As after a restart, by another object.
    other = Checkpointer(tmp_path / "checkpoints", keep=2)
    assert other.latest_position() == position
    assert_equal(other.restore(abstract_state(mesh)), state)
    assert_equal(other.restore_params(shapes), state.params)
    assert_equal(other.restore_ref_params(shapes), reference)
    restored = other.restore_params(shapes)
    assert jax.tree.map(lambda x: x.sharding, restored) == shardings
    other.close()


def test_the_newest_ones_stay(checkpointer, mesh, tmp_path):
    for step in (1, 2, 3):
        checkpointer.save(step, make_state(mesh, step), {"step": step}, None)
    assert checkpointer.latest_position() == {"step": 3}
    assert_equal(checkpointer.restore(abstract_state(mesh)), make_state(mesh, 3))
    names = {path.name for path in (tmp_path / "checkpoints").iterdir()}
    assert names == {"2", "3"}


def test_an_unfinished_checkpoint_is_not_seen(checkpointer, mesh, tmp_path):
    checkpointer.save(1, make_state(mesh, 1), {"step": 1}, None)
    unfinished = tmp_path / "checkpoints" / "2.orbax-checkpoint-tmp"
    unfinished.mkdir()
    (unfinished / "params").mkdir()
    other = Checkpointer(tmp_path / "checkpoints", keep=2)
    assert other.latest_position() == {"step": 1}
    other.save(2, make_state(mesh, 2), {"step": 2}, None)
    assert other.latest_position() == {"step": 2}
    other.close()
