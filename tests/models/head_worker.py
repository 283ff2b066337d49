"""Measures a float32 output layer of a bfloat16 model on two virtual devices, for `test_head.py`.

python -m tests.models.head_worker REPORT
"""

import json
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl.models.attention.choice import select_kernels
from jaxrl.models.policy import Model
from jaxrl.runtime.sharding import make_mesh, param_shardings
from jaxrl.sampling.weights import WeightConverter
from jaxrl.training.packing import BatchShape
from jaxrl.training.update import GradientStep, ScoreStep, put_batch
from tests.helpers import (
    NUM_TOKENS,
    TINY,
    pack_all,
    policy_loss,
    random_sequences,
    relative_distance,
    tiny_params,
)

ONE = {"data": 1, "fsdp": 1, "tensor": 1}
MESHES = {"one": ONE, "tensor": ONE | {"tensor": 2}, "fsdp": ONE | {"fsdp": 2}}


def measured(config, sizes):
    """The sampler's table and logits, and the trainer's log-probabilities and gradients."""
    mesh = make_mesh(**sizes, devices=jax.devices()[: np.prod([*sizes.values()])])
    params = tiny_params(config)
    # Layers add nothing, as on two devices bfloat16 rounds their sums otherwise.
    for layer in (params["blocks"]["attention"]["o"], params["blocks"]["mlp"]["down"]):
        layer["kernel"] *= 0
    params = jax.device_put(params, param_shardings(mesh, config))
    prepare = partial(config.weights_for_decoding, dtype=jnp.bfloat16)
    weights = WeightConverter(
        prepare, config, mesh=mesh, train_mesh=mesh, scan_layers=True
    ).convert(params)
    head = weights["lm_head"]["kernel"]
    hidden = jnp.asarray(np.random.default_rng(0).normal(size=(5, TINY.width)), jnp.bfloat16)
    policy = Model(
        config,
        mesh,
        select_kernels("xla", mesh, config),
        num_tokens=NUM_TOKENS,
        dtype=jnp.bfloat16,
        remat="none",
        logits_chunk_tokens=16,
    )
    shape = BatchShape(num_micro=1, micro_rows=2, row_tokens=44)
    packed = pack_all(random_sequences([13, 44, 24]), shape)
    batch = put_batch(mesh, packed.batch)
    sums = GradientStep(policy, policy_loss())(params, batch, packed)
    return {
        "head": {"dtype": str(head.dtype), "part": head.sharding.shard_shape(head.shape)},
        "logits": np.asarray(jax.jit(partial(config.unembed, num_tokens=250))(weights, hidden)),
        "logprobs": np.asarray(ScoreStep(policy, temperature=1.0)(params, batch, packed)),
        "gradients": jax.device_get(sums.gradients),
    }


def main(path):
    report = {}
    for kind in ("tied", "untied"):
        config = replace(TINY, tie_embeddings=kind == "tied").with_head_dtype("float32")
        found = {name: measured(config, sizes) for name, sizes in MESHES.items()}
        one = found.pop("one")
        for name, several in found.items():
            gaps = {
                f"{what}_gap": float(np.abs(several[what] - one[what])[..., :250].max())
                for what in ("logits", "logprobs")
            }
            distance = relative_distance(several["gradients"], one["gradients"])
            gaps["gradient_gap"] = float(distance)
            report[f"{name} {kind}"] = {"head": several["head"], **gaps}
    Path(path).write_text(json.dumps(report))


if __name__ == "__main__":
    main(sys.argv[1])
