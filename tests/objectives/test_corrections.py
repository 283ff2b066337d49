import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.objectives.corrections import importance_weights

pytestmark = pytest.mark.usefixtures("quick_compilation")

# Two trajectories in a row.
OLD = np.array([[-1.1, -0.9, -2, 0, -0.3, -1, -1.7, -0.9]], np.float32)
ROLLOUT = np.array([[-1.2, -0.9, -2, 0, -0.3, -1, -3.2, -0.8]], np.float32)
MASK = np.array([[1, 1, 0, 0, 1, 0, 1, 1]], bool)
IDS = np.array([[1] * 4 + [2] * 4])


# The log-ratios are .1, 0 and 0, 1.5, -.1; their sums .1 and 1.4.
@pytest.mark.parametrize(
    ("form", "expected"),
    [
        ({"level": "token", "mode": "truncate", "cap": 9.0}, [1.105171, 1, 1, 4.481689, 0.904837]),
        ({"level": "token", "mode": "truncate"}, [1.105171, 1, 1, 2, 0.904837]),
        ({"level": "sequence", "mode": "truncate"}, [1.105171, 1.105171, 2, 2, 2]),
        ({"level": "token", "mode": "mask"}, [1.105171, 1, 1, 4.481689, 0.904837]),
        ({"level": "token", "mode": "mask", "low": 0.95, "high": 2.0}, [1.105171, 1, 1, 0, 0]),
        ({"level": "sequence", "mode": "mask"}, [1.105171, 1.105171, 4.0552, 4.0552, 4.0552]),
        ({"level": "sequence", "mode": "reject", "high": 4.0}, [1, 1, 0, 0, 0]),
        ({"level": "token", "mode": "reject", "low": 0.95, "high": 1.05}, [0, 1, 1, 0, 0]),
        # Means of .05 and .4667 nats, so ratios of 1.0513 and 1.5947.
        ({"level": "geometric", "mode": "reject", "low": 1.1, "high": 1.6}, [0, 0, 1, 1, 1]),
        ({"level": "geometric", "mode": "truncate", "cap": 1.2}, [1.051271] * 2 + [1.2] * 3),
    ],
)
def test_two_trajectories_by_hand(form, expected):
    actual = np.asarray(importance_weights(OLD, ROLLOUT, MASK, IDS, **form))
    np.testing.assert_allclose(actual[MASK], expected, rtol=1e-6)
    assert (actual[~MASK] == 0).all()


def test_the_range_includes_its_ends():
    # exp and log of powers of two are not exact, so the ends are taken from the ratio itself.
    mask, ids = np.ones((1, 1), bool), np.ones((1, 1), int)
    old, rollout = np.full((1, 1), -0.5, np.float32), np.full((1, 1), -1.5, np.float32)
    ratio = float(jnp.exp(jnp.float32(1.0)))
    for low, high in ((ratio, 5.0), (0.5, ratio)):
        form = {"level": "token", "mode": "mask", "low": low, "high": high}
        assert float(importance_weights(old, rollout, mask, ids, **form)[0, 0]) == ratio


@pytest.mark.parametrize(
    ("level", "mode"), [("token", "truncate"), ("sequence", "mask"), ("geometric", "reject")]
)
def test_equal_probabilities_weigh_exactly_one_without_a_gradient(level, mode):
    def total(old, rollout):
        weights = importance_weights(old, rollout, MASK, IDS, level=level, mode=mode)
        return weights.sum(), weights

    run = jax.jit(jax.grad(total, argnums=(0, 1), has_aux=True))
    gradients, weights = run(OLD, OLD)
    np.testing.assert_array_equal(weights, MASK.astype(np.float32))
    assert not any(gradient.any() for gradient in gradients)


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_tokens_off_by_thousands_of_nats_stay_finite(level):
    far = np.full_like(OLD, -1e4)
    for pair, expected in (((far, OLD), np.exp(-20)), ((OLD, far), np.exp(20))):
        actual = importance_weights(*pair, MASK, IDS, level=level, mode="truncate", cap=1e30)
        np.testing.assert_allclose(actual, MASK * expected, rtol=1e-5)
