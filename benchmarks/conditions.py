"""Shows under which conditions four claims hold, with policies of a few numbers.

    python -m benchmarks.conditions --seeds=1,2,3

A policy is a table of logits: a row for each thing to decide, a column for each way to decide it.
What it draws is paid and trained on by jaxrl's own advantages, shaping, controllers and clipped
loss. Each claim is played twice against its baseline: once where the condition of its effect is
met, and once where it is not, which is where the worlds of `benchmarks/claims.py` are. Seconds on
one core.
"""

from __future__ import annotations

import argparse
import functools
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks.claims_report import table
from jaxrl.objectives.advantages import grpo, pass_at_k
from jaxrl.objectives.losses import clipped_policy_loss
from jaxrl.objectives.shaping import entropy_reward, overlong_penalty
from jaxrl.training.controllers import EntropyCoefficients, difficulty

NUM_TASKS, GROUP_SIZE = 16, 16  # of a step
GROUP_IDS = np.repeat(np.arange(NUM_TASKS), GROUP_SIZE)
CLIP_LOW = 0.2

Measures = dict[str, float]


class Draws(NamedTuple):
    """One step's trajectories; the tokens of each are its decisions."""

    rows: np.ndarray  # int32 [N, T], of the table
    choices: np.ndarray  # int32 [N, T], columns of the table
    mask: np.ndarray  # bool [N, T], False where a trajectory decided no more
    advantages: jax.Array | np.ndarray  # float32 [N]


@dataclass(frozen=True, kw_only=True)
class World:
    """A policy to begin with, and how it is paid.

    Attributes:
        logits: float [rows, columns], of the first policy.
        draw: one step's trajectories with their advantages, from the policy's chances, the number
            of the step, the arm's settings and a generator.
        measure: exact properties of a policy, from its chances.
        num_steps: steps of a run.
        num_updates: optimizer steps on each step's batch.
        lr: of Adam.
    """

    logits: np.ndarray
    draw: Callable[..., Draws]
    measure: Callable[[np.ndarray], Measures]
    num_steps: int
    num_updates: int = 4
    lr: float = 0.05


def train(world: World, seed: int, *, clip_high: float = 0.2, **settings: float) -> list[Measures]:
    """The measures before the first step and after each."""
    rng = np.random.default_rng(seed)
    logits = jnp.asarray(world.logits, jnp.float32)
    state = optax.adam(world.lr).init(logits)
    measures = [world.measure(np.asarray(jax.nn.softmax(logits)))]
    for step in range(world.num_steps):
        draws = world.draw(np.asarray(jax.nn.softmax(logits)), step, rng, **settings)
        logits, state = _update(logits, state, draws, world.lr, world.num_updates, clip_high)
        measures.append(world.measure(np.asarray(jax.nn.softmax(logits))))
    return measures


@functools.partial(jax.jit, static_argnums=(3, 4, 5))
def _update(logits, state, draws, lr, num_updates, clip_high):  # type: ignore[no-untyped-def]
    """Trains on one batch with the clipped loss, its mean over decisions."""

    def logprobs(logits: jax.Array) -> jax.Array:
        return jax.nn.log_softmax(logits)[draws.rows, draws.choices]

    old = logprobs(logits)
    advantages = jnp.broadcast_to(draws.advantages[:, None], old.shape)

    def loss(logits: jax.Array) -> jax.Array:
        lost = clipped_policy_loss(
            logprobs(logits), old, advantages, draws.mask, clip_low=CLIP_LOW, clip_high=clip_high
        )
        return lost.per_token.sum() / draws.mask.sum()

    def one(carry, _):  # type: ignore[no-untyped-def]
        logits, state = carry
        changes, state = optax.adam(lr).update(jax.grad(loss)(logits), state)
        return (optax.apply_updates(logits, changes), state), None

    return jax.lax.scan(one, (logits, state), None, length=num_updates)[0]


@jax.jit
def compared(rewards: np.ndarray, group_ids: np.ndarray = GROUP_IDS) -> jax.Array | np.ndarray:
    """GRPO's advantages, with the population's deviation."""
    return grpo(rewards, group_ids, normalize_std=True, ddof=0, epsilon=1e-6)


def drawn(chances: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """A column for each row of chances [N, columns]."""
    passed = chances.cumsum(axis=1) < rng.random(len(chances))[:, None] * chances.sum(1)[:, None]
    return passed.sum(axis=1)


def entropy(chances: np.ndarray) -> float:
    """Entropy of one distribution, nats."""
    return float(-(chances * np.log(np.maximum(chances, 1e-30))).sum())


# Clip-higher: of two tokens one is always right.


def one_good_token(start: float, lr: float = 0.003) -> World:
    """A policy that draws the right one of two tokens with this chance."""

    def draw(chances: np.ndarray, step: int, rng: np.random.Generator) -> Draws:
        rows = np.zeros((len(GROUP_IDS), 1), np.int32)
        choices = drawn(chances[rows[:, 0]], rng)[:, None]
        rewards = (choices[:, 0] == 0).astype(np.float32)
        return Draws(rows, choices, np.ones_like(rows, bool), compared(rewards))

    return World(
        logits=np.log([[start, 1 - start]]),
        draw=draw,
        measure=lambda chances: {"good": float(chances[0, 0]), "entropy": entropy(chances[0])},
        num_steps=30,
        num_updates=64,  # small ones, so that the ceiling and not the rate ends a batch
        lr=lr,
    )


def steps_to(name: str, value: float) -> Callable[[Sequence[Measures]], float]:
    """Steps until a measure reaches a value."""

    def of(measures: Sequence[Measures]) -> float:
        return next((i for i, m in enumerate(measures) if m[name] >= value), math.inf)

    return of


def mean_until(name: str, until: int) -> Callable[[Sequence[Measures]], float]:
    """The mean of a measure over the first steps."""
    return lambda measures: statistics.fmean(m[name] for m in measures[1 : until + 1])


def at(name: str, step: int = -1) -> Callable[[Sequence[Measures]], float]:
    """A measure after a step, by default the last one."""
    return lambda measures: measures[step][name]


# Overlong shaping: a policy that chooses how long to answer.

LIMIT, BUFFER = 10, 2  # pieces of text; a fifth, as published
LONGEST, NEEDED = 15, 3


def lengths(chance: float) -> World:
    """Answers of 1 to 15 pieces, equally likely at first, of which ten fit.

    Args:
        chance: that an answer is right which has the three pieces that it needs and is not cut off.
    """

    def draw(chances: np.ndarray, step: int, rng: np.random.Generator, *, shaped: float) -> Draws:
        rows = np.zeros((len(GROUP_IDS), 1), np.int32)
        choices = drawn(chances[rows[:, 0]], rng)[:, None]
        length = choices[:, 0] + 1
        is_good = (length >= NEEDED) & (length <= LIMIT) & (rng.random(len(length)) < chance)
        rewards = np.where(is_good, 1.0, -1.0).astype(np.float32)
        if shaped:
            cut = np.minimum(length, LIMIT)
            rewards = rewards + overlong_penalty(cut, max_length=LIMIT, buffer=BUFFER)
        return Draws(rows, choices, np.ones_like(rows, bool), compared(rewards))

    return World(
        logits=np.zeros((1, LONGEST)),
        draw=draw,
        measure=lambda chances: {
            "cut": float(chances[0, LIMIT:].sum()),
            "right": chance * float(chances[0, NEEDED - 1 : LIMIT].sum()),
        },
        num_steps=30,
    )


# Pass@k, then Pass@1: a habit that is right in some tasks, and looking, which has to be learnt.


advantages_of_sets = jax.jit(pass_at_k, static_argnames="k")
SKILL, LOOK = 0.2, 0.2  # chances, at first, that looking succeeds, and to look


def habit_or_look(share: float, *, can_learn: bool = True) -> World:
    """The first row chooses between a habit and looking, the second whether looking succeeds.

    Args:
        share: of tasks in which the habit is right; in the others it never is.
        can_learn: looking gets better with training.
    """

    def draw(
        chances: np.ndarray, step: int, rng: np.random.Generator, *, k: int, until: float
    ) -> Draws:
        is_open = np.repeat(rng.random(NUM_TASKS) < share, GROUP_SIZE)
        rows = np.tile(np.array([[0, 1]], np.int32), (len(GROUP_IDS), 1))
        choices = np.stack([drawn(chances[row], rng) for row in rows.T], axis=1)
        looks = choices[:, 0] == 1
        is_right = np.where(looks, choices[:, 1] == 0, is_open)
        mask = np.stack([np.ones_like(looks), looks & can_learn], axis=1)
        own = int(k) if step < until else 1
        return Draws(rows, choices, mask, advantages_of_sets(is_right, GROUP_IDS, k=own))

    def measure(chances: np.ndarray) -> Measures:
        (habit, looks), good = chances[0], float(chances[1, 0])
        wrong = [1 - habit - looks * good, 1 - looks * good]  # where the habit is right, and not
        of = [share, 1 - share]
        return {
            "pass@1": float(np.dot(of, [1 - w for w in wrong])),
            "pass@8": float(np.dot(of, [1 - w**8 for w in wrong])),
            "looks": float(looks),
        }

    return World(
        logits=np.log([[1 - LOOK, LOOK], [SKILL, 1 - SKILL]]),
        draw=draw,
        measure=measure,
        num_steps=80,
        num_updates=1,
    )


def push_on_looking(
    share: float, k: int, *, look: float = LOOK, skill: float = SKILL, size: int = GROUP_SIZE
) -> float:
    """The expected advantage that looking gets in `habit_or_look`, a trajectory, by enumeration.

    The derivative of the expected objective in the logit of looking, since the advantages of a
    group sum to 0. Below 0, the policy unlearns to look.
    """
    push = 0.0
    for weight, right in ((share, 1 - look * (1 - skill)), (1 - share, look * skill)):
        # Of the right answers and of the wrong ones, the share of those that looked.
        looked = look * skill / right, look * (1 - skill) / (1 - right)
        for num_right in range(size + 1):
            ways = math.comb(size, num_right)
            chance = ways * right**num_right * (1 - right) ** (size - num_right)
            is_right = np.arange(size) < num_right
            made = np.asarray(advantages_of_sets(is_right, np.zeros(size, int), k=k))
            push += weight * chance * float(made @ np.where(is_right, *looked)) / size
    return push


# ARES: a policy that chooses how much to muse, on easy and on hard tasks.

MOST = 15  # tokens of high entropy in an answer


def musing(mastered_at: float) -> World:
    """Half of the tasks is easy, right nine times in ten; the others once in five.

    Args:
        mastered_at: step from which the hard ones are right nine times in ten, too.
    """
    state, tokens = EntropyCoefficients.init(), np.arange(MOST + 1)

    def draw(chances: np.ndarray, step: int, rng: np.random.Generator, *, shaped: float) -> Draws:
        nonlocal state
        is_hard = np.repeat(np.arange(NUM_TASKS) % 2, GROUP_SIZE)
        rows = is_hard[:, None].astype(np.int32)
        counts = drawn(chances[is_hard], rng)
        chance = np.where((is_hard == 1) & (step < mastered_at), 0.2, 0.9)
        is_right = rng.random(len(counts)) < chance
        rewards, groups = is_right.astype(np.float32), GROUP_IDS
        if shaped:
            num_right = is_right.reshape(NUM_TASKS, GROUP_SIZE).sum(axis=1)
            buckets = [difficulty(int(right), GROUP_SIZE) for right in num_right]
            is_kept = (num_right > 0) & (num_right < GROUP_SIZE)
            means = counts.reshape(NUM_TASKS, GROUP_SIZE).mean(axis=1)
            kept_buckets = [b for b, kept in zip(buckets, is_kept, strict=True) if kept]
            state = state.update(means[is_kept], kept_buckets)
            groups = np.where(is_kept[GROUP_IDS], GROUP_IDS, -1)
            # Each difficulty and verdict by count, as they are far fewer than trajectories.
            pay = {
                (bucket, right): entropy_reward(
                    tokens,
                    np.full(len(tokens), right),
                    [bucket] * len(tokens),
                    targets=state.targets,
                    coefficients=state.alphas,
                )
                for bucket in set(buckets)
                for right in (False, True)
            }
            rewards = rewards + np.array(
                [
                    pay[buckets[group], bool(right)][count]
                    for group, right, count in zip(GROUP_IDS, is_right, counts, strict=True)
                ],
                np.float32,
            )
        return Draws(rows, counts[:, None], np.ones_like(rows, bool), compared(rewards, groups))

    ways = np.array([math.comb(MOST, n) for n in tokens], float)
    return World(
        logits=np.log(np.stack([ways, ways])),  # 7.5 tokens in the mean
        draw=draw,
        measure=lambda chances: {
            "easy": float(chances[0] @ tokens),
            "hard": float(chances[1] @ tokens),
        },
        num_steps=100,
        num_updates=1,
    )


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """A claim's arms, the first of them its baseline, and the worlds in which they are played."""

    claim: str
    worlds: Mapping[str, Callable[[], World]]  # the first meets the condition, the others do not
    arms: Mapping[str, Mapping[str, float]]  # settings of `train`
    report: Mapping[str, Callable[[Sequence[Measures]], float]]  # of the measures by step, from 0


COMPARISONS = (
    Comparison(
        claim="clip-higher",
        worlds={
            "the right token has 2%": lambda: one_good_token(0.02),
            "it has 40%": lambda: one_good_token(0.4),
            "2%, updates three times as large": lambda: one_good_token(0.02, lr=0.01),
        },
        arms={"0.2": {"clip_high": 0.2}, "0.28": {"clip_high": 0.28}},
        report={
            "its chance after 10 steps": at("good", 10),
            "steps to 0.5": steps_to("good", 0.5),
            "entropy, first 10 steps": mean_until("entropy", 10),
            "entropy, last step": at("entropy"),
        },
    ),
    Comparison(
        claim="overlong shaping",
        worlds={
            "1% of the answers that fit are right": lambda: lengths(0.01),
            "50% are right": lambda: lengths(0.5),
        },
        arms={"GRPO": {"shaped": 0}, "overlong shaping": {"shaped": 1}},
        report={"cut off, all steps": mean_until("cut", 30), "cut off, last step": at("cut")},
    ),
    Comparison(
        claim="Pass@k, then Pass@1",
        worlds={
            "the habit is right in 60% of the tasks": lambda: habit_or_look(0.6),
            "it is right in 7%": lambda: habit_or_look(0.07),
            "in 60%, and looking cannot be learnt": lambda: habit_or_look(0.6, can_learn=False),
        },
        arms={"k = 1": {"k": 1, "until": 0}, "k = 4, then 1": {"k": 4, "until": 40}},
        report={
            "pass@1, step 40": at("pass@1", 40),
            "pass@8, step 40": at("pass@8", 40),
            "pass@1, step 80": at("pass@1"),
        },
    ),
    Comparison(
        claim="ARES",
        worlds={
            "hard tasks stay hard": lambda: musing(math.inf),
            "from step 10 on they are easy": lambda: musing(10),
        },
        arms={"GRPO": {"shaped": 0}, "ARES": {"shaped": 1}},
        report={"tokens, easy tasks": at("easy"), "tokens, hard tasks": at("hard")},
    ),
)


def as_table(comparison: Comparison, seeds: Sequence[int]) -> str:
    """A row of each world and arm: every seed's value of each measure."""
    rows = []
    for name, world in comparison.worlds.items():
        for arm, settings in comparison.arms.items():
            runs = [train(world(), seed, **settings) for seed in seeds]
            values = [
                ", ".join(_number(of(run)) for run in runs) for of in comparison.report.values()
            ]
            rows.append([name, arm, *values])
    return table([comparison.claim, "arm", *comparison.report], rows)


def _number(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:.3f}"


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--seeds",
        type=lambda text: tuple(map(int, text.split(","))),
        default=(1, 2, 3),
        help="of the draws, with commas between them",
    )
    args = parser.parse_args(argv)
    for comparison in COMPARISONS:
        print(f"\n{as_table(comparison, args.seeds)}", flush=True)
    pushes = (
        f"{share:.2f}: {push_on_looking(share, 1):.3f}, {push_on_looking(share, 4):.3f}"
        for share in (0.07, 0.6)
    )
    print("\npush on looking by the habit's share, k = 1 and k = 4:", "; ".join(pushes))


if __name__ == "__main__":
    main()
