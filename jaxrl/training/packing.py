"""Pack trajectories into batches. No other module packs or pads."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import jax
import numpy as np

from jaxrl.models.attachments import UNITS, Tower
from jaxrl.models.aux_arrays import TokenArraySpec
from jaxrl.models.output import LOGIT_CAPACITIES
from jaxrl.objectives.balancing import karmarkar_karp
from jaxrl.types import Attachment, Batch

CAPACITY_DIVISORS = (64, 32, 16, 8, 4, 2, 1)
"""Divisors of the maximum attachment capacity. Each divisor in use compiles a program."""

MICRO_BATCH_TOKENS = 64
"""Cost of a micro-batch beside its tokens, such as adding its gradients, in tokens per device."""

COMPILATION_FLOPS = {"cpu": 1e12, "gpu": 1e16, "tpu": 1e16}
"""FLOPs that a device can compute while the programs of a new size compile: 12 s on a CPU for a
model of 4 layers, half a minute on an accelerator."""

MAX_SIZES = 16
"""Number of sizes in use above which a size is added only for sequences that fit in no other."""


class TokenSequence(Protocol):
    """Protocol of the sequences to pack: trajectories and demonstrations."""

    @property
    def token_ids(self) -> np.ndarray:
        """Token ids: int32 [L]."""

    @property
    def loss_mask(self) -> np.ndarray:
        """Mask of tokens to train on: bool [L]."""

    @property
    def rollout_logprobs(self) -> np.ndarray:
        """Log-probabilities from the sampler, in nats: float32 [L]."""

    @property
    def contexts(self) -> tuple[tuple[int, int], ...]:
        """(start, number of repeated tokens) of each context after the first; see `Trajectory`."""

    @property
    def attachments(self) -> tuple[Attachment, ...]:
        """Attachments, in the order of their placeholder tokens."""

    @property
    def token_arrays(self) -> Mapping[str, np.ndarray]:
        """Recorded per-token arrays `[L, ...]`, by name."""


@dataclass
class CompiledSizes:
    """Micro-batch sizes for which programs are compiled; see `fit_rows`."""

    sizes: tuple[tuple[int, int], ...] = ()  # (b, T)
    excess: float = 0.0  # cost since the last addition that new sizes would have saved

    @classmethod
    def from_json(cls, saved: Mapping[str, Any]) -> CompiledSizes:
        """Restore the sizes from the JSON form of `dataclasses.asdict`."""
        return cls(tuple((rows, tokens) for rows, tokens in saved["sizes"]), saved["excess"])


@dataclass(frozen=True, kw_only=True)
class BatchShape:
    """Shape of mini-batches, or the largest shape if there are `sizes`."""

    num_micro: int  # A, micro-batches
    micro_rows: int  # b, rows of a micro-batch; a multiple of data * fsdp * expert
    row_tokens: int  # T, length of a row
    shares_prompts: bool = False  # True if sequences in a row share their prompt's tokens
    max_tokens: int | None = None  # longest sequence; None for the length of a row
    tower: Tower | None = None  # encoder of attachments; None without attachments
    max_units: int = 0  # maximum attachment tokens of a sequence; 0 for its number of tokens
    num_pieces: int = 1  # C, pieces of a row on different devices; divides T
    # Recorded arrays that the model reads.
    token_arrays: Mapping[str, TokenArraySpec] = field(default_factory=dict)
    # Cost that a new size would have saved when its programs are compiled, in mini-batches.
    size_saving: float = field(default=1.0, compare=False)
    # Sizes in use if `fit_rows` may change b and T without increasing b * T, else None.
    sizes: CompiledSizes | None = field(default=None, compare=False)

    @property
    def row_units(self) -> int:
        """Maximum number of attachment tokens in a row."""
        sequence_tokens = self.max_tokens or self.row_tokens
        return self.row_tokens // sequence_tokens * (self.max_units or sequence_tokens)

    @property
    def num_sequences(self) -> int:
        """Number of sequences that fit regardless of their lengths."""
        sequences_per_row = self.row_tokens // (self.max_tokens or self.row_tokens)
        return self.num_micro * self.micro_rows * sequences_per_row

    @property
    def num_full_rows(self) -> int:
        """Number of full-length sequences in a micro-batch, named `micro_rows` in the config."""
        return self.num_sequences // self.num_micro

    def with_full_rows(self, num_full_rows: int) -> BatchShape:
        """Return a shape with `num_full_rows` sequences per micro-batch and no smaller capacity.

        `num_full_rows` is a multiple of the number of row shards.
        """
        num_micro = -(-self.num_sequences // num_full_rows)
        if not self.shares_prompts:
            return dataclasses.replace(self, num_micro=num_micro, micro_rows=num_full_rows)
        row_tokens = num_full_rows // self.micro_rows * (self.max_tokens or self.row_tokens)
        return dataclasses.replace(self, num_micro=num_micro, row_tokens=row_tokens)

    def with_size_saving(self, num_params: int, platform: str, num_devices: int) -> BatchShape:
        """Return a copy whose `size_saving` is the compilation time of a size, in mini-batches.

        Training takes 6 FLOPs per parameter and token (https://arxiv.org/abs/2001.08361);
        `COMPILATION_FLOPS` is the cost of compilation.
        """
        num_slots = self.num_micro * self.micro_rows * self.row_tokens
        compilation = COMPILATION_FLOPS[platform] * num_devices
        return dataclasses.replace(
            self, size_saving=max(compilation / (6 * num_params * num_slots), 1.0)
        )

    @classmethod
    def for_sequences(
        cls,
        num_sequences: int,
        *,
        micro_rows: int,
        row_tokens: int,
        num_prompt_shards: int = 0,
        **settings: Any,
    ) -> BatchShape:
        """Return a shape that holds any `num_sequences` sequences of up to `row_tokens` tokens.

        Args:
            num_sequences: Number of sequences in a mini-batch.
            micro_rows: Number of full-length sequences that a micro-batch holds.
            row_tokens: Length of the longest sequence.
            num_prompt_shards: Number of row shards if the attention kernels support shared
                prompts, else 0. If they do, each device has one long row per micro-batch instead
                of several: more sequences share a prompt, and there is less padding. These kernels
                skip tokens that are not attended to.
            settings: Other fields of the shape.
        """
        shape = cls(
            num_micro=max(-(-num_sequences // micro_rows), 1),
            micro_rows=micro_rows,
            row_tokens=row_tokens,
            sizes=CompiledSizes(),
            **settings,
        )
        if not num_prompt_shards:
            return shape
        return dataclasses.replace(
            shape,
            micro_rows=num_prompt_shards,
            row_tokens=micro_rows // num_prompt_shards * row_tokens,
            shares_prompts=True,
            max_tokens=row_tokens,
        )


@dataclass(frozen=True, kw_only=True)
class PackedAttachments:
    """Attachments of a batch, kept on the host until their micro-batch is computed."""

    tower: Tower
    # Attachments with tokens on a device, by micro-batch and device.
    cells: Mapping[tuple[int, int], tuple[Attachment, ...]]
    num_shards: int  # number of devices that split the tokens
    divisor: int  # entry of `CAPACITY_DIVISORS`, which sets the capacity
    num_patches: int  # P, patches on each device

    def make_shard_inputs(
        self, micro: int, shard: int, dtype: Any
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return a shard's patches `[P, values]` in `dtype` and int32 coordinates `[P, W]`."""
        collated = self.tower.collate(self.cells.get((micro, shard), ()))
        patches = np.zeros((self.num_patches, self.tower.num_values_per_patch), dtype)
        locations = np.zeros((self.num_patches, self.tower.num_coords), np.int32)
        patches[: len(collated.patches)] = collated.patches
        locations[: len(collated.coords)] = collated.coords
        return patches, locations


@dataclass(frozen=True, kw_only=True)
class PackedBatch:
    """Batch on the host, with packing statistics."""

    batch: Batch  # numpy arrays [A, b, T]
    num_micro: int  # non-empty micro-batches
    num_tokens: int  # tokens of all sequences, before prompts are shared
    num_shared: int  # tokens saved by sharing prompts
    num_loss_tokens: int  # sampled tokens of the complete mini-batch, including `rest`
    padding: float  # share of padding in the non-empty micro-batches
    imbalance: float  # (most tokens on a device - mean) / mean
    attachments: PackedAttachments | None = None  # None without attachments
    rest: PackedBatch | None = None  # trajectories without a gradient; None if there are none


def compute_logit_capacities(
    packed: PackedBatch, num_shards: int, num_pieces: int = 1
) -> list[int]:
    """Return the logit capacity of each non-empty micro-batch, one of `LOGIT_CAPACITIES`.

    This is the smallest capacity, in quarters of a device's tokens, that holds every device's loss
    tokens. Rows are split over `num_shards` devices, and each row into `num_pieces` pieces.
    """
    has_loss = np.asarray(packed.batch.loss_mask & (packed.batch.positions > 0))
    if num_pieces > 1:  # the logits for a token are computed at the token before it
        has_loss = np.roll(has_loss, -1, axis=2)
    logit_capacity = []
    for micro in has_loss[: packed.num_micro]:
        # [shards, rows, pieces, tokens]
        pieces = micro.reshape(num_shards, -1, num_pieces, micro.shape[1] // num_pieces)
        most, room = int(pieces.sum(axis=(1, 3)).max()), pieces[0, :, 0].size
        logit_capacity.append(next(count for count in LOGIT_CAPACITIES if 4 * most <= count * room))
    return logit_capacity


@dataclass(frozen=True, kw_only=True)
class SequenceSize:
    """Sizes of a sequence and its shared prompt, in tokens."""

    length: int  # tokens; contexts after the first count without the shared tokens
    prompt: int  # equal for sequences whose contexts begin with the same `num_shared` tokens
    num_shared: int = 0  # tokens that sequences with this prompt share within a row
    units: int = 0  # attachment tokens
    shared_units: int = 0  # attachment tokens among the shared ones


def split_contexts(sequence: TokenSequence) -> list[slice]:
    """Return the token slice of each context, in order."""
    starts = [0, *(start for start, _ in sequence.contexts)]
    return [*map(slice, starts, [*starts[1:], len(sequence.token_ids)])]


def select_arrays(sequence: TokenSequence, shape: BatchShape) -> dict[str, np.ndarray]:
    """Return the sequence's recorded arrays `[L, ...]`, limited to the names in `shape`."""
    recorded = sequence.token_arrays
    return {name: recorded[name] for name in shape.token_arrays if name in recorded}


def compute_sequence_sizes(
    sequences: Sequence[TokenSequence], shape: BatchShape
) -> list[SequenceSize]:
    """Compute the sizes of each sequence and of the prefix that it can share.

    The shared prefix ends before the token that predicts the first loss token, because each
    sequence needs its own copy of that token. Two prefixes are equal only if their attachments and
    recorded arrays are also equal. A sequence with several contexts shares a prefix only if every
    context begins with it.

    Raises:
        ValueError: A sequence has several contexts, and the model reads attachments.
    """
    tower = shape.tower
    prompt_indices: dict[Any, int] = {}
    seq_sizes = []
    for number, sequence in enumerate(sequences):
        mask, prompt, ids = sequence.loss_mask, number, sequence.token_ids
        num_shared = max(int(mask.argmax()) - 1, 0) if shape.shares_prompts else 0
        # Several contexts must all begin with the prefix.
        attached, later = sequence.attachments, split_contexts(sequence)[1:]
        if later and tower:
            raise ValueError(
                "a trajectory has several contexts, and the model reads images, which support only "
                "one context; set config.rollout.context.name to 'none'."
            )
        if not all(_has_equal_prefix(sequence, context, num_shared, shape) for context in later):
            num_shared = 0
        # Sequences with equal tokens, attachments and arrays in the prefix get the same number.
        has_unit = tower.is_placeholder(ids) if tower and attached else np.zeros(len(ids), bool)
        shared_units = int(has_unit[:num_shared].sum())
        if num_shared:
            ends = np.cumsum(
                [tower.count_tokens(attachment) for attachment in attached] if tower else []
            )
            shared_attachments = (
                attached[: int(np.searchsorted(ends, shared_units)) + 1] if shared_units else ()
            )
            arrays = select_arrays(sequence, shape)
            aux_arrays = tuple((name, x[:num_shared].tobytes()) for name, x in arrays.items())
            prompt = prompt_indices.setdefault(
                (ids[:num_shared].tobytes(), shared_attachments, aux_arrays), number
            )
        seq_sizes.append(
            SequenceSize(
                length=len(ids) - num_shared * len(later),
                prompt=prompt,
                num_shared=num_shared,
                units=int(has_unit.sum()),
                shared_units=shared_units,
            )
        )
    return seq_sizes


def _has_equal_prefix(
    sequence: TokenSequence, context: slice, num_shared: int, shape: BatchShape
) -> bool:
    """Return True if a context begins with the shared prefix and has no loss on it."""
    span = slice(context.start, context.start + num_shared)
    arrays = [sequence.token_ids, *select_arrays(sequence, shape).values()]
    is_equal = all(np.array_equal(x[span], x[:num_shared]) for x in arrays)
    return is_equal and not sequence.loss_mask[span.start : span.stop + 1].any()


def fit_rows(
    seq_sizes: Sequence[SequenceSize], shape: BatchShape, num_shards: int = 1
) -> tuple[BatchShape, list[list[int]]]:
    """Choose the size of micro-batches, and assign sequences to rows.

    The cost of a size is the number of slots for tokens, plus `MICRO_BATCH_TOKENS` per device and
    micro-batch. The cheapest size in use is reused until the cheapest of all sizes would have saved
    `shape.size_saving`; that size is then added. The result depends only on the arguments, so it is
    equal in all processes, and in a resumed run, which restores `shape.sizes`.

    Returns:
        The shape and the sequence indices of each row.

    Raises:
        ValueError: The sequences need more rows than `shape` has.
    """
    rows = assign_rows(seq_sizes, shape.row_tokens, shape.row_units)
    if len(rows) > shape.num_micro * shape.micro_rows:
        raise ValueError(
            f"{len(seq_sizes)} sequences need {len(rows)} rows, the batch has "
            f"{shape.num_micro * shape.micro_rows}. This is a bug in jaxrl."
        )
    if shape.sizes is None or not seq_sizes:
        return shape, rows
    longest, assigned = max(item.length for item in seq_sizes), {shape.row_tokens: rows}
    shared = {item.prompt: item.num_shared for item in seq_sizes}
    num_tokens = sum(item.length - item.num_shared for item in seq_sizes) + sum(shared.values())
    max_slots = shape.num_micro * shape.micro_rows * shape.row_tokens
    possible = list_micro_batch_sizes(shape, num_shards)
    in_use = [size for size in shape.sizes.sizes if size in possible]
    best = current = None
    lowest = lowest_in_use = math.inf
    for number, (micro_rows, row_tokens) in enumerate([*in_use, *possible]):
        # Skip sizes that cannot be cheaper, before sequences are assigned to rows.
        slots = micro_rows * row_tokens
        cost = slots + MICRO_BATCH_TOKENS * num_shards
        if row_tokens < longest or -(-num_tokens // slots) * cost >= lowest:
            continue
        if row_tokens not in assigned:
            assigned[row_tokens] = assign_rows(seq_sizes, row_tokens, shape.row_units)
        num_micro = -(-len(assigned[row_tokens]) // micro_rows)
        if num_micro * slots <= max_slots and num_micro * cost < lowest:
            lowest, best = num_micro * cost, (micro_rows, row_tokens)
            if number < len(in_use):
                lowest_in_use, current = lowest, best
    assert best is not None  # the largest size always suffices
    shape.sizes.excess += lowest_in_use / lowest - 1
    has_saved = shape.sizes.excess >= shape.size_saving and len(in_use) < MAX_SIZES
    if current is not None and not has_saved:
        best = current
    elif best not in in_use:
        shape.sizes.sizes, shape.sizes.excess = (*in_use, best), 0.0
    fitted = dataclasses.replace(
        shape,
        num_micro=max_slots // math.prod(best),
        micro_rows=best[0],
        row_tokens=best[1],
        # A shorter row has room for as many attachments.
        max_tokens=best[1],
        max_units=shape.row_units,
    )
    return fitted, assigned[best[1]]


def list_micro_batch_sizes(shape: BatchShape, num_shards: int) -> list[tuple[int, int]]:
    """List the micro-batch sizes (rows, row length) that fit in `shape`."""
    sizes = []
    for row_tokens in _list_bucket_sizes(shape.row_tokens, math.lcm(16, shape.num_pieces), 64):
        if shape.shares_prompts:
            sizes.append((shape.micro_rows, row_tokens))
            continue
        max_rows = shape.micro_rows
        if not shape.tower:
            max_rows = max_rows * shape.row_tokens // row_tokens
        counts = _list_bucket_sizes(max_rows // num_shards, 1, 16)
        sizes += [(count * num_shards, row_tokens) for count in counts]
    return sizes


def _list_bucket_sizes(largest: int, unit: int, num_parts: int) -> list[int]:
    """Return bucket sizes up to `largest`: multiples of `unit`, `num_parts // 2` per doubling."""
    sizes = (
        -(-largest * part // (num_parts * unit << halvings)) * unit
        for halvings in range((-(-largest // unit)).bit_length())
        for part in range(num_parts, num_parts // 2, -1)
    )
    return [*dict.fromkeys(min(size, largest) for size in sizes)]


def assign_rows(
    seq_sizes: Sequence[SequenceSize], row_tokens: int, row_units: int | None = None
) -> list[list[int]]:
    """Assign sequences to rows first-fit, one prompt after another.

    Prompts are sorted by the total length of their sequences, and the sequences of a prompt by
    length, longest first. Rows that already have the prompt are tried first.

    Args:
        seq_sizes: Sizes of the sequences, each at most a row long.
        row_tokens: Capacity of a row in tokens.
        row_units: Capacity of a row in attachment tokens; `row_tokens` if None.

    Returns:
        Sequence indices of each row. Sequences with the same prompt are adjacent.
    """
    totals: Counter[int] = Counter()
    for item in seq_sizes:
        totals[item.prompt] += item.length
    order = sorted(
        range(len(seq_sizes)),
        key=lambda i: (-totals[seq_sizes[i].prompt], seq_sizes[i].prompt, -seq_sizes[i].length),
    )
    room = np.full(len(seq_sizes), row_tokens)
    unit_room = np.full(len(seq_sizes), row_tokens if row_units is None else row_units)
    rows: list[list[int]] = []
    rows_with: dict[int, list[int]] = {}  # by prompt
    for index in order:
        item, candidates = seq_sizes[index], rows_with.setdefault(seq_sizes[index].prompt, [])
        size, units = item.length - item.num_shared, item.units - item.shared_units
        fitting = (row for row in candidates if size <= room[row] and units <= unit_room[row])
        slot = next(fitting, -1)
        if slot < 0:
            size, units, end = item.length, item.units, len(rows) + 1
            slot = int(np.argmax((size <= room[:end]) & (units <= unit_room[:end])))
            candidates.append(slot)
        if slot == len(rows):
            rows.append([])
        rows[slot].append(index)
        room[slot] -= size
        unit_room[slot] -= units
    return rows


Row = list[tuple[int, int]]
"""Index of each sequence in a row, and the number of its leading tokens that are omitted."""


def select_tokens(
    sequence: TokenSequence, seq_size: SequenceSize, num_omitted: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return indices and positions, int32 `[n]`, of the tokens that a sequence adds to a row.

    The first `num_omitted` tokens are already in the row, from a sequence with the same prompt.
    """
    contexts = split_contexts(sequence)
    first = [num_omitted, *[seq_size.num_shared] * (len(contexts) - 1)]
    positions = [
        np.arange(count, context.stop - context.start, dtype=np.int32)
        for count, context in zip(first, contexts, strict=True)
    ]
    locations = [span + context.start for span, context in zip(positions, contexts, strict=True)]
    return np.concatenate(locations), np.concatenate(positions)


def omit_shared_prompts(seq_sizes: Sequence[SequenceSize], row: Sequence[int]) -> Row:
    """Return a row that contains the shared tokens of each prompt only once."""
    seen: set[int] = set()
    out = []
    for index in row:
        prompt = seq_sizes[index].prompt
        out.append((index, seq_sizes[index].num_shared if prompt in seen else 0))
        seen.add(prompt)
    return out


def pack_sequences(
    sequences: Sequence[TokenSequence],
    advantages: Sequence[np.ndarray] | np.ndarray,
    shape: BatchShape,
    *,
    token_fields: Mapping[str, Sequence[np.ndarray]] | None = None,
    num_loss_tokens: int | None = None,
    num_shards: int = 1,
) -> PackedBatch:
    """Pack sequences into a mini-batch.

    Args:
        sequences: Trajectories or demonstrations to train on.
        advantages: One float32 value per sequence, or one per token of each sequence.
        shape: Shape of the batch.
        token_fields: Other per-token fields of `Batch` by name, float32 [L] per sequence. If
            `token_weights` is missing, all weights are 0.
        num_loss_tokens: Number of sampled tokens in the complete mini-batch; None to count those in
            `sequences`.
        num_shards: Number of devices that split the rows of a micro-batch.

    Raises:
        ValueError: A sequence is longer than `shape` allows.
    """
    seq_sizes = compute_sequence_sizes(sequences, shape)
    max_tokens = shape.max_tokens or shape.row_tokens
    longest = max((item.length for item in seq_sizes), default=0)
    if longest > max_tokens:
        raise ValueError(
            f"a sequence of {longest} tokens does not fit a row of {max_tokens}; raise "
            "config.rollout.max_total_tokens or shorten the demonstrations."
        )
    # Assign sequences to rows, and rows to devices.
    shape, assigned = fit_rows(seq_sizes, shape, num_shards)
    rows = [omit_shared_prompts(seq_sizes, row) for row in assigned]
    loads = [0] * num_shards
    if num_shards > 1:
        rows, loads = balance_rows(rows, seq_sizes, shape.micro_rows, num_shards)
    # Fill the arrays, and split them into micro-batches.
    arrays = _fill_batch_arrays(sequences, advantages, seq_sizes, rows, shape, token_fields or {})
    tower_arrays, attachments = pack_attachments(sequences, rows, shape, num_shards)
    if num_loss_tokens is None:
        num_loss_tokens = sum(int(sequence.loss_mask.sum()) for sequence in sequences)
    blocks = (shape.num_micro, shape.micro_rows, shape.row_tokens)
    fields = jax.tree.map(lambda array: array.reshape(*blocks, *array.shape[2:]), arrays)
    fields["token_arrays"] |= tower_arrays
    num_tokens = sum(len(sequence.token_ids) for sequence in sequences)
    num_computed = sum(_count_tokens(seq_sizes, row) for row in rows)
    num_micro = -(-len(rows) // shape.micro_rows)
    return PackedBatch(
        batch=Batch(**fields),
        num_micro=num_micro,
        num_tokens=num_tokens,
        num_shared=num_tokens - num_computed,
        num_loss_tokens=num_loss_tokens,
        attachments=attachments,
        padding=1 - num_computed / max(num_micro * shape.micro_rows * shape.row_tokens, 1),
        imbalance=max(loads) * num_shards / num_computed - 1
        if num_shards > 1 and num_computed
        else 0.0,
    )


def _count_tokens(seq_sizes: Sequence[SequenceSize], row: Row) -> int:
    """Count the tokens in a row; a shared prompt counts once."""
    return sum(seq_sizes[index].length - num_omitted for index, num_omitted in row)


def balance_rows(
    rows: Sequence[Row], seq_sizes: Sequence[SequenceSize], micro_rows: int, num_shards: int
) -> tuple[list[Row], list[int]]:
    """Order rows so that devices get equal numbers of rows and similar numbers of tokens.

    Devices split the rows of a micro-batch in order. Rows are first assigned to devices by the
    largest differencing method; each device's rows are then distributed over the micro-batches.

    Returns:
        Rows, including empty rows that complete a micro-batch, and the number of tokens by device.
    """
    padded = [*rows, *([] for _ in range(-len(rows) % micro_rows))]
    sizes = [_count_tokens(seq_sizes, row) for row in padded]
    if not padded:
        return [], [0] * num_shards
    shares = karmarkar_karp(sizes, num_shards, equal_size=True)
    per_shard = micro_rows // num_shards
    order = [
        index
        for start in range(0, len(padded) // num_shards, per_shard)
        for share in shares
        for index in share[start : start + per_shard]
    ]
    return [padded[index] for index in order], [sum(sizes[i] for i in share) for share in shares]


def _fill_batch_arrays(
    sequences: Sequence[TokenSequence],
    advantages: Sequence[np.ndarray] | np.ndarray,
    seq_sizes: Sequence[SequenceSize],
    rows: Sequence[Row],
    shape: BatchShape,
    token_fields: Mapping[str, Sequence[np.ndarray]],
) -> dict[str, Any]:
    """Return the fields of `Batch`, `[A * b, T]`, filled with the packed sequences."""
    size = (shape.num_micro * shape.micro_rows, shape.row_tokens)
    arrays: dict[str, Any] = {
        "token_ids": np.zeros(size, np.int32),
        "segment_ids": np.zeros(size, np.int32),
        "positions": np.zeros(size, np.int32),
        "loss_mask": np.zeros(size, bool),
        "advantages": np.zeros(size, np.float32),
        "rollout_logprobs": np.zeros(size, np.float32),
        "token_weights": np.zeros(size, np.float32),
        **{name: np.zeros(size, np.float32) for name in token_fields},
    }
    aux_arrays = {name: array.full(*size) for name, array in shape.token_arrays.items()}
    # Segment ids begin at 1; 0 marks padding.
    for row, members in enumerate(rows):
        start = 0
        for index, num_omitted in members:
            sequence = sequences[index]
            rest, positions = select_tokens(sequence, seq_sizes[index], num_omitted)
            mask = sequence.loss_mask[rest]
            at = (row, slice(start, start + len(rest)))
            arrays["token_ids"][at] = sequence.token_ids[rest]
            arrays["segment_ids"][at] = index + 1
            arrays["positions"][at] = positions
            arrays["loss_mask"][at] = mask
            per_token = np.broadcast_to(advantages[index], len(sequence.token_ids))
            arrays["advantages"][at] = np.where(mask, per_token[rest], 0.0)
            arrays["rollout_logprobs"][at] = sequence.rollout_logprobs[rest]
            for name, values in token_fields.items():
                arrays[name][at] = values[index][rest]
            for name, recorded in select_arrays(sequence, shape).items():
                aux_arrays[name][at] = recorded[rest]
            start += len(rest)
    return arrays | {"token_arrays": aux_arrays}


def pack_attachments(
    sequences: Sequence[TokenSequence], rows: Sequence[Row], shape: BatchShape, num_shards: int
) -> tuple[dict[str, np.ndarray], PackedAttachments | None]:
    """Pack attachments; return the arrays of `Tower.input_arrays` and a `PackedAttachments`.

    Returns {} and None if there are no attachments. A device holds each attachment of its rows
    once. The capacity is the smallest that suffices on every device; see `CAPACITY_DIVISORS`.

    Raises:
        ValueError: The attachments exceed the largest capacity.
    """
    tower, b = shape.tower, shape.micro_rows
    if tower is None or not any(sequence.attachments for sequence in sequences):
        return {}, None
    # Collect the distinct attachments of each device, and choose the capacity.
    cells: dict[tuple[int, int], dict[Attachment, int]] = {}  # by micro-batch and device
    for slot, attachment, *_ in _iterate_attachments(sequences, rows, shape, num_shards):
        cell = cells.setdefault(slot, {})
        cell.setdefault(attachment, len(cell))
    units_of = {slot: tower.collate(tuple(cell)).units for slot, cell in cells.items()}
    most = max(sum(attachment.num_patches for attachment in cell) for cell in cells.values())
    # All attachments of a row may fall in a single piece, so each piece gets the row's capacity.
    room = b // num_shards * shape.row_units * tower.num_patches_per_token
    if most > room:
        raise ValueError(
            f"the images of a micro-batch have {most} patches on one device; expected at most "
            f"{room}. Raise config.rollout.max_image_tokens or lower config.images.max_pixels."
        )
    sizes = {
        divisor: -(-room // (divisor * tower.num_patches_per_token)) * tower.num_patches_per_token
        for divisor in CAPACITY_DIVISORS
    }
    divisor = next(divisor for divisor, size in sizes.items() if most <= size)
    # Fill the tower's arrays, then the index of each attachment token on its device.
    full_size = shape.num_micro, b, shape.row_tokens
    arrays = {name: array.full(*full_size) for name, array in tower.input_arrays.items()}
    for row, members in enumerate(rows):
        start = 0
        for index, num_omitted in members:
            ids = sequences[index].token_ids
            columns = slice(start, start + len(ids) - num_omitted)
            for name, values in tower.compute_token_arrays(
                ids, sequences[index].attachments
            ).items():
                arrays[name][row // b, row % b, columns] = values[num_omitted:]
            start += len(ids) - num_omitted
    for slot, attachment, at, indices in _iterate_attachments(sequences, rows, shape, num_shards):
        arrays[UNITS][at] = units_of[slot][cells[slot][attachment]][indices]
    return arrays, PackedAttachments(
        tower=tower,
        cells={slot: tuple(cell) for slot, cell in cells.items()},
        num_shards=num_shards * shape.num_pieces,
        divisor=divisor,
        num_patches=sizes[divisor],
    )


def _iterate_attachments(
    sequences: Sequence[TokenSequence], rows: Sequence[Row], shape: BatchShape, num_shards: int
) -> Iterator[tuple[tuple[int, int], Attachment, tuple[int, int, np.ndarray], np.ndarray]]:
    """Yield each attachment once for each device that holds any of its tokens.

    Yields (micro-batch, device), the attachment, the indices in `[A, b, T]` of its tokens on that
    device, and the positions of these tokens within the attachment.
    """
    tower, b, size = shape.tower, shape.micro_rows, shape.row_tokens // shape.num_pieces
    assert tower is not None
    for row, members in enumerate(rows):
        micro, within, start = row // b, row % b, 0
        shard = within * num_shards // b
        for index, num_omitted in members:
            ids, attachments = sequences[index].token_ids, sequences[index].attachments
            for attachment, run in zip(
                attachments, tower.find_attachment_tokens(ids, attachments), strict=True
            ):
                indices = np.flatnonzero(run >= num_omitted)
                columns = start - num_omitted + run[indices]
                for piece in np.unique(columns // size).tolist():
                    in_piece = columns // size == piece
                    slot = (micro, shard * shape.num_pieces + piece)
                    yield slot, attachment, (micro, within, columns[in_piece]), indices[in_piece]
            start += len(ids) - num_omitted
