"""Packed rows of random segments, and attention over them by brute force in float64."""

import numpy as np


def random_segments(rng, num_rows, row_tokens):
    """Segment ids `[R, T]`: runs of random lengths, of one token too, then padding; a row is empty.

    Where there is one row only, it is not empty.
    """
    out = np.zeros((num_rows, row_tokens), np.int32)
    for row in range(num_rows - (num_rows > 1)):
        filled = row_tokens if row == 0 else rng.integers(1, row_tokens + 1)
        cuts = np.unique(rng.integers(1, filled, 4)) if filled > 1 else []
        lengths = np.diff([0, *cuts, filled])
        out[row, :filled] = 10 * row + 1 + np.repeat(np.arange(len(lengths)), lengths)
    if row_tokens > 3:
        out[0, -1] = 9  # a segment of one token
    return out


def random_inputs(rng, shape, num_kv_heads):
    """Queries `[R, T, N, H]`, keys, values, and a gradient of the outputs, all float32."""
    R, T, _, H = shape
    kv = (R, T, num_kv_heads, H)
    return [rng.normal(size=one).astype(np.float32) for one in (shape, kv, kv, shape)]


def brute_force(q, k, v, gradient, segment_ids):
    """Outputs and gradients of queries, keys and values, float64; those of padding are 0.

    The gradient of the outputs must be 0 at padding.
    """
    q, k, v, gradient = (np.asarray(x, np.float64) for x in (q, k, v, gradient))
    groups, scale = q.shape[2] // k.shape[2], q.shape[3] ** -0.5
    out, dq, dk, dv = (np.zeros(x.shape) for x in (q, q, k, v))
    for row, head in np.ndindex(q.shape[0], q.shape[2]):
        ids, kv = segment_ids[row], head // groups
        mask = np.tri(len(ids), dtype=bool) & (ids[:, None] == ids) & (ids > 0)[:, None]
        scores = np.where(mask, q[row, :, head] @ k[row, :, kv].T * scale, -np.inf)
        highest = np.where(mask.any(axis=1), scores.max(axis=1), 0.0)[:, None]
        weights = np.where(mask, np.exp(scores - highest), 0.0)
        weights /= np.maximum(weights.sum(axis=1, keepdims=True), 1e-300)
        out[row, :, head] = weights @ v[row, :, kv]
        dv[row, :, kv] += weights.T @ gradient[row, :, head]
        of_weights = gradient[row, :, head] @ v[row, :, kv].T
        mean = (weights * of_weights).sum(axis=1, keepdims=True)
        of_scores = weights * (of_weights - mean) * scale
        dq[row, :, head] = of_scores @ k[row, :, kv]
        dk[row, :, kv] += of_scores.T @ q[row, :, head]
    return out, dq, dk, dv
