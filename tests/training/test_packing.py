import dataclasses
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl.training.packing import (
    MICRO_BATCH_TOKENS,
    BatchShape,
    CompiledSizes,
    SequenceSize,
    assign_rows,
    fit_rows,
    list_micro_batch_sizes,
    pack_sequences,
)
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
    items = [SequenceSize(length=length, prompt=index) for index, length in enumerate(lengths)]
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
        SequenceSize(length=4 + n, prompt=p, num_shared=4)
        for p, n in ((7, 5), (8, 2), (7, 3), (8, 2))
    ]
    assert assign_rows(items, 12) == [[0, 2], [1, 3]]
    # Prompt 1 has the most tokens: 8 + (6 - 3) = 11 of 12. Prompt 2 begins the next row with
    # 6 + (4 - 3) = 7, and prompt 3 goes on with 5.
    items = [
        SequenceSize(length=n, prompt=p, num_shared=3) for p, n in ((2, 4), (1, 6), (2, 6), (1, 8))
    ]
    items.append(SequenceSize(length=5, prompt=3))
    assert assign_rows(items, 12) == [[3, 1], [2, 0, 4]]
    # Of four sequences of 4 + 3 with one prompt, a row of 13 has room for three; the fourth repeats
    # the prompt.
    items = [SequenceSize(length=7, prompt=1, num_shared=4) for _ in range(4)]
    assert assign_rows(items, 13) == [[0, 1, 2], [3]]


def test_a_prompt_stands_once_in_a_row_by_hand():
    # Prompts [1, 2, 3] with responses of 2, 1 and 3: the 3 is computed for each, since its logits
    # differ by what follows. The last does not fit behind the others.
    sequences = [sequence([0, 0, 0, *[1] * n]) for n in (2, 1, 3)]
    weights = [np.arange(len(s.token_ids), dtype=np.float32) for s in sequences]
    shape = BatchShape(num_micro=2, micro_rows=1, row_tokens=10, shares_prompts=True)
    packed = pack_sequences(
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
    batch = pack_sequences(sequences, by_token, shape).batch
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
    packed = pack_sequences([sequence(mask) for mask in masks], np.ones(2, np.float32), shape)
    assert packed.num_shared == num_shared
    different = [sequence(mask) for mask in masks]
    different[1].token_ids[0] = 9
    assert pack_sequences(different, np.ones(2, np.float32), shape).num_shared == 0


def test_smaller_micro_batches_hold_as_many_sequences():
    shape = BatchShape.for_sequences(11, micro_rows=6, row_tokens=8)
    smaller = shape.with_full_rows(4)
    assert (shape.num_micro, smaller.num_micro, smaller.micro_rows) == (2, 3, 4)
    assert (smaller.num_full_rows, smaller.num_sequences, smaller.row_tokens) == (4, 12, 8)
    # Two devices with one long row each.
    shape = BatchShape.for_sequences(11, micro_rows=6, row_tokens=8, num_prompt_shards=2)
    smaller = shape.with_full_rows(2)
    assert (shape.num_micro, shape.row_tokens, shape.num_full_rows) == (2, 24, 6)
    assert (smaller.num_micro, smaller.micro_rows, smaller.row_tokens) == (6, 2, 8)
    assert (smaller.num_full_rows, smaller.num_sequences) == (2, 12)


def test_rows_fit_equal_groups_by_hand():
    # Four sequences of 64 + 128 tokens take 63 + 4 * 129 = 579 slots, so a row of 4 * 192 = 768 has
    # no room for a second group, nor for two of its sequences (771). Lengths are multiples of 16.
    items = [SequenceSize(length=192, prompt=i // 4, num_shared=63) for i in range(32)]
    shape = BatchShape.for_sequences(32, micro_rows=4, row_tokens=192, num_prompt_shards=1)
    fitted, rows = fit_rows(items, shape)
    assert (fitted.micro_rows, fitted.row_tokens) == (1, 592)
    assert rows == [[*range(start, start + 4)] for start in range(0, 32, 4)]
    # Of two groups, one is split, since four rows of 320 have fewer slots than two of 592.
    fitted, rows = fit_rows(items[:8], shape)
    assert (fitted.row_tokens, len(rows)) == (592, 2)


def test_a_size_is_added_when_it_would_have_saved_enough():
    shape = BatchShape.for_sequences(1, micro_rows=1, row_tokens=256, num_prompt_shards=1)

    def fit(length):
        return fit_rows([SequenceSize(length=length, prompt=0)], shape)[0].row_tokens

    assert fit(190) == 192
    # 192 + 64 cost 0.6 times more than 96 + 64.
    assert [fit(90), fit(90), fit(90)] == [192, 96, 96]
    assert fit(190) == 192
    assert fit(200) == 208  # longer than all rows in use
    assert shape.sizes.sizes == ((1, 192), (1, 96), (1, 208))
    # After an update ran out of memory, sizes that are now too large are not used.
    two = BatchShape.for_sequences(2, micro_rows=2, row_tokens=256, num_prompt_shards=1)
    items = [SequenceSize(length=200, prompt=i) for i in range(2)]
    assert fit_rows(items, two)[0].row_tokens == 400
    assert fit_rows(items, two.with_full_rows(1))[0].row_tokens == 208


def test_a_size_saves_its_compilation_by_hand():
    shape = BatchShape(num_micro=5, micro_rows=2, row_tokens=100)
    # 1e6 parameters x 1,000 slots x 6 FLOPs are 6e9 per mini-batch, compilation 1e12 per device.
    assert shape.with_size_saving(10**6, "cpu", 3).size_saving == 500
    assert shape.with_size_saving(10**9, "cpu", 3).size_saving == 1  # less than one mini-batch


def test_a_restored_run_chooses_the_same_sizes():
    rng = np.random.default_rng(0)
    shape = BatchShape.for_sequences(16, micro_rows=4, row_tokens=384, num_prompt_shards=1)
    restored = dataclasses.replace(shape, sizes=CompiledSizes())
    for step in range(60):
        if step % 20 == 7:
            saved = json.loads(json.dumps(dataclasses.asdict(restored.sizes)))
            restored = dataclasses.replace(restored, sizes=CompiledSizes.from_json(saved))
        lengths = rng.integers(70, 384, 16).tolist()
        items = [
            SequenceSize(length=n, prompt=i // 4, num_shared=63) for i, n in enumerate(lengths)
        ]
        fitted, other = fit_rows(items, shape)[0], fit_rows(items, restored)[0]
        assert (fitted.micro_rows, fitted.row_tokens) == (other.micro_rows, other.row_tokens)
    assert restored.sizes == shape.sizes
    assert len(shape.sizes.sizes) > 2


@settings(deadline=None, max_examples=50)
@given(
    st.lists(st.integers(1, 96), min_size=1, max_size=20),
    st.integers(1, 3),
    st.integers(1, 3),
    st.integers(1, 4),
    st.booleans(),
)
def test_sizes_are_the_cheapest_that_fit(lengths, per_shard, num_shards, num_prompts, shares):
    shape = BatchShape.for_sequences(
        len(lengths),
        micro_rows=per_shard * num_shards,
        row_tokens=96,
        num_prompt_shards=num_shards * shares,
    )
    items = [
        SequenceSize(length=n, prompt=i % num_prompts, num_shared=min(lengths) // 2 * shares)
        if shares
        else SequenceSize(length=n, prompt=i)
        for i, n in enumerate(lengths)
    ]

    largest = per_shard * num_shards * 96

    def cost(num_rows, size):
        num_micro, slots = -(-num_rows // size[0]), size[0] * size[1]
        fits = num_micro * slots <= shape.num_micro * largest
        return num_micro * (slots + MICRO_BATCH_TOKENS * num_shards) if fits else np.inf

    fitted, rows = fit_rows(items, shape, num_shards)
    size = fitted.micro_rows, fitted.row_tokens
    assert sorted(index for row in rows for index in row) == list(range(len(items)))
    for row in rows:
        shared = {items[index].prompt: items[index].num_shared for index in row}
        total = sum(items[index].length - items[index].num_shared for index in row)
        assert total + sum(shared.values()) <= size[1]
    assert size[0] % num_shards == 0
    assert size[0] * size[1] <= largest
    assert len(rows) <= size[0] * fitted.num_micro
    assert fitted.num_micro * size[0] * size[1] <= shape.num_micro * largest
    costs = [
        cost(len(assign_rows(items, other[1])), other)
        for other in list_micro_batch_sizes(shape, num_shards)
        if other[1] >= max(lengths)
    ]
    assert cost(len(rows), size) == min(costs)


def test_sequences_that_do_not_fit_are_refused():
    shape = BatchShape(num_micro=1, micro_rows=1, row_tokens=8)
    merged = BatchShape.for_sequences(2, micro_rows=2, row_tokens=8, num_prompt_shards=1)
    assert merged.row_tokens == 16
    for too_small in (shape, merged):
        with pytest.raises(ValueError, match=r"9 tokens does not fit a row of 8.*max_total_tokens"):
            pack_sequences([sequence([1] * 3), sequence([1] * 9)], np.ones(2), too_small)
    shape = BatchShape(num_micro=1, micro_rows=2, row_tokens=4)
    with pytest.raises(ValueError, match="3 sequences need 3 rows, the batch has 2"):
        pack_sequences([sequence([0, 1, 1])] * 3, np.ones(3), shape)


def test_nothing_to_pack():
    shape = BatchShape(num_micro=1, micro_rows=2, row_tokens=4)
    packed = pack_sequences(
        [], np.zeros(0), shape, token_fields={"token_weights": []}, num_loss_tokens=1
    )
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
    packed = pack_sequences(sequences, advantages, shape, token_fields={"token_weights": weights})
    batch = packed.batch
    _, *size = batch.token_ids.shape
    assert np.prod(size) <= micro_rows * row_tokens
    assert batch.token_ids.size <= shape.num_micro * micro_rows * row_tokens
    assert all(
        getattr(batch, name).shape == batch.token_ids.shape
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
    shape = BatchShape.for_sequences(12, **sizes, num_prompt_shards=1)
    packed = pack_sequences(sequences, np.ones(12, np.float32), shape)
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
