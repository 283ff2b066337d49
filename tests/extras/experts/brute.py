"""Grouped matmul in float64, group by group, and gradients of a kernel."""

import jax
import numpy as np


def differentiated(product):
    """Return a function from operands and the products' gradient to products and gradients."""

    def run(rows, weights, sizes, gradient):
        out, back = jax.vjp(lambda rows, weights: product(rows, weights, sizes), rows, weights)
        return out, *back(gradient)

    return jax.jit(run)


def brute_force(rows, weights, sizes, gradient):
    """Return products `[A, F]` and gradients of rows and weights; 0 beyond the groups."""
    sizes = np.asarray(sizes)
    rows, weights, gradient = (np.asarray(x, np.float64) for x in (rows, weights, gradient))
    out, of_rows, of_weights = np.zeros_like(gradient), np.zeros_like(rows), np.zeros_like(weights)
    ends = np.cumsum(sizes)
    for group, (start, end) in enumerate(zip(ends - sizes, ends, strict=True)):
        out[start:end] = rows[start:end] @ weights[group]
        of_rows[start:end] = gradient[start:end] @ weights[group].T
        of_weights[group] = rows[start:end].T @ gradient[start:end]
    return out, of_rows, of_weights
