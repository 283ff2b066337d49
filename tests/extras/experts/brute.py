"""Grouped products in float64, group by group."""

import numpy as np


def brute_force(rows, weights, sizes, gradient):
    """The products `[A, F]`, and the gradients of rows and weights; 0 beyond the groups."""
    sizes = np.asarray(sizes)
    rows, weights, gradient = (np.asarray(x, np.float64) for x in (rows, weights, gradient))
    out, of_rows, of_weights = np.zeros_like(gradient), np.zeros_like(rows), np.zeros_like(weights)
    ends = np.cumsum(sizes)
    for group, (start, end) in enumerate(zip(ends - sizes, ends, strict=True)):
        out[start:end] = rows[start:end] @ weights[group]
        of_rows[start:end] = gradient[start:end] @ weights[group].T
        of_weights[group] = rows[start:end].T @ gradient[start:end]
    return out, of_rows, of_weights
