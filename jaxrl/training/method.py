"""Training method: frozen settings and functions, built by `builders.method`.

docs/configuration.md describes the fields that are named after a config key. The functions below
also accept config sections, so that validation rules use the same conditions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jaxrl.utils.callables import NamedFunction


@dataclass(frozen=True, kw_only=True)
class AdvantageSettings:
    """Advantage estimator and its scheduled settings (config section `advantage`)."""

    estimator: NamedFunction  # from `objectives.advantages.ESTIMATORS`, or custom
    # By setting: pairs of a step of the stage and the value from that step on.
    schedules: Mapping[str, Sequence[tuple[int, Any]]]
    by_turn: bool
    turn_discount: float


@dataclass(frozen=True, kw_only=True)
class LossSettings:
    """Settings of the policy loss (config section `loss`).

    `correction` is passed to `importance_weights`.
    """

    policy_loss: NamedFunction
    # From `objectives.losses.LOSS_TERMS`, or custom; scaled by `term_coef`.
    term: NamedFunction | None
    term_coef: float
    # From `objectives.losses.TOKEN_FILTERS`, or custom; None if all tokens count.
    token_filter: NamedFunction | None
    aggregation: NamedFunction
    correction: Mapping[str, Any] = field(hash=False)
    entropy_coef: float
    mask_observations: bool
    old_logprobs: str  # `trainer` or `sampler`


@dataclass(frozen=True, kw_only=True)
class KLSettings:
    """Settings of the KL term (config section `kl`).

    `adaptive`, `log` and `budget` hold keyword arguments for the `update` method of the KL
    controller of the same name.
    """

    coef: float
    estimator: NamedFunction
    anchor: str
    apply_to: str
    controller: str
    low_factor: float
    second_chance: bool
    adaptive: Mapping[str, Any] = field(hash=False)
    log: Mapping[str, Any] = field(hash=False)
    budget: Mapping[str, Any] = field(hash=False)


@dataclass(frozen=True, kw_only=True)
class FilterSettings:
    """Filters that select the groups and trajectories to train on (config section `filter`)."""

    # From `objectives.filters.FILTERS`, or custom; None for all groups.
    group_filter: NamedFunction | None
    # From `objectives.filters.TRAJECTORY_FILTERS`, or custom; None for all trajectories.
    trajectory_filter: NamedFunction | None
    key: str  # metric or reward part that the filter compares
    tasks_per_batch: int
    max_batches: int
    carry_over: bool
    unfinished_tasks: int
    resample_attempts: int
    resample_early: bool
    skip_solved: bool
    skip_entropy: float

    @property
    def filters_on_penalized_rewards(self) -> bool:
        """Return True if the filter compares rewards after subtracting the KL penalty."""
        has_metric = self.group_filter is not None and "metric" in self.group_filter.arguments
        return has_metric and self.key == "seq_final_reward"


@dataclass(frozen=True, kw_only=True)
class ShapingSettings:
    """Reward shaping (config section `shaping`); see `environment.overlong_limit` for the limit."""

    overlong_buffer: int
    overlong_limit: int
    overlong_factor: float
    boundary_aware: bool
    abstention_bonus: float
    abstention_rate: float
    stage_level: bool
    stage_tolerance: int
    sample_level: bool
    entropy_reward: bool
    centered_gain: bool
    entropy_window: int
    entropy_percentile: float
    entropy_decay: float
    alpha_init: float
    alpha_step: float
    alpha_max: float
    # Values for easy and medium tasks; the next three fields also have one for hard tasks.
    min_accuracies: tuple[float, float]
    margins: tuple[float, float, float]
    huber_knees: tuple[float, float, float]
    sigmoid_temperatures: tuple[float, float, float]
    bootstrap_tasks: int


@dataclass(frozen=True, kw_only=True)
class WatchSettings:
    """Settings for detecting collapse and reacting to it (config section `watch`)."""

    detector: NamedFunction  # from `training.watch.DETECTORS`, or custom
    action: str  # from `training.watch.ACTIONS`, for signs that `actions` does not name
    actions: Mapping[str, str]
    lr_factor: float
    max_roll_backs: int


@dataclass(frozen=True, kw_only=True)
class OptimizerSettings:
    """Settings of `optimizer` or `sft.optimizer`; only `optimizer` sets the last three fields."""

    lr: float
    schedule: NamedFunction  # from `optimizer.SCHEDULES`, or custom; follows the warm-up
    warmup_steps: int
    final_lr_fraction: float
    num_updates: int  # optimizer steps of the stage
    beta1: float
    beta2: float
    epsilon: float
    weight_decay: float
    grad_clip: float
    moments_dtype: str
    offload: bool
    num_minibatches: int = 1
    num_epochs: int = 1
    skip_signal_free: bool = True


@dataclass(frozen=True, kw_only=True)
class Method:
    """Training method: how a step samples groups, computes advantages and updates the policy."""

    seed: int  # random seed of estimators that sample
    tasks_per_step: int
    group_size: int
    async_level: int
    temperature: float  # temperature of sampling and of the log-probabilities in training
    top_p: float  # top-p of sampling only; training scores the full distribution
    replays: bool  # True if training replays the token arrays that the sampler recorded
    advantage: AdvantageSettings
    loss: LossSettings
    kl: KLSettings
    filter: FilterSettings
    shaping: ShapingSettings
    balance_coef: float  # coefficient of the experts' load-balancing loss
    watch: WatchSettings | None  # detection of collapse, run after every step
    optimizer: OptimizerSettings

    @property
    def groups_per_minibatch(self) -> int:
        """Number of groups in a mini-batch."""
        return self.tasks_per_step // self.optimizer.num_minibatches

    @property
    def has_lag(self) -> bool:
        """Return True if a step may train on samples from before the latest update."""
        return bool(self.async_level) or carries_over_samples(self.filter)

    @property
    def gap_has_drift(self) -> bool:
        """Return True if the policy is updated between sampling and the gap measurement."""
        num_updates = self.optimizer.num_minibatches * self.optimizer.num_epochs
        return self.has_lag or (self.loss.old_logprobs == "sampler" and num_updates > 1)

    @property
    def trains_on_zero_advantages(self) -> bool:
        """Return True if a trajectory with an advantage of 0 may have a gradient.

        The gradient may come from a KL, entropy, extra or load-balancing term, or a custom loss.
        """
        others = self.loss.entropy_coef != 0 or self.balance_coef != 0 or self.loss.term is not None
        return has_kl_loss(self.kl) or others or self.loss.policy_loss.is_custom

    @property
    def loss_has_user_code(self) -> bool:
        """Return True if the loss, its extra term, token filter or KL estimator is user code."""
        parts = (self.loss.policy_loss, self.loss.term, self.loss.token_filter, self.kl.estimator)
        return any(part is not None and part.is_user_code for part in parts)

    @property
    def has_reference(self) -> bool:
        """Return True if a KL term needs the policy from the start of the stage as a reference."""
        return self.kl.coef != 0 and self.kl.anchor == "ref"


def needs_old_logprobs(
    optimizer: OptimizerSettings, filter: FilterSettings, loss: LossSettings
) -> bool:
    """Return True if the trainer must score batches before their updates.

    Otherwise, the old log-probabilities are those of the sampler, or come from the forward pass of
    the update. The latter requires a single optimizer step per batch, and samples from the current
    policy only.
    """
    has_one_update = optimizer.num_minibatches * optimizer.num_epochs == 1
    are_current = has_one_update and not carries_over_samples(filter)
    return loss.old_logprobs == "trainer" and not are_current


def carries_over_samples(filter: FilterSettings) -> bool:
    """Return True if a step may train on samples that an earlier step started."""
    return filter.carry_over or filter.unfinished_tasks > 0


def needs_divergences(kl: KLSettings) -> bool:
    """Return True if the KL divergence of each trajectory must be computed before the update."""
    return kl.coef != 0 and (kl.apply_to == "reward" or kl.controller != "fixed")


def has_kl_loss(kl: KLSettings) -> bool:
    """Return True if the loss of each token has a KL term."""
    return kl.coef != 0 and kl.apply_to == "loss"


def uses_token_kl_weights(kl: KLSettings) -> bool:
    """Return True if the KL coefficient varies across tokens or steps."""
    is_plain = kl.controller == "fixed" and kl.low_factor == 1 and not kl.second_chance
    return has_kl_loss(kl) and not is_plain


def uses_entropy_windows(shaping: ShapingSettings, kl: KLSettings) -> bool:
    """Return True if the method uses window entropies (`Trajectory.windows`)."""
    return shaping.entropy_reward or kl.low_factor != 1 or kl.second_chance


def uses_difficulty_buckets(shaping: ShapingSettings, kl: KLSettings) -> bool:
    """Return True if the method sorts tasks into difficulty buckets."""
    return shaping.entropy_reward or kl.controller == "budget" or kl.second_chance


def has_stage_gate(shaping: ShapingSettings) -> bool:
    """Return True if BAPO's stage gate divides training into an early and a late stage."""
    return shaping.boundary_aware and shaping.stage_level
