"""Tests each algorithm's claim against plain GRPO at the same budget; writes docs/results.md.

    python -m benchmarks.claims

Makes small worlds (`examples/claims_world.py`, `examples/math_world.py`), one warm start in each,
and from it runs of every arm with several seeds, two runs side by side: about an hour on two cores.
Killed, it goes on from what is done when the same command is given again. `--claims` names some of
the claims; the page keeps what it says of the others. `--report_only` writes the page from the runs
that are there, `--quick` plays everything at a size that shows only that it works, and
`--questions=dev` looks at the development questions, on which settings may be chosen.
"""

from __future__ import annotations

import argparse
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks import claims_report as report
from benchmarks.claims_report import Claim, Criterion, Measure, Panel
from benchmarks.claims_runs import ROOT, Job, Record, read_record, run_jobs

CONFIG = "benchmarks/claims_config.py"
THRESHOLD = 0.85
"""The exact match to which updates are counted; chosen on development questions."""

OWN_WORLDS = "\n## The methods' own worlds\n"

HOP_NAMES = ("one_hop", "two_hop", "three_hop", "four_hop")


@dataclass(frozen=True, kw_only=True)
class WorldSize:
    """Size of a world and of its warm start."""

    builder: str = "examples.claims_world"  # the module
    flags: Mapping[str, Any] = field(default_factory=dict)  # of the builder
    sft_steps: int


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One way of training in one world."""

    world: str
    num_steps: int
    changes: Mapping[str, Any] = field(default_factory=dict)  # to claims_config.py
    after: str | None = None  # goes on with the weights of this arm, rather than the warm start
    # Watches the development questions while it trains, since what it sees there changes how it
    # trains; evaluated by a run of its own.
    is_watched_on_dev: bool = False


EASY = "6,1,1,1,1"
"""Shares of training problems by their number of moves: most are the easiest."""

WORLDS = {
    "hops": WorldSize(flags={"world": "hops", "seed": 1, "num_questions": 160}, sft_steps=1000),
    "math": WorldSize(
        builder="examples.math_world",
        flags={"seed": 2, "num_held_out": 300, "shares": EASY},
        sft_steps=900,
    ),
    "ambiguous": WorldSize(
        flags={"world": "ambiguous", "seed": 1, "num_held_out": 200}, sft_steps=700
    ),
    "unanswerable": WorldSize(
        flags={"world": "unanswerable", "seed": 1, "num_questions": 160}, sft_steps=1200
    ),
}

HOPS = {"optimizer.lr": 2e-4, "rollout.max_total_tokens": 208, "eval.every_steps": 5}
# With one sample a problem, chance alone moves the step at which a score is reached by ten.
MATH = {"eval.every_steps": 5, "eval.samples": 4}
# Many updates of each batch, so that ratios leave the clipping range.
PRESSED = {"optimizer.num_epochs": 3, "eval.every_steps": 10}
PASS_AT_K = {"eval.samples": 8, "eval.every_steps": 20}
BAPO = {
    "shaping.boundary_aware": True,
    "filter.resample_attempts": 2,
}
PLAIN = "GRPO"
ARMS = {
    "hops": {
        PLAIN: Arm(world="hops", num_steps=50, changes=HOPS),
        "ARES": Arm(
            world="hops",
            num_steps=50,
            changes={
                **HOPS,
                "shaping.entropy_reward": True,
                "filter.name": "accuracy_range",
                "filter.tasks_per_batch": 4,
                "filter.max_batches": 0,
                "kl.coef": 0.01,
                "kl.controller": "budget",
                "kl.low_factor": 0.5,
                "loss.clip_high": 0.3,
            },
        ),
        "no observation mask": Arm(
            world="hops", num_steps=50, changes={**HOPS, "loss.mask_observations": False}
        ),
    },
    "math": {
        PLAIN: Arm(world="math", num_steps=50, changes=MATH),
        "dynamic sampling": Arm(
            world="math",
            num_steps=50,
            changes={
                **MATH,
                "filter.name": "varied",
                "filter.varied.metric": "acc",
                "filter.tasks_per_batch": 4,
                "filter.max_batches": 0,
            },
        ),
        "overlong shaping": Arm(
            world="math",
            num_steps=50,
            changes={**MATH, "shaping.overlong_buffer": 14},  # a fifth, as published
        ),
        "GRPO, pressed": Arm(world="math", num_steps=30, changes=PRESSED),
        "clip-higher": Arm(world="math", num_steps=30, changes={**PRESSED, "loss.clip_high": 0.28}),
    },
    "ambiguous": {
        PLAIN: Arm(world="ambiguous", num_steps=80, changes=PASS_AT_K),
        "Pass@k": Arm(
            world="ambiguous",
            num_steps=60,
            changes={**PASS_AT_K, "advantage.name": "pass_at_k", "advantage.pass_at_k.k": 4},
        ),
        "Pass@k, then GRPO": Arm(
            world="ambiguous", num_steps=20, changes=PASS_AT_K, after="Pass@k"
        ),
    },
    "unanswerable": {
        PLAIN: Arm(world="unanswerable", num_steps=60, is_watched_on_dev=True),
        "BAPO": Arm(
            world="unanswerable",
            num_steps=60,
            changes={
                **BAPO,
                "shaping.stage_level": False,
                "shaping.sample_level": False,
            },
            is_watched_on_dev=True,
        ),
        "BAPO, with stages": Arm(
            world="unanswerable",
            num_steps=60,
            changes={
                **BAPO,
                "shaping.stage_tolerance": 1,
                "eval.suites": "('sampled', 'greedy')",
                "eval.every_steps": 3,
            },
            is_watched_on_dev=True,
        ),
    },
}
"""Arms by world and name; the first arm of a claim is its baseline."""

EM = Measure(name="exact match", of=report.final("all/exact_match"))
TRUNCATED = Measure(name="truncated, last third", of=report.last_steps("outcome/out_of_budget"))
EVER_TRUNCATED = Measure(
    name="truncated, all steps", of=report.last_steps("outcome/out_of_budget", 1.0)
)
ENTROPY = Measure(name="entropy, last third", of=report.last_steps("actor/entropy"))
GENERATED = Measure(
    name="trajectories generated", of=report.total("rollout/num_generated"), digits=0
)
TO_THRESHOLD = report.steps_to("all/exact_match", THRESHOLD)
TOKENS = {
    name: Measure(name=f"tokens, {name}", of=report.final(f"{name}/tokens"), digits=1)
    for name in HOP_NAMES
}


def nearly_equal(measure: Measure, arm: str, *, baseline: str = PLAIN) -> Criterion:
    return Criterion(
        measure=measure,
        arm=arm,
        baseline=baseline,
        is_higher_better=True,
        allowance=report.NEARLY,
    )


def gain(
    measure: Measure,
    arm: str,
    *,
    least: float,
    is_higher_better: bool = True,
    baseline: str = PLAIN,
) -> Criterion:
    return Criterion(
        measure=measure,
        arm=arm,
        baseline=baseline,
        is_higher_better=is_higher_better,
        least=least,
    )


def pass_at(k: int, step: int) -> Measure:
    return Measure(name=f"pass@{k}, step {step}", of=report.at_step(f"ambiguous/pass@{k}", step))


def one_hop(step: int) -> Measure:
    return Measure(name=f"one hop, step {step}", of=report.at_step("one_hop/exact_match", step))


CLAIMS = (
    Claim(
        name="pass_at_k",
        title="Pass@k training keeps several answers alive",
        says="""\
Claimed ([Pass@k training](https://arxiv.org/abs/2508.10751)): with the advantage of the best of k,
pass@k on held-out questions rises where plain GRPO saturates, and going back to GRPO afterwards
gains pass@1 without giving the wider search back. The test: questions whose answer is one of three
that a search shows, the first of them in half of the cases. A policy that has settled on the first
scores 0.5, however often it tries. 60 steps of each, then 20 more steps of GRPO after either.""",
        world="ambiguous",
        arms=(PLAIN, "Pass@k", "Pass@k, then GRPO"),
        measures=(
            pass_at(1, 60),
            pass_at(8, 60),
            one_hop(60),
            pass_at(1, 80),
            pass_at(8, 80),
            one_hop(80),
        ),
        criteria=(
            gain(pass_at(8, 60), "Pass@k", least=0.05),
            nearly_equal(pass_at(1, 80), "Pass@k, then GRPO"),
            gain(pass_at(8, 80), "Pass@k, then GRPO", least=0.05),
        ),
        panels=(
            Panel(title="ambiguous questions, pass@1", measure="ambiguous/pass@1"),
            Panel(title="ambiguous questions, pass@8", measure="ambiguous/pass@8"),
            Panel(title="one hop, exact match", measure="one_hop/exact_match"),
            Panel(title="entropy, nats a token", metric="actor/entropy", window=5),
        ),
    ),
    Claim(
        name="dapo_dynamic_sampling",
        title="DAPO: dynamic sampling needs fewer updates",
        says=f"""\
Claimed ([DAPO](https://arxiv.org/abs/2503.14476)): groups that are all right or all wrong teach
nothing; drawing more tasks until the batch is full of others reaches the same score in fewer
updates. The test: steps until exact match on held-out problems is {THRESHOLD}, on the line between
evaluations. Six in ten training problems have two moves, which soon teach nothing more. The number
of updates is the same in both arms, that of generated trajectories is not, so it is given as
well.""",
        world="math",
        arms=(PLAIN, "dynamic sampling"),
        measures=(
            Measure(name=f"steps to {THRESHOLD}", of=TO_THRESHOLD, digits=1),
            Measure(
                name=f"trajectories to {THRESHOLD}",
                of=report.total_until("rollout/num_generated", TO_THRESHOLD),
                digits=0,
            ),
            GENERATED,
            EM,
        ),
        criteria=(
            gain(
                Measure(name=f"steps to {THRESHOLD}", of=TO_THRESHOLD, digits=1),
                "dynamic sampling",
                least=2,
                is_higher_better=False,
            ),
        ),
        panels=(
            Panel(title="exact match, held out", measure="all/exact_match"),
            Panel(title="trajectories generated", metric="rollout/num_generated", window=5),
        ),
    ),
    Claim(
        name="dapo_clip_higher",
        title="DAPO: clip-higher keeps entropy up",
        says="""\
Claimed ([DAPO](https://arxiv.org/abs/2503.14476)): a higher ceiling of the ratio, 1.28 rather than
1.2, lets unlikely tokens rise and so keeps the policy's entropy from collapsing. The test: entropy
over the last third of the steps; how a line begins is free here, so that there is entropy that no
score takes away. Both arms are pressed: each batch gives twelve optimizer steps, since with few of
them the ratio stays near 1 and no ceiling is touched.""",
        world="math",
        arms=("GRPO, pressed", "clip-higher"),
        measures=(
            ENTROPY,
            Measure(name="clipped share", of=report.last_steps("actor/pg_clipfrac", 1.0), digits=4),
            EM,
        ),
        criteria=(
            gain(ENTROPY, "clip-higher", least=0.01, baseline="GRPO, pressed"),
            nearly_equal(EM, "clip-higher", baseline="GRPO, pressed"),
        ),
        panels=(
            Panel(title="entropy, nats a token", metric="actor/entropy", window=5),
            Panel(title="exact match, held out", measure="all/exact_match"),
        ),
    ),
    Claim(
        name="dapo_overlong_shaping",
        title="DAPO: overlong shaping cuts fewer answers off",
        says="""\
Claimed ([DAPO](https://arxiv.org/abs/2503.14476)): a penalty that grows over the last part of the
budget makes fewer answers run out of it. The test: the share of training trajectories that are cut
off, over all steps, since it falls within a few. The longest problem needs four fifths of the
budget, but the warm start works many problems out twice.""",
        world="math",
        arms=(PLAIN, "overlong shaping"),
        measures=(
            EVER_TRUNCATED,
            TRUNCATED,
            Measure(name="truncated, held out", of=report.final("all/truncated")),
            Measure(name="tokens, held out", of=report.final("all/tokens"), digits=1),
            EM,
        ),
        criteria=(
            gain(EVER_TRUNCATED, "overlong shaping", least=0.005, is_higher_better=False),
            nearly_equal(EM, "overlong shaping"),
        ),
        panels=(
            Panel(title="truncated, training", metric="outcome/out_of_budget", window=5),
            Panel(title="truncated, held out", measure="all/truncated"),
            Panel(title="sampled tokens, held out", measure="all/tokens"),
            Panel(title="exact match, held out", measure="all/exact_match"),
        ),
    ),
    Claim(
        name="bapo",
        title="BAPO: declines what cannot be answered",
        says="""\
Claimed ([BAPO](https://arxiv.org/abs/2601.11037)): paying for "I don't know" where a group found
nothing makes the policy more precise and more reliable at nearly the same accuracy, and does not
make it refuse what it could answer. Precision is correct answers over answers given; reliability is
(1 − r)·precision + r·accuracy, with r the share of questions declined and accuracy that over all
questions. The test: a third of the questions has no answer in the corpus. BAPO pays from the start
here, since runs are short; with its stages, it pays little until two evaluations were below the
best one. All arms watch the development questions while they train, since the stages go by what is
seen there.""",
        world="unanswerable",
        arms=(PLAIN, "BAPO", "BAPO, with stages"),
        measures=(
            Measure(name="precision", of=report.final("precision")),
            Measure(name="reliability", of=report.final("reliability")),
            Measure(name="exact match, answerable", of=report.final("answerable/exact_match")),
            Measure(name="declined, unanswerable", of=report.final("unanswerable/abstained")),
            Measure(name="declined, answerable", of=report.final("answerable/abstained")),
            GENERATED,
        ),
        criteria=(
            gain(Measure(name="precision", of=report.final("precision")), "BAPO", least=0.05),
            gain(Measure(name="reliability", of=report.final("reliability")), "BAPO", least=0.03),
            nearly_equal(
                Measure(name="exact match, answerable", of=report.final("answerable/exact_match")),
                "BAPO",
            ),
        ),
        panels=(
            Panel(title="exact match, answerable", measure="answerable/exact_match"),
            Panel(title="declined, unanswerable", measure="unanswerable/abstained"),
            Panel(title="declined, answerable", measure="answerable/abstained"),
            Panel(title="reliability", measure="reliability"),
        ),
    ),
    Claim(
        name="ares",
        title="ARES: spends tokens by difficulty",
        says="""\
Claimed ([ARES](https://arxiv.org/abs/2510.08457)): rewarding and charging tokens of high window
entropy by difficulty makes answers to easy questions shorter and leaves room on hard ones, at equal
accuracy. The test: sampled tokens by number of hops. What can be saved here is musing, which no
answer needs.""",
        world="hops",
        arms=(PLAIN, "ARES"),
        measures=(*TOKENS.values(), EM, GENERATED),
        criteria=(
            gain(TOKENS["one_hop"], "ARES", least=1, is_higher_better=False),
            gain(
                Measure(
                    name="tokens, four hops over one",
                    of=report.ratio("four_hop/tokens", "one_hop/tokens"),
                    digits=2,
                ),
                "ARES",
                least=0.2,
            ),
            nearly_equal(EM, "ARES"),
        ),
        panels=(
            Panel(title="tokens, one hop", measure="one_hop/tokens"),
            Panel(title="tokens, four hops", measure="four_hop/tokens"),
            Panel(title="exact match, held out", measure="all/exact_match"),
        ),
    ),
    Claim(
        name="observation_mask",
        title="Search-R1: the loss leaves search results out",
        says="""\
Claimed ([Search-R1](https://arxiv.org/abs/2503.09516)): training on the text of search results, as
if the policy had written it, harms; masking it out is steadier and scores higher. The test: the
same training with the mask off, so that GRPO without the mask is the arm and GRPO the baseline it
should fall behind.""",
        world="hops",
        arms=(PLAIN, "no observation mask"),
        measures=(
            EM,
            Measure(name="four hops", of=report.final("four_hop/exact_match")),
            TRUNCATED,
        ),
        criteria=(gain(EM, "no observation mask", least=0.03, is_higher_better=False),),
        panels=(
            Panel(title="exact match, held out", measure="all/exact_match"),
            Panel(title="gradient norm", metric="actor/grad_norm", window=5),
            Panel(title="truncated, held out", measure="all/truncated"),
        ),
    ),
)


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Folders of everything, and the size at which it is made."""

    out: Path
    seeds: tuple[int, ...]
    questions: str
    is_quick: bool

    def world(self, name: str) -> Path:
        """Folder of a world."""
        return self.out / "worlds" / name

    def warm_start(self, name: str) -> Path:
        """The workdir of its warm start."""
        return self.out / "warm_starts" / name

    def run(self, world: str, arm: str, seed: int) -> Path:
        """The workdir of one run."""
        words = "".join(c if c.isalnum() else " " for c in arm.lower()).split()
        return self.out / "runs" / world / "_".join(words) / f"seed_{seed}"

    def evaluation(self, world: str, arm: str, seed: int) -> Path:
        """The workdir of its last evaluation, where that is a run of its own."""
        return self.run(world, arm, seed).with_name(f"seed_{seed}_held_out")


QUICK_WORLDS = {
    "examples.claims_world": {
        "num_people": 108,
        "num_held_out": 27,
        "num_questions": 8,
        "num_demonstrations": 160,
        "num_worlds": 2,
    },
    "examples.math_world": {
        "num_train": 64,
        "num_held_out": 10,
        "num_demonstrations": 160,
        "max_lines": 8,
    },
}
QUICK_RUN = {
    "rollout.tasks_per_step": 4,
    "rollout.group_size": 4,
    "rollout.num_rows": 16,
    # A policy that gets nothing right never fills a batch.
    "filter.name": "none",
    "filter.tasks_per_batch": 0,
    "advantage.pass_at_k.k": 2,
}
"""Settings that `--quick` changes beside the numbers of steps."""


def settings(layout: Layout, world: str, changes: Mapping[str, Any]) -> tuple[str, ...]:
    """Arguments of `jaxrl.launch`."""
    config = f"--config={ROOT / CONFIG}:{layout.world(world)}"
    return (config, *(f"--config.{key}={value}" for key, value in changes.items()))


def world_jobs(layout: Layout, name: str) -> list[Job]:
    """Makes a world and its warm start."""
    size = WORLDS[name]
    flags = {**size.flags, **(QUICK_WORLDS[size.builder] if layout.is_quick else {})}
    world, warm_start = layout.world(name), layout.warm_start(name)
    changes = {"stages": "('sft',)", "sft.num_steps": 3 if layout.is_quick else size.sft_steps}
    return [
        Job(
            folder=world,
            module=size.builder,
            arguments=(
                f"--out={world}",
                *(f"--{flag}={value}" for flag, value in flags.items()),
            ),
        ),
        Job(
            folder=warm_start,
            module="jaxrl.launch",
            arguments=(*settings(layout, name, changes), f"--workdir={warm_start}"),
            needs=(world,),
        ),
    ]


def arm_jobs(layout: Layout, name: str, arm: Arm, seed: int) -> list[Job]:
    """A run of an arm, and its evaluation where that is a run of its own."""
    workdir = layout.run(arm.world, name, seed)
    before = layout.run(arm.world, arm.after, seed) if arm.after else layout.warm_start(arm.world)
    watched = "dev" if arm.is_watched_on_dev else layout.questions
    changes = {
        "seed": seed,
        "num_steps": arm.num_steps,
        "model.path": before / "export",
        "tasks.eval.source": layout.world(arm.world) / f"questions_{watched}.jsonl",
        **arm.changes,
    }
    if layout.is_quick:
        changes |= {"num_steps": 2, "eval.every_steps": 1, **QUICK_RUN}
    jobs = [
        Job(
            folder=workdir,
            module="jaxrl.launch",
            arguments=(*settings(layout, arm.world, changes), f"--workdir={workdir}"),
            needs=(before,),
        )
    ]
    if arm.is_watched_on_dev:
        held_out = layout.evaluation(arm.world, name, seed)
        questions = layout.world(arm.world) / f"questions_{layout.questions}.jsonl"
        changes = {
            "stages": "('evaluate',)",
            "seed": seed,
            "model.path": workdir / "export",
            "tasks.eval.source": questions,
            "eval.final_suites": "('sampled',)",
        }
        arguments = (*settings(layout, arm.world, changes), f"--workdir={held_out}")
        jobs.append(
            Job(folder=held_out, module="jaxrl.launch", arguments=arguments, needs=(workdir,))
        )
    return jobs


def all_jobs(layout: Layout, claims: Sequence[Claim], arms: Sequence[str] = ()) -> list[Job]:
    """Jobs that the claims need, in the order in which they are best begun: long chains first.

    Args:
        layout: where everything lies.
        claims: to put to the test.
        arms: runs of these alone; none: of all.
    """
    wanted = {(claim.world, name) for claim in claims for name in claim.arms}
    worlds = [name for name in WORLDS if any(claim.world == name for claim in claims)]
    jobs = [job for world in worlds for job in world_jobs(layout, world)]
    for seed in layout.seeds:
        for world in worlds:
            for name, arm in ARMS[world].items():
                if (world, name) in wanted and (not arms or name in arms):
                    jobs += arm_jobs(layout, name, arm, seed)
    return jobs


def read_results(layout: Layout, worlds: Sequence[str]) -> dict[str, dict[str, list[Record]]]:
    """Records by world and arm; arms without every seed finished are left out."""
    results: dict[str, dict[str, list[Record]]] = {}
    for world in worlds:
        results[world] = {}
        for name, arm in ARMS[world].items():
            jobs = [job for seed in layout.seeds for job in arm_jobs(layout, name, arm, seed)]
            if not all((job.folder / "finished.json").exists() for job in jobs):
                continue
            results[world][name] = [
                read_record(
                    layout.run(world, name, seed),
                    held_out=layout.evaluation(world, name, seed)
                    if arm.is_watched_on_dev
                    else None,
                    before=results[world][arm.after][number] if arm.after else None,
                )
                for number, seed in enumerate(layout.seeds)
            ]
    return results


def page(
    layout: Layout, claims: Sequence[Claim], results: Mapping[str, report.Arms], before: str
) -> str:
    """The text of docs/results.md.

    Args:
        layout: of the runs.
        claims: that are judged anew.
        results: their runs, by world and arm.
        before: the page as it was; what it says of other claims stays, and so does its last part.
    """
    anew = {claim.name for claim in claims}
    rows, sections, arm_rows = [], [], []
    for claim in CLAIMS:
        if claim.name in anew:
            rows.append(report.summary_row(claim, results[claim.world]))
            sections.append(section(layout, claim, results[claim.world]))
        elif (row := line_of(before, f"| {claim.title} |")) is not None:
            rows.append(row)
            sections.append(section_of(before, f"## {claim.title}: "))
        else:
            continue
        for name in claim.arms:
            start = f"| {claim.world} | {name} |"
            row = arm_row(claim.world, name) if claim.name in anew else line_of(before, start)
            if row is not None and row not in arm_rows:
                arm_rows.append(row)
    parts = [
        "# What the claims come to",
        """\
Each algorithm's claim, put to the test against plain GRPO in a small made-up world. This page is
written by the benchmark, verdicts included; nothing in it is set by hand, but for the last two
parts: on worlds in which a method trains by itself, and on
[when the four claims hold](#when-four-claims-hold) that do not show here, or not in full.

```sh
python -m benchmarks.claims
```""",
        "\n".join([report.table(["claim", "verdict", "differences to the baseline"], []), *rows]),
        f"""\
## How to read this

Numbers are means over seeds ± their standard deviation; bands in the pictures reach from the lowest
seed to the highest. All runs of a world start from the same warm start and differ in the seed of
task order and samples. Except where a section says otherwise, arms have the same number of steps,
of tasks and of trajectories a step. The questions are about people whom no training question and
no demonstration names, the problems have numbers that neither has in their order; settings were
tried on development questions, which are others again. The model has two layers, so all of this
says what a method does to a policy, not how much it would gain with a large one.

{report.RULE}""",
        *sections,
        "## The worlds and the arms",
        "\n".join([report.table(["world", "arm", "steps", "changes"], []), *arm_rows]),
    ]
    return "\n\n".join(parts) + "\n" + own_worlds(before)


def section(layout: Layout, claim: Claim, arms: report.Arms) -> str:
    """A claim's section, and what was run for it."""
    text = report.section(claim, arms, f"images/results_{claim.name}.svg")
    names = ("jax", "jaxlib", "flax", "optax", "numpy")
    versions = ", ".join(f"{name} {version(name)}" for name in names)
    seeds = ", ".join(map(str, layout.seeds))
    num_runs = sum(len(arms[name]) for name in claim.arms)
    return (
        f"{text}\n\n{num_runs} runs with the seeds {seeds}, on the {layout.questions} questions; "
        f"Python {platform.python_version()}, {versions}; {platform.machine()}, "
        f"{os.cpu_count()} cores."
    )


def arm_row(world: str, name: str) -> str:
    """Row of what an arm changes."""
    arm = ARMS[world][name]
    changes = ", ".join(f"`{key}={value}`" for key, value in arm.changes.items()) or "–"
    after = f"after {arm.after}: " if arm.after else ""
    return f"| {world} | {name} | {after}{arm.num_steps} | {changes} |"


def line_of(text: str, start: str) -> str | None:
    """The first line that begins so."""
    return next((line for line in text.splitlines() if line.startswith(start)), None)


def section_of(text: str, start: str) -> str:
    """A section, from its heading to the next one."""
    _, _, rest = text.partition(f"\n{start}")
    return start + rest.partition("\n## ")[0].strip()


def own_worlds(text: str) -> str:
    """The last part of the page, which `benchmarks.worlds` has the figures for; "" without one."""
    return "".join(text.partition(OWN_WORLDS)[1:])


def with_arms(claim: Claim, arms: report.Arms) -> Claim | None:
    """The claim with those of its arms that were run; None where one that decides is missing."""
    deciding = {arm for c in claim.criteria for arm in (c.arm, c.baseline)}
    if not deciding <= set(arms):
        return None
    return replace(claim, arms=tuple(arm for arm in claim.arms if arm in arms))


def write_results(layout: Layout, claims: Sequence[Claim], docs: Path) -> None:
    """Writes the page and its pictures anew, as far as the runs of these claims are done."""
    worlds = [world for world in WORLDS if any(claim.world == world for claim in claims)]
    results = read_results(layout, worlds)
    done = [c for c in (with_arms(c, results[c.world]) for c in claims) if c is not None]
    for claim in done:
        path = docs / "images" / f"results_{claim.name}.svg"
        report.draw(claim, results[claim.world], path)
    docs.mkdir(parents=True, exist_ok=True)  # without any claim nothing was drawn
    path = docs / "results.md"
    before = path.read_text(encoding="utf-8") if path.exists() else ""
    path.write_text(page(layout, done, results, before), encoding="utf-8")
    print(f"wrote {path}, in it anew {len(done)} of {len(claims)} claims")
    for claim in done:
        print(report.summary_row(claim, results[claim.world]))


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("runs/claims"), help="folder of all runs")
    parser.add_argument("--docs", type=Path, default=None, help="folder of results.md")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--workers", type=int, default=2, help="runs side by side")
    parser.add_argument("--questions", choices=("eval", "dev"), default="eval")
    names = tuple(claim.name for claim in CLAIMS)
    parser.add_argument("--claims", nargs="+", choices=names, default=names, help="default: all")
    parser.add_argument("--arms", nargs="+", default=(), help="only these; default: all")
    parser.add_argument("--quick", action="store_true", help="tiny, to see that it works")
    parser.add_argument("--report_only", action="store_true", help="run nothing")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_args(argv)
    out = args.out.resolve()
    layout = Layout(
        out=out, seeds=tuple(range(args.seeds)), questions=args.questions, is_quick=args.quick
    )
    claims = [claim for claim in CLAIMS if claim.name in args.claims]
    # Only whole claims may go to the page that is in the repository.
    is_real = not args.quick and args.questions == "eval" and not args.arms
    docs = args.docs or (ROOT / "docs" if is_real else out / "docs")
    if not args.report_only:
        jobs = all_jobs(layout, claims, args.arms)
        run_jobs(jobs, num_workers=args.workers, cache=out / "cache")
    write_results(layout, claims, docs)


if __name__ == "__main__":
    main()
