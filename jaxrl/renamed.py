"""Keys of earlier versions: what they are called now, and how what was written then is read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

RENAMED = {
    "rollout.num_slots": "rollout.num_rows",
    "env.protocol": "env.search.protocol",
    "env.python": "env.search.tools",
    "search.corpus": "search.local.corpus",
    "search.index": "search.local.index",
    "search.topk": "search.local.topk",
    "search.max_observation_tokens": "rollout.max_observation_tokens",
    "reward.format_reward": "env.search.search_r1.format_reward",
    "reward.format_failure": "env.search.search_r1.format_failure",
    "reward.answer_reward": "env.search.search_r1.answer_reward",
    "reward.exact_match_bonus": "env.search.search_r1.exact_match_bonus",
    "reward.not_found": "env.search.search_r1.not_found",
    **{f"advantage.{key}": f"advantage.grpo.{key}" for key in ("normalize_std", "ddof", "epsilon")},
    "advantage.baseline": "advantage.reinforce_plus_plus.baseline",
    "advantage.k": "advantage.pass_at_k.k",
    "advantage.k_schedule": "advantage.pass_at_k.k_schedule",
    "filter.metric": "filter.varied.metric",
    "filter.low": "filter.accuracy_range.low",
    "filter.high": "filter.accuracy_range.high",
    "loss.dual_clip": "loss.clip.dual_clip",
    "kl.target": "kl.adaptive.target or config.kl.log.target",
    "kl.horizon": "kl.adaptive.horizon",
    **{f"kl.budgets.{key}": f"kl.budget.budgets.{key}" for key in ("easy", "medium", "hard")},
    "kl.budget_step": "kl.budget.step",
}
"""Keys of earlier versions, which are refused by what they are called now."""

RENAMED_VALUES = {"model.remat": {True: "full", False: "none"}}
"""Values of earlier versions by key, likewise; true and false only."""

WEIGHTS = "reward.weights"
"""Earlier a section with a key for each part, 0 where it pays nothing; a mapping now."""


def old_keys(flat: Mapping[str, Any]) -> list[str]:
    """The keys of a flat configuration that have another name now, or a value that has, sorted."""
    values = {key for key in RENAMED_VALUES if isinstance(flat.get(key), bool)}
    return sorted({*(flat.keys() & RENAMED.keys()), *values})


def name_now(key: str) -> str:
    """What one of `old_keys` is called now, or what its values are."""
    if key in RENAMED:
        return f"config.{RENAMED[key]}"
    return " or ".join(map(repr, RENAMED_VALUES[key].values()))


def with_present_names(flat: Mapping[str, Any]) -> dict[str, Any]:
    """A flat configuration as this version would have written it, by whichever it was written."""
    if not old_keys(flat):
        return dict(flat)
    parts = {key: value for key, value in flat.items() if key.startswith(f"{WEIGHTS}.")}
    present = {key: value for key, value in flat.items() if key not in {*RENAMED, *parts}}
    for key in old_keys(flat):
        present[_present_name(key, flat)] = _present_value(key, flat)
    by_name = {key.removeprefix(f"{WEIGHTS}."): value for key, value in parts.items()}
    weights = present.get(WEIGHTS, by_name)
    if isinstance(weights, Mapping) and weights:  # the file may be damaged
        present[WEIGHTS] = {name: value for name, value in weights.items() if value}
    return present


def _present_name(key: str, flat: Mapping[str, Any]) -> str:
    if key == "kl.target":  # of the two controllers that have one
        return f"kl.{'log' if flat.get('kl.controller') == 'log' else 'adaptive'}.target"
    return RENAMED.get(key, key)


def _present_value(key: str, flat: Mapping[str, Any]) -> Any:
    value = flat[key]
    if key == "env.python":
        return ("python",) if value else ()
    if key == "rollout.num_slots":  # of which num_rows, where it was not 0, were decoded
        return flat.get("rollout.num_rows") or value
    return RENAMED_VALUES.get(key, {}).get(value, value)


def contents_with_present_names(contents: Mapping[str, str]) -> dict[str, str]:
    """Fingerprints by the keys that name their files, `key` or `key/file`, likewise."""
    split = {name: name.partition("/") for name in contents}
    return {
        f"{RENAMED.get(key, key)}{slash}{file}": contents[name]
        for name, (key, slash, file) in split.items()
    }
