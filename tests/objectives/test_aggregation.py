import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl.objectives.aggregation import AGGREGATIONS, token_mean, token_weights
from tests.helpers import Sequence, loss_weights, weights_in_rows

VALUES = np.array([[1, 2, 3, 4], [6, 8, 7, 8], [9, 9, 9, 9]], np.float32)
MASK = np.array([[1, 1, 1, 0], [1, 1, 0, 0], [0, 0, 0, 0]], bool)
ROW_IDS = np.array([[1] * 4, [2] * 4, [3] * 4], np.int32)


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("token-mean", 4),
        ("seq-mean-token-sum", 10),
        ("seq-mean-token-mean", 4.5),
        ("seq-mean-token-sum-norm", 2.5),
    ],
)
def test_three_rows_by_hand(mode, expected):
    weights = weights_in_rows(MASK, ROW_IDS, mode, scale=4)
    np.testing.assert_allclose((weights * VALUES).sum(), expected, rtol=1e-6)
    assert (weights[~MASK] == 0).all()


@pytest.mark.parametrize("mode", AGGREGATIONS)
def test_nothing_to_train_on_weighs_nothing(mode):
    assert loss_weights([], mode, 4) == []
    nothing = Sequence(token_ids=None, loss_mask=np.zeros(3, bool), rollout_logprobs=None)
    for weights in loss_weights([nothing, nothing], mode, 4):
        assert weights.dtype == np.float32
        np.testing.assert_array_equal(weights, np.zeros(3))


@settings(max_examples=60, deadline=None)
@given(
    counts=st.lists(st.integers(0, 9), min_size=1, max_size=8),
    mode=st.sampled_from([*AGGREGATIONS]),
    random=st.randoms(use_true_random=False),
)
def test_order_changes_no_bit(counts, mode, random):
    sequences = [Sequence(None, np.arange(10) < count, None) for count in counts]
    order = [*range(len(counts))]
    random.shuffle(order)
    plain, shuffled = (
        loss_weights(sequences, mode, 7),
        loss_weights([sequences[i] for i in order], mode, 7),
    )
    for place, index in enumerate(order):
        np.testing.assert_array_equal(shuffled[place], plain[index])


@pytest.mark.parametrize("found", [np.ones(2), np.ones((3, 1)), np.nan, np.array([1, np.inf, 1])])
def test_what_an_aggregation_returns_is_checked(found):
    masks = [np.ones(2, bool)] * 3
    with pytest.raises(ValueError, match=r"loss\.aggregation returned .* expected \[3\] finite"):
        token_weights(masks, lambda token_counts: found)
    assert token_weights(masks, token_mean)[0].tolist() == [np.float32(1 / 6)] * 2


def test_they_compute_in_jax_as_well():
    counts = np.array([3, 0, 2])
    for name in ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum"):
        aggregation = AGGREGATIONS[name]
        np.testing.assert_allclose(jax.jit(aggregation)(counts), aggregation(counts), rtol=1e-6)
