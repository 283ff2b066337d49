import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl.training.packing import BatchShape, assign_rows, pack
from tests.helpers import Sequence, gather, random_sequences

FIELDS = ("token_ids", "loss_mask", "rollout_logprobs")


def sequence(mask, rollout=-1.0):
    mask = np.array(mask, bool)
    return Sequence(
        token_ids=np.arange(1, len(mask) + 1, dtype=np.int32),
        loss_mask=mask,
        rollout_logprobs=np.where(mask, rollout, 0).astype(np.float32),
    )


def test_rows_by_hand():
    # Longest first: 5 opens a row, 4 another, 3 fits beside the 5, 2 beside the 4, 2 opens one.
    assert assign_rows([2, 5, 3, 4, 2], 8) == [[1, 2], [3, 0, 4]]
    assert assign_rows([2, 5, 3, 4, 2], 6) == [[1], [3, 0], [2, 4]]
    assert assign_rows([], 8) == []


def test_two_in_a_row_by_hand():
    shape = BatchShape(num_micro=2, micro_rows=1, row_tokens=6)
    packed = pack(
        [sequence([0, 1]), sequence([0, 1, 1]), sequence([0, 1, 0, 1])],
        np.array([2.0, -1.0, 0.5], np.float32),
        shape,
    )
    batch = packed.batch
    np.testing.assert_array_equal(batch.segment_ids, [[[3, 3, 3, 3, 1, 1]], [[2, 2, 2, 0, 0, 0]]])
    np.testing.assert_array_equal(batch.token_ids, [[[1, 2, 3, 4, 1, 2]], [[1, 2, 3, 0, 0, 0]]])
    np.testing.assert_array_equal(batch.positions, [[[0, 1, 2, 3, 0, 1]], [[0, 1, 2, 0, 0, 0]]])
    np.testing.assert_array_equal(
        batch.advantages, [[[0, 0.5, 0, 0.5, 0, 2]], [[0, -1, -1, 0, 0, 0]]]
    )
    assert (packed.num_micro, packed.num_tokens, packed.num_counted) == (2, 9, 5)
    assert packed.padding == pytest.approx(3 / 12)
    assert batch.old_logprobs is None
    assert batch.ref_logprobs is None


def test_only_micro_batches_in_use_count():
    shape = BatchShape.for_sequences(9, micro_rows=4, row_tokens=10)
    assert shape == BatchShape(num_micro=3, micro_rows=4, row_tokens=10)
    packed = pack([sequence([0, 1])] * 9, np.ones(9), shape)
    assert packed.batch.token_ids.shape == (3, 4, 10)
    assert packed.num_micro == 1  # five in a row, two rows
    assert packed.padding == pytest.approx(1 - 18 / 40)


def test_room_for_any_sequences():
    assert BatchShape.for_sequences(0, micro_rows=4, row_tokens=8).num_micro == 1
    shape = BatchShape.for_sequences(5, micro_rows=2, row_tokens=3)
    packed = pack([sequence([0, 1, 1])] * 5, np.ones(5), shape)
    assert packed.num_micro == shape.num_micro == 3


def test_too_long_is_refused():
    with pytest.raises(ValueError, match=r"9 tokens does not fit a row of 8.*max_total_tokens"):
        assign_rows([3, 9], 8)
    shape = BatchShape(num_micro=1, micro_rows=1, row_tokens=8)
    with pytest.raises(ValueError, match="does not fit a row"):
        pack([sequence([1] * 9)], np.ones(1), shape)


def test_too_many_rows_are_refused():
    shape = BatchShape(num_micro=1, micro_rows=2, row_tokens=4)
    with pytest.raises(ValueError, match="3 sequences need 3 rows, the batch has 2"):
        pack([sequence([0, 1, 1])] * 3, np.ones(3), shape)


def test_nothing_to_pack():
    shape = BatchShape(num_micro=1, micro_rows=2, row_tokens=4)
    packed = pack([], np.zeros(0), shape, token_fields={"token_weights": []}, num_counted=1)
    assert (packed.num_micro, packed.num_tokens, packed.num_counted) == (0, 0, 1)
    assert packed.batch.token_weights.shape == (1, 2, 4)
    assert not packed.batch.token_weights.any()
    assert not packed.batch.segment_ids.any()


@st.composite
def lengths_and_rows(draw):
    row_tokens = draw(st.integers(1, 24))
    return draw(st.lists(st.integers(1, row_tokens), max_size=20)), row_tokens


@given(lengths_and_rows())
def test_rows_hold_each_sequence_once_and_fit(case):
    lengths, row_tokens = case
    rows = assign_rows(lengths, row_tokens)
    assert sorted(index for row in rows for index in row) == list(range(len(lengths)))
    sizes = [sum(lengths[index] for index in row) for row in rows]
    assert all(0 < size <= row_tokens for size in sizes)
    # First fit: what opened a row found no room before it, so no two rows are at most half full.
    assert sum(2 * size <= row_tokens for size in sizes) <= 1


@settings(deadline=None, max_examples=60)
@given(lengths_and_rows(), st.integers(1, 4), st.integers(0, 2**16))
def test_batches_hold_each_token_once(case, micro_rows, seed):
    lengths, row_tokens = case
    sequences = random_sequences(lengths, seed=seed)
    shape = BatchShape.for_sequences(len(lengths), micro_rows=micro_rows, row_tokens=row_tokens)
    advantages = np.array([sequence.advantage for sequence in sequences], np.float32)
    offsets = np.cumsum(lengths)[:-1]
    weights = np.split(np.random.default_rng(seed).random(sum(lengths), np.float32), offsets)
    packed = pack(sequences, advantages, shape, token_fields={"token_weights": weights})
    batch = packed.batch
    assert all(
        getattr(batch, name).shape == (shape.num_micro, micro_rows, row_tokens)
        for name in (*FIELDS, "segment_ids", "positions", "advantages", "token_weights")
    )
    for index, wanted in enumerate(sequences):
        places = np.argwhere(batch.segment_ids == index + 1)
        assert len({(micro, row) for micro, row, _ in places}) == 1
        assert (np.diff(places[:, 2]) == 1).all()
        for name in FIELDS:
            np.testing.assert_array_equal(
                gather(batch, getattr(batch, name), index), getattr(wanted, name)
            )
        np.testing.assert_array_equal(
            gather(batch, batch.positions, index), np.arange(lengths[index])
        )
        np.testing.assert_array_equal(
            gather(batch, batch.advantages, index), advantages[index] * wanted.loss_mask
        )
        np.testing.assert_array_equal(gather(batch, batch.token_weights, index), weights[index])

    padding = batch.segment_ids == 0
    assert padding.sum() == padding.size - sum(lengths)
    assert not any(
        getattr(batch, name)[padding].any()
        for name in (*FIELDS, "positions", "advantages", "token_weights")
    )
    assert not batch.segment_ids[packed.num_micro :].any()
    assert all(batch.segment_ids[micro].any() for micro in range(packed.num_micro))
    assert packed.num_counted == sum(int(sequence.loss_mask.sum()) for sequence in sequences)
