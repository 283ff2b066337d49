"""Random packed rows and pages, and attention over them by brute force in float64."""

import itertools

import jax.numpy as jnp
import numpy as np


def random_segments(rng, num_rows, row_tokens):
    """Return segment ids `[R, T]` of random lengths, then padding; the last of several is empty."""
    out = np.zeros((num_rows, row_tokens), np.int32)
    for row in range(num_rows - (num_rows > 1)):
        filled = row_tokens if row == 0 else rng.integers(1, row_tokens + 1)
        cuts = np.unique(rng.integers(1, filled, 4)) if filled > 1 else []
        lengths = np.diff([0, *cuts, filled])
        out[row, :filled] = 10 * row + 1 + np.repeat(np.arange(len(lengths)), lengths)
    if row_tokens > 3:
        out[0, -1] = 9  # a segment of one token
    return out


def random_rows(rng, num_rows, row_tokens, *, shares_prompts=True):
    """Return segment ids and positions `[R, T]`, and which token reads which `[R, T, T]`.

    With `shares_prompts`, some segments continue the first tokens of an earlier one. Some have the
    id of the segment before them, as contexts of one trajectory do.
    """
    segment_ids = random_segments(rng, num_rows, row_tokens)
    positions = np.zeros_like(segment_ids)
    attention_mask = np.zeros((num_rows, row_tokens, row_tokens), bool)
    for row, ids in enumerate(segment_ids):
        cuts = [0, *(np.flatnonzero(np.diff(ids)) + 1), row_tokens]
        shared = range(0)
        for start, end in itertools.pairwise(cuts):
            if ids[start] == 0:
                continue
            prefix = range(0)
            if shares_prompts and len(shared) and rng.random() < 0.7:
                prefix = shared
            else:
                shared = range(start, rng.integers(start, end))
            positions[row, start:end] = len(prefix) + np.arange(end - start)
            for token in range(start, end):
                attention_mask[row, token, [*prefix, *range(start, token + 1)]] = True
            continues = start > 0 and positions[row, start] == positions[row, start - 1] + 1
            if start > 0 and not continues and rng.random() < 0.4:
                segment_ids[row, start:end] = segment_ids[row, start - 1]
    return segment_ids, positions, attention_mask


def random_inputs(rng, shape, num_kv_heads):
    """Return queries `[R, T, N, H]`, keys, values and a gradient of the outputs, all float32."""
    R, T, _, H = shape
    kv = (R, T, num_kv_heads, H)
    return [rng.normal(size=size).astype(np.float32) for size in (shape, kv, kv, shape)]


def brute_force(q, k, v, gradient, attention_mask):
    """Return outputs and gradients of queries, keys and values in float64; 0 for padding.

    `reads[r, t]` are the tokens of its row that token t reads, none for padding. The gradient of
    the outputs must be 0 there.
    """
    q, k, v, gradient = (np.asarray(x, np.float64) for x in (q, k, v, gradient))
    groups, scale = q.shape[2] // k.shape[2], q.shape[3] ** -0.5
    out, dq, dk, dv = (np.zeros(x.shape) for x in (q, q, k, v))
    for row, head in np.ndindex(q.shape[0], q.shape[2]):
        mask, kv = attention_mask[row], head // groups
        scores = np.where(mask, q[row, :, head] @ k[row, :, kv].T * scale, -np.inf)
        highest = np.where(mask.any(axis=1), scores.max(axis=1), 0.0)[:, None]
        weights = np.where(mask, np.exp(scores - highest), 0.0)
        weights /= np.maximum(weights.sum(axis=1, keepdims=True), 1e-300)
        out[row, :, head] = weights @ v[row, :, kv]
        dv[row, :, kv] += weights.T @ gradient[row, :, head]
        weights_gradient = gradient[row, :, head] @ v[row, :, kv].T
        mean = (weights * weights_gradient).sum(axis=1, keepdims=True)
        scores_gradient = weights * (weights_gradient - mean) * scale
        dq[row, :, head] = scores_gradient @ k[row, :, kv]
        dk[row, :, kv] += scores_gradient.T @ q[row, :, head]
    return out, dq, dk, dv


def random_pages(rng, B, Q, N, K, H, page, M):
    """Return queries, pages (some unused), page tables, and limits (one of them 0)."""
    num_pages = B * M + 3
    q = rng.normal(size=(B, Q, N, H)).astype(np.float32)
    keys, values = rng.normal(size=(2, num_pages, K, page, H)).astype(np.float32)
    tables = rng.permutation(num_pages)[: B * M].reshape(B, M).astype(np.int32)
    limits = rng.integers(0, M * page + 1, (B, Q)).astype(np.int32)
    limits[0, 0] = 0
    limits[-1, -1] = M * page
    for b in range(B):  # "no page" after the last page that is read
        tables[b, -(-limits[b].max() // page) :] = num_pages
    return q, keys, values, tables, limits


def brute_force_pages(q, keys, values, tables, limits):
    """Return outputs and log-sum-exp in float64; 0 and minus infinity if a query reads nothing."""
    groups = q.shape[2] // keys.shape[1]
    out, lse = np.zeros(q.shape), np.full(q.shape[:3], -np.inf)
    for b, i, n in np.ndindex(q.shape[:3]):
        if limits[b, i]:
            named = tables[b, : -(-limits[b, i] // keys.shape[2])]
            k, v = (
                np.float64(x[named, n // groups]).reshape(-1, q.shape[3])[: limits[b, i]]
                for x in (keys, values)
            )
            scores = k @ np.float64(q[b, i, n]) * q.shape[3] ** -0.5
            lse[b, i, n] = np.logaddexp.reduce(scores)
            out[b, i, n] = np.exp(scores - lse[b, i, n]) @ v
    return out, lse


def assert_agrees(actual, expected, tolerance=2e-6):
    """Compare outputs and log-sum-exp of a kernel with those of `brute_force_pages`."""
    (out, lse), (expected_out, expected_lse) = actual, expected
    assert out.dtype == lse.dtype == jnp.float32
    assert np.isfinite(out).all()
    assert np.isfinite(lse).all()
    np.testing.assert_allclose(out, expected_out, atol=tolerance)
    has_keys = np.isfinite(expected_lse)
    np.testing.assert_allclose(np.asarray(lse)[has_keys], expected_lse[has_keys], atol=tolerance)
    assert (np.asarray(lse)[~has_keys] < -1e30).all()
