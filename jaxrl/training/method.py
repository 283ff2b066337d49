"""What a configuration makes of the method: its loss, its estimator, its controllers.

Every choice is a function of `objectives`, taken from a dict by its name in the configuration. The
loss is compiled into the update step; the rest is computed on the host, from what all processes
know, and enters the step as arrays.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from ml_collections import ConfigDict

from jaxrl.config_checks import has_gate, is_measured, is_pass_at_k, needs_buckets, needs_windows
from jaxrl.objectives import advantages as estimators
from jaxrl.objectives import losses
from jaxrl.objectives.controllers import (
    BUCKETS,
    AdaptiveKL,
    DifficultyBuckets,
    EntropyCoefficients,
    KLBudget,
    LogKL,
    SkipSet,
    StageGate,
)
from jaxrl.objectives.corrections import importance_weights
from jaxrl.objectives.entropy import EntropyThreshold
from jaxrl.objectives.kl import kl_estimate
from jaxrl.training.collect import scored_ids
from jaxrl.training.update import TokenLoss
from jaxrl.types import Batch, Trajectory

POLICY_LOSSES: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "clip": (losses.clipped_policy_loss, losses.clip_metrics),
    "gspo": (losses.gspo_policy_loss, losses.gspo_metrics),
    "cispo": (losses.cispo_policy_loss, losses.cispo_metrics),
}
"""Each loss and what it measures of itself, for the same arguments."""


def make_policy_loss(loss: ConfigDict, kl: ConfigDict) -> TokenLoss:
    """The policy loss with its KL and entropy terms; a term that is off adds nothing."""
    policy_loss, loss_metrics = POLICY_LOSSES[loss.name]
    settings: dict[str, Any] = {"clip_low": loss.clip_low, "clip_high": loss.clip_high}
    if loss.name == "clip":
        settings["dual_clip"] = loss.dual_clip or None
    needs_segments = loss.name == "gspo"
    correction = loss.correction.to_dict()
    is_corrected = correction["level"] != "none"
    entropy_coef, estimator, anchor_name = loss.entropy_coef, kl.estimator, kl.anchor
    kl_coef = kl.coef if kl.place == "loss" else 0.0
    mask_observations = loss.mask_observations

    def token_loss(
        logprobs: jax.Array, entropies: jax.Array, batch: Batch
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        mask = batch.loss_mask
        # With one optimizer step a batch, the policy before the update is the current one.
        current = jax.lax.stop_gradient(logprobs)
        old = current if batch.old_logprobs is None else batch.old_logprobs
        arguments: tuple[Any, ...] = (logprobs, old, batch.advantages, mask)
        arguments += (batch.segment_ids,) if needs_segments else ()
        values = policy_loss(*arguments, **settings)
        # Of an observation that is trained on, the sampler has no log-probability.
        is_sampled = mask if mask_observations else mask & (batch.rollout_logprobs != 0)
        gap = jnp.where(is_sampled, old - batch.rollout_logprobs, 0.0)
        metrics = {
            "actor/entropy": entropies,
            **{f"actor/{name}": x for name, x in loss_metrics(*arguments, **settings).items()},
            "rollout_corr/logprob_diff_mean": jnp.abs(gap),
            "rollout_corr/logprob_diff_max": jnp.abs(gap),
            "rollout_corr/k3_kl": kl_estimate(
                batch.rollout_logprobs, old, is_sampled, estimator="k3"
            ),
        }
        if is_corrected:
            weights = importance_weights(
                old, batch.rollout_logprobs, mask, batch.segment_ids, **correction
            )
            values = values * weights
            metrics["rollout_corr/weight_mean"] = weights
            metrics["rollout_corr/weight_square_mean"] = weights**2
        metrics["actor/pg_loss"] = values
        if kl_coef:
            anchor = batch.ref_logprobs if anchor_name == "ref" else old
            assert anchor is not None
            divergence = kl_estimate(logprobs, anchor, mask, estimator=estimator)
            values = values + _kl_weights(batch, kl_coef) * divergence
            metrics["actor/kl_loss"] = divergence
        if entropy_coef:
            values = values - entropy_coef * jnp.where(mask, entropies, 0.0)
        return values, metrics

    return token_loss


def _kl_weights(batch: Batch, kl_coef: float) -> jax.Array | float:
    return kl_coef if batch.kl_weights is None else batch.kl_weights


def k_at(advantage: ConfigDict, stage_step: int) -> int:
    """The k of the next step, after `stage_step` steps of the train stage."""
    begun = [k for step, k in advantage.k_schedule if step <= stage_step]
    return begun[-1] if begun else advantage.k


def make_estimator(config: ConfigDict) -> Callable[..., np.ndarray]:
    """`estimate(trajectories, step, k) -> float32 [N]`, one advantage a trajectory.

    An environment error is in no group and gets 0. `step` seeds the estimators that draw. `k` is
    read by those of pass@k, which compile once for each.
    """
    settings = config.advantage
    name, seed = settings.name, config.seed
    has_k = is_pass_at_k(config)
    keywords: dict[str, Any] = {}
    if name == "grpo":
        keywords = {key: settings[key] for key in ("normalize_std", "ddof", "epsilon")}
    elif name == "reinforce_plus_plus":
        keywords = {"baseline": settings.baseline}
    static = ("k",) if has_k else ()
    estimator = jax.jit(partial(_ESTIMATORS[name], **keywords), static_argnames=static)

    def estimate(trajectories: Sequence[Trajectory], step: int, k: int) -> np.ndarray:
        if has_k:
            outcomes = np.array([t.is_correct and t.is_scored for t in trajectories], bool)
        else:
            outcomes = np.array([t.reward for t in trajectories], np.float32)
        extra: list[Any] = []
        if name == "reinforce_plus_plus":
            extra = [np.array([t.num_sampled for t in trajectories], np.int32)]
        elif name == "pass_at_k_entropy_guided":
            extra = [np.array([t.mean_entropy for t in trajectories], np.float32)]
        elif name == "pass_at_k_bootstrap":
            extra = [jax.random.fold_in(jax.random.key(seed), step)]
        sizes = {"k": k} if has_k else {}
        advantages = estimator(outcomes, scored_ids(trajectories), *extra, **sizes)
        return np.asarray(advantages, np.float32)

    return estimate


_ESTIMATORS: dict[str, Callable[..., Any]] = {
    "grpo": estimators.grpo,
    "rloo": estimators.rloo,
    "reinforce_plus_plus": estimators.reinforce_plus_plus,
    "pass_at_k": estimators.pass_at_k,
    "pass_at_k_combination": estimators.pass_at_k_combination,
    "pass_at_k_exceeding": estimators.pass_at_k_exceeding,
    "pass_at_k_full_sampling": estimators.pass_at_k_full_sampling,
    "pass_at_k_bootstrap": estimators.pass_at_k_bootstrap,
    "pass_at_k_entropy_guided": estimators.entropy_guided,
}


@dataclasses.dataclass(frozen=True)
class Controllers:
    """The states that change from step to step; None for what the method does not use."""

    gate: StageGate | None = None
    threshold: EntropyThreshold | None = None
    buckets: DifficultyBuckets | None = None
    coefficients: EntropyCoefficients | None = None
    kl: AdaptiveKL | LogKL | KLBudget | None = None
    skipped: SkipSet | None = None

    @classmethod
    def init(cls, config: ConfigDict) -> Controllers:
        """The states before the first step."""
        return cls(
            gate=StageGate.init() if has_gate(config) else None,
            threshold=EntropyThreshold.init() if needs_windows(config) else None,
            buckets=DifficultyBuckets.init() if needs_buckets(config) else None,
            coefficients=(
                EntropyCoefficients.init(alpha=config.shaping.alpha_init)
                if config.shaping.entropy_reward
                else None
            ),
            kl=_init_kl(config.kl) if is_measured(config) else None,
            skipped=SkipSet.init() if config.filter.skip_solved else None,
        )

    @classmethod
    def from_json(cls, saved: dict[str, Any], config: ConfigDict) -> Controllers:
        """The inverse of `dataclasses.asdict`; what a changed configuration needs anew is fresh."""
        fresh = cls.init(config)
        states = {field.name: getattr(fresh, field.name) for field in dataclasses.fields(cls)}
        for name, state in states.items():
            found = saved.get(name)
            if state is not None and found and found.keys() == dataclasses.asdict(state).keys():
                states[name] = type(state)(**found)
        return cls(**states)

    @property
    def is_late(self) -> bool:
        """False in the early stage of a method that has one."""
        return self.gate is None or self.gate.is_late

    @property
    def level(self) -> float | None:
        """Window entropy from which on a token wavers, in nats; None before it is known."""
        return None if self.threshold is None else self.threshold.value

    def bucket(self, task_id: str) -> str:
        """The difficulty of a task; hard where nothing is known of it."""
        return "hard" if self.buckets is None else self.buckets.buckets.get(task_id, "hard")

    def kl_coef(self, config: ConfigDict) -> float:
        """The KL coefficient as it stands."""
        return self.kl.coef if isinstance(self.kl, AdaptiveKL | LogKL) else config.kl.coef

    def metrics(self) -> dict[str, Any]:
        """Every number of every state, as `controller/<name>/<field>`; of tasks, how many."""
        states: dict[str, dict[str, Any]] = {}
        for field in dataclasses.fields(self):
            state = getattr(self, field.name)
            if isinstance(state, DifficultyBuckets):
                counts = Counter(state.buckets.values())
                states[field.name] = {name: counts[name] for name in BUCKETS}
            elif isinstance(state, SkipSet):
                states[field.name] = {"count": len(state.task_ids)}
            elif state is not None:
                states[field.name] = dataclasses.asdict(state)
        found: dict[str, Any] = {}
        for name, state in states.items():
            for key, value in state.items():
                inner = value if isinstance(value, dict) else {"": value}
                for last, number in inner.items():
                    found["/".join(x for x in ("controller", name, key, last) if x)] = number
        return found


def _init_kl(kl: ConfigDict) -> AdaptiveKL | LogKL | KLBudget | None:
    match kl.controller:
        case "adaptive":
            return AdaptiveKL.init(coef=kl.coef)
        case "log":
            return LogKL.init(coef=kl.coef)
        case "budget":
            return KLBudget.init()
    return None
