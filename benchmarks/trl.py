r"""Train a model with jaxrl and with TRL's `GRPOTrainer` on the same questions.

    python -m examples.real_world --out=data/real
    python3 -m venv runs/trl_venv
    runs/trl_venv/bin/pip install torch==2.13.0 trl==1.16.0
    taskset -c 0 python -m benchmarks.trl --trl_python=runs/trl_venv/bin/python --out=runs/trl

The questions are SQuAD's from `examples/real_world.py`. The prompt is the part of the passage with
the answer, then the question. Episodes have one turn; the reward is F1. Both trainers load the
same weights, use the same prompts in the same order, and run the same step: `tasks_per_step`
prompts with `group_size` completions each, sampled at temperature 1, GRPO advantages divided by the
group's standard deviation, the clipped loss averaged over all tokens of the batch (TRL's
`loss_type="dapo"`), no KL term, one AdamW step without decay at a constant rate. All is float32.

Each trainer runs in a separate process with one thread, and the two alternate steps. A step covers
all work between two consecutive turns; the first two and the last are not counted. `sampling` is
the CPU time of prompts, sampling and rewards, `update` that of the rest of the step. `trained`
counts the tokens of prompts and completions, including repeated prompts. With `--recomputes=true`,
the default of both trainers, the backward pass recomputes layers. For groups with equal rewards,
our update skips the backward pass (`config.optimizer.skip_signal_free`); TRL computes their
gradients, which are zero.

TRL then trains on our first two batches. Its losses, gradient norms and rewards are printed next to
ours; the second batch also compares the optimizers' first steps. Our evaluation scores both
exported models and the initial model on held-out questions, sampled and greedy.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_type_hints

import numpy as np
from ml_collections import ConfigDict

import jaxrl.train
from benchmarks import common
from benchmarks.peers import ONE_THREAD
from benchmarks.trl_worker import TurnClient, read_jsonl
from examples.real_world import MODEL_FOLDER, make_good_query, strip_title, write_jsonl
from jaxrl import api
from jaxrl.config import default_config
from jaxrl.data.stream import Stream
from jaxrl.data.tokenizer import Tokenizer
from jaxrl.envs.base import Env, Episode, Message, Outcome, Reward, StepResult, Task
from jaxrl.envs.rewards.qa import exact_match, f1
from jaxrl.envs.search.bm25 import LocalSearch
from jaxrl.logs.statistics import bootstrap_means, compute_percentile_interval
from jaxrl.logs.steps import StepTimer
from jaxrl.models.hf_weights import copy_non_weight_files
from jaxrl.types import Trajectory

SYSTEM = "Answer the question in a few words from the text. Write the answer alone."

NUM_WARM_UP = 2
"""Number of initial steps that are not counted."""

TRAINERS = ("jaxrl", "TRL")


@dataclass(frozen=True, kw_only=True)
class Work:
    """Settings of both trainers; every field is a flag."""

    num_updates: int = 12
    tasks_per_step: int = 4
    group_size: int = 4  # completions per prompt
    max_prompt_tokens: int = 160  # questions with longer prompts are skipped
    max_response_tokens: int = 24
    micro_rows: int = 8  # sequences per micro-batch; for ours, rows of the longest length
    lr: float = 2e-5
    clip: float = 0.2
    recomputes: bool = True  # True to recompute layers in the backward pass
    num_replayed: int = 2  # number of our batches to replay in TRL; 0: none
    num_held_out: int = 120  # maximum number of held-out questions
    eval_samples: int = 2  # sampled answers per held-out question
    seed: int = 0


class Reading(Env):
    """Single-turn environment. The prompt has a text and a question; the response is the answer."""

    stop_strings = ()
    reward_parts = ("exact_match", "f1")

    def start(self, tasks: Sequence[Task]) -> list[list[Message]]:
        """Return the messages of each task."""
        return [list(task.messages or ()) for task in tasks]

    def step(self, episodes: Sequence[Episode], texts: Sequence[str]) -> list[StepResult]:
        """End every episode."""
        return [StepResult(outcome=Outcome.ANSWERED) for _ in texts]

    def score(self, group: Sequence[Episode]) -> list[Reward]:
        """Compute exact match and F1 as SQuAD defines them."""
        return [self._score_one(episode.response, episode.task.answers) for episode in group]

    def _score_one(self, answer: str, answers: Sequence[str]) -> Reward:
        is_exact = exact_match(answer, answers)
        parts = {"exact_match": is_exact, "f1": f1(answer, answers)}
        return Reward(parts=parts, final_answer=answer.strip(), is_correct=is_exact == 1)


def make_reading_task(question: Mapping[str, Any], passage: str) -> dict[str, Any]:
    """Convert a question of the world to a single-turn task."""
    user_content = f"{passage}\n\nQuestion: {question['question']}"
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": user_content}]
    fields = {name: question[name] for name in ("id", "answers", "data_source")}
    return {**fields, "messages": messages}


def write_tasks(world: Path, model: str, out: Path, work: Work) -> None:
    """Write the training tasks of both trainers, and the held-out tasks.

    TRL reads its file in order. Our trainer shuffles tasks by the seed, so TRL's file is written in
    the shuffled order.

    Raises:
        SystemExit: Too few questions have prompts of at most `work.max_prompt_tokens` tokens.
    """
    engine, tokenizer = LocalSearch(world / "corpus.jsonl", topk=1), Tokenizer.from_folder(model)
    num_tasks = work.num_updates * work.tasks_per_step
    counts = {"train": num_tasks, "eval": work.num_held_out}
    for split, count in counts.items():
        questions = read_jsonl(world / f"questions_{split}.jsonl")
        results = engine.run_batch([make_good_query(item["question"]) for item in questions])
        tasks = [
            make_reading_task(q, strip_title(str(f)))
            for q, f in zip(questions, results, strict=True)
        ]
        lengths = [len(tokenizer.render_prompt(item["messages"])) for item in tasks]
        fitting = zip(tasks, lengths, strict=True)
        tasks = [item for item, length in fitting if length <= work.max_prompt_tokens][:count]
        print(
            f"{split}: {len(tasks)} of {len(questions)} questions, prompts of {min(lengths)} to "
            f"{max(lengths)} tokens",
            flush=True,
        )
        write_jsonl(out / f"{split}.jsonl", tasks)
        if split == "train" and len(tasks) < count:
            raise SystemExit(
                f"error: {world} has {len(tasks)} questions with at most {work.max_prompt_tokens} "
                f"tokens; expected {count}. Lower --num_updates or --tasks_per_step."
            )
        if split == "train":
            in_order = Stream(tasks, seed=work.seed).get_items(0, count)
            write_jsonl(out / "tasks_in_order.jsonl", in_order)


def get_config(out: Path, model: str, work: Work) -> ConfigDict:
    """Return our configuration, for training and evaluation."""
    config = default_config().lock()
    config.seed, config.num_steps = work.seed, work.num_updates
    config.model.path = model
    config.model.remat = "full" if work.recomputes else "none"
    config.tasks.train.source = str(out / "train.jsonl")
    config.tasks.eval.source = str(out / "eval.jsonl")
    config.env.name = "benchmarks.trl.Reading"
    config.reward.weights = {"f1": 1.0}
    config.rollout.tasks_per_step, config.rollout.group_size = work.tasks_per_step, work.group_size
    config.rollout.max_prompt_tokens = work.max_prompt_tokens
    config.rollout.max_response_tokens = work.max_response_tokens
    config.rollout.max_total_tokens = work.max_prompt_tokens + work.max_response_tokens
    config.rollout.max_num_seqs = work.tasks_per_step * work.group_size
    config.rollout.chunk_tokens = 8
    config.rollout.observation_lag_chunks = 1
    config.advantage.grpo.epsilon = 1e-4  # TRL's
    config.loss.clip_low = config.loss.clip_high = work.clip
    config.optimizer.lr, config.optimizer.weight_decay = work.lr, 0.0
    config.optimizer.micro_rows = work.micro_rows
    config.eval.suites, config.eval.final_suites = (), ("sampled", "greedy")
    config.eval.samples = work.eval_samples
    config.checkpoint.every_steps = work.num_updates
    config.log.trajectories = -1
    config.compilation_cache = "off"  # results must not depend on earlier runs
    return config


class TurnClock(StepTimer):
    """Step timer that waits for a turn before its step samples."""

    def __init__(self, turn_client: TurnClient):
        """Create the timer; a trainer also creates one after its last step."""
        super().__init__()
        self._turns, self._has_turn = turn_client, False

    def time_sampling(self) -> Any:
        """Wait for the step's turn once, then return a context manager that times sampling."""
        if not self._has_turn:
            self._turns.next_step()
            self._has_turn = True
        return self._turns.time_sampling()

    def compute_metrics(self, trajectories: Sequence[Trajectory]) -> dict[str, float]:
        """Report the step to the benchmark; return no metrics."""
        first = {t.task_id: t.token_ids[: t.prompt_length].tolist() for t in trajectories}
        self._turns.add_figures(
            prompts=list(first.values()),
            sampled_tokens=sum(t.num_sampled for t in trajectories),
            all_tokens=sum(len(t.token_ids) for t in trajectories),
        )
        return {}


def train_ours(out: Path) -> None:
    """Run our worker: train in turns and export to OUT/jaxrl/export."""
    model, work = read_settings(out)
    turn_client = TurnClient(out / "jaxrl.log")
    jaxrl.train.StepTimer = functools.partial(TurnClock, turn_client)
    config = get_config(out, model, work)
    config.stages = ("train",)
    api.train(config, out / "jaxrl")
    turn_client.end_step()


def read_settings(out: Path) -> tuple[str, Work]:
    """Read the model folder and the settings of both trainers."""
    settings = json.loads((out / "settings.json").read_text())
    return settings.pop("model"), Work(**settings)


class Worker:
    """Process of a trainer that waits for turns."""

    def __init__(self, command: Sequence[str]):
        """Start the process."""
        self._process = subprocess.Popen(
            command,
            env=os.environ | ONE_THREAD,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._command = " ".join(command)
        self.steps: list[dict[str, Any]] = []

    def read(self) -> Any:
        """Read the process's next message."""
        assert self._process.stdout is not None
        if line := self._process.stdout.readline():
            return json.loads(line)
        raise SystemExit(f"error: {self._command} ended with {self._process.wait()}; see its log")

    def step(self) -> None:
        """Run one step in the process and store its record in `steps`."""
        assert self._process.stdin is not None
        self._process.stdin.write("step\n")
        self._process.stdin.flush()
        self.steps.append(self.read())

    def join(self) -> None:
        """Wait until the process exits."""
        self._process.communicate()
        if self._process.returncode:
            raise SystemExit(f"error: {self._command} ended with {self._process.returncode}")


def alternate_steps(workers: Sequence[Worker], num_steps: int) -> None:
    """Alternate training steps; the worker that goes first alternates too."""
    for number in range(num_steps):
        for worker in workers if number % 2 == 0 else reversed(workers):
            worker.step()
        took = " ".join(f"{worker.steps[-1]['step_cpu_s']:.1f}" for worker in workers)
        print(f"step {number + 1}: {took} s of processor time", flush=True)


def check_prompts(ours: Sequence[Mapping[str, Any]], theirs: Sequence[Mapping[str, Any]]) -> None:
    """Assert that both trainers used the same prompts in the same order."""
    for number, (item, other) in enumerate(zip(ours, theirs, strict=True), start=1):
        size = len(other["prompts"]) // len(item["prompts"])
        groups = [ids for ids in item["prompts"] for _ in range(size)]
        assert groups == other["prompts"], f"the prompts of step {number} differ"


def make_replay_batches(out: Path, num_steps: int) -> list[dict[str, Any]]:
    """Convert the trajectories of our first steps to the format of TRL's `rollout_func`."""
    batches = []
    for step in range(1, num_steps + 1):
        records = read_jsonl(out / "jaxrl" / "trajectories" / f"step_{step:06d}.jsonl")
        batches.append(
            {
                "prompt_ids": [item["token_ids"][: item["prompt_length"]] for item in records],
                "completion_ids": [item["token_ids"][item["prompt_length"] :] for item in records],
                "logprobs": [item["rollout_logprobs"][item["prompt_length"] :] for item in records],
            }
        )
    return batches


def compare_metrics(
    ours: Sequence[Mapping[str, Any]], theirs: Sequence[Mapping[str, Any]]
) -> list[str]:
    """Format losses, gradient norms and rewards of the same completions for comparison."""
    names = {
        "loss": "actor/pg_loss",
        "grad_norm": "actor/grad_norm",
        "reward": "critic/rewards/mean",
    }
    lines = []
    for number, other in enumerate(theirs):
        pairs = [
            f"{name} {ours[number][jaxrl_name]:.6f} and {other[name]:.6f}"
            for name, jaxrl_name in names.items()
        ]
        lines.append(f"same completions, step {number + 1}: {', '.join(pairs)}")
    return lines


def make_speed_rows(steps: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[list[str]]:
    """Format the rows of the table of step times.

    Args:
        steps: Records by trainer: the startup's, then one per step.
    """
    timed = {
        name: messages_received[1 + NUM_WARM_UP : -1] for name, messages_received in steps.items()
    }

    def compute_medians(figure: Any) -> list[float]:
        return [statistics.median(map(figure, timed[name])) for name in TRAINERS]

    def format_row(head: str, digits: int, figures: Sequence[float]) -> list[str]:
        ratio = figures[0] / figures[1]
        return [head, *(f"{figure:,.{digits}f}" for figure in figures), f"{ratio:.2f}"]

    def update_s(item: Mapping[str, Any]) -> float:
        return float(item["step_cpu_s"] - item["sampling_cpu_s"])

    step_s = compute_medians(lambda item: item["step_cpu_s"])
    # Loading and compiling: the startup, and the excess time of the first steps.
    before = [
        steps[name][0]["start_cpu_s"]
        + sum(item["step_cpu_s"] - median for item in steps[name][1 : 1 + NUM_WARM_UP])
        for name, median in zip(TRAINERS, step_s, strict=True)
    ]
    return [
        format_row("seconds a step", 1, compute_medians(lambda item: item["step_s"])),
        format_row("processor seconds a step", 1, step_s),
        # The mean includes late compilations, which the median hides.
        format_row(
            "the same, mean",
            1,
            [statistics.fmean(item["step_cpu_s"] for item in timed[name]) for name in TRAINERS],
        ),
        format_row("sampling", 1, compute_medians(lambda item: item["sampling_cpu_s"])),
        format_row("update", 1, compute_medians(update_s)),
        format_row(
            "sampled tokens a step", 0, compute_medians(lambda item: item["sampled_tokens"])
        ),
        format_row("trained tokens a step", 0, compute_medians(lambda item: item["all_tokens"])),
        format_row(
            "sampled tokens / processor s of sampling",
            1,
            compute_medians(lambda item: item["sampled_tokens"] / item["sampling_cpu_s"]),
        ),
        format_row(
            "trained tokens / processor s of update",
            1,
            compute_medians(lambda item: item["all_tokens"] / update_s(item)),
        ),
        format_row(
            "trained tokens / processor s of step",
            1,
            compute_medians(lambda item: item["all_tokens"] / item["step_cpu_s"]),
        ),
        format_row("loading and compiling, processor s", 1, before),
        format_row(
            "peak memory, GB", 2, [timed[name][-1]["peak_bytes"] / 1e9 for name in TRAINERS]
        ),
    ]


def make_score_rows(records: Mapping[str, Mapping[str, Any]]) -> list[list[str]]:
    """Format the rows of the table of scores and their differences, with 95% intervals.

    Args:
        records: Evaluations by name: "before", and the name of each trainer.
    """
    rows = []
    for suite in ("sampled", "greedy"):
        for measure in ("exact_match", "f1"):
            cells = []
            for name in ("before", *TRAINERS):
                mean = records[name]["summary"][suite]["all"][measure]
                cells.append(
                    format_with_interval(mean, records[name]["intervals"][suite]["all"][measure])
                )
            ours, theirs = (
                compute_means_by_question(records[name], suite, measure) for name in TRAINERS
            )
            gaps = np.array([[ours[task] - theirs[task]] for task in ours])
            rng = np.random.default_rng(0)
            resampled = bootstrap_means(gaps, num_resamples=1000, rng=rng)
            cells.append(
                format_with_interval(
                    float(gaps.mean()), compute_percentile_interval(resampled[:, 0])
                )
            )
            rows.append([f"{measure.replace('_', ' ')}, {suite}", *cells])
    return rows


def format_with_interval(mean: float, interval: Sequence[float] | None) -> str:
    """Format a mean with its confidence interval, if there is one."""
    return f"{mean:.3f}" + (f" [{interval[0]:.2f}, {interval[1]:.2f}]" if interval else "")


def compute_means_by_question(
    record: Mapping[str, Any], suite: str, measure: str
) -> dict[str, float]:
    """Return the mean of a metric per question, over the sampled answers."""
    by_task: dict[str, list[float]] = {}
    for item in record["questions"][suite]:
        by_task.setdefault(item["task_id"], []).append(item[measure])
    return {task: statistics.fmean(values) for task, values in by_task.items()}


def evaluate(out: Path, name: str, model: str, work: Work) -> dict[str, Any]:
    """Evaluate a model folder with our evaluation."""
    workdir = out / f"eval_{name}"
    api.evaluate(get_config(out, model, work), workdir)
    return json.loads((workdir / "eval" / "evaluate_0.json").read_text())


def parse_flags(argv: Sequence[str] | None) -> tuple[argparse.Namespace, Work]:
    """Parse the command line into flags and settings."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trl_python", default=sys.executable, help="Python that has trl")
    parser.add_argument("--world", type=Path, default=Path("data/real"))
    parser.add_argument("--model", help="model folder (default: the world's)")
    parser.add_argument("--out", type=Path, default=Path("runs/trl"), help="empty output folder")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    for name, kind in get_type_hints(Work).items():
        kind = {"true": True, "false": False}.__getitem__ if kind is bool else kind
        parser.add_argument(f"--{name}", type=kind, default=getattr(Work, name))
    flags = parser.parse_args(argv)
    return flags, Work(
        **{field.name: getattr(flags, field.name) for field in dataclasses.fields(Work)}
    )


def main(argv: Sequence[str] | None = None) -> None:
    """Run the benchmark or, with `--worker`, our worker."""
    flags, work = parse_flags(argv)
    out: Path = flags.out
    if flags.worker:
        train_ours(out)
        return
    if (out / "settings.json").exists():
        raise SystemExit(
            f"error: {out} contains a run of this benchmark; set --out to a new folder."
        )
    if work.num_updates < NUM_WARM_UP + 2:
        raise SystemExit(
            f"error: --num_updates is {work.num_updates}; expected at least "
            f"{NUM_WARM_UP + 2}, of which {NUM_WARM_UP} warm up and the last is not "
            "timed."
        )
    out.mkdir(parents=True, exist_ok=True)
    model = flags.model or str(flags.world / MODEL_FOLDER)
    write_tasks(flags.world, model, out, work)
    (out / "settings.json").write_text(json.dumps({"model": model} | dataclasses.asdict(work)))

    # Train, alternating steps.
    ours = Worker([sys.executable, "-m", "benchmarks.trl", "--worker", f"--out={out}"])
    steps = {"jaxrl": [ours.read()]}
    theirs = Worker([flags.trl_python, "-m", "benchmarks.trl_worker", str(out)])
    steps["TRL"] = [theirs.read()]
    alternate_steps([ours, theirs], work.num_updates)
    messages_received = theirs.read()
    ours.join()
    theirs.join()
    steps["jaxrl"] += ours.steps
    steps["TRL"] += theirs.steps
    check_prompts(ours.steps, theirs.steps)
    (out / "steps.json").write_text(json.dumps({"steps": steps, "trl": messages_received}))
    copy_non_weight_files(Path(model), out / "trl_model")

    # Report speed first, then compare losses and gradients on the same completions.
    lines = [common.format_table(["", *TRAINERS, "ratio"], make_speed_rows(steps)), ""]
    print(lines[0], flush=True)
    if work.num_replayed:
        write_jsonl(out / "replay.jsonl", make_replay_batches(out, work.num_replayed))
        replay = Worker([flags.trl_python, "-m", "benchmarks.trl_worker", str(out), "--replay"])
        metrics = [
            item for item in read_jsonl(out / "jaxrl" / "metrics.jsonl") if "actor/pg_loss" in item
        ]
        lines += [*compare_metrics(metrics, replay.read()), ""]
        replay.join()
    # Score all models with the same evaluation.
    folders = {"before": model, "jaxrl": str(out / "jaxrl/export"), "TRL": str(out / "trl_model")}
    records = {name: evaluate(out, name, folder, work) for name, folder in folders.items()}
    lines += [
        common.format_table(["", "before", *TRAINERS, "jaxrl − TRL"], make_score_rows(records)),
        "",
    ]
    versions = common.get_package_versions("jax", "jaxlib") | messages_received["versions"]
    lines.append(", ".join(f"{name} {version}" for name, version in versions.items()))
    lines.append(f"{common.get_processor_name()}, load average {os.getloadavg()[2]:.1f} at the end")
    report = "\n".join(lines)
    (out / "report.md").write_text(report + "\n")
    print(report)


if __name__ == "__main__":
    main()
