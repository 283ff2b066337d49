import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl.objectives.aggregation import MODES, token_weights

VALUES = np.array([[1, 2, 3, 4], [6, 8, 7, 8], [9, 9, 9, 9]], np.float32)
MASK = np.array([[1, 1, 1, 0], [1, 1, 0, 0], [0, 0, 0, 0]], bool)
ROW_IDS = np.array([[1] * 4, [2] * 4, [3] * 4], np.int32)

weights_jit = jax.jit(token_weights, static_argnames=("mode", "scale"))


def counts(mask, ids):
    return {"num_tokens": int(mask.sum()), "num_trajectories": len(np.unique(ids[mask]))}


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("token-mean", 4),
        ("seq-mean-token-sum", 10),
        ("seq-mean-token-mean", 4.5),
        ("seq-mean-token-sum-norm", 2.5),
    ],
)
@pytest.mark.parametrize("run", [token_weights, weights_jit])
def test_three_rows_by_hand(mode, expected, run):
    weights = run(MASK, ROW_IDS, mode=mode, **counts(MASK, ROW_IDS), scale=4.0)
    assert weights.dtype == np.float32
    np.testing.assert_allclose((weights * VALUES).sum(), expected, rtol=1e-6)
    assert (weights[~MASK] == 0).all()


def test_numpy_in_numpy_out():
    args = {"mode": "seq-mean-token-mean", "num_tokens": 5}
    assert isinstance(token_weights(MASK, ROW_IDS, **args, num_trajectories=2), np.ndarray)
    traced = token_weights(MASK, ROW_IDS, **args, num_trajectories=jnp.array(2))
    assert isinstance(traced, jax.Array)
    assert isinstance(
        token_weights(MASK, ROW_IDS, **args, num_trajectories=np.int64(2)), np.ndarray
    )


@pytest.mark.parametrize("mode", MODES)
def test_nothing_to_train_on_weighs_nothing(mode):
    args = {"mode": mode, "num_tokens": 0, "num_trajectories": 0, "scale": 4.0}
    for ids in (np.zeros((2, 3), np.int32), np.ones((2, 3), np.int32)):
        assert not token_weights(np.zeros((2, 3), bool), ids, **args).any()
        assert not weights_jit(np.zeros((2, 3), bool), ids, **args).any()


def slow_weights(mask, ids, *, mode, num_tokens, num_trajectories, scale):
    out = np.zeros(mask.shape)
    for place in zip(*np.nonzero(mask), strict=True):
        own = mask[ids == ids[place]].sum()
        out[place] = {
            "token-mean": 1 / num_tokens if num_tokens else 0,
            "seq-mean-token-sum": 1 / num_trajectories,
            "seq-mean-token-mean": 1 / num_trajectories / own,
            "seq-mean-token-sum-norm": 1 / num_trajectories / scale,
        }[mode]
    return out


@st.composite
def packed(draw, rows=4, length=10):
    """Trajectories one after the other in rows, with arbitrary ids, gaps and masks."""
    ids = np.zeros((rows, length), np.int32)
    names = iter(draw(st.permutations([*range(1, rows * length), 10**6])))
    for row in ids:
        place = 0
        for size in draw(st.lists(st.integers(1, 6), max_size=5)):
            gap = draw(st.integers(0, 1))
            row[place + gap : place + gap + size] = next(names)
            place += gap + size
    bits = draw(st.lists(st.booleans(), min_size=rows * length, max_size=rows * length))
    return np.array(bits).reshape(ids.shape) & (ids > 0), ids


@settings(max_examples=60, deadline=None)
@given(batch=packed(), mode=st.sampled_from(MODES))
def test_agrees_with_a_slow_loop(batch, mode):
    args = {"mode": mode, **counts(*batch), "scale": 7.0}
    expected = slow_weights(*batch, **args)
    np.testing.assert_allclose(token_weights(*batch, **args), expected, rtol=1e-6)
    np.testing.assert_allclose(weights_jit(*batch, **args), expected, rtol=1e-6)


@settings(max_examples=60, deadline=None)
@given(batch=packed(), mode=st.sampled_from(MODES), order=st.permutations(range(4)))
def test_micro_batches_and_row_order_change_nothing(batch, mode, order):
    mask, ids = batch
    args = {"mode": mode, **counts(*batch), "scale": 7.0}
    whole = token_weights(mask, ids, **args)
    for cut in np.split(np.array(order), 2):
        np.testing.assert_array_equal(token_weights(mask[cut], ids[cut], **args), whole[cut])


@settings(max_examples=30, deadline=None)
@given(batch=packed(), mode=st.sampled_from(MODES))
def test_packing_changes_nothing(batch, mode):
    mask, ids = batch
    args = {"mode": mode, **counts(*batch), "scale": 7.0}
    packed_weights = token_weights(mask, ids, **args)
    for id in np.unique(ids[ids > 0]):
        alone = mask[ids == id][None]
        got = token_weights(alone, np.full(alone.shape, 1), **args)
        np.testing.assert_array_equal(got[0], packed_weights[ids == id])


def test_settings_that_make_no_sense_are_refused():
    with pytest.raises(ValueError, match="unknown aggregation 'mean'; expected one of token-mean"):
        token_weights(MASK, ROW_IDS, mode="mean", num_tokens=5, num_trajectories=2)
    with pytest.raises(ValueError, match="scale"):
        token_weights(
            MASK, ROW_IDS, mode="seq-mean-token-sum-norm", num_tokens=5, num_trajectories=2
        )
