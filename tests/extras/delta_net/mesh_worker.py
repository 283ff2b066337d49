"""Check a hybrid model on meshes of eight virtual devices; run by `test_meshes.py`.

python -m tests.extras.delta_net.mesh_worker
"""

import jax
import numpy as np

from jaxrl.runtime.sharding import make_param_shardings
from jaxrl.training.packing import BatchShape
from jaxrl.training.update import GradientStep, ScoreStep, shard_batch
from tests.extras.delta_net.models import TINY_HYBRID, random_params
from tests.helpers import gather, pack_all, policy_loss, random_sequences, relative_distance
from tests.mesh_worker import (
    build_model,
    check_below,
    check_equal,
    complete,
    mesh_of,
    sample,
    start_engine,
)

MESHES = [complete(fsdp=2), complete(tensor=2), complete(data=2, fsdp=2, tensor=2)]
SHAPE = BatchShape(num_micro=2, micro_rows=8, row_tokens=150)
LENGTHS = [13, 150, 70, 24, 7, 65, 64, 128] * 2


def check_meshes(config, meshes):
    """Check gradients, log-probabilities and samples on meshes against those of one device."""
    params = random_params(config, seed=0)
    packed = pack_all(random_sequences(LENGTHS), SHAPE)
    results = []
    for sizes in [complete(), *meshes]:
        print(sizes, flush=True)
        mesh = mesh_of(sizes)
        model = build_model(mesh, config, logits_chunk_tokens=256)
        on_mesh = jax.device_put(params, make_param_shardings(mesh, config))
        batch = shard_batch(mesh, packed.batch)
        gradient = GradientStep(model, policy_loss())(on_mesh, batch, packed).gradients
        logprobs = ScoreStep(model, temperature=1.0)(on_mesh, batch, packed)
        gradient, logprobs = jax.device_get((gradient, logprobs))
        samples = sample(start_engine(mesh, config, on_mesh))
        results.append((gradient, logprobs, [s.token_ids.tolist() for s in samples]))

        wanted = results[0]
        check_below(1e-5, gradient_distance=float(relative_distance(gradient, wanted[0])))
        check_below(5e-5, logprob_gap=float(np.abs(logprobs - wanted[1]).max()))
        check_equal(results[-1][2], wanted[2])
        # The sampler's log-probabilities are those of the trainer on one device.
        shape = BatchShape(num_micro=3, micro_rows=8, row_tokens=64)
        one = mesh_of(complete())
        sampled = pack_all(samples, shape)
        score = ScoreStep(build_model(one, config), temperature=1.0)
        scored = score(params, shard_batch(one, sampled.batch), sampled)
        for index, sequence in enumerate(samples):
            gap = gather(sampled.batch, scored, index) - sequence.rollout_logprobs
            check_below(1e-4, sampled_gap=np.abs(gap)[sequence.loss_mask].max(initial=0))


def main():
    check_meshes(TINY_HYBRID, MESHES)


if __name__ == "__main__":
    main()
