import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.objectives.kl import KL_ESTIMATORS, kl_estimate

pytestmark = pytest.mark.usefixtures("quick_compilation")

LOGPROBS = np.array([[-1, -1, -1, -2]], np.float32)
ANCHOR = np.array([[-1, -0.5, -2, -1]], np.float32)


def estimated(*arrays, name):
    return kl_estimate(*arrays, estimator=KL_ESTIMATORS[name])


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("k1", [0, -0.5, 1, -1]),
        ("k2", [0, 0.125, 0.5, 0.5]),
        ("k3", [0, 0.148721, 0.367879, 0.718282]),
        ("abs", [0, 0.5, 1, 1]),
    ],
)
def test_four_tokens_by_hand(name, expected):
    for suffix in ("", "+"):
        got = estimated(LOGPROBS, ANCHOR, name=name + suffix)
        np.testing.assert_allclose(got, [expected], atol=1e-6)


def test_k3_is_the_default_and_ends_at_ten():
    logprobs, anchor = np.array([[-10, -100]], np.float32), np.array([[-1, -1]], np.float32)
    np.testing.assert_array_equal(kl_estimate(logprobs, anchor), [[10, 10]])


def test_k3_on_samples_of_the_current_policy_estimates_kl_to_the_anchor():
    old, new = np.log([0.7, 0.2, 0.1]), np.log([0.5, 0.3, 0.2])
    k3 = kl_estimate(new[None].astype(np.float32), old[None].astype(np.float32))[0]
    np.testing.assert_allclose(np.exp(new) @ k3, 0.092033, atol=1e-6)
    np.testing.assert_allclose(np.exp(new) @ (new - old), 0.092033, atol=1e-6)
    np.testing.assert_allclose(np.exp(old) @ k3, 0.078211, atol=1e-6)  # not KL(old || new)
    np.testing.assert_allclose(np.exp(old) @ (old - new), 0.085123, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("k1", np.ones(4)),
        ("k2", (LOGPROBS - ANCHOR)[0]),
        ("k3", 1 - np.exp((ANCHOR - LOGPROBS)[0])),
        ("abs", np.sign((LOGPROBS - ANCHOR)[0])),
        ("k1+", (LOGPROBS - ANCHOR)[0]),
        ("k2+", (LOGPROBS - ANCHOR)[0]),
        ("k3+", (LOGPROBS - ANCHOR)[0]),
        ("abs+", (LOGPROBS - ANCHOR)[0]),
    ],
)
def test_gradients_by_hand(name, expected):
    gradient = jax.grad(lambda x: estimated(x, ANCHOR, name=name).sum())
    np.testing.assert_allclose(gradient(jnp.array(LOGPROBS)), [expected], rtol=1e-6)


def test_what_is_no_number_a_token_is_refused():
    with pytest.raises(
        ValueError, match=r"kl\.estimator returned the shape \[\]; expected \[1, 4\]"
    ):
        kl_estimate(LOGPROBS, ANCHOR, estimator=lambda log_ratios: log_ratios.mean())
