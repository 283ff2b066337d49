"""Rules that detect failing training from the statistics of a step and of earlier steps.

Most rules compare a step with up to `MEMORY` earlier steps, so a run that only starts badly
raises no sign. Errors that are never acceptable (different prompts in a group, samples that share a
random key) raise a sign immediately.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from jaxrl.extras.sentinel.evidence import Evidence, evidence_of
from jaxrl.training.method import Method
from jaxrl.training.watch import Sign
from jaxrl.types import Group

MEMORY = 50
"""Number of earlier steps in the baseline."""

RECENT = 3
"""Number of steps, including the current one, over which noisy statistics are averaged."""

SETTLED = 10
"""Number of steps, including the current one, over which the accuracy is averaged."""

MIN_USUAL = 5
"""Minimum number of earlier steps for a baseline."""

ROUNDING_GAP = 0.002
"""Mean gap between sampler and trainer, in nats per token, that is ignored even if it grows."""

EXPLODED = 10.0
"""Multiple of the largest recent gradient norm that counts as an exploding gradient."""

BANDS = ((0.001, "equal"), (0.01, "rounding of bfloat16"), (0.05, "off"), (math.inf, "far off"))
"""Upper bounds on the mean gap between sampler and trainer in nats per token, and their labels."""

Found = tuple[str, str] | None
"""Result of a rule: name and text of the sign, or None."""


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
) -> tuple[dict[str, Any], list[Sign]]:
    """Apply all rules to a step. Return the next state and the signs, most certain first.

    Args:
        record: Metrics of the step by name.
        groups: Groups that the step trained on, with advantages.
        state: State after the previous step: statistics of earlier "steps", `History.best` as
            "best", numbers of consecutive steps in which each rule fired as "counts", and
            log-likelihoods of identical samples, summed over steps, as "twins".
        method: Training method.
        step: Step number within the stage, from 1.
        reward_fall: Fraction of the reward range that the mean must drop below its best.
        share: Fraction of bad responses (malformed, truncated, ...) that raises a sign.
        gap: Mean gap between sampler and trainer, in nats per token, that is always too large.
    """
    # Samples that are identical by chance soon differ, which drops their pair from the sums.
    now = evidence_of(record, groups, method)
    past: list[Evidence] = list(state.get("steps", []))
    best = dict(state.get("best", {}))
    twins = {
        pair: value + state.get("twins", {}).get(pair, 0.0) for pair, value in now["twins"].items()
    }
    history = History(past=past, now=now, number=step, best=best)
    rules: dict[str, tuple[Found, int]] = {
        # By rule: its result, and the number of consecutive steps in which it must fire.
        "prompts": (prompts_differ(now), 1),
        "twins": (keys_repeat(twins), 1),
        "uneven": (advantages_uneven(now, method), 1),
        "skipped": (gradient_not_finite(history), 1),
        "gap": (sampler_differs(history, gap, has_lag=method.has_lag), 2),
        "gradient": (gradient_exploded(history), 1),
        "moved": (update_too_large(history), 1),
        "constant": (rewards_constant(now), RECENT),
        "sudden": (suddenly_right(history), RECENT),
        "yes": (judge_says_yes(history), RECENT),
        "found": (search_changed(history), 1),
        "reward": (reward_fell(history, reward_fall), 1),
        "entropy": (entropy_moved(history, share), RECENT),
        "likelihood": (likelihood_fell(history), 2),
        **{name: (share_rose(history, name, share), 2) for name in _WORDS},
        "length": (length_jumped(history), 2),
        "signal": (no_signal(history), 8),
    }
    # `since` is the last healthy step, to which a rollback may return.
    counts, signs = {}, []
    for name, (sign, wanted) in rules.items():
        counts[name] = state.get("counts", {}).get(name, 0) + 1 if sign else 0
        if sign and counts[name] >= wanted:
            sound = step - counts[name]  # the last step without the sign
            if name == "reward":
                sound = min(sound, best["number"])
            signs.append(Sign(name=sign[0], text=sign[1], since=max(sound, 0)))
    kept = {key: value for key, value in now.items() if key != "twins"}
    following = {
        "steps": [*past, kept][-MEMORY:],
        "counts": counts,
        "best": history.next_best(),
        "twins": twins,
    }
    return following, signs


detect_signs.signs = (  # type: ignore[attr-defined]  # keys of config.watch.actions
    *("prompts_differ", "keys_repeat", "advantages_uneven", "gradient_not_finite"),
    *("ids_differ", "sampler_differs", "gradient_exploded", "update_too_large"),
    *("rewards_constant", "suddenly_right", "judge_says_yes", "search_changed", "reward_fell"),
    *("entropy_collapsed", "entropy_rose", "likelihood_fell", "responses_cut"),
    *("responses_malformed", "turns_void", "responses_loop", "length_jumped", "no_signal"),
)


class History:
    """Statistics of a step and of the steps before it."""

    def __init__(
        self, *, past: Sequence[Evidence], now: Evidence, number: int, best: Mapping[str, Any]
    ):
        """Store the statistics.

        Args:
            past: Statistics of up to `MEMORY` earlier steps, oldest first.
            now: Statistics of this step.
            number: Step number within the stage, from 1.
            best: Best window of `MIN_USUAL` consecutive steps (mean `reward`, standard deviation
                `sd`, number of `groups`, `number` of the last step), and `low`, the lowest reward.
        """
        self.past, self.now, self.number, self.best = past, now, number, best

    def usual(self, name: str, last: int = MEMORY) -> list[float]:
        """Return the last values of a statistic before this step, oldest first, without None."""
        return _known(name, self.past)[-last:]

    def recent(self, name: str) -> float | None:
        """Return a statistic's mean over the last `RECENT` steps; None if a value is missing."""
        known = _known(name, [*self.past[1 - RECENT :], self.now])
        return sum(known) / len(known) if len(known) == RECENT else None

    def before(self, name: str) -> list[float]:
        """Return the values of a statistic from before the last `RECENT` steps, without None."""
        return _known(name, self.past[: max(len(self.past) - RECENT + 1, 0)])

    def next_best(self) -> dict[str, Any]:
        """Return `best`, updated with this step."""
        last = [step for step in [*self.past, self.now] if step.get("reward") is not None]
        low = min([*_known("reward_min", last), self.best.get("low", math.inf)])
        best = {**self.best, "low": low} if last else dict(self.best)
        if len(last) < MIN_USUAL:
            return best
        last = last[-MIN_USUAL:]
        mean = sum(step["reward"] for step in last) / MIN_USUAL
        if mean < best.get("reward", -math.inf):
            return best
        groups = sum(step["groups"] for step in last)
        spread = max(step["reward_sd"] for step in last)
        return {"reward": mean, "sd": spread, "groups": groups, "low": low, "number": self.number}


def _known(name: str, steps: Sequence[Evidence]) -> list[float]:
    return [step[name] for step in steps if step.get(name) is not None]


def prompts_differ(now: Evidence) -> Found:
    """Detect samples of one task with different prompts."""
    if not now["prompts"]:
        return None
    return "prompts_differ", (
        f"in {now['prompts']} groups, samples have different prompts, so their rewards cannot be "
        "compared. A likely cause is randomness in the environment's start() or chat template, or "
        "an environment that changes its tasks."
    )


def keys_repeat(twins: Mapping[str, float]) -> Found:
    """Detect pairs of samples that stay identical although that is very unlikely."""
    pair, nats = min(twins.items(), key=lambda item: item[1], default=("", 0.0))
    if nats > -30.0:
        return None
    i, j = pair.split("-")
    return "keys_repeat", (
        f"samples {i} and {j} of every group have been identical since the last step in which they "
        f"differed; the probability of that is 1 in 10^{-nats / math.log(10):.0f}. They share "
        "a random key, so groups are effectively smaller."
    )


def advantages_uneven(now: Evidence, method: Method) -> Found:
    """Detect group advantages that do not sum to 0 although the estimator guarantees it."""
    if now["uneven"] < 1e-3:
        return None
    return "advantages_uneven", (
        f"the advantages of a group sum to {now['uneven']:.2g} times the largest one; expected "
        f"0 for {method.advantage.estimator.name!r}. Groups were assembled incorrectly, or lost "
        "members after advantages were computed."
    )


def gradient_not_finite(history: History) -> Found:
    """Detect updates that were skipped because the gradient was not finite."""
    before = [*history.usual("skipped", 1), 0.0][0]
    skipped = (history.now["skipped"] or 0.0) - before
    if skipped <= 0:
        return None
    return "gradient_not_finite", (
        f"{skipped:.0f} updates were skipped because their gradient was not finite. Look for huge "
        "rewards (critic/rewards/max) or log-ratios (actor/ppo_kl). A lower learning rate or "
        "config.optimizer.grad_clip helps against huge log-ratios."
    )


def sampler_differs(history: History, limit: float, *, has_lag: bool) -> Found:
    """Detect a gap between sampler and trainer logprobs that is too large or has grown."""
    now, usual = history.now["gap"], history.before("gap")[-20:]
    if now is None:
        return None
    has_grown = len(usual) >= MIN_USUAL and now > 10 * max(usual) and now > ROUNDING_GAP
    is_wide = now >= limit
    # With lag, tokens were sampled with older weights, so the gap grows with every update.
    is_sign = (has_grown and is_wide) if has_lag else (has_grown or is_wide)
    if not is_sign:
        return None
    before = f"; before it was {median(usual):.2g} ({band(median(usual))})" if usual else ""
    text = f"sampler and trainer differ by {now:.2g} nats per token ({band(now)}){before}. "
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


def band(gap: float) -> str:
    """Return the label in `BANDS` for a mean gap in nats per token."""
    return next(name for limit, name in BANDS if gap < limit)


def gradient_exploded(history: History) -> Found:
    """Detect a gradient norm far above the largest recent one."""
    now, usual = history.now["gradient"], [x for x in history.usual("gradient", 20) if x > 0]
    if now is None or len(usual) < MIN_USUAL or now <= EXPLODED * max(usual):
        return None
    return "gradient_exploded", (
        f"the gradient norm is {now:.3g}; in the previous {len(usual)} steps it was at most "
        f"{max(usual):.3g}. Likely causes are rewards of a different scale, or a diverging "
        "ratio or KL term; look at critic/rewards/max, actor/ppo_kl and actor/kl_loss. "
        "config.optimizer.grad_clip limits the effect."
    )


def update_too_large(history: History) -> Found:
    """Detect a batch of updates that moved the policy too far."""
    now, usual = history.now["moved"], [abs(x) for x in history.usual("moved", 20)]
    if now is None or len(usual) < MIN_USUAL or abs(now) < 0.1 or abs(now) < 10 * median(usual):
        return None
    return "update_too_large", (
        f"the updates of this batch moved the policy {abs(now):.2g} nats per token (actor/ppo_kl), "
        f"usually {median(usual):.2g}: clipping does not bound a single Adam step. Lower "
        "config.optimizer.lr, make fewer updates per batch (config.optimizer.num_minibatches) or "
        "set config.watch.action='roll_back', which restarts before it with a lower learning rate."
    )


def rewards_constant(now: Evidence) -> Found:
    """Detect rewards that are equal for correct and wrong answers."""
    correct = now["correct"]
    if not now["is_constant"] or now["num"] < 8 or not 0.02 < (correct or 0.0) < 0.95:
        return None
    return "rewards_constant", (
        f"all {now['num']} rewards are {now['reward']:.3g}, while {correct:.0%} of the answers are "
        "correct: the reward does not distinguish them, so nothing can be learned. Look at "
        "config.reward.weights and at each part in metrics.jsonl (reward/*)."
    )


def suddenly_right(history: History) -> Found:
    """Detect a sudden jump to 100% correct answers that chance does not explain."""
    usual, now = history.before("correct")[-10:], history.now
    if len(usual) < MIN_USUAL or now["correct"] != 1.0 or now["num"] < 8:
        return None
    likely = max(usual)
    if not 0 < likely < 1 or RECENT * now["groups"] * math.log10(likely) > -4:
        return None
    return "suddenly_right", (
        f"all {now['num']} answers count as correct; in earlier steps at most {likely:.0%} "
        "did. Either the correctness check (config.reward.correct) accepts everything, or the "
        "answer is in the prompt."
    )


def judge_says_yes(history: History) -> Found:
    """Detect a judge that gives every answer a score of 1, correct or wrong."""
    correct = history.recent("correct")
    for judge_name, yes in history.now["yes"].items():
        if yes == 1.0 and history.now["num"] >= 8 and correct is not None and correct < 0.9:
            return "judge_says_yes", (
                f"the judge {judge_name!r} gave 1 to all {history.now['num']} answers of the step, "
                f"but only {correct:.0%} are correct by config.reward.correct. Read its prompt "
                "and some of its responses; the policy may be exploiting it."
            )
    return None


def search_changed(history: History) -> Found:
    """Detect a sharp drop in searches that find the answer, at a similar call rate."""
    share, usual = history.recent("found"), history.before("found")
    searching, used = history.recent("searching"), history.before("searching")
    if share is None or searching is None or len(usual) < MIN_USUAL:
        return None
    was, asked = median(usual[-20:]), median(used[-20:])
    num = RECENT * history.now["groups"] * searching
    error = math.sqrt(max(was * (1 - was), 0.01) / max(num, 1.0))
    if was < 0.2 or share > 0.4 * was or was - share < 4 * error or searching < 0.5 * asked:
        return None
    return "search_changed", (
        f"{share:.0%} of the responses that search find an accepted answer, {was:.0%} before: "
        "the tool's results have changed, or queries have become useless. Try some of the queries "
        "in trajectories/ by hand."
    )


def reward_fell(history: History, fall: float) -> Found:
    """Detect a mean reward far below the best one."""
    now, best = history.recent("reward"), history.best
    if now is None or "reward" not in best:
        return None
    low = min(best["low"], history.now["reward_min"])
    size = best["reward"] - low
    # Samples of a group are correlated, so the standard error counts groups, not samples.
    num = RECENT * history.now["groups"]
    error = math.hypot(best["sd"] / math.sqrt(best["groups"]), best["sd"] / math.sqrt(num))
    if size <= 0 or best["reward"] - now < max(fall * size, 4 * error):
        return None
    return "reward_fell", (
        f"the mean reward of the last {RECENT} steps is {now:.3g}; its best was "
        f"{best['reward']:.3g} up to step {best['number']}. If no other sign explains it, "
        "config.watch.action='roll_back' restarts before it with a lower learning rate; "
        "docs/research/results.md, Training that collapses, lists other remedies."
    )


def entropy_moved(history: History, share: float) -> Found:
    """Detect identical samples while answers are wrong, or an unusually low or high entropy."""
    now = history.now
    entropy, usual = now["entropy"], history.before("entropy")
    if entropy is None:
        return None
    is_alike = (now["alike"] or 0.0) >= max(share, 0.9) and (now["signal"] or 0.0) <= 0.1
    # A policy that has learned its task also samples identical responses. Average the accuracy
    # over several steps, since that of a small batch is noisy.
    right = [step["correct"] or 0.0 for step in [*history.past, now][-SETTLED:]]
    if is_alike and sum(right) / len(right) < 0.75:
        return "entropy_collapsed", (
            f"{now['alike']:.0%} of the responses equal another one in the same group (entropy "
            f"{entropy:.2g} nats per token) and {sum(right) / len(right):.0%} are correct in "
            f"the last {len(right)} steps: the policy no longer explores, and groups have "
            "nothing to compare. Raise config.loss.entropy_coef or config.loss.clip_high, or "
            "return to a checkpoint with higher entropy."
        )
    if len(usual) >= MIN_USUAL and entropy < 0.05 * median(usual[-20:]):
        return "entropy_collapsed", (
            f"the entropy is {entropy:.2g} nats per token, usually {median(usual[-20:]):.2g}: "
            "the policy is almost deterministic and no longer explores. Raise "
            "config.loss.entropy_coef or config.loss.clip_high, or return to an earlier checkpoint."
        )
    if len(usual) >= MIN_USUAL and entropy > max(3 * median(usual), median(usual) + 0.5):
        return "entropy_rose", (
            f"the entropy is {entropy:.2g} nats per token, usually {median(usual):.2g}: the "
            "policy is diverging. Lower config.optimizer.lr or config.loss.entropy_coef."
        )
    return None


def likelihood_fell(history: History) -> Found:
    """Detect a drop in the likelihood of responses with a positive advantage."""
    now, usual = history.recent("likelihood"), history.before("likelihood")
    if now is None or len(usual) < MIN_USUAL:
        return None
    was = median(usual)
    spread = median(abs(x - was) for x in usual)
    if now > min(was - max(0.5, 6 * spread), min(usual) - 0.5):
        return None
    return "likelihood_fell", (
        f"tokens of responses with a positive advantage have a mean logprob of {now:.2g} nats, "
        f"usually {was:.2g}: rewarded responses become less likely. Use "
        "config.loss.term.name='llds', fewer updates per batch or a lower learning rate."
    )


_WORDS = {
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
"""By statistic: name of the sign, description of the responses, and advice."""


def share_rose(history: History, name: str, share: float) -> Found:
    """Detect a rise in `name`, a fraction of responses that should stay small."""
    now, usual = history.now[name], history.before(name)
    if now is None or len(usual) < MIN_USUAL or now < share:
        return None
    was = median(usual)
    error = math.sqrt(max(was * (1 - was), 0.02) / history.now["groups"])
    if now - was < max(0.3, 4 * error):  # the fraction in a small batch is noisy
        return None
    sign, what, advice = _WORDS[name]
    return sign, f"{now:.0%} of the responses {what}, usually {median(usual):.0%}. {advice}"


def length_jumped(history: History) -> Found:
    """Detect responses more than three times as long as usual, or less than a third as long."""
    now, usual = history.recent("length"), history.before("length")
    if now is None or len(usual) < MIN_USUAL:
        return None
    was = median(usual[-20:])
    if was / 3 <= now <= 3 * was or abs(now - was) < 16:
        return None
    return "length_jumped", (
        f"responses have {now:.0f} sampled tokens on average, usually {was:.0f}. Look at "
        "generated_text in trajectories/ for the reason."
    )


def no_signal(history: History) -> Found:
    """Detect that no group has different rewards, although answers are wrong."""
    now = history.now
    if now["signal"] is None or now["signal"] > 0 or (now["correct"] or 0.0) >= 0.9:
        return None
    return "no_signal", (
        f"no group had different rewards (mean {now['reward'] or 0.0:.3g}) for at least eight "
        "steps. If all answers are wrong, use a warm start, a better prompt or easier tasks; "
        "config.filter.name='varied' samples until rewards differ."
    )
