"""Learning rates and AdamW, compared with plain arithmetic."""

import math
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxrl.builders import method
from jaxrl.training.optimizer import make_optimizer, make_schedule
from tests.helpers import resolved, settings, tiny_params

pytestmark = pytest.mark.usefixtures("quick_compilation")


def optimizer_settings(num_updates, **changes):
    config = settings(**{f"optimizer.{name}": value for name, value in changes.items()})
    return replace(
        method.build_optimizer_settings(resolved(config), "train"),
        num_updates=num_updates,
    )


@pytest.mark.parametrize(
    ("schedule", "warmup", "final", "expected"),
    [
        ("constant", 4, 0.0, [2, 4, 6, 8, 8, 8]),
        ("constant", 1, 0.0, [8, 8, 8, 8, 8, 8]),
        ("linear", 0, 0.0, [8, 8 * 5 / 6, 8 * 4 / 6, 4, 8 * 2 / 6, 8 / 6, 0, 0]),
        ("linear", 2, 0.25, [4, 8, 8, 6.5, 5, 3.5, 2, 2]),
        ("cosine", 0, 0.0, [8, 4 + 4 * math.cos(math.pi / 6), 6, 4, 2]),
        ("cosine", 2, 0.5, [4, 8, 8, 6 + math.sqrt(2), 6, 6 - math.sqrt(2), 4, 4]),
    ],
)
def test_learning_rates_by_hand(schedule, warmup, final, expected):
    # Six updates: the warm-up's first, at 1 / warmup of the peak, to the last before the end.
    changes = {"schedule": schedule, "final_lr_fraction": final}
    rate = make_schedule(optimizer_settings(6, lr=8.0, warmup_steps=warmup, **changes))
    rates = [rate(step) for step in range(len(expected))]
    np.testing.assert_allclose(rates, expected, rtol=1e-5, atol=1e-5)


def test_adamw_by_hand():
    # Gradients of norm 5 and 0.5, clipped to 1, at rates 0.05 and 0.1, with decoupled decay.
    rate = {"lr": 0.1, "warmup_steps": 2, "grad_clip": 1.0, "weight_decay": 0.5}
    optimizer = make_optimizer(optimizer_settings(10, **rate, beta1=0.8, beta2=0.9, epsilon=1e-3))
    params = {"x": np.array([1.0, -2.0], np.float32), "y": np.array([0.5], np.float32)}
    state = optimizer.init(params)
    gradients = [
        {"x": np.array([3.0, 0.0], np.float32), "y": np.array([4.0], np.float32)},
        {"x": np.array([0.0, -0.3], np.float32), "y": np.array([0.4], np.float32)},
    ]
    first = dict.fromkeys(params, np.float32(0))
    second = dict.fromkeys(params, np.float32(0))
    expected = dict(params)
    for step, (gradient, factor, rate) in enumerate(
        zip(gradients, (1 / 5, 1), (0.05, 0.1), strict=True), start=1
    ):
        changes, state = optimizer.update(gradient, state, params)
        params = optax.apply_updates(params, changes)
        for name, value in expected.items():
            g = gradient[name] * factor
            first[name] = 0.8 * first[name] + 0.2 * g
            second[name] = 0.9 * second[name] + 0.1 * g * g
            mean, square = first[name] / (1 - 0.8**step), second[name] / (1 - 0.9**step)
            expected[name] = value - rate * (mean / (np.sqrt(square) + 1e-3) + 0.5 * value)
        for name, value in expected.items():
            np.testing.assert_allclose(params[name], value, rtol=1e-5)


def test_no_clipping_where_it_is_off():
    rate = {"lr": 1.0, "beta1": 0.0, "beta2": 0.0, "weight_decay": 0.0, "epsilon": 1.0}
    for clip, norm in ((0.0, 100.0), (10.0, 10.0)):
        optimizer = make_optimizer(optimizer_settings(1, grad_clip=clip, **rate))
        changes, _ = optimizer.update(
            jnp.array([100.0]), optimizer.init(jnp.zeros(1)), jnp.zeros(1)
        )
        np.testing.assert_allclose(changes, [-norm / (norm + 1)], rtol=1e-5)


def test_every_weight_decays_where_nothing_else_moves_it():
    params = tiny_params()
    optimizer = make_optimizer(optimizer_settings(10, lr=0.1, weight_decay=0.5))
    zeros = jax.tree.map(np.zeros_like, params)
    changes, _ = jax.jit(lambda g, p: optimizer.update(g, optimizer.init(p), p))(zeros, params)
    for change, leaf in zip(jax.tree.leaves(changes), jax.tree.leaves(params), strict=True):
        np.testing.assert_allclose(change, -0.05 * np.asarray(leaf), rtol=1e-5)


def test_short_moments_are_those_of_gradients_alone():
    # Gradients of 1 and 1.004, the same in bfloat16: the mean of squares, in float32, tells them
    # apart.
    moments = {}
    for dtype in ("float32", "bfloat16"):
        optimizer = make_optimizer(optimizer_settings(2, moments_dtype=dtype, grad_clip=0.0))
        params, state = jnp.ones(3), optimizer.init(jnp.ones(3))
        for gradient in (1.0, 1.004):
            _, state = optimizer.update(jnp.full(3, gradient), state, params)
        moments[dtype] = [optax.tree.get(state, name) for name in ("mu", "nu")]
    assert [x.dtype for x in moments["bfloat16"]] == [jnp.bfloat16, jnp.float32]
    np.testing.assert_allclose(moments["float32"][0], 0.09 + 0.1004, rtol=1e-6)
    np.testing.assert_allclose(
        moments["bfloat16"][0].astype(np.float32), moments["float32"][0], rtol=0.01
    )
    np.testing.assert_array_equal(moments["bfloat16"][1], moments["float32"][1])
