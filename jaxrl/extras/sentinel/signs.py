"""Signs that training is about to fail, from the numbers of a step and of those before it.

Each sign compares a step with up to `MEMORY` steps before, so a run that begins badly raises none
for that alone. What is never right (prompts of a group that differ, samples that share a key) is a
sign at once.
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
"""Steps that are kept to say what is usual."""

RECENT = 3
"""Newest steps over which noisy numbers are averaged, the current one among them."""

SETTLED = 10
"""Newest steps over which a policy that is sure of its answers is asked how many are right."""

MIN_USUAL = 5
"""Earlier steps without which nothing is usual yet."""

ROUNDING_GAP = 0.002
"""Mean gap of sampler and trainer, nats a token, below which a growing gap is still small."""

EXPLODED = 10.0
"""Gradient norm, in multiples of the largest of the last steps, that is no usual one."""

BANDS = ((0.001, "equal"), (0.01, "rounding of bfloat16"), (0.05, "off"), (math.inf, "apart"))
"""Mean gap of sampler and trainer, nats a token, and what to call it up to there."""

Found = tuple[str, str] | None
"""Result of a rule: the name of a sign and its text; None where all is well."""


def judge(
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
    """Judge a step; return the next state and the signs, the surest first.

    Args:
        record: Metrics of the step.
        groups: Groups that it trained on, with their advantages.
        state: `steps`, the evidence of earlier steps; `best`, the best mean reward so far;
            `counts`, for each rule the steps in a row in which it held; `twins`, sums over them.
        method: Method of training.
        step: Number of the step in its stage, from 1.
        reward_fall: See `watch.sentinel.reward_fall`.
        share: See `watch.sentinel.share`.
        gap: See `watch.sentinel.gap`.
    """
    now = evidence_of(record, groups, method)
    past: list[Evidence] = list(state.get("steps", []))
    best = dict(state.get("best", {}))
    twins = {
        pair: value + state.get("twins", {}).get(pair, 0.0) for pair, value in now["twins"].items()
    }
    history = History(past=past, now=now, number=step, best=best)
    rules: dict[str, tuple[Found, int]] = {
        # name of the rule: what it finds, and in how many steps in a row it has to
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
    counts, signs = {}, []
    for name, (sign, wanted) in rules.items():
        counts[name] = state.get("counts", {}).get(name, 0) + 1 if sign else 0
        if sign and counts[name] >= wanted:
            sound = step - counts[name]  # the last step without it
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


judge.signs = (  # type: ignore[attr-defined]  # names that config.watch.actions may hold
    *("prompts_differ", "keys_repeat", "advantages_uneven", "gradient_not_finite"),
    *("ids_differ", "sampler_differs", "gradient_exploded", "update_too_large"),
    *("rewards_constant", "suddenly_right", "judge_says_yes", "search_changed", "reward_fell"),
    *("entropy_collapsed", "entropy_rose", "likelihood_fell", "responses_cut"),
    *("responses_malformed", "turns_void", "responses_loop", "length_jumped", "no_signal"),
)


class History:
    """The numbers of a step beside those of the steps before it."""

    def __init__(
        self, *, past: Sequence[Evidence], now: Evidence, number: int, best: Mapping[str, Any]
    ):
        """Hold the evidence of a step.

        Args:
            past: Evidence of up to `MEMORY` earlier steps, oldest first.
            now: Evidence of this step.
            number: Number of this step in its stage, from 1.
            best: Mean reward of the best `MIN_USUAL` steps in a row, `reward`, its spread `sd`,
                their `groups`, the lowest reward so far, `low`, and the last of them, `number`.
        """
        self.past, self.now, self.number, self.best = past, now, number, best

    def usual(self, name: str, last: int = MEMORY) -> list[float]:
        """Return a number in the last steps before this one that had it, oldest first."""
        return _known(name, self.past)[-last:]

    def recent(self, name: str) -> float | None:
        """Return the mean of a number over the last `RECENT` steps, this one included."""
        known = _known(name, [*self.past[1 - RECENT :], self.now])
        return sum(known) / len(known) if len(known) == RECENT else None

    def before(self, name: str) -> list[float]:
        """Return a number in the steps before the recent ones."""
        return _known(name, self.past[: max(len(self.past) - RECENT + 1, 0)])

    def next_best(self) -> dict[str, Any]:
        """Return `best` after this step."""
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
    """Samples of one task that do not begin with the same ids."""
    if not now["prompts"]:
        return None
    return "prompts_differ", (
        f"in {now['prompts']} groups samples do not have the same prompt, so that their rewards "
        "cannot be compared. An environment whose start() or chat template draws something at "
        "random, or changes its tasks, does that."
    )


def keys_repeat(twins: Mapping[str, float]) -> Found:
    """Samples that are the same again and again, although each was likely to differ."""
    pair, nats = min(twins.items(), key=lambda item: item[1], default=("", 0.0))
    if nats > -30.0:
        return None
    i, j = pair.split("-")
    return "keys_repeat", (
        f"samples {i} and {j} of every group are the same, in all steps so far since they last "
        f"differed; by chance that happens once in 10^{-nats / math.log(10):.0f}. Two samples draw "
        "by the same random key, so that a group is smaller than it looks."
    )


def advantages_uneven(now: Evidence, method: Method) -> Found:
    """Advantages of a group that do not add up to 0, where the estimator says they do."""
    if now["uneven"] < 1e-3:
        return None
    return "advantages_uneven", (
        f"the advantages of a group add up to {now['uneven']:.2g} times the largest of them; those "
        f"of {method.advantage.estimator.name!r} add up to 0. Groups were put together wrongly, or "
        "lost members after their advantages were computed."
    )


def gradient_not_finite(history: History) -> Found:
    """Updates that were skipped."""
    before = [*history.usual("skipped", 1), 0.0][0]
    skipped = (history.now["skipped"] or 0.0) - before
    if skipped <= 0:
        return None
    return "gradient_not_finite", (
        f"{skipped:.0f} updates were skipped, as their gradient was not finite. Look for rewards "
        "or log-ratios that are huge (actor/ppo_kl, critic/rewards/max); a lower learning rate or "
        "config.optimizer.grad_clip helps against the second."
    )


def sampler_differs(history: History, limit: float, *, has_lag: bool) -> Found:
    """Log-probabilities of sampler and trainer that are further apart than they were."""
    now, usual = history.now["gap"], history.before("gap")[-20:]
    if now is None:
        return None
    has_grown = len(usual) >= MIN_USUAL and now > 10 * max(usual) and now > ROUNDING_GAP
    is_wide = now >= limit
    # What was sampled by older weights is apart by what updates have moved since.
    is_sign = (has_grown and is_wide) if has_lag else (has_grown or is_wide)
    if not is_sign:
        return None
    before = f"; before it was {median(usual):.2g} ({band(median(usual))})" if usual else ""
    text = f"sampler and trainer are {now:.2g} nats a token apart ({band(now)}){before}. "
    # k3 of the gap d is exp(d) - 1 - d: about |d| where the trainer finds tokens impossible that
    # were sampled, about d^2 / 2 where weights or rounding differ a little.
    if (history.now["gap_k3"] or 0.0) > 0.5 * now and (history.now["gap_max"] or 0.0) > 5.0:
        return "ids_differ", text + (
            f"Single tokens are up to {history.now['gap_max']:.0f} nats apart: the trainer reads "
            "other ids than were sampled, or other positions. Look for text that is tokenised "
            "again, ids that were cut or swapped, another chat template."
        )
    return "sampler_differs", text + (
        "All tokens are a little off: the sampler has other weights than the trainer (an update "
        "that did not reach it, a quantised copy), or computes in another way (dtype, attention, "
        "temperature). config.loss.correction weighs it out, but look for the cause first."
    )


def band(gap: float) -> str:
    """The name of a mean gap, nats a token."""
    return next(name for limit, name in BANDS if gap < limit)


def gradient_exploded(history: History) -> Found:
    """A gradient far above the largest of the last steps."""
    now, usual = history.now["gradient"], [x for x in history.usual("gradient", 20) if x > 0]
    if now is None or len(usual) < MIN_USUAL or now <= EXPLODED * max(usual):
        return None
    return "gradient_exploded", (
        f"the gradient's norm is {now:.3g}; in the {len(usual)} steps before it was at most "
        f"{max(usual):.3g}. Rewards of another size, a ratio or a KL term that ran away do that; "
        "look at critic/rewards/max, actor/ppo_kl and actor/kl_loss. config.optimizer.grad_clip "
        "bounds what it does."
    )


def update_too_large(history: History) -> Found:
    """Updates of one batch that moved the policy far."""
    now, usual = history.now["moved"], [abs(x) for x in history.usual("moved", 20)]
    if now is None or len(usual) < MIN_USUAL or abs(now) < 0.1 or abs(now) < 10 * median(usual):
        return None
    return "update_too_large", (
        f"the updates of this batch moved the policy {abs(now):.2g} nats a token (actor/ppo_kl), "
        f"usually {median(usual):.2g}: clipping does not hold what one step of Adam does. Lower "
        "config.optimizer.lr, take fewer updates a batch (config.optimizer.num_minibatches) or set "
        "config.watch.action='roll_back', which goes back to before it with a lower rate."
    )


def rewards_constant(now: Evidence) -> Found:
    """Rewards that do not tell right from wrong."""
    correct = now["correct"]
    if not now["is_constant"] or now["num"] < 8 or not 0.02 < (correct or 0.0) < 0.95:
        return None
    return "rewards_constant", (
        f"all {now['num']} rewards are {now['reward']:.3g}, while {correct:.0%} of the answers are "
        "right: the reward does not tell them apart, and nothing can be learned. Look at "
        "config.reward.weights and at each part in metrics.jsonl (reward/*)."
    )


def suddenly_right(history: History) -> Found:
    """Every answer right at once, which chance does not explain."""
    usual, now = history.before("correct")[-10:], history.now
    if len(usual) < MIN_USUAL or now["correct"] != 1.0 or now["num"] < 8:
        return None
    likely = max(usual)
    if not 0 < likely < 1 or RECENT * now["groups"] * math.log10(likely) > -4:
        return None
    return "suddenly_right", (
        f"all {now['num']} answers count as right, where at most {likely:.0%} did in the steps "
        "before. What decides that (config.reward.correct) says yes to everything, or the answer "
        "has come into the prompt."
    )


def judge_says_yes(history: History) -> Found:
    """A judge whose verdict is 1 for every answer, right or wrong."""
    correct = history.recent("correct")
    for judge_name, yes in history.now["yes"].items():
        if yes == 1.0 and history.now["num"] >= 8 and correct is not None and correct < 0.9:
            return "judge_says_yes", (
                f"the judge {judge_name!r} gave 1 to all {history.now['num']} answers of the step, "
                f"of which {correct:.0%} are right by config.reward.correct. Read some of its "
                "replies, and its prompt; it may be taken in by what the policy writes."
            )
    return None


def search_changed(history: History) -> Found:
    """Results that hold the answer far less often, though as much is asked."""
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
        f"{share:.0%} of the responses that search find an accepted answer, where {was:.0%} did: "
        "the tool returns something else than before, or queries have become useless. Ask it one "
        "of the queries in trajectories/ by hand."
    )


def reward_fell(history: History, fall: float) -> Found:
    """A mean reward that has lost much of the best one."""
    now, best = history.recent("reward"), history.best
    if now is None or "reward" not in best:
        return None
    low = min(best["low"], history.now["reward_min"])
    size = best["reward"] - low
    # Samples of a group are right or wrong together: what is drawn independently are groups.
    num = RECENT * history.now["groups"]
    error = math.hypot(best["sd"] / math.sqrt(best["groups"]), best["sd"] / math.sqrt(num))
    if size <= 0 or best["reward"] - now < max(fall * size, 4 * error):
        return None
    return "reward_fell", (
        f"the mean reward of the last {RECENT} steps is {now:.3g}, its best was "
        f"{best['reward']:.3g} up to step {best['number']}. If no other sign says why, "
        "config.watch.action='roll_back' goes back to before it, with a lower rate; "
        "docs/research/results.md, Training that collapses, has what else was tried."
    )


def entropy_moved(history: History, share: float) -> Found:
    """Samples that are all alike while answers are wrong, or an entropy far above the usual."""
    now = history.now
    entropy, usual = now["entropy"], history.before("entropy")
    if entropy is None:
        return None
    is_alike = (now["alike"] or 0.0) >= max(share, 0.9) and (now["signal"] or 0.0) <= 0.1
    # A policy that has learned its task is alike too, and a small batch of it may be a bad one.
    right = [step["correct"] or 0.0 for step in [*history.past, now][-SETTLED:]]
    if is_alike and sum(right) / len(right) < 0.75:
        return "entropy_collapsed", (
            f"{now['alike']:.0%} of the responses equal another of their group (entropy "
            f"{entropy:.2g} nats a token) and {sum(right) / len(right):.0%} are right in the last "
            f"{len(right)} steps: the policy tries nothing else any more, and groups have nothing "
            "to compare. Raise "
            "config.loss.entropy_coef or config.loss.clip_high, or go back to where the entropy "
            "was higher."
        )
    if len(usual) >= MIN_USUAL and entropy < 0.05 * median(usual[-20:]):
        return "entropy_collapsed", (
            f"the entropy is {entropy:.2g} nats a token, usually {median(usual[-20:]):.2g}: the "
            "policy is all but sure of every token, and tries nothing else any more. Raise "
            "config.loss.entropy_coef or config.loss.clip_high, or go back."
        )
    if len(usual) >= MIN_USUAL and entropy > max(3 * median(usual), median(usual) + 0.5):
        return "entropy_rose", (
            f"the entropy is {entropy:.2g} nats a token, usually {median(usual):.2g}: the policy "
            "comes apart. Lower config.optimizer.lr or config.loss.entropy_coef."
        )
    return None


def likelihood_fell(history: History) -> Found:
    """Tokens of what is rewarded that become less likely."""
    now, usual = history.recent("likelihood"), history.before("likelihood")
    if now is None or len(usual) < MIN_USUAL:
        return None
    was = median(usual)
    spread = median(abs(x - was) for x in usual)
    if now > min(was - max(0.5, 6 * spread), min(usual) - 0.5):
        return None
    return "likelihood_fell", (
        f"tokens of responses with a positive advantage have {now:.2g} nats each, usually "
        f"{was:.2g}: what is rewarded becomes less likely. config.loss.term.name='llds' works "
        "against it, fewer updates a batch and a lower rate too."
    )


_WORDS = {
    "cut": ("responses_cut", "end at a limit of tokens or turns", (
        "They no longer come to an end. config.shaping.overlong_buffer charges for length; "
        "config.watch.action='roll_back' goes back to before it."
    )),
    "malformed": ("responses_malformed", "end without a search or an answer", (
        "Look at generated_text in trajectories/; a format reward works against it."
    )),
    "void": ("turns_void", "have a turn without a call or an answer", (
        "config.filter.trajectories='void_turns' keeps them out of the loss, and "
        "config.watch.action='roll_back' goes back to before it."
    )),
    "loops": ("responses_loop", "go round in circles", (
        "Look at generated_text in trajectories/; config.watch.action='roll_back' goes back."
    )),
}  # fmt: skip
"""By a share's name: its sign, what the responses do, what helps."""


def share_rose(history: History, name: str, share: float) -> Found:
    """A share of responses that should be small and has risen."""
    now, usual = history.now[name], history.before(name)
    if now is None or len(usual) < MIN_USUAL or now < share:
        return None
    was = median(usual)
    error = math.sqrt(max(was * (1 - was), 0.02) / history.now["groups"])
    if now - was < max(0.3, 4 * error):  # few responses differ much by chance
        return None
    sign, what, advice = _WORDS[name]
    return sign, f"{now:.0%} of the responses {what}, usually {median(usual):.0%}. {advice}"


def length_jumped(history: History) -> Found:
    """Responses that are several times as long, or as short, as they were."""
    now, usual = history.recent("length"), history.before("length")
    if now is None or len(usual) < MIN_USUAL:
        return None
    was = median(usual[-20:])
    if was / 3 <= now <= 3 * was or abs(now - was) < 16:
        return None
    return "length_jumped", (
        f"responses have {now:.0f} sampled tokens, usually {was:.0f}. Look at generated_text in "
        "trajectories/ for what they do with them."
    )


def no_signal(history: History) -> Found:
    """Groups in which nothing differs, for many steps, though answers are wrong."""
    now = history.now
    if now["signal"] is None or now["signal"] > 0 or (now["correct"] or 0.0) >= 0.9:
        return None
    return "no_signal", (
        f"no group had rewards that differ (mean {now['reward'] or 0.0:.3g}), for eight steps and "
        "more. Answers that are all wrong want a warm start, a better prompt or easier tasks; "
        "config.filter.name='varied' draws until groups differ."
    )
