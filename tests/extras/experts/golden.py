"""Golden mixtures of experts, with gradients of a loss that balances the routers."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict

from jaxrl.extras.experts.routing import balance_loss
from jaxrl.models.aux_arrays import AuxArrays
from jaxrl.models.hf_weights import locate_hf_tensors
from tests.helpers import full_pass, relative_distance, split_fused


def loss_of(config, expected, scan, params):
    """Return the loss of next tokens and routers as in `make_golden.py`, and its parts."""
    token_ids, mask = jnp.asarray(expected["token_ids"]), jnp.asarray(expected["mask"])
    positions = jnp.broadcast_to(jnp.arange(token_ids.shape[1]), token_ids.shape)
    aux = AuxArrays(statistics_weights=mask.reshape(-1).astype(jnp.float32))
    segment_ids = jnp.ones_like(token_ids)
    hidden = full_pass(
        config, params, token_ids, positions, segment_ids, remat="full", scan=scan, aux=aux
    )
    logits = config.unembed(params, hidden, num_tokens=config.vocab_size)
    logprobs = jax.nn.log_softmax(logits[:, :-1])
    logprobs = jnp.take_along_axis(logprobs, token_ids[:, 1:, None], axis=-1)[..., 0]
    loss = -(logprobs * mask[:, 1:]).sum() / mask[:, 1:].sum()
    usage = aux.statistics
    balance = balance_loss(usage.probabilities, usage.counts, usage.num_tokens)
    return loss + 0.1 * balance, (logits, balance)


def check_golden(config, params, expected):
    """Check logits, losses and gradients against those of torch."""
    # Runs of layers in loops; all layers alike one after another.
    scan = bool(config.partial_layer_indices)
    differentiate = jax.value_and_grad(partial(loss_of, config, expected, scan), has_aux=True)
    (loss, (logits, balance)), gradients = jax.jit(differentiate)(params)
    np.testing.assert_allclose(logits, expected["logits"], atol=1e-4, rtol=0)
    np.testing.assert_allclose(balance, expected["balance_loss"], atol=1e-5)
    np.testing.assert_allclose(loss, expected["loss"], atol=1e-5)
    flat, ours = flatten_dict(gradients, sep="/"), {}
    for name, tensor in locate_hf_tensors(config).items():
        leaf = np.asarray(flat[tensor.param][tensor.index] if tensor.index else flat[tensor.param])
        ours[name] = leaf.T if tensor.is_transposed else leaf
    prefix = "gradient/"
    theirs = {n.removeprefix(prefix): x for n, x in expected.items() if n.startswith(prefix)}
    theirs = split_fused(theirs, config)
    assert ours.keys() == theirs.keys()
    assert relative_distance(ours, theirs) < 1e-4
    routers = [name for name in ours if name.endswith("mlp.gate.weight")]
    assert len(routers) == len(config.expert_layers)
    for name in routers:
        assert relative_distance({"": ours[name]}, {"": theirs[name]}) < 1e-4
