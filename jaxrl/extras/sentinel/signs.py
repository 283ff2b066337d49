"""Rules that detect failing training from the statistics of a step and earlier steps.

Most rules compare a step with up to `BASELINE_STEPS` earlier steps, so a run that is bad from the
start raises no sign. Bugs (different prompts in a group, samples that share a random key) raise a
sign immediately.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from jaxrl.extras.sentinel.evidence import StepStats, compute_step_stats
from jaxrl.training.method import Method
from jaxrl.training.watch import CollapseSign
from jaxrl.types import Group

BASELINE_STEPS = 50
"""Maximum number of earlier steps to compare with."""

RECENT = 3
"""Number of latest steps over which noisy statistics are averaged."""

ACCURACY_STEPS = 10
"""Number of latest steps over which the accuracy is averaged."""

MIN_PRIOR = 5
"""Minimum number of earlier steps to compare with."""

ROUNDING_GAP = 0.002
"""Mean gap between sampler and trainer, in nats per token, that never raises a sign."""

MAX_GROWTH = 10.0
"""Multiple of the largest recent gradient norm above which a gradient explodes."""

RuleResult = tuple[str, str] | None
"""Name and text of the sign that a rule raises, or None."""


def detect_signs(
    record: Mapping[str, Any],
    groups: Sequence[Group],
    state: Mapping[str, Any],
    method: Method,
    step: int,
    *,
    reward_fall: float,
    share: float,
    gap: float,
) -> tuple[dict[str, Any], list[CollapseSign]]:
    """Apply all rules to a step; return the new state and the signs, most certain first.

    Args:
        record: Metrics of the step, keyed by name.
        groups: Groups that the step trained on, with advantages.
        state: State after the previous step: "steps" (statistics of earlier steps), "best"
            (`StepHistory.best`), "counts" (consecutive steps in which each rule fired) and "twins"
            (log-likelihoods of identical samples, summed over steps).
        method: Training method.
        step: Step number within the stage, from 1.
        reward_fall: Drop from the best mean reward that raises a sign, as a fraction of the reward
            range.
        share: Fraction of bad responses (for example, malformed or truncated) that raises a sign.
        gap: Mean gap between sampler and trainer that always raises a sign, in nats per token.
    """
    # Pairs that are identical by chance soon differ, and then leave the sums.
    now = compute_step_stats(record, groups, method)
    past: list[StepStats] = list(state.get("steps", []))
    best = dict(state.get("best", {}))
    duplicates = {
        pair: value + state.get("twins", {}).get(pair, 0.0) for pair, value in now["twins"].items()
    }
    history = StepHistory(past=past, now=now, number=step, best=best)
    rules: dict[str, tuple[RuleResult, int]] = {
        # Result of each rule, and the number of consecutive steps in which it must fire.
        "prompts": (detect_prompt_mismatch(now), 1),
        "twins": (detect_repeated_keys(duplicates), 1),
        "uneven": (detect_uneven_advantages(now, method), 1),
        "skipped": (detect_skipped_updates(history), 1),
        "gap": (detect_sampler_mismatch(history, gap, has_drift=method.gap_has_drift), 2),
        "gradient": (detect_gradient_explosion(history), 1),
        "moved": (detect_large_update(history), 1),
        "constant": (detect_constant_rewards(now), RECENT),
        "sudden": (detect_sudden_success(history), RECENT),
        "yes": (detect_lenient_judge(history), RECENT),
        "found": (detect_search_quality_drop(history), 1),
        "reward": (detect_reward_drop(history, reward_fall), 1),
        "entropy": (detect_entropy_change(history, share), RECENT),
        "likelihood": (detect_likelihood_drop(history), 2),
        **{name: (detect_bad_response_increase(history, name, share), 2) for name in _SHARE_SIGNS},
        "length": (detect_length_change(history), 2),
        "signal": (detect_missing_signal(history), 8),
    }
    # `since` is the last healthy step, the target of a rollback.
    counts, signs = {}, []
    for name, (sign, num_required) in rules.items():
        counts[name] = state.get("counts", {}).get(name, 0) + 1 if sign else 0
        if sign and counts[name] >= num_required:
            healthy_step = step - counts[name]  # the last step without the sign
            if name == "reward":
                healthy_step = min(healthy_step, best["number"])
            signs.append(CollapseSign(name=sign[0], text=sign[1], since=max(healthy_step, 0)))
    stats = {key: value for key, value in now.items() if key != "twins"}
    next_state = {
        "steps": [*past, stats][-BASELINE_STEPS:],
        "counts": counts,
        "best": history.compute_updated_best(),
        "twins": duplicates,
    }
    return next_state, signs


detect_signs.signs = (  # type: ignore[attr-defined]  # keys of config.watch.actions
    *("prompts_differ", "keys_repeat", "advantages_uneven", "gradient_not_finite"),
    *("ids_differ", "sampler_differs", "gradient_exploded", "update_too_large"),
    *("rewards_constant", "suddenly_right", "judge_says_yes", "search_changed", "reward_fell"),
    *("entropy_collapsed", "entropy_rose", "likelihood_fell", "responses_cut"),
    *("responses_malformed", "turns_void", "responses_loop", "length_jumped", "no_signal"),
)


class StepHistory:
    """Statistics of the current step and earlier steps."""

    def __init__(
        self, *, past: Sequence[StepStats], now: StepStats, number: int, best: Mapping[str, Any]
    ):
        """Store the statistics.

        Args:
            past: Statistics of up to `BASELINE_STEPS` earlier steps, oldest first.
            now: Statistics of this step.
            number: Step number within the stage, from 1.
            best: Best window of `MIN_PRIOR` consecutive steps (mean `reward`, standard deviation
                `sd`, number of `groups`, `number` of the last step), and `low`, the lowest reward.
        """
        self.past, self.now, self.number, self.best = past, now, number, best

    def get_recent_values(self, name: str, last: int = BASELINE_STEPS) -> list[float]:
        """Return up to `last` values of a statistic before this step, oldest first."""
        return _get_values(name, self.past)[-last:]

    def compute_recent_mean(self, name: str) -> float | None:
        """Compute a statistic's mean over the last `RECENT` steps; None if a value is missing."""
        values = _get_values(name, [*self.past[1 - RECENT :], self.now])
        return sum(values) / len(values) if len(values) == RECENT else None

    def get_baseline_values(self, name: str) -> list[float]:
        """Return the values of a statistic before the last `RECENT` steps, oldest first."""
        return _get_values(name, self.past[: max(len(self.past) - RECENT + 1, 0)])

    def compute_updated_best(self) -> dict[str, Any]:
        """Return the best and lowest values so far, including this step."""
        last = [step for step in [*self.past, self.now] if step.get("reward") is not None]
        low = min([*_get_values("reward_min", last), self.best.get("low", math.inf)])
        best = {**self.best, "low": low} if last else dict(self.best)
        if len(last) < MIN_PRIOR:
            return best
        last = last[-MIN_PRIOR:]
        mean = sum(step["reward"] for step in last) / MIN_PRIOR
        if mean < best.get("reward", -math.inf):
            return best
        groups = sum(step["groups"] for step in last)
        spread = max(step["reward_sd"] for step in last)
        return {"reward": mean, "sd": spread, "groups": groups, "low": low, "number": self.number}


def _get_values(name: str, steps: Sequence[StepStats]) -> list[float]:
    return [step[name] for step in steps if step.get(name) is not None]


def detect_prompt_mismatch(now: StepStats) -> RuleResult:
    """Detect samples of one task with different prompts."""
    if not now["prompts"]:
        return None
    return "prompts_differ", (
        f"in {now['prompts']} groups, samples have different prompts, so their rewards cannot be "
        "compared. A likely cause is randomness in the environment's start() or chat template, or "
        "an environment that changes its tasks."
    )


def detect_repeated_keys(duplicates: Mapping[str, float]) -> RuleResult:
    """Detect pairs of samples that are improbably often identical."""
    pair, nats = min(duplicates.items(), key=lambda item: item[1], default=("", 0.0))
    if nats > -30.0:
        return None
    i, j = pair.split("-")
    return "keys_repeat", (
        f"samples {i} and {j} of every group have been identical since the last step in which they "
        f"differed; the probability of that is 1 in 10^{-nats / math.log(10):.0f}. They share "
        "a random key, so groups are effectively smaller."
    )


def detect_uneven_advantages(now: StepStats, method: Method) -> RuleResult:
    """Detect groups whose advantages do not sum to 0, as the estimator guarantees."""
    if now["uneven"] < 1e-3:
        return None
    return "advantages_uneven", (
        f"the advantages of a group sum to {now['uneven']:.2g} times the largest one; expected "
        f"0 for {method.advantage.estimator.name!r}. Groups were assembled incorrectly, or lost "
        "members after advantages were computed."
    )


def detect_skipped_updates(history: StepHistory) -> RuleResult:
    """Detect updates that were skipped because the gradient was not finite."""
    earlier = [*history.get_recent_values("skipped", 1), 0.0][0]
    skipped = (history.now["skipped"] or 0.0) - earlier
    if skipped <= 0:
        return None
    return "gradient_not_finite", (
        f"{skipped:.0f} updates were skipped because their gradient was not finite. Look for huge "
        "rewards (critic/rewards/max) or log-ratios (actor/ppo_kl). A lower learning rate or "
        "config.optimizer.grad_clip helps against huge log-ratios."
    )


def detect_sampler_mismatch(history: StepHistory, limit: float, *, has_drift: bool) -> RuleResult:
    """Detect a gap between sampler and trainer logprobs that is too large or has grown."""
    now, prior = history.now["gap"], history.get_baseline_values("gap")[-20:]
    if now is None:
        return None
    has_grown = len(prior) >= MIN_PRIOR and now > 10 * max(prior) and now > ROUNDING_GAP
    is_large = now >= limit
    # If the trainer has newer weights than the sampler had, the gap grows with every update.
    is_sign = (has_grown and is_large) if has_drift else (has_grown or is_large)
    if not is_sign:
        return None
    earlier = f"; before it was {median(prior):.2g}" if prior else ""
    text = f"sampler and trainer differ by {now:.2g} nats per token{earlier}. "
    # k3 of the gap d is exp(d) - 1 - d. This is about |d| if the trainer assigns sampled tokens
    # almost no probability, and about d^2 / 2 if weights or rounding differ slightly.
    if (history.now["gap_k3"] or 0.0) > 0.5 * now and (history.now["gap_max"] or 0.0) > 5.0:
        return "ids_differ", text + (
            f"Single tokens differ by up to {history.now['gap_max']:.0f} nats: the trainer gets "
            "other ids or positions than were sampled. Look for text that is tokenized again, "
            "ids that were truncated or swapped, or a different chat template."
        )
    return "sampler_differs", text + (
        "All tokens are slightly off: the sampler has different weights (an update that did not "
        "reach it, a quantized copy), or computes differently (dtype, attention, temperature). "
        "config.loss.correction can correct for it, but look for the cause first."
    )


def detect_gradient_explosion(history: StepHistory) -> RuleResult:
    """Detect a gradient norm far above the largest recent norm."""
    now = history.now["gradient"]
    prior = [x for x in history.get_recent_values("gradient", 20) if x > 0]
    if now is None or len(prior) < MIN_PRIOR or now <= MAX_GROWTH * max(prior):
        return None
    return "gradient_exploded", (
        f"the gradient norm is {now:.3g}; in the previous {len(prior)} steps it was at most "
        f"{max(prior):.3g}. Likely causes are rewards of a different scale, or a diverging "
        "ratio or KL term; look at critic/rewards/max, actor/ppo_kl and actor/kl_loss. "
        "config.optimizer.grad_clip limits the effect."
    )


def detect_large_update(history: StepHistory) -> RuleResult:
    """Detect a step whose updates moved the policy too far."""
    now, prior = history.now["moved"], [abs(x) for x in history.get_recent_values("moved", 20)]
    if now is None or len(prior) < MIN_PRIOR or abs(now) < 0.1 or abs(now) < 10 * median(prior):
        return None
    return "update_too_large", (
        f"the updates of this batch moved the policy {abs(now):.2g} nats per token (actor/ppo_kl), "
        f"usually {median(prior):.2g}: clipping does not bound a single Adam step. Lower "
        "config.optimizer.lr, make fewer updates per batch (config.optimizer.num_minibatches) or "
        "set config.watch.action='roll_back', which restarts before it with a lower learning rate."
    )


def detect_constant_rewards(now: StepStats) -> RuleResult:
    """Detect rewards that are equal for correct and wrong answers."""
    correct = now["correct"]
    if not now["is_constant"] or now["num"] < 8 or not 0.02 < (correct or 0.0) < 0.95:
        return None
    return "rewards_constant", (
        f"all {now['num']} rewards are {now['reward']:.3g}, while {correct:.0%} of the answers are "
        "correct: the reward does not distinguish them, so nothing can be learned. Look at "
        "config.reward.weights and at each part in metrics.jsonl (reward/*)."
    )


def detect_sudden_success(history: StepHistory) -> RuleResult:
    """Detect an implausibly sudden jump to 100% correct answers."""
    prior, now = history.get_baseline_values("correct")[-10:], history.now
    if len(prior) < MIN_PRIOR or now["correct"] != 1.0 or now["num"] < 8:
        return None
    max_accuracy = max(prior)
    if not 0 < max_accuracy < 1 or RECENT * now["groups"] * math.log10(max_accuracy) > -4:
        return None
    return "suddenly_right", (
        f"all {now['num']} answers count as correct; in earlier steps at most {max_accuracy:.0%} "
        "did. Either the correctness check (config.reward.correct) accepts everything, or the "
        "answer is in the prompt."
    )


def detect_lenient_judge(history: StepHistory) -> RuleResult:
    """Detect a judge that gives every answer a score of 1, correct or wrong."""
    correct = history.compute_recent_mean("correct")
    for judge_name, approval_rate in history.now["yes"].items():
        if (
            approval_rate == 1.0
            and history.now["num"] >= 8
            and correct is not None
            and correct < 0.9
        ):
            return "judge_says_yes", (
                f"the judge {judge_name!r} gave 1 to all {history.now['num']} answers of the step, "
                f"but only {correct:.0%} are correct by config.reward.correct. Read its prompt "
                "and some of its responses; the policy may be exploiting it."
            )
    return None


def detect_search_quality_drop(history: StepHistory) -> RuleResult:
    """Detect a sharp drop in the fraction of searches that find the answer."""
    share, prior = history.compute_recent_mean("found"), history.get_baseline_values("found")
    searching = history.compute_recent_mean("searching")
    call_rates = history.get_baseline_values("searching")
    if share is None or searching is None or len(prior) < MIN_PRIOR:
        return None
    typical, typical_calls = median(prior[-20:]), median(call_rates[-20:])
    num = RECENT * history.now["groups"] * searching
    std_error = math.sqrt(max(typical * (1 - typical), 0.01) / max(num, 1.0))
    if (
        typical < 0.2
        or share > 0.4 * typical
        or typical - share < 4 * std_error
        or searching < 0.5 * typical_calls
    ):
        return None
    return "search_changed", (
        f"{share:.0%} of the responses that search find an accepted answer, {typical:.0%} before: "
        "the tool's results have changed, or queries have become useless. Try some of the queries "
        "in trajectories/ by hand."
    )


def detect_reward_drop(history: StepHistory, min_drop: float) -> RuleResult:
    """Detect a mean reward far below the best mean reward so far."""
    now, best = history.compute_recent_mean("reward"), history.best
    if now is None or "reward" not in best:
        return None
    low = min(best["low"], history.now["reward_min"])
    reward_range = best["reward"] - low
    # Samples of a group are correlated, so the standard error counts groups, not samples.
    num = RECENT * history.now["groups"]
    std_error = math.hypot(best["sd"] / math.sqrt(best["groups"]), best["sd"] / math.sqrt(num))
    if reward_range <= 0 or best["reward"] - now < max(min_drop * reward_range, 4 * std_error):
        return None
    return "reward_fell", (
        f"the mean reward of the last {RECENT} steps is {now:.3g}; its best was "
        f"{best['reward']:.3g} up to step {best['number']}. If no other sign explains it, "
        "config.watch.action='roll_back' restarts before it with a lower learning rate; "
        "docs/research/results.md, Training that collapses, lists other remedies."
    )


def detect_entropy_change(history: StepHistory, min_fraction: float) -> RuleResult:
    """Detect identical wrong answers, or unusually low or high entropy."""
    now = history.now
    entropy, prior = now["entropy"], history.get_baseline_values("entropy")
    if entropy is None:
        return None
    is_alike = (now["alike"] or 0.0) >= max(min_fraction, 0.9) and (now["signal"] or 0.0) <= 0.1
    # A policy that has learned the task also samples identical responses. Average the accuracy
    # over several steps, since the accuracy of a small batch is noisy.
    accuracy = [step["correct"] or 0.0 for step in [*history.past, now][-ACCURACY_STEPS:]]
    if is_alike and sum(accuracy) / len(accuracy) < 0.75:
        return "entropy_collapsed", (
            f"{now['alike']:.0%} of the responses equal another one in the same group (entropy "
            f"{entropy:.2g} nats per token) and {sum(accuracy) / len(accuracy):.0%} are correct in "
            f"the last {len(accuracy)} steps: the policy no longer explores, and groups have "
            "nothing to compare. Raise config.loss.entropy_coef or config.loss.clip_high, or "
            "return to a checkpoint with higher entropy."
        )
    if len(prior) >= MIN_PRIOR and entropy < 0.05 * median(prior[-20:]):
        return "entropy_collapsed", (
            f"the entropy is {entropy:.2g} nats per token, usually {median(prior[-20:]):.2g}: "
            "the policy is almost deterministic and no longer explores. Raise "
            "config.loss.entropy_coef or config.loss.clip_high, or return to an earlier checkpoint."
        )
    if len(prior) >= MIN_PRIOR and entropy > max(3 * median(prior), median(prior) + 0.5):
        return "entropy_rose", (
            f"the entropy is {entropy:.2g} nats per token, usually {median(prior):.2g}: the "
            "policy is diverging. Lower config.optimizer.lr or config.loss.entropy_coef."
        )
    return None


def detect_likelihood_drop(history: StepHistory) -> RuleResult:
    """Detect a drop in the likelihood of responses with a positive advantage."""
    now = history.compute_recent_mean("likelihood")
    prior = history.get_baseline_values("likelihood")
    if now is None or len(prior) < MIN_PRIOR:
        return None
    typical = median(prior)
    spread = median(abs(x - typical) for x in prior)
    if now > min(typical - max(0.5, 6 * spread), min(prior) - 0.5):
        return None
    return "likelihood_fell", (
        f"tokens of responses with a positive advantage have a mean logprob of {now:.2g} nats, "
        f"usually {typical:.2g}: rewarded responses become less likely. Use "
        "config.loss.term.name='llds', fewer updates per batch or a lower learning rate."
    )


_SHARE_SIGNS = {
    "cut": ("responses_cut", "end at a limit of tokens or turns", (
        "config.shaping.overlong_buffer penalizes length; config.watch.action='roll_back' "
        "restarts before it."
    )),
    "malformed": ("responses_malformed", "end without a search or an answer", (
        "Look at generated_text in trajectories/; a format reward helps."
    )),
    "void": ("turns_void", "have a turn without a call or an answer", (
        "config.filter.trajectories='void_turns' excludes them from the loss; "
        "config.watch.action='roll_back' restarts before it."
    )),
    "loops": ("responses_loop", "repeat themselves", (
        "Look at generated_text in trajectories/; config.watch.action='roll_back' restarts before "
        "it."
    )),
}  # fmt: skip
"""For each statistic: name of the sign, description of the responses, and advice."""


def detect_bad_response_increase(
    history: StepHistory, name: str, min_fraction: float
) -> RuleResult:
    """Detect a rise in the fraction of bad responses, for the statistic `name`."""
    now, prior = history.now[name], history.get_baseline_values(name)
    if now is None or len(prior) < MIN_PRIOR or now < min_fraction:
        return None
    typical = median(prior)
    std_error = math.sqrt(max(typical * (1 - typical), 0.02) / history.now["groups"])
    if now - typical < max(0.3, 4 * std_error):  # the fraction in a small batch is noisy
        return None
    sign, description, advice = _SHARE_SIGNS[name]
    return sign, f"{now:.0%} of the responses {description}, usually {median(prior):.0%}. {advice}"


def detect_length_change(history: StepHistory) -> RuleResult:
    """Detect a mean response length above 3 times or below 1/3 of the typical length."""
    now, prior = history.compute_recent_mean("length"), history.get_baseline_values("length")
    if now is None or len(prior) < MIN_PRIOR:
        return None
    typical = median(prior[-20:])
    if typical / 3 <= now <= 3 * typical or abs(now - typical) < 16:
        return None
    return "length_jumped", (
        f"responses have {now:.0f} sampled tokens on average, usually {typical:.0f}. Look at "
        "generated_text in trajectories/ for the reason."
    )


def detect_missing_signal(history: StepHistory) -> RuleResult:
    """Detect groups in which all rewards are equal, although some answers are wrong."""
    now = history.now
    if now["signal"] is None or now["signal"] > 0 or (now["correct"] or 0.0) >= 0.9:
        return None
    return "no_signal", (
        f"no group had different rewards (mean {now['reward'] or 0.0:.3g}) for at least eight "
        "steps. If all answers are wrong, use a warm start, a better prompt or easier tasks; "
        "config.filter.name='varied' samples until rewards differ."
    )
