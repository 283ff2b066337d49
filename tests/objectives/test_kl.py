import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.objectives.kl import KL_ESTIMATORS, kl_estimate

pytestmark = pytest.mark.usefixtures("quick_compilation")

LOGPROBS = np.array([[-1, -1, -1, -2]], np.float32)
ANCHOR = np.array([[-1, -0.5, -2, -1]], np.float32)
GAP = (LOGPROBS - ANCHOR)[0]


@pytest.mark.parametrize(
    ("name", "values", "slopes"),
    [
        ("k1", [0, -0.5, 1, -1], np.ones(4)),
        ("k2", [0, 0.125, 0.5, 0.5], GAP),
        ("k3", [0, 0.148721, 0.367879, 0.718282], 1 - np.exp(-GAP)),
        ("abs", [0, 0.5, 1, 1], np.sign(GAP)),
    ],
)
def test_four_tokens_by_hand(name, values, slopes):
    for estimator, gradient in ((name, slopes), (name + "+", GAP)):

        def total(logprobs, estimator=KL_ESTIMATORS[estimator]):
            estimate = kl_estimate(logprobs, ANCHOR, estimator=estimator)
            return estimate.sum(), estimate

        actual_gradient, actual = jax.grad(total, has_aux=True)(jnp.array(LOGPROBS))
        np.testing.assert_allclose(actual, [values], atol=1e-6)
        np.testing.assert_allclose(actual_gradient, [gradient], rtol=1e-6)


def test_k3_is_the_default_and_ends_at_ten():
    logprobs, anchor = np.array([[-10, -100]], np.float32), np.array([[-1, -1]], np.float32)
    np.testing.assert_array_equal(kl_estimate(logprobs, anchor), [[10, 10]])
