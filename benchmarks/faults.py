"""Faults put into a run on purpose: in how many steps the sentinel sees each, and what it calls it.

    python -m examples.quickstart_world --out=data/collapse --max_hops=1
    python -m benchmarks.faults

Warms the model of configs/collapse.py up once, then trains it once for each fault, at a rate at
which nothing collapses. From one step on something is wrong: rewards, weights, ids, keys or
results. Prints a table, and writes it to `WORKDIR/faults.json`. `--faults` names some;
`none` trains without any.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.claims_report import table
from configs import collapse
from jaxrl.components import assemble, settings_of
from jaxrl.config_checks import validate
from jaxrl.envs.base import CallRecord
from jaxrl.envs.local_search import LocalSearch
from jaxrl.envs.random_search import RandomSearch
from jaxrl.envs.retrieval import Hit
from jaxrl.logs.display import Display
from jaxrl.run import run
from jaxrl.types import Group, Trajectory

Groups = list[Group]
Parts = Any
"""Components as `components.assemble` makes them."""


def constant_rewards(groups: Groups) -> Groups:
    """A reward that tells nothing apart."""
    return of_each(groups, lambda t: dataclasses.replace(t, reward=0.5))


def huge_rewards(groups: Groups) -> Groups:
    """Rewards a thousand times as large, and gradients with them."""
    return of_each(groups, lambda t: dataclasses.replace(t, reward=1000 * t.reward))


def swapped_ids(groups: Groups) -> Groups:
    """Two neighbouring sampled ids that changed places in every response."""

    def swap(trajectory: Trajectory) -> Trajectory:
        places = np.flatnonzero(trajectory.loss_mask)
        ids = trajectory.token_ids.copy()
        if len(places) > 3:
            ids[places[2:4]] = ids[places[[3, 2]]]
        return dataclasses.replace(trajectory, token_ids=ids)

    return of_each(groups, swap)


def one_key(groups: Groups) -> Groups:
    """Samples 0 and 1 of each group drawn by the same key."""
    twins = []
    for group in groups:
        first, second, *others = group.trajectories
        twin = dataclasses.replace(first, sample_index=second.sample_index)
        twins.append(Group(trajectories=(first, twin, *others)))
    return twins


def yielding_judge(groups: Groups) -> Groups:
    """A judge whose verdict is 1 for every answer."""

    def praise(trajectory: Trajectory) -> Trajectory:
        parts = {**trajectory.reward_parts, "judge": 1.0}
        asked = (CallRecord(call="is it right?", tool="judge"),)
        return dataclasses.replace(trajectory, reward_parts=parts, reward_records=asked)

    return of_each(groups, praise)


def other_prompts(groups: Groups) -> Groups:
    """A prompt that changes from sample to sample."""

    def change(trajectory: Trajectory) -> Trajectory:
        ids = trajectory.token_ids.copy()
        ids[0] += trajectory.sample_index % 2
        return dataclasses.replace(trajectory, token_ids=ids)

    return of_each(groups, change)


def of_each(groups: Groups, change: Callable[[Trajectory], Trajectory]) -> Groups:
    """Groups of changed trajectories."""
    return [Group(trajectories=tuple(map(change, group.trajectories))) for group in groups]


IN_GROUPS: dict[str, tuple[Callable[[Groups], Groups], tuple[str, ...]]] = {
    "constant rewards": (constant_rewards, ("rewards_constant",)),
    "exploding gradient": (huge_rewards, ("gradient_exploded",)),
    "swapped ids": (swapped_ids, ("ids_differ",)),
    "two samples, one key": (one_key, ("keys_repeat",)),
    "a judge that says yes": (yielding_judge, ("judge_says_yes",)),
    "prompts that differ": (other_prompts, ("prompts_differ",)),
}
"""By a fault, what it does to the groups of a rollout, and the signs that name it rightly."""


def with_groups(parts: Parts, step: int, change: Callable[[Groups], Groups]) -> Parts:
    """Parts whose rollouts are changed from a training step on."""
    rollout = parts.rollout

    def faulty(draws: Any, sampling: Any, **others: Any) -> Groups:
        groups = rollout(draws, sampling=sampling, **others)
        is_late = sampling.seeds.step >= step - 1
        return change(groups) if is_late and sampling.group_size > 1 else groups  # not evaluations

    return dataclasses.replace(parts, rollout=faulty)


def with_stale_sampler(parts: Parts, step: int) -> Parts:
    """Parts whose sampler gets the same weights again and again from a training step on."""
    taken: list[Any] = []
    set_weights = parts.engine.set_weights

    def forgetful(weights: Any) -> None:
        if len(taken) < step:
            taken.append(None)
            taken[-1] = jax.tree.map(jnp.copy, weights)  # the update donates them
            taken[:-1] = [None] * (len(taken) - 1)
        set_weights(jax.tree.map(jnp.copy, taken[-1]))

    parts.engine.set_weights = forgetful
    return parts


def with_sharp_policy(parts: Parts, step: int, factor: float = 30.0) -> Parts:
    """Parts whose policy is made all but sure of each token before a step, by its final norm."""
    stage = parts.stages["train"]
    update, seen = stage.update, [0]

    class Sharpened:
        def __getattr__(self, name: str) -> Any:
            return getattr(update, name)

        def __call__(self, state: Any, batch: Any, packed: Any, lr_scale: Any = None) -> Any:
            state, metrics = update(state, batch, packed, lr_scale)
            seen[0] += 1
            if seen[0] == (step - 1) * stage.settings.num_minibatches * stage.settings.num_epochs:
                sharp = jax.tree.map_with_path(
                    lambda path, x: (
                        x * factor if jax.tree_util.keystr(path) == "['norm']['scale']" else x
                    ),
                    state.params,
                )
                state = dataclasses.replace(state, params=sharp)
            return state, metrics

    stages = {**parts.stages, "train": dataclasses.replace(stage, update=Sharpened())}
    return dataclasses.replace(parts, stages=stages)


class LyingSearch(LocalSearch):
    """The configured corpus, until `since`: from then on documents drawn at random."""

    step, since = 0, 2**31

    def retrieve(self, queries: Sequence[str], topk: int) -> list[list[Hit]]:
        """Documents for each query."""
        if type(self).step < type(self).since:
            return super().retrieve(queries, topk)
        return RandomSearch(self, seed=0).retrieve(queries, topk)


def with_steps_told(parts: Parts) -> Parts:
    """Parts that tell `LyingSearch` which step samples."""
    rollout = parts.rollout

    def telling(draws: Any, sampling: Any, **others: Any) -> Groups:
        LyingSearch.step = sampling.seeds.step + 1
        return rollout(draws, sampling=sampling, **others)

    return dataclasses.replace(parts, rollout=telling)


FAULTS: dict[str, tuple[str, ...]] = {
    **{name: signs for name, (_, signs) in IN_GROUPS.items()},
    "stale sampler": ("sampler_differs",),
    "entropy collapse": ("entropy_collapsed",),
    "a search that lies": ("search_changed",),
    "none": (),
}
"""Faults, and the signs that name each rightly."""


def with_fault(parts: Parts, fault: str, step: int) -> Parts:
    """Parts in which a fault acts from a training step on, counted from 1."""
    if fault in IN_GROUPS:
        return with_groups(parts, step, IN_GROUPS[fault][0])
    if fault == "stale sampler":
        return with_stale_sampler(parts, step)
    if fault == "entropy collapse":
        return with_sharp_policy(parts, step)
    if fault == "a search that lies":
        LyingSearch.since = step
        return with_steps_told(parts)
    return parts


def signs_of(workdir: Path) -> list[tuple[int, str]]:
    """Steps and names of the signs of a run, those that were there already left out."""
    path = workdir / "sentinel.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return [(line["step"], line["sign"]) for line in map(json.loads, lines)]


def main(argv: Sequence[str] | None = None) -> None:
    """Trains with each fault and prints what was seen of it."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument(
        "--world", default="data/collapse", help="made by examples.quickstart_world"
    )
    parser.add_argument("--workdir", type=Path, default=Path("runs/faults"))
    parser.add_argument("--faults", nargs="*", default=list(FAULTS), choices=list(FAULTS))
    parser.add_argument("--step", type=int, default=30, help="the first step with the fault")
    parser.add_argument("--steps", type=int, default=40)
    args = parser.parse_args(argv)
    rows, seen = [], {}
    for fault in args.faults:
        workdir = args.workdir / fault.replace(" ", "_")
        config = collapse.get_config(args.world)
        config.update_from_flattened_dict(
            {
                **{"num_steps": args.steps, "eval.every_steps": 0},
                **{"optimizer.lr": 3e-4, "watch.name": "sentinel"},
            }
        )
        config.stages = ("sft",)
        warm = args.workdir / "warm"
        if not (warm / "export").is_dir():
            play(config, warm, "none", 0)
        config.stages, config.model.path = ("train",), str(warm / "export")
        if fault == "a search that lies":
            config.search.engine = "benchmarks.faults.LyingSearch"
            config.search.settings = {"corpus": config.search.local.corpus}
        if not (workdir / "export").is_dir():
            play(config, workdir, fault, args.step)
        signs = [one for one in signs_of(workdir) if one[0] >= args.step]
        early = [one for one in signs_of(workdir) if one[0] < args.step]
        first = min(signs, default=None)
        right = [step for step, sign in signs if sign in FAULTS[fault]]
        seen[fault] = {"signs": signs, "before": early}
        told = ", ".join(f"{sign} ({step})" for step, sign in signs) or "none"
        late = f"{right[0] - args.step + 1}" if right else "-"
        rows.append([fault, late, told, f"{len(early)}"])
        print(f"{fault}: first {first}, named rightly in step {late}", flush=True)
    args.workdir.mkdir(parents=True, exist_ok=True)
    (args.workdir / "faults.json").write_text(json.dumps(seen, indent=1) + "\n", encoding="utf-8")
    print(table(["fault", "named rightly in its step", "signs (step)", "signs before it"], rows))


def play(config: Any, workdir: Path, fault: str, step: int) -> None:
    """Trains with a fault from a step on."""
    validate(config)
    workdir.mkdir(parents=True, exist_ok=True)
    parts = with_fault(assemble(config), fault, step)
    run(settings_of(config), workdir, parts, Display())


if __name__ == "__main__":
    # A configuration names `LyingSearch` by its module, which is another one than __main__.
    importlib.import_module("benchmarks.faults").main()
