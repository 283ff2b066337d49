import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl.training.packing import BatchShape, Item, assign_rows, pack
from tests.helpers import Sequence, gather, random_sequences, sharing_prompts

FIELDS = ("token_ids", "loss_mask", "rollout_logprobs")


def sequence(mask, rollout=-1.0):
    mask = np.array(mask, bool)
    return Sequence(
        token_ids=np.arange(1, len(mask) + 1, dtype=np.int32),
        loss_mask=mask,
        rollout_logprobs=np.where(mask, rollout, 0).astype(np.float32),
    )


def rows_of(lengths, row_tokens):
    items = [Item(length=length, prompt=index) for index, length in enumerate(lengths)]
    return assign_rows(items, row_tokens)


def test_rows_by_hand():
    # Longest first: 5 opens a row, 4 another, 3 fits beside the 5, 2 beside the 4, 2 opens one.
    assert rows_of([2, 5, 3, 4, 2], 8) == [[1, 2], [3, 0, 4]]
    assert rows_of([2, 5, 3, 4, 2], 6) == [[1], [3, 0], [2, 4]]
    assert rows_of([], 8) == []


def test_rows_of_shared_prompts_by_hand():
    # Prompts of 4, responses of 5, 3 and 2, 2. A row of 12 has room for 4 + 5 + 3 or 4 + 2 + 2 + 4,
    # but not for the 9 and another prompt's 6.
    items = [
        Item(length=4 + n, prompt=p, num_shared=4) for p, n in ((7, 5), (8, 2), (7, 3), (8, 2))
    ]
    assert assign_rows(items, 12) == [[0, 2], [1, 3]]
    # Longest first, 8 + 4 fill a row of 12 with two prompts, and 6 + 6 another with the rest of
    # theirs. One prompt after another, 8 + (6 - 3) and 6 + (4 - 3): as many, so the first stays.
    items = [Item(length=n, prompt=p, num_shared=3) for p, n in ((1, 8), (2, 4), (1, 6), (2, 6))]
    assert assign_rows(items, 12) == [[0, 2], [3, 1]]


def test_a_prompt_stands_once_in_a_row_by_hand():
    # Prompts [1, 2, 3] with responses of 2, 1 and 3: the 3 is computed for each, since its logits
    # differ by what follows. The last does not fit behind the others.
    sequences = [sequence([0, 0, 0, *[1] * n]) for n in (2, 1, 3)]
    weights = [np.arange(len(s.token_ids), dtype=np.float32) for s in sequences]
    shape = BatchShape(num_micro=2, micro_rows=1, row_tokens=10, shares_prompts=True)
    packed = pack(
        sequences,
        np.array([2.0, -1.0, 0.5], np.float32),
        shape,
        token_fields={"token_weights": weights},
    )
    batch = packed.batch
    first, second = (getattr(batch, name)[0, 0] for name in ("segment_ids", "positions"))
    np.testing.assert_array_equal(first, [3, 3, 3, 3, 3, 3, 1, 1, 1, 0])
    np.testing.assert_array_equal(second, [0, 1, 2, 3, 4, 5, 2, 3, 4, 0])
    np.testing.assert_array_equal(batch.token_ids[0, 0], [1, 2, 3, 4, 5, 6, 3, 4, 5, 0])
    np.testing.assert_array_equal(batch.loss_mask[0, 0], [0, 0, 0, 1, 1, 1, 0, 1, 1, 0])
    np.testing.assert_array_equal(batch.advantages[0, 0, 3:9], [0.5, 0.5, 0.5, 0, 2, 2])
    np.testing.assert_array_equal(batch.token_weights[0, 0], [0, 1, 2, 3, 4, 5, 2, 3, 4, 0])
    np.testing.assert_array_equal(batch.token_ids[1, 0], [1, 2, 3, 4, 0, 0, 0, 0, 0, 0])
    assert (packed.num_tokens, packed.num_shared, packed.num_micro) == (15, 2, 2)
    assert packed.padding == pytest.approx(7 / 20)
    # Advantages of single tokens stand beside these, and nowhere else.
    by_token = [np.arange(len(s.token_ids), dtype=np.float32) + 10 for s in sequences]
    batch = pack(sequences, by_token, shape).batch
    np.testing.assert_array_equal(batch.advantages[0, 0], [0, 0, 0, 13, 14, 15, 0, 13, 14, 0])


@pytest.mark.parametrize(
    ("masks", "num_shared"),
    [
        (([0, 0, 0, 1], [0, 0, 0, 1, 1]), 2),
        (([0, 0, 1], [0, 0, 0, 1]), 0),  # other prompts: one is longer
        (([0, 0, 0, 1], [0, 0, 0, 0]), 0),  # nothing is trained on in the second
        (([0, 1], [0, 1]), 0),  # nothing before the token that each needs for itself
        (([1, 1], [1, 1]), 0),
    ],
)
def test_what_is_shared(masks, num_shared):
    shape = BatchShape(num_micro=1, micro_rows=1, row_tokens=12, shares_prompts=True)
    packed = pack([sequence(mask) for mask in masks], np.ones(2, np.float32), shape)
    assert packed.num_shared == num_shared
    different = [sequence(mask) for mask in masks]
    different[1].token_ids[0] = 9
    assert pack(different, np.ones(2, np.float32), shape).num_shared == 0


def test_smaller_micro_batches_hold_as_many_sequences():
    shape = BatchShape.for_sequences(11, micro_rows=6, row_tokens=8)
    smaller = shape.with_full_rows(4)
    assert (shape.num_micro, smaller.num_micro, smaller.micro_rows) == (2, 3, 4)
    assert (smaller.full_rows, smaller.num_sequences, smaller.row_tokens) == (4, 12, 8)
    # Two devices with one long row each.
    shape = BatchShape.for_sequences(11, micro_rows=6, row_tokens=8, shards_with_prompts=2)
    smaller = shape.with_full_rows(2)
    assert (shape.num_micro, shape.row_tokens, shape.full_rows) == (2, 24, 6)
    assert (smaller.num_micro, smaller.micro_rows, smaller.row_tokens) == (6, 2, 8)
    assert (smaller.full_rows, smaller.num_sequences) == (2, 12)


def test_sequences_that_do_not_fit_are_refused():
    shape = BatchShape(num_micro=1, micro_rows=1, row_tokens=8)
    merged = BatchShape.for_sequences(2, micro_rows=2, row_tokens=8, shards_with_prompts=1)
    assert merged.row_tokens == 16
    for too_small in (shape, merged):
        with pytest.raises(ValueError, match=r"9 tokens does not fit a row of 8.*max_total_tokens"):
            pack([sequence([1] * 3), sequence([1] * 9)], np.ones(2), too_small)
    shape = BatchShape(num_micro=1, micro_rows=2, row_tokens=4)
    with pytest.raises(ValueError, match="3 sequences need 3 rows, the batch has 2"):
        pack([sequence([0, 1, 1])] * 3, np.ones(3), shape)


def test_nothing_to_pack():
    shape = BatchShape(num_micro=1, micro_rows=2, row_tokens=4)
    packed = pack([], np.zeros(0), shape, token_fields={"token_weights": []}, num_loss_tokens=1)
    assert (packed.num_micro, packed.num_tokens, packed.num_loss_tokens) == (0, 0, 1)
    assert packed.batch.token_weights.shape == (1, 2, 4)
    assert not packed.batch.token_weights.any()
    assert not packed.batch.segment_ids.any()


@st.composite
def lengths_and_rows(draw):
    row_tokens = draw(st.integers(1, 24))
    return draw(st.lists(st.integers(1, row_tokens), max_size=20)), row_tokens


@settings(deadline=None, max_examples=50)
@given(lengths_and_rows())
def test_rows_hold_each_sequence_once_and_fit(case):
    lengths, row_tokens = case
    rows = rows_of(lengths, row_tokens)
    assert sorted(index for row in rows for index in row) == list(range(len(lengths)))
    sizes = [sum(lengths[index] for index in row) for row in rows]
    assert all(0 < size <= row_tokens for size in sizes)
    # First fit: what opened a row found no room before it, so no two rows are at most half full.
    assert sum(2 * size <= row_tokens for size in sizes) <= 1


@settings(deadline=None, max_examples=30)
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
    for index, sequence in enumerate(sequences):
        positions = np.argwhere(batch.segment_ids == index + 1)
        assert len({(micro, row) for micro, row, _ in positions}) == 1
        assert (np.diff(positions[:, 2]) == 1).all()
        expected = {
            **{name: getattr(sequence, name) for name in FIELDS},
            "positions": np.arange(lengths[index]),
            "advantages": advantages[index] * sequence.loss_mask,
            "token_weights": weights[index],
        }
        for name, values in expected.items():
            np.testing.assert_array_equal(gather(batch, getattr(batch, name), index), values)

    padding = batch.segment_ids == 0
    assert padding.sum() == padding.size - sum(lengths)
    assert not any(
        getattr(batch, name)[padding].any()
        for name in (*FIELDS, "positions", "advantages", "token_weights")
    )
    assert not batch.segment_ids[packed.num_micro :].any()
    assert all(batch.segment_ids[micro].any() for micro in range(packed.num_micro))
    assert packed.num_loss_tokens == sum(int(sequence.loss_mask.sum()) for sequence in sequences)


@settings(deadline=None, max_examples=30)
@given(
    st.lists(st.integers(2, 24), min_size=12, max_size=12),
    st.tuples(st.integers(1, 9), st.integers(1, 9)),
    st.integers(1, 4),
)
def test_rows_with_shared_prompts_hold_each_token_with_loss_once(lengths, prompts, micro_rows):
    sequences = sharing_prompts(random_sequences(lengths), prompts)
    sizes = {"micro_rows": micro_rows, "row_tokens": 30}
    shape = BatchShape.for_sequences(12, **sizes, shards_with_prompts=1)
    packed = pack(sequences, np.ones(12, np.float32), shape)
    batch = packed.batch
    assert (batch.segment_ids > 0).sum() == packed.num_tokens - packed.num_shared
    assert packed.num_tokens == sum(lengths)
    for index, sequence in enumerate(sequences):
        [row] = {tuple(position[:2]) for position in np.argwhere(batch.segment_ids == index + 1)}
        ids, positions, segments = (
            getattr(batch, name)[row] for name in ("token_ids", "positions", "segment_ids")
        )
        [start, *_, end] = [*np.flatnonzero(segments == index + 1)] * 2
        left_out = positions[start]
        np.testing.assert_array_equal(ids[start : end + 1], sequence.token_ids[left_out:])
        np.testing.assert_array_equal(
            positions[start : end + 1], range(left_out, len(sequence.token_ids))
        )
        assert not sequence.loss_mask[: left_out + 1].any()
        if left_out:  # the rest begins the last segment before it that begins at 0
            first = np.flatnonzero(positions[:start] == 0)[-1]
            np.testing.assert_array_equal(
                ids[first : first + left_out], sequence.token_ids[:left_out]
            )
            assert len(set(segments[first : first + left_out])) == 1
