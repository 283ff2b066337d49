"""Updates of a mixture of experts: invariance, load balancing and metrics."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxrl.extras.experts.routing import (
    ROUTED_EXPERTS,
    balance_loss,
    compute_usage_metrics,
    init_results,
    record_layer_routing,
    route_tokens,
    store_results,
)
from jaxrl.models.attention.reference import XLA
from jaxrl.models.aux_arrays import AuxArrays
from jaxrl.models.policy import Model
from jaxrl.training.packing import BatchShape
from jaxrl.training.update import ScoreStep, UpdateStep, init_state
from tests.helpers import (
    NUM_TOKENS,
    TINY_MOE,
    pack_all,
    policy_loss,
    random_sequences,
    relative_distance,
    tiny_params,
)
from tests.toys import one_device_mesh

pytestmark = pytest.mark.usefixtures("quick_compilation")
SEQUENCES = random_sequences([9, 20, 31, 14, 25, 6])


def gradient(shape, coef):
    """Return the first gradient, ten times Adam's first moment, and the metrics."""
    mesh = one_device_mesh()
    optimizer = optax.adamw(1e-3)
    params = jax.tree.map(jnp.asarray, tiny_params(TINY_MOE))
    model = Model(TINY_MOE, mesh, XLA, num_tokens=NUM_TOKENS)
    step = UpdateStep(model, policy_loss(), optimizer, balance_coef=coef)
    packed = pack_all(SEQUENCES, shape)
    state, metrics = step(init_state(params, mesh, TINY_MOE, optimizer), packed.batch, packed)
    moment = optax.tree_utils.tree_get(state.opt_state, "mu")
    return moment, {name: float(metric.value) for name, metric in metrics.items()}


@pytest.mark.slow(
    instead="training/test_signal_free.py::test_routers_are_balanced_and_measured_over_every_token"
)
def test_the_balance_is_of_the_whole_mini_batch_however_it_is_packed():
    one_row = BatchShape(num_micro=1, micro_rows=1, row_tokens=112)
    many = BatchShape(num_micro=6, micro_rows=1, row_tokens=32)
    (whole, metrics), (split, split_metrics) = (gradient(shape, 0.5) for shape in (one_row, many))
    assert relative_distance(whole, split) < 1e-5
    assert metrics.keys() == split_metrics.keys()
    for name, value in metrics.items():
        np.testing.assert_allclose(split_metrics[name], value, rtol=1e-4, atol=1e-5, err_msg=name)
    without_balance, _ = gradient(one_row, 0.0)
    routers = [tree["blocks"]["moe"]["router"] for tree in (whole, without_balance)]
    assert relative_distance(*routers) > 1e-2  # so it does something


def test_models_whose_experts_are_computed_otherwise_share_no_program():
    mesh, params = one_device_mesh(), jax.tree.map(jnp.asarray, tiny_params(TINY_MOE))
    packed = pack_all(SEQUENCES[:2], BatchShape(num_micro=1, micro_rows=1, row_tokens=32))

    def return_zeros(rows, weights, counts):
        return jnp.zeros((rows.shape[0], weights.shape[-1]), jnp.float32)

    silent = replace(TINY_MOE, experts=replace(TINY_MOE.experts, grouped_matmul=return_zeros))
    assert silent == TINY_MOE  # as models, which they are whatever computes their experts
    scores = [
        ScoreStep(Model(model, mesh, XLA, num_tokens=NUM_TOKENS), temperature=1.0)(
            params, packed.batch, packed
        )
        for model in (TINY_MOE, silent)
    ]
    assert np.abs(scores[0] - scores[1]).max() > 1e-3


def test_balance_and_metrics_by_hand():
    # Two layers, four experts, three tokens that count and one that does not, two experts each.
    probabilities = np.array([[0.4, 0.3, 0.2, 0.1], [0.25] * 4], np.float32)
    aux = AuxArrays(statistics_weights=jnp.array([1.0, 1.0, 1.0, 0.0]), records=True)
    found = init_results(aux, num_layers=2, num_tokens=4, top_k=2, num_experts=4)
    for number, row in enumerate(probabilities):
        logits = jnp.log(jnp.tile(row, (4, 1)))
        found = record_layer_routing(
            aux, found, number, route_tokens(logits, top_k=2, renormalize=True)
        )
    store_results(aux, found)
    usage = aux.statistics
    assert aux.recorded[ROUTED_EXPERTS].tolist() == [[[0, 1]] * 2] * 4  # ties go to the first
    np.testing.assert_allclose(usage.counts, [[3, 3, 0, 0]] * 2)
    np.testing.assert_allclose(usage.probabilities, 3 * probabilities, rtol=1e-6)
    # Of the tokens all chose 0 and 1; these have 0.7 and 0.5 of the probability.
    actual = balance_loss(usage.probabilities, usage.counts, 3.0)
    np.testing.assert_allclose(actual, 4 * (0.7 + 0.5) / 2, rtol=1e-6)
    metrics = compute_usage_metrics(usage)
    entropy = -(probabilities[0] * np.log(probabilities[0])).sum()
    np.testing.assert_allclose(metrics["entropy"], (entropy + np.log(4)) / 2, rtol=1e-6)
    assert (metrics["load_max"], metrics["load_min"], metrics["load_max_mean"]) == (2, 0, 2)


def test_given_experts_are_taken_with_the_shares_of_these_logits():
    logits = jnp.log(jnp.array([[0.4, 0.3, 0.2, 0.1]] * 2))
    replayed_ids = jnp.array([[3, 1], [255, 255]])  # the second token's are not known
    choice = route_tokens(logits, top_k=2, renormalize=True, replayed_ids=replayed_ids)
    assert choice.topk_ids.tolist() == [[3, 1], [0, 1]]
    np.testing.assert_allclose(choice.topk_weights, [[0.25, 0.75], [4 / 7, 3 / 7]], rtol=1e-6)
