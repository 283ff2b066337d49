"""Reductions of metrics over two micro-batches of two rows, then over two updates."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.objectives.metrics import REDUCTIONS, Metric

VALUES = [[[4.0, 9.0], [2.0, 1.0]], [[6.0, 5.0], [-3.0, 8.0]]]
MASKS = [[[True, False], [True, False]], [[True, True], [False, False]]]  # 4, 2, then 6, 5
WEIGHTS = [[[0.5, 0.0], [0.25, 0.0]], [[0.125, 0.125], [0.0, 0.0]]]


def reduced(name):
    @jax.jit
    def total(values):
        first, second = (
            Metric(v, name).reduce(jnp.array(mask), jnp.array(weights))
            for v, mask, weights in zip(values, MASKS, WEIGHTS, strict=True)
        )
        return first.combine(second).finish(jnp.float32(4))

    return total(jnp.array(VALUES))


@pytest.mark.parametrize(
    ("name", "expected"),
    [("mean", 17 / 4), ("maximum", 6.0), ("loss", 2.0 + 0.5 + 0.75 + 0.625)],
)
def test_reductions_by_hand(name, expected):
    actual = reduced(name)
    assert float(actual.value) == expected


@pytest.mark.parametrize(
    ("name", "expected"), [("mean", np.nan), ("maximum", np.nan), ("loss", 0.0)]
)
def test_without_tokens_mean_and_maximum_are_nan(name, expected):
    nothing = jnp.zeros((1, 2))
    metric = Metric(nothing, name).reduce(nothing.astype(bool), nothing).finish(jnp.float32(0))
    np.testing.assert_equal(float(metric.value), expected)


def test_a_metric_is_averaged_by_default():
    assert Metric(0.0).reduction == "mean"
    merged = {name: float(reduction.merge([1.0, 3.0])) for name, reduction in REDUCTIONS.items()}
    assert merged == {"mean": 2.0, "maximum": 3.0, "loss": 2.0}


def test_no_gradient_flows_through_a_metric():
    def total(values):
        return Metric(values).reduce(jnp.ones((1, 2), bool), jnp.ones((1, 2))).value

    assert not np.asarray(jax.grad(total)(jnp.array([[1.0, 2.0]]))).any()
