"""Golden adapters, and logits of a policy with an adapter."""

from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp

from jaxrl.runtime.sharding import make_mesh
from tests.helpers import full_pass

GOLDEN = Path(__file__).parents[2] / "golden"
MESH = make_mesh(data=1, fsdp=1, tensor=1, devices=jax.devices()[:1])


@partial(jax.jit, static_argnums=0, static_argnames="scan")
def plain_logits(model, weights, token_ids, *, scan=True):
    positions = jnp.broadcast_to(jnp.arange(token_ids.shape[1]), token_ids.shape)
    hidden = full_pass(model, weights, token_ids, positions, jnp.ones_like(positions), scan=scan)
    return model.unembed(weights, hidden, num_tokens=model.vocab_size)


def logits_of(adapter, policy, token_ids, **settings):
    weights = adapter.prepare_training_weights(policy, jnp.float32)
    return plain_logits(adapter.model, weights, token_ids, **settings)
