"""All choices of losses, KL terms, corrections and estimators, for property tests of updates."""

import dataclasses
import itertools
from functools import cache

import jax
import numpy as np

from jaxrl.config import default_config
from jaxrl.models.attention.choice import select_kernels
from jaxrl.models.policy import Model
from jaxrl.objectives.kl import KL_ESTIMATORS
from jaxrl.training.estimators import AdvantageEstimator
from jaxrl.training.policy_loss import make_policy_loss
from jaxrl.types import flatten_groups
from tests.episodes import grouped
from tests.helpers import NUM_TOKENS, TINY, gradient_of, method_of, random_sequences

LENGTHS = [9, 20, 31, 14, 25, 6, 12, 17]

LOSSES = {
    "clip": {"loss.clip.dual_clip": 3.0},
    "gspo": {"loss.name": "gspo", "loss.aggregation": "seq-mean-token-mean"},
    "cispo": {"loss.name": "cispo"},
    "dppo": {
        "loss.name": "dppo",
        "loss.dppo.divergence": "kl",
        "loss.token_filter.name": "off_policy",
    },
    "clip with llds": {"loss.term.name": "llds"},
}
KL_TERMS = {
    "no KL": {},
    **{f"{name} to ref": {"kl.coef": 0.3, "kl.estimator": name} for name in KL_ESTIMATORS},
    "k3 to old": {"kl.coef": 0.3, "kl.anchor": "old"},
    "weighed k3": {"kl.coef": 0.3, "kl.low_factor": 0.5},
}
CORRECTIONS = {
    "no correction": {},
    **{
        f"{level} {mode}": {"loss.correction.level": level, "loss.correction.mode": mode}
        for level, mode in itertools.product(("token", "sequence"), ("truncate", "mask"))
    },
    "geometric reject": {
        **{"loss.correction.level": "geometric", "loss.correction.mode": "reject"},
        **{"loss.correction.low": 0.95, "loss.correction.high": 1.05},
    },
}
EVERY = list(itertools.product(LOSSES, KL_TERMS, CORRECTIONS))
# For the complete update, which compiles for seconds: each choice at least once.
WHOLE = [
    ("clip", "k3 to ref", "token truncate"),
    ("gspo", "weighed k3", "sequence truncate"),
    ("clip with llds", "no KL", "no correction"),
    ("dppo", "k3 to old", "geometric reject"),
    ("cispo", "k1+ to ref", "sequence mask"),
]


def configured(*changes):
    config = default_config()
    for change in changes:
        config.update_from_flattened_dict(change)
    return config


def loss_of(loss, kl, correction):
    bonus = {"loss.entropy_coef": 0.1}
    config = configured(LOSSES[loss], KL_TERMS[kl], CORRECTIONS[correction], bonus)
    return make_policy_loss(method_of(config))


def mode_of(loss):
    return LOSSES[loss].get("loss.aggregation", "token-mean")


def sequences():
    """Return trajectories with differing rollout, old and reference logprobs, some out of range."""
    rng = np.random.default_rng(5)
    varied = []
    for sequence in random_sequences(LENGTHS):
        length = len(sequence.token_ids)
        old = -5 + 0.4 * rng.standard_normal(length).astype(np.float32)
        ref = old + 0.6 * rng.standard_normal(length).astype(np.float32)
        # Small enough on average that the products over trajectories differ.
        rollout = old - 0.2 * rng.standard_normal(length).astype(np.float32)
        rollout = np.where(sequence.loss_mask, rollout, 0).astype(np.float32)
        logprobs = {"old_logprobs": old, "ref_logprobs": ref, "rollout_logprobs": rollout}
        varied.append(dataclasses.replace(sequence, **logprobs))
    return varied


def flat(batch):
    """Merge all rows into one micro-batch `[R, T]`."""
    return jax.tree.map(lambda x: x.reshape(-1, x.shape[-1]), batch)


def loss_gradient(token_loss):
    """Return the compiled gradient by each token's log-probability and entropy."""

    def total(logprobs, entropies, batch):
        values, _ = token_loss(logprobs, entropies, batch)
        return (values * batch.token_weights).sum()

    return jax.jit(jax.grad(total, argnums=(0, 1)))


def whole_gradient(mesh, loss, kl, correction):
    kernels = select_kernels("xla", mesh, TINY)
    sizes = {"num_tokens": NUM_TOKENS, "logits_chunk_tokens": 10**6}
    model = Model(TINY, mesh, **sizes, remat="none", attention=kernels)
    return gradient_of(model, loss_of(loss, kl, correction))


SLOTS = 12  # trajectories per batch; fixed, so that each estimator compiles once


@cache
def estimator(name, baseline=False):
    config = configured({"advantage.name": name})
    config.advantage.reinforce_plus_plus.baseline = baseline
    config.advantage.pass_at_k.k = 2
    method = method_of(config)
    estimate = AdvantageEstimator(method.advantage, method.seed)

    def advantages(trajectories, step):
        """Return the advantages float32 [SLOTS] by sample index, not by position."""
        estimated = flatten_groups(estimate(grouped(trajectories), step, 0))
        by_index = {t.sample_index: t.advantage for t in estimated}
        return np.array([by_index[index] for index in range(SLOTS)], np.float32)

    return advantages
