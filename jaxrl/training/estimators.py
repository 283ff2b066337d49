"""From columns of a step's trajectories to one advantage each, by the configured estimator."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np
from ml_collections import ConfigDict

from jaxrl.config_checks import is_pass_at_k
from jaxrl.objectives import advantages as estimators
from jaxrl.types import Columns, Group, with_fields


def k_at(advantage: ConfigDict, stage_step: int) -> int:
    """The k of the next step, after `stage_step` steps of the train stage."""
    begun = [k for step, k in advantage.k_schedule if step <= stage_step]
    return begun[-1] if begun else advantage.k


def make_estimator(config: ConfigDict) -> Callable[[Sequence[Group], int, int], list[Group]]:
    """`estimate(groups, step, k)` gives every trajectory its advantage.

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

    def estimate(groups: Sequence[Group], step: int, k: int) -> list[Group]:
        columns = Columns(groups)
        outcomes = columns.is_correct if has_k else columns.rewards
        extra: list[Any] = []
        if name == "reinforce_plus_plus":
            extra = [columns.token_counts]
        elif name == "pass_at_k_entropy_guided":
            extra = [columns.mean_entropies]
        elif name == "pass_at_k_bootstrap":
            extra = [jax.random.fold_in(jax.random.key(seed), step)]
        sizes = {"k": k} if has_k else {}
        found = np.asarray(estimator(outcomes, columns.group_ids, *extra, **sizes), np.float32)
        return with_fields(groups, advantage=[float(advantage) for advantage in found])

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
