import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl.objectives.aggregation import AGGREGATIONS, token_mean, token_weights
from tests.helpers import Sequence, compute_loss_weights, weights_in_rows

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
def test_a_batch_without_loss_tokens_has_zero_weights(mode):
    assert compute_loss_weights([], mode, 4) == []
    nothing = Sequence(token_ids=None, loss_mask=np.zeros(3, bool), rollout_logprobs=None)
    for weights in compute_loss_weights([nothing, nothing], mode, 4):
        assert weights.dtype == np.float32
        np.testing.assert_array_equal(weights, np.zeros(3))


@settings(max_examples=25, deadline=None)
@given(
    counts=st.lists(st.integers(0, 9), min_size=1, max_size=8),
    mode=st.sampled_from([*AGGREGATIONS]),
    random=st.randoms(use_true_random=False),
)
def test_order_changes_no_bit(counts, mode, random):
    sequences = [Sequence(None, np.arange(10) < count, None) for count in counts]
    order = [*range(len(counts))]
    random.shuffle(order)
    plain = compute_loss_weights(sequences, mode, 7)
    shuffled = compute_loss_weights([sequences[i] for i in order], mode, 7)
    for weights, index in zip(shuffled, order, strict=True):
        np.testing.assert_array_equal(weights, plain[index])


@pytest.mark.parametrize("returned", [np.ones(2), np.array([1, np.inf, 1])])
def test_the_result_of_an_aggregation_is_checked(returned):
    masks = [np.ones(2, bool)] * 3
    with pytest.raises(ValueError, match=r"loss\.aggregation returned .* expected \[3\] finite"):
        token_weights(masks, lambda token_counts: returned)
    assert token_weights(masks, token_mean)[0].tolist() == [np.float32(1 / 6)] * 2
